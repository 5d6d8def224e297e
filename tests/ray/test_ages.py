"""However slow makers and trainers are, and whenever: no sample is trained on when it is older than the bound.

First many runs of the plain objects (gate, pipeline, served models, rounds, fit loop) under a seeded scheduler that
decides at every named point who goes on; then real actors that are held at seeded points.
"""

import asyncio
import contextlib
import itertools
import random
import socket
import threading
from collections import Counter, deque
from types import SimpleNamespace

import pytest
import ray
import torch
from coati.ray.delivery import ItemSender
from ray_testing import (
    PATIENCE,
    Background,
    item,
    make_maker,
    maker_models,
    numbered,
    strategy,
    trainer_models,
)
from torch import nn
from transformers import StoppingCriteria

from coati.config import Deadlines, RolloutSettings, TopologySettings
from coati.experience_buffer.collector import BatchCollector
from coati.experience_buffer.utils import make_experience_batch, split_experience_batch
from coati.experience_maker.naive import AllSamplesDropped, NaiveExperienceMaker, UnfinishedExperience
from coati.experience_maker.pipeline import ExperiencePipeline
from coati.experience_maker.work_loop import WorkLoop
from coati.ledger import DeliveryLog, RoundOrder, WorkShare, ages_of
from coati.ray import delivery
from coati.ray.callbacks import MakerCallback, TrainerCallback
from coati.ray.detached_trainer_ppo import DetachedPPOTrainer
from coati.ray.experience_maker_holder import ExperienceMakerHolder
from coati.ray.options import MakerOptions, TrainerOptions
from coati.ray.topology import makers_updated_by
from coati.trainer.fit_loop import FitLoop
from coati.weights import ServedModels, VerifiedUpdate

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


# Plain objects, many interleavings.


class Scheduler:
    """Runs functions in threads, one at a time. At each pause seeded dice decide who goes on.

    Some are slow: they are chosen rarely, for a while. If nobody can go on before all are done, that is starvation.
    """

    def __init__(self, seed):
        self._dice = random.Random(seed)
        self._waits = {}  # who to (what for, may go on)
        self._speeds = {}
        self._batons = {}
        self._back = threading.Semaphore(0)
        self._me = threading.local()
        self._error = None

    def spawn(self, name, function):
        self._waits[name] = ("its start", lambda: True)
        self._speeds[name] = 1.0
        self._batons[name] = threading.Semaphore(0)
        threading.Thread(target=self._run, args=(name, function), daemon=True).start()

    def _run(self, name, function):
        self._me.name = name
        assert self._batons[name].acquire(timeout=PATIENCE)
        try:
            function()
        except BaseException as error:
            self._error = error
        del self._waits[name]
        self._back.release()

    def pause(self, point, until=lambda: True):
        """Let others go first; come back when `until` holds and the dice say so."""
        name = self._me.name
        self._waits[name] = (point, until)
        self._back.release()
        assert self._batons[name].acquire(timeout=PATIENCE), f"{name} was left at {point}"

    def run(self):
        while self._waits:
            ready = [name for name, (_, until) in self._waits.items() if until()]
            assert ready, f"nobody can go on: { ({name: point for name, (point, _) in self._waits.items()}) }"
            if self._dice.random() < 0.1:
                self._speeds = {name: self._dice.random() ** 4 + 1e-3 for name in self._speeds}
            name = self._dice.choices(ready, [self._speeds[one] for one in ready])[0]
            self._batons[name].release()
            assert self._back.acquire(timeout=PATIENCE), f"{name} does not come back"
            if self._error is not None:
                raise self._error


