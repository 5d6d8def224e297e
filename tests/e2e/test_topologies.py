"""Any M makers and T trainers: nobody starves, nothing is lost, everything ends.

Whole runs in miniature, with the real gates, round orders and update lists. Makers work and take updates at random
moments; trainers step together when each has a batch. What is not here: processes and their messages (tests/ray).
"""

import itertools
import random
from collections import Counter, deque
from types import SimpleNamespace

import pytest

from coati.ledger import UNBOUNDED, AdmissionGate, RoundOrder, WorkShare
from coati.ray.run_actors import first_updaters

SHAPES = list(itertools.product(range(1, 9), range(1, 9)))
LARGE = [(64, 1), (1, 64), (63, 17), (17, 63), (64, 64)]
PER_VERSION = 2


class Maker:
    def __init__(self, share):
        self.gate, self.version = AdmissionGate(share), 0
        self.turn, self.sent = share.maker_index, Counter()
        self.inbox = deque()  # versions on their way
        self.updates = Counter()

    def make_one(self):
        """One item, and the trainer that gets it."""
        assert self.gate.admit(1, version=self.version) == 1
        trainer = self.turn % self.gate.share.num_trainers
        round_index = self.gate.share.round_of(self.sent[trainer])
        self.turn, self.sent[trainer] = self.turn + 1, self.sent[trainer] + 1
        is_ordered = self.gate.share.max_staleness != UNBOUNDED
        return trainer, SimpleNamespace(round_index=round_index if is_ordered else None, version=self.version)

    def take_update(self):
        self.version = self.inbox.popleft()
        self.updates[self.version] += 1


class Run:
    def __init__(self, num_makers, num_trainers, *, max_staleness, seed=0):
        self.total = PER_VERSION * (2 + num_makers // PER_VERSION)  # every maker has something to do
        share = {"rounds_per_version": PER_VERSION, "total_rounds": self.total, "max_staleness": max_staleness}
        share |= {"num_makers": num_makers, "num_trainers": num_trainers}
        self.makers = [Maker(WorkShare(maker_index=index, **share)) for index in range(num_makers)]
        self.updaters = first_updaters(range(num_makers), num_trainers)
        self.orders = [RoundOrder() for _ in range(num_trainers)]
        self.buffers = [[] for _ in range(num_trainers)]
        self.num_trained = [0] * num_trainers
        self.version, self.ages, self.dice = 0, [], random.Random(seed)

    def play(self):
        """To the end, one random event after the other."""
        events = (self.make, self.update, self.train)
        while self.num_trained[0] < self.total:
            assert any(event() for event in self.dice.sample(events, 3)), f"stalls at version {self.version}"
        while self.update():
            pass

    def make(self):
        maker = self._pick(lambda maker: maker.gate.admissible(1, version=maker.version))
        if maker is not None:
            trainer, item = maker.make_one()
            self.buffers[trainer] += self.orders[trainer].add([item])
        return maker is not None

    def update(self):
        maker = self._pick(lambda maker: maker.inbox)
        if maker is not None:
            maker.take_update()
        return maker is not None

    def train(self):
        """One step of all trainers together; then each sends the new version to its makers."""
        if any(len(buffer) < PER_VERSION for buffer in self.buffers):
            return False
        for rank, buffer in enumerate(self.buffers):
            self.ages += [self.version - item.version for item in buffer[:PER_VERSION]]
            del buffer[:PER_VERSION]
            self.num_trained[rank] += PER_VERSION
        self.version += 1
        for rank in range(len(self.buffers)):
            for index in (index for index, updater in self.updaters.items() if updater == rank):
                self.makers[index].inbox.append(self.version)
        return True

    def _pick(self, is_able):
        return next((maker for maker in self.dice.sample(self.makers, len(self.makers)) if is_able(maker)), None)


def check(num_makers, num_trainers, max_staleness):
    run = Run(num_makers, num_trainers, max_staleness=max_staleness)
    run.play()
    assert run.num_trained == [run.total] * num_trainers, "every trainer gets its share"
    assert len(run.ages) == run.total * num_trainers
    assert max_staleness == UNBOUNDED or 0 <= min(run.ages) <= max(run.ages) <= max_staleness
    assert not any(map(len, [*run.orders, *run.buffers])), "nothing is left behind"
    assert all(maker.gate.is_done and maker.gate.num_issued > 0 for maker in run.makers), "everybody works, and ends"
    once = dict.fromkeys(range(1, run.version + 1), 1)
    assert all(maker.updates == once for maker in run.makers), "each maker gets each update exactly once"


@pytest.mark.parametrize("max_staleness", [0, 1, UNBOUNDED])
def test_every_shape_up_to_eight_by_eight(max_staleness):
    for makers, trainers in SHAPES:
        check(makers, trainers, max_staleness)


@pytest.mark.parametrize(("makers", "trainers"), LARGE)
def test_large_shapes(makers, trainers):
    check(makers, trainers, max_staleness=1)
