"""However slow makers and trainers are, and whenever: no sample is trained on when it is older than the bound.

Real actors that are held at seeded points; tests/unit/test_staleness_interleavings.py does the same with plain objects.
"""

import asyncio
import contextlib
import itertools
import random
import socket
from collections import Counter

import pytest
import ray
import torch
from ray_testing import PATIENCE, numbered, strategy
from tiny import actor_and_critic, item, maker_models
from transformers import StoppingCriteria

from coati.config import Deadlines, RolloutSettings, TopologySettings
from coati.ledger import WorkShare
from coati.ray.callbacks import MakerCallback, TrainerCallback
from coati.ray.detached_trainer_ppo import DetachedPPOTrainer
from coati.ray.experience_maker_holder import ExperienceMakerHolder
from coati.ray.options import MakerOptions, TrainerOptions
from coati.ray.run_actors import first_updaters

BATCH, UPDATE_STEPS, TOTAL_STEPS = 2, 2, 7  # 7 = three versions of two batches, and a remainder
NUM_TOKENS = 3
DEADLINES = Deadlines(start_seconds=PATIENCE, batch_seconds=PATIENCE, update_seconds=PATIENCE, grace_seconds=1.0)
MAKER_BATCH = 3
BUFFER_LIMIT = 2


def share_of(index, num_makers, num_trainers, max_staleness):
    return WorkShare(
        rounds_per_version=UPDATE_STEPS * BATCH,
        total_rounds=TOTAL_STEPS * BATCH,
        max_staleness=max_staleness,
        maker_index=index,
        num_makers=num_makers,
        num_trainers=num_trainers,
    )


# Real actors.

# Nobody has come to a point for so long: all others wait for those who are held, or for each other.
REST_SECONDS = 0.1


@ray.remote(num_cpus=0)
class Brake:
    """Holds whoever comes to a point, by seeded dice: not at all, for a few arrivals, or until all others rest."""

    def __init__(self, seed):
        self._seed = seed
        self._visits = Counter()
        self._news = asyncio.Condition()
        self._steps = []

    async def hold(self, who, point):
        self._visits[who, point] += 1
        dice = random.Random(f"{self._seed} {who} {point} {self._visits[who, point]}")
        arrivals = dice.choice([0, 0, 0, 0, 1, 3, 10**9])
        async with self._news:
            self._news.notify_all()
            with contextlib.suppress(TimeoutError):
                for _ in range(arrivals):
                    await asyncio.wait_for(self._news.wait(), REST_SECONDS)

    async def note(self, step):
        self._steps.append(step)

    async def steps(self):
        return self._steps


class Held:
    """A point of a program, where the brake may hold it."""

    def __init__(self, brake, who):
        self._brake, self._who = brake, who

    def at(self, point):
        ray.get(self._brake.hold.remote(self._who, point), timeout=PATIENCE)


class SlowMaker(MakerCallback):
    def __init__(self, held):
        self._held = held

    def on_make_experience_start(self):
        self._held.at("make")

    def on_send_start(self):
        self._held.at("send")


class SlowTokens(StoppingCriteria):
    """Held inside a generation, so that new weights come between two tokens."""

    def __init__(self, held):
        self._held = held

    def __call__(self, input_ids, scores, **kwargs):
        self._held.at("token")
        return torch.zeros(len(input_ids), dtype=torch.bool)