class Model(nn.Module):
    """Its one weight is the number of the version, so that what it writes tells who wrote it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("number", torch.zeros(()))


def update_to(version):
    return VerifiedUpdate(
        f"update {version}", version, "trainer", {("actor", "number"): torch.tensor(float(version))}, True
    )


class FakeScores:
    """Scores that come when the scheduler lets the reward of the maker go on."""

    def __init__(self, scheduler, may_issue):
        self._scheduler, self._may_issue = scheduler, may_issue
        self.is_ready, self.terms = False, {}

    def wait(self, seconds=None):
        """As long as it takes; with a limit also until something else can be done."""
        self._scheduler.pause("scores", lambda: self.is_ready or (seconds is not None and self._may_issue()))


class FakeGeneration(NaiveExperienceMaker):
    """Writes the number of the weights it sees as each token's log-prob, and pauses between tokens.

    A reward, which is somebody else's work, drops some samples.
    """

    reward_model = None

    def __init__(self, model, scheduler, dice, may_issue):
        self._model, self._scheduler, self._dice, self._may_issue = model, scheduler, dice, may_issue
        self.policy_version = 0
        self.commit_point = None  # set by the pipeline of a maker that takes weights in flight
        self.to_score = deque()
        self.num_beside = 0

    def begin_experience(self, input_ids, attention_mask, *, sample_ids, group_ids, columns):
        self.num_beside += self.meanwhile is not None
        written, versions = [], []
        for _ in range(NUM_TOKENS):
            written.append(float(self._model.number))
            versions.append(self.policy_version)
            self._scheduler.pause("a token")
            if self.meanwhile is not None:
                self.meanwhile()
            if self.commit_point is not None:
                self.policy_version = self.commit_point()
        made = []
        for sample_id in sample_ids.tolist():
            one = item(sample_id, num_actions=NUM_TOKENS)
            one.action_log_probs = torch.tensor(written)
            one.policy_versions = torch.tensor(versions)
            made.append(one)
        self.to_score.append(FakeScores(self._scheduler, self._may_issue))
        return UnfinishedExperience(make_experience_batch(made), self.to_score[-1])

    def finish_experience(self, unfinished):
        unfinished.scores.wait()
        kept = torch.tensor([self._dice.random() < 0.9 for _ in range(unfinished.experience.num_samples)])
        if not kept.any():
            raise AllSamplesDropped("the dice dropped them")
        return unfinished.experience.select(kept)


class Run:
    """M makers and T trainers in one process."""

    def __init__(self, monkeypatch, seed, *, num_makers, num_trainers, max_staleness, in_flight, in_step):
        self.scheduler = Scheduler(seed)
        self.dice = random.Random(seed + 1)
        self.trainers = [Trainer(self, rank, num_trainers, in_step) for rank in range(num_trainers)]
        self.makers = [
            Maker(
                self,
                share_of(index, num_makers, num_trainers, max_staleness),
                in_flight,
            )
            for index in range(num_makers)
        ]
        for kind, members in (("maker", self.makers), ("trainer", self.trainers)):
            for index, member in enumerate(members):
                self.scheduler.spawn(f"{kind} {index}", member.work)
        for trainer in self.trainers:
            self.scheduler.spawn(f"the buffer of {trainer.name}", trainer.append_loop)
        for index, maker in enumerate(self.makers):
            self.scheduler.spawn(f"the reward of maker {index}", maker.reward_loop)
        # The sender waits for acknowledgements here, and not for Ray.
        monkeypatch.setattr(delivery, "ray", SimpleNamespace(get=self._await_acknowledgement))
        self.scheduler.run()

    def _await_acknowledgement(self, call, *, timeout):
        self.scheduler.pause("an acknowledgement", lambda: call.is_done)


class Maker:
    """The working loop of a maker, over its real pipeline and its real sender; its reward is another thread."""

    def __init__(self, run, share, in_flight):
        self._run = run
        model = Model()
        self.served = ServedModels({"actor": model})
        self.generation = FakeGeneration(model, run.scheduler, run.dice, self._may_issue)
        self._pipeline = ExperiencePipeline(self.generation, self.served, share=share, in_flight=in_flight)
        names = [trainer.name for trainer in run.trainers]
        self._sender = ItemSender(names, sender=f"maker {share.maker_index}", deadlines=DEADLINES, share=share)
        handles = {trainer.name: SimpleNamespace(buffer_extend=trainer) for trainer in run.trainers}
        self._sender._peers = SimpleNamespace(names=names, handle=handles.get)
        self._first_id = share.maker_index * 10**6
        self.sent = []
        self.is_finished = False

    def work(self):
        WorkLoop(self._pipeline, await_admission=self._await_admission, deliver=self._deliver).run(self._prompts())
        self._sender.flush()
        self.is_finished = True

    def reward_loop(self):
        waiting = self.generation.to_score
        while True:
            self._run.scheduler.pause("a batch to score", lambda: waiting or self.is_finished)
            if not waiting:
                return
            self._run.scheduler.pause("a reward")
            waiting.popleft().is_ready = True

    def _prompts(self):
        for first in itertools.count(self._first_id, MAKER_BATCH):
            ids = torch.arange(first, first + MAKER_BATCH)
            yield {"input_ids": torch.ones(MAKER_BATCH, 2), "sample_ids": ids}

    def _await_admission(self, wanted):
        self._run.scheduler.pause(f"version {self._pipeline.version_needed()}", self._may_issue)
        num_rows = self._pipeline.admit(wanted)
        assert num_rows > 0
        return num_rows

    def _may_issue(self):
        return self.served.version >= (self._pipeline.gate.version_needed() or 0)

    def _deliver(self, made):
        self.sent += made.experience.sample_ids.tolist()
        self._sender.send(split_experience_batch(made.experience))


class Trainer:
    """The buffer and the fit loop of a trainer. Trainers in step agree on every batch, as ranks of a group do."""

    def __init__(self, run, rank, num_trainers, in_step):
        self._run, self._rank, self._num_trainers, self._in_step = run, rank, num_trainers, in_step
        self._deliveries, self._rounds, self._collector = DeliveryLog(), RoundOrder(), BatchCollector(BATCH)
        self._calls = deque()
        self._batches = []
        self._votes = []
        self.name = f"trainer {rank}"
        self.version = 0
        self.ages, self.trained = [], []

    def work(self):
        FitLoop(
            next_batch=self._next_batch,
            train=self._train,
            publish=self._publish,
            **({"agree": self._agree} if self._in_step else {}),
        ).run(TOTAL_STEPS, UPDATE_STEPS, train_epochs=1)

    def remote(self, items):
        """What a maker calls; the answer comes when `append_loop` has taken the items in."""
        call = SimpleNamespace(items=items, is_done=False)
        self._calls.append(call)
        return call

    def append_loop(self):
        """One call after the other, as the concurrency group of an actor runs them. Some are executed twice."""
        while self._is_more_to_come():
            call = self._calls.popleft()
            for _ in range(1 + (self._run.dice.random() < 0.2)):
                self._take_in(call.items)
            call.is_done = True

    def _is_more_to_come(self):
        makers = self._run.makers
        self._run.scheduler.pause("a delivery", lambda: self._calls or all(maker.is_finished for maker in makers))
        return bool(self._calls)

    def _take_in(self, items):
        ready = self._rounds.add(self._deliveries.fresh(items))
        self._batches += [make_experience_batch(batch) for batch in self._collector.add(ready)]
        self._run.scheduler.pause("room in the buffer", lambda: len(self._batches) <= BUFFER_LIMIT)

    def _next_batch(self):
        self._run.scheduler.pause("a batch", lambda: self._batches)
        return self._batches.pop(0)

    def _agree(self, has_data, is_stopped):
        self._votes.append(has_data and not is_stopped)
        number = len(self._votes)
        everyone = self._run.trainers
        self._run.scheduler.pause("the others", lambda: all(len(one._votes) >= number for one in everyone))
        return all(one._votes[number - 1] for one in everyone)

    def _train(self, batch):
        self._run.scheduler.pause("a step")
        assert torch.equal(batch.action_log_probs, batch.policy_versions.float())  # written by who it says
        self.ages.append(ages_of(batch, self.version).oldest)
        self.trained += batch.sample_ids.tolist()
        self._run.scheduler.pause("the end of a step")
        return {}

    def _publish(self):
        self.version += 1
        for maker in makers_updated_by(self._rank, range(len(self._run.makers)), self._num_trainers):
            self._run.scheduler.pause("an update")
            self._run.makers[maker].served.offer(update_to(self.version))


SHAPES = [
    # M, T, whether the trainers are one group: without that, the fast one may run ahead of the slow one
    *((makers, 1, True) for makers in range(1, 5)),
    *((makers, 2, in_step) for makers in range(1, 5) for in_step in (True, False)),
]


@pytest.mark.parametrize("in_flight", [False, True], ids=["between batches", "in flight"])
@pytest.mark.parametrize("max_staleness", range(4))
def test_measured_ages_never_exceed_the_bound_and_nobody_starves(max_staleness, in_flight, monkeypatch):
    torch.set_num_threads(1)
    oldest, num_beside = 0.0, 0
    for (num_makers, num_trainers, in_step), seed in itertools.product(SHAPES, range(3)):
        run = Run(
            monkeypatch,
            seed,
            num_makers=num_makers,
            num_trainers=num_trainers,
            max_staleness=max_staleness,
            in_flight=in_flight,
            in_step=in_step,
        )
        where = f"{num_makers} makers, {num_trainers} trainers, seed {seed}"
        ages = [age for trainer in run.trainers for age in trainer.ages]
        assert max(ages) <= max_staleness, where
        assert min(ages) >= 0 or not in_step, where  # no data from the future
        oldest = max(oldest, *ages)
        num_beside += sum(maker.generation.num_beside for maker in run.makers)
        trained = [index for trainer in run.trainers for index in trainer.trained]
        assert len(trained) == TOTAL_STEPS * BATCH * num_trainers, where
        assert sorted(trained) == sorted(index for maker in run.makers for index in maker.sent), where
        assert len(set(trained)) == len(trained), where
    assert oldest == max_staleness  # the runs go as far as they may: the bound is what held them
    assert (num_beside > 0) == (max_staleness > 0)  # batches generated while a reward was at the one before


# A real maker whose models somebody else is busy with.


def test_a_maker_whose_new_weights_cannot_be_committed_yet_waits_and_loses_no_prompt(sinks):
    name = next(iter(sinks))
    half_sent, is_offered, has_looked = (threading.Event() for _ in range(3))

    class Watcher(MakerCallback):
        def on_send_end(self):
            half_sent.set()

    # On-policy, two samples for each version: the other half of the batch waits for version 1.
    share = WorkShare(rounds_per_version=2, total_rounds=4, max_staleness=0)
    maker = make_maker([name], share=share, callbacks=[Watcher()])
    pipeline = maker._pipeline
    wait_for_version, admit = pipeline.served.wait_for_version, pipeline.admit

    def watched_wait(*args, **kwargs):
        has_come = wait_for_version(*args, **kwargs)
        if is_offered.is_set() and not has_come:
            has_looked.set()
        return has_come

    def watched_admit(wanted):
        num_rows = admit(wanted)
        if is_offered.is_set():
            has_looked.set()
        return num_rows

    pipeline.served.wait_for_version, pipeline.admit = watched_wait, watched_admit
    with pipeline.served.use():
        loop = Background(maker.workingloop, lambda: [numbered(0, 4)])
        assert half_sent.wait(PATIENCE)
        actor, critic = trainer_models(1)
        is_offered.set()
        maker.update_experience_maker(
            new_actor_state_dict=actor.state_dict(), new_critic_state_dict=critic.state_dict(), fully_update=True
        )
        assert has_looked.wait(PATIENCE)  # the maker has seen that version 1 is there, and is not to be had
    loop.result()
    assert ray.get(sinks[name].sample_ids.remote()) == [0, 1, 2, 3]
    assert ray.get(sinks[name].versions.remote()) == [0, 0, 1, 1]


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
    losses = [[r["metrics"]["actor_loss"] for r in page.records if "actor_loss" in r["metrics"]] for page in pages]
    assert len(losses[0]) == after[0].num_batches
    assert losses[0] == losses[1]  # of the joined batch, on both


@pytest.mark.timeout(280)
def test_real_actors_held_at_random_keep_the_bound(cluster, keep, unique):
    num_makers, num_trainers, max_staleness = 2, 2, 1
    brake = keep(Brake.remote(seed=5))
    maker_names = [unique(f"maker-{index}") for index in range(num_makers)]
    trainer_names = [unique(f"trainer-{rank}") for rank in range(num_trainers)]
    group = {"world_size": num_trainers, "master_addr": "127.0.0.1", "master_port": free_port(), "local_rank": 0}
    trainers = [
        keep(
            DetachedPPOTrainer.options(name=name, num_cpus=0).remote(
                maker_names,
                strategy,
                trainer_models,
                env_info={**group, "rank": rank},
                train_batch_size=BATCH,
                buffer_limit=BUFFER_LIMIT,
                callbacks=[SlowTrainer(brake, name)],
                options=TrainerOptions(
                    topology=TopologySettings(max_staleness=max_staleness),
                    deadlines=DEADLINES,
                    num_threads=1,
                    updated_makers=makers_updated_by(rank, maker_names, num_trainers),
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
