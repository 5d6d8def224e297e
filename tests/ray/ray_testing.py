"""Small models, samples and actors for the tests of coati.ray."""

import asyncio
import threading

import ray
import torch
from tiny import actor_and_critic

from coati.actors.options import TrainerOptions
from coati.config import Deadlines, TopologySettings, TrainSettings
from coati.ray.detached_trainer_base import DetachedTrainer
from coati.ray.detached_trainer_ppo import PPOTrainer
from coati.trainer.strategies import DDPStrategy

PATIENCE = 180.0  # timeout in seconds for events that should happen at once, generous for busy machines
DEADLINES = Deadlines(start_seconds=120.0, batch_seconds=120.0, update_seconds=120.0, grace_seconds=0.2)


def strategy():
    torch.set_num_threads(1)
    return DDPStrategy(seed=0, device="cpu", timeout_seconds=60)


def numbered(first, count):
    """One batch of prompts whose samples have the given ids."""
    return {
        "input_ids": torch.full((count, 2), 3),
        "attention_mask": torch.ones(count, 2, dtype=torch.long),
        "sample_ids": torch.arange(first, first + count),
    }


def make_ppo_trainer(maker_names, *, seed=0, **kwargs):
    """Create a PPO trainer in this process."""
    topology = {name: kwargs.pop(name) for name in TopologySettings.model_fields.keys() & kwargs.keys()}
    options = TrainerOptions(
        train=TrainSettings(actor_lr=1e-2, critic_lr=1e-2),
        topology=TopologySettings(**{"max_staleness": -1} | topology),
        deadlines=DEADLINES,
        num_threads=1,
    )
    kwargs = {"train_batch_size": 4} | kwargs
    return PPOTrainer(maker_names, strategy, lambda: actor_and_critic(seed), options=options, **kwargs)


class Background:
    """Runs a function in a thread; `result` returns or raises its outcome."""

    def __init__(self, function, *args):
        self._result = self._error = None
        self._thread = threading.Thread(target=self._run, args=(function, *args), daemon=True)
        self._thread.start()

    def _run(self, function, *args):
        try:
            self._result = function(*args)
        except BaseException as error:
            self._error = error

    @property
    def is_running(self):
        return self._thread.is_alive()

    def result(self):
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive(), "the background thread did not end"
        if self._error is not None:
            raise self._error
        return self._result


@ray.remote(num_cpus=0)
class Gate:
    """Synchronizes actors and tests at named points."""

    def __init__(self):
        self._events = {}

    def _event(self, point):
        return self._events.setdefault(point, asyncio.Event())

    async def open(self, point):
        self._event(point).set()

    async def wait(self, point):
        await asyncio.wait_for(self._event(point).wait(), PATIENCE)

    async def arrive(self, point):
        """Announce that the caller has reached the point, and wait until it is opened."""
        await self.open(f"{point} reached")
        await self.wait(point)


def pass_gate(gate, call, point):
    ray.get(getattr(gate, call).remote(point), timeout=PATIENCE)


@ray.remote(num_cpus=0)
class Sink:
    """A trainer with only the methods that makers call. It can hold, refuse or repeat deliveries."""

    def __init__(self, gate=None, hold_from=None):
        self.reset()
        self._gate = gate
        self._hold_from = hold_from  # from this call on, calls wait at the gate

    def buffer_extend(self, items):
        if self._hold_from is not None and len(self._calls) >= self._hold_from:
            pass_gate(self._gate, "arrive", "sink")
        self._calls.append([(int(item.sample_ids), item.delivery_id) for item in items])
        self._versions += [int(item.policy_versions[0]) for item in items if item.policy_versions is not None]

    def reset(self):
        self._calls, self._versions = [], []

    def versions(self):
        return self._versions

    def sample_ids(self):
        return [sample_id for call in self._calls for sample_id, _ in call]

    def calls(self):
        return self._calls


class RecordingTrainer(DetachedTrainer):
    """A trainer that records its batches instead of learning."""

    def __init__(self, *args, gate=None, **kwargs):
        super().__init__(*args, **kwargs)
        self.story = []
        self.trained = []
        self.in_step = None  # called inside each training step

    def training_step(self, experience):
        self.trained.append(experience.sample_ids.tolist())
        self.story.append("train")
        if self.in_step is not None:
            self.in_step()
        return {"loss": 0.0}

    def _update_remote_makers(self, fully_update=False, **kwargs):
        self.story.append(f"update {self.version}")

    def close(self):
        self._buffer.close()

    def state(self):
        return self.trained, self.story