class SlowTrainer(TrainerCallback):
    """Held at its steps and updates; notes what every step was trained on."""

    def __init__(self, brake, who):
        self._brake, self._held = brake, Held(brake, who)

    def on_batch_start(self):
        self._held.at("step")

    def on_update_start(self):
        self._held.at("update")

    def on_batch_end(self, metrics, experience):
        ages = int(metrics["version"]) - experience.policy_versions[experience.action_mask]
        step = (experience.sample_ids.tolist(), ages.tolist(), metrics["train/age_max"])
        ray.get(self._brake.note.remote(step), timeout=PATIENCE)


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def check_ranks_with_unequal_data(trainers, brake):
    """Two ranks get 5 items and 1, and no more will come: both take all steps, and every item is trained on."""
    before = ray.get([trainer.progress.remote() for trainer in trainers], timeout=PATIENCE)
    num_steps_before = len(ray.get(brake.steps.remote(), timeout=PATIENCE))
    amounts, version = [(0, 5), (5, 1)], before[0].version
    for trainer, (first, count) in zip(trainers, amounts, strict=True):
        fed = [item(index) for index in range(first, first + count)]
        for one in fed:
            one.policy_versions = torch.full_like(one.action_mask, version, dtype=torch.long)
        ray.get(trainer.buffer_extend.remote(fed), timeout=PATIENCE)
    # A rank that went alone would wait for the other until the strategy's timeout, and raise.
    ray.get([trainer.fit.remote(100, UPDATE_STEPS, 2) for trainer in trainers], timeout=PATIENCE)
    after = ray.get([trainer.progress.remote() for trainer in trainers], timeout=PATIENCE)
    # The first rank has batches of 2, 2 and 1; the second one of 1 and none. All of it twice, in two episodes.
    assert [one.num_batches - other.num_batches for one, other in zip(after, before, strict=True)] == [6, 6]
    assert [one.num_samples - other.num_samples for one, other in zip(after, before, strict=True)] == [10, 2]
    assert [one.version for one in after] == [version + 2] * 2
    steps = ray.get(brake.steps.remote(), timeout=PATIENCE)[num_steps_before:]
    assert Counter(index for ids, _, _ in steps for index in ids) == dict.fromkeys(range(6), 2)
    pages = ray.get([trainer.records_since.remote(0) for trainer in trainers], timeout=PATIENCE)
    losses = [
        [r["metrics"]["actor_loss"] for r in page.records if "actor_loss" in r.get("metrics", {})] for page in pages
    ]
    assert len(losses[0]) == after[0].num_batches
    assert losses[0] == losses[1]  # of the joined batch, on both


@pytest.mark.timeout(280)
def test_real_actors_held_at_random_keep_the_bound(cluster, keep, unique):
    num_makers, num_trainers, max_staleness = 2, 2, 1
    brake = keep(Brake.remote(seed=5))
    maker_names = [unique(f"maker-{index}") for index in range(num_makers)]
    trainer_names = [unique(f"trainer-{rank}") for rank in range(num_trainers)]
    updaters = first_updaters(maker_names, num_trainers)
    group = {"world_size": num_trainers, "master_addr": "127.0.0.1", "master_port": free_port(), "local_rank": 0}
    trainers = [
        keep(
            DetachedPPOTrainer.options(name=name, num_cpus=0).remote(
                maker_names,
                strategy,
                actor_and_critic,
                env_info={**group, "rank": rank},
                train_batch_size=BATCH,
                buffer_limit=BUFFER_LIMIT,
                callbacks=[SlowTrainer(brake, name)],
                options=TrainerOptions(
                    topology=TopologySettings(max_staleness=max_staleness),
                    deadlines=DEADLINES,
                    num_threads=1,
                    updated_makers=[one for one, updater in updaters.items() if updater == rank],
                ),
            )
        )
        for rank, name in enumerate(trainer_names)
    ]
    makers = [
        keep(
            ExperienceMakerHolder.options(name=name, num_cpus=0).remote(
                trainer_names,
                strategy,
                maker_models,
                callbacks=[SlowMaker(Held(brake, name))],
                options=MakerOptions(
                    rollout=RolloutSettings(engine="reference", max_new_tokens=NUM_TOKENS, in_flight=True),
                    share=share_of(index, num_makers, num_trainers, max_staleness),
                    deadlines=DEADLINES,
                    num_threads=1,
                ),
                stopping_criteria=[SlowTokens(Held(brake, name))],
            )
        )
        for index, name in enumerate(maker_names)
    ]
    ray.get([actor.progress.remote() for actor in trainers + makers], timeout=PATIENCE)
    work = [trainer.fit.remote(TOTAL_STEPS, UPDATE_STEPS) for trainer in trainers]
    work += [
        maker.workingloop.remote(
            lambda index=index: (
                numbered(index * 10**6 + first, MAKER_BATCH) for first in itertools.count(0, MAKER_BATCH)
            )
        )
        for index, maker in enumerate(makers)
    ]
    ray.get(work, timeout=PATIENCE)
    steps = ray.get(brake.steps.remote(), timeout=PATIENCE)
    assert len(steps) == TOTAL_STEPS * num_trainers
    for _, ages, told in steps:
        assert set(ages) <= set(range(max_staleness + 1))
        assert told == max(ages)
    trained = [index for ids, _, _ in steps for index in ids]
    assert len(trained) == len(set(trained)) == TOTAL_STEPS * BATCH * num_trainers
    progress = ray.get([maker.progress.remote() for maker in makers], timeout=PATIENCE)
    assert sum(one.num_delivered for one in progress) == len(trained)
    assert [one.state for one in progress] == ["finished"] * num_makers
    check_ranks_with_unequal_data(trainers, brake)
