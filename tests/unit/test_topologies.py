"""With any M makers and T trainers, no actor starves, no sample is lost, and every run ends.

These are whole runs in miniature, with the real leases, buffers, requests and update lists. Makers work and receive
updates at random times; trainers step together when each has a batch; makers die and are replaced under their names.
Processes and their messages are tested in tests/ray.
"""

import itertools
import random
from collections import Counter, deque

import pytest
import tiny
import torch

from coati.experience_buffer.buffer import LeasedBuffer
from coati.experience_maker.base import MakerBatch
from coati.experience_maker.work_source import LeasedPrompts
from coati.ledger import LedgerRules
from coati.peers import LocalPeers

SHAPES = list(itertools.product((1, 2, 3, 5), (1, 2, 3, 5)))
ALL_SHAPES = list(itertools.product(range(1, 9), range(1, 9)))
BY_SIZE = pytest.mark.parametrize("shapes", [SHAPES, pytest.param(ALL_SHAPES, marks=pytest.mark.long)], ids=len)
LARGE = [(64, 1), (1, 64), (63, 17), (17, 63), (64, 64)]
PER_VERSION = 4


class Trainer:
    def __init__(self, rules):
        self.buffer = LeasedBuffer(rules, PER_VERSION, clock=itertools.count().__next__)

    def lease(self, request):
        return self.buffer.lease(request)


class Maker:
    def __init__(self, run, name, version):
        self.run, self.version, self.incarnation = run, version, 0
        self.work, self.inbox = deque(), deque()  # unfinished batches; versions in flight
        self.updates = Counter()
        self.prompts = LeasedPrompts(
            tiny.NumberStream(PER_VERSION, unusable=run.unusable),
            run.trainer_names,
            run.rules,
            self,
            peers=run.peers,
            maker_name=name,
        )

    def ask(self):
        """Begin a batch, if the leases allow one."""
        batch = self.prompts.poll(PER_VERSION) if len(self.work) < 2 else None
        if batch is not None:
            self.work.append((batch, self.version))
        return batch is not None

    def finish(self):
        """Deliver the oldest batch."""
        if not self.work:
            return False
        batch, version = self.work.popleft()
        items = self.prompts.close_leases(
            MakerBatch(batch), [tiny.item(number) for number in [sample.id for sample in batch]]
        )
        for item in items:
            item.reward = torch.tensor(float(version))
        for rank, trainer in enumerate(self.run.trainers):
            mine = [item for item in items if item.lease[0] % len(self.run.trainers) == rank]
            trainer.buffer.extend(mine)
        return True

    def update(self):
        if not self.inbox:
            return False
        self.version = self.inbox.popleft()
        self.updates[self.version] += 1
        return True


class Run:
    def __init__(self, num_makers, num_trainers, *, max_staleness, group_size=1, num_deaths=0, unusable=(), seed=0):
        self.versions = 3
        self.dice, self.unusable, self.num_deaths = random.Random(seed), unusable, num_deaths
        options = {"samples_per_version": PER_VERSION, "total_samples": PER_VERSION * self.versions, "lead": 1}
        options |= {"max_staleness": max_staleness, "group_size": group_size, "num_streams": num_trainers}
        self.rules = LedgerRules(**options)
        self.trainers = [Trainer(LedgerRules(**options, stream=rank)) for rank in range(num_trainers)]
        self.trainer_names = [f"trainer-{rank}" for rank in range(num_trainers)]
        self.peers = LocalPeers(**dict(zip(self.trainer_names, self.trainers, strict=True)))
        names = [f"maker-{index}" for index in range(num_makers)]
        self.updaters = {name: index % num_trainers for index, name in enumerate(names)}
        self.makers = {name: Maker(self, name, 0) for name in names}
        self.version, self.ages = 0, []
        self.trained = [[] for _ in self.trainers]
        self.ready = [None] * num_trainers  # batches of ranks that are waiting for the others

    def play(self):
        """Run random events until the run ends."""
        events = (self.ask, self.finish, self.update, self.train)
        while self.version < self.versions:
            if self.num_deaths and self.dice.random() < 0.1:
                self.die()
            assert any(event() for event in self.dice.sample(events, 4)), f"stalls at version {self.version}"
        while self.update():
            pass

    def ask(self):
        return self._any(Maker.ask)

    def finish(self):
        return self._any(Maker.finish)

    def update(self):
        return self._any(Maker.update)

    def train(self):
        """Take a step on all trainers together; then each sends the new version to its makers."""
        before = self.ready.count(None)
        self.ready = [
            trainer.buffer.try_sample(0.0) if batch is None else batch
            for batch, trainer in zip(self.ready, self.trainers, strict=True)
        ]
        if None in self.ready:
            return self.ready.count(None) < before
        self.version += 1
        for rank, batch in enumerate(self.ready):
            self.trained[rank] += batch.sample_ids.tolist()
            self.ages += [self.version - 1 - written for written in batch.reward.tolist()]
            self.trainers[rank].buffer.mark_trained(self.version)
            for name in (name for name, updater in self.updaters.items() if updater == rank):
                self.makers[name].inbox.append(self.version)
        self.ready = [None] * len(self.trainers)
        return True

    def die(self):
        """Replace a random maker by a successor that has only the newest weights."""
        self.num_deaths -= 1
        name = self.dice.choice(list(self.makers))
        for trainer in self.trainers:
            trainer.buffer.release(name, "died")
        self.makers[name] = Maker(self, name, self.version)

    def _any(self, act):
        makers = list(self.makers.values())
        return any(act(maker) for maker in self.dice.sample(makers, len(makers)))


def check(num_makers, num_trainers, max_staleness, **options):
    run = Run(num_makers, num_trainers, max_staleness=max_staleness, **options)
    run.play()
    total = PER_VERSION * run.versions
    assert [len(found) for found in run.trained] == [total] * num_trainers, "every trainer gets its samples"
    everything = [number for found in run.trained for number in found]
    assert len(set(everything)) == len(everything), "no sample is trained on twice"
    if not run.unusable:
        assert sorted(everything) == list(range(total * num_trainers)), "no sample is lost"
    if max_staleness is not None:
        assert 0 <= min(run.ages) <= max(run.ages) <= max_staleness
    assert not any(trainer.buffer.num_items_waiting for trainer in run.trainers), "no sample is left over"
    assert all(maker.version == run.version for maker in run.makers.values())
    assert all(max(maker.updates.values(), default=1) == 1 for maker in run.makers.values()), "no update arrives twice"
    return run


@BY_SIZE
@pytest.mark.parametrize("max_staleness", [0, 1, None])
def test_any_makers_with_any_trainers(shapes, max_staleness):
    for makers, trainers in shapes:
        check(makers, trainers, max_staleness)


@pytest.mark.long
@pytest.mark.parametrize(("makers", "trainers"), LARGE)
def test_large_shapes(makers, trainers):
    check(makers, trainers, max_staleness=1)


@BY_SIZE
@pytest.mark.parametrize("max_staleness", [0, 1, None])
def test_makers_may_die_at_any_moment(shapes, max_staleness):
    for seed, (makers, trainers) in enumerate(shapes):
        check(makers, trainers, max_staleness, num_deaths=6, group_size=2, seed=seed)


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_prompts_that_cannot_be_used_are_replaced(max_staleness):
    for makers, trainers in [(1, 1), (3, 1), (1, 3), (4, 4)]:
        check(makers, trainers, max_staleness, unusable=range(0, 100, 5))


def test_on_policy_runs_train_on_the_same_batches_with_any_makers():
    runs = [check(makers, 2, 0, num_deaths=deaths, seed=makers) for makers in (1, 3, 8) for deaths in (0, 4)]
    assert all(run.trained == runs[0].trained for run in runs)
