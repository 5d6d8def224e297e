"""The bound that moves: its rule by hand, and runs under moving bounds simulated to their end."""

import itertools
import pickle
import random
from collections import deque
from types import SimpleNamespace

import pytest

from coati.config import TopologySettings
from coati.ledger import AdmissionGate, RoundOrder, WorkShare
from coati.ledger.staleness import BoundSchedule, SignalMeter, StalenessController, VersionSignals

# With the defaults: down above KL 0.04 or below ESS 0.5; up at KL 0.02, ESS 0.75 and idle 0.1 or better.
BORED = VersionSignals(kl=0.02, idle=0.1, effective_samples=0.75)
BUSY = VersionSignals(kl=0.02, idle=0.09, effective_samples=0.75)
TOO_OLD = VersionSignals(kl=0.0, idle=0.9, effective_samples=0.49)


def controller(start=0, **settings):
    """A controller of 0…3 that has settled at `start`."""
    topology = TopologySettings(**{"staleness_control": "adaptive", "max_staleness": 3} | settings)
    made = StalenessController(topology)
    while made.max_staleness < start:
        made.decide(VersionSignals(kl=0.0, idle=1.0))
    for _ in range(start):
        made.decide(BUSY)
    return made


@pytest.mark.parametrize(
    ("signals", "expected"),
    [
        (BORED, 2),
        (BUSY, 1),
        (VersionSignals(kl=0.021, idle=1.0, effective_samples=1.0), 1),  # in the gap: neither up nor down
        (VersionSignals(kl=0.04, idle=1.0, effective_samples=1.0), 1),
        (VersionSignals(kl=0.041, idle=1.0, effective_samples=1.0), 0),
        (VersionSignals(kl=0.0, idle=1.0, effective_samples=0.74), 1),
        (VersionSignals(kl=0.0, idle=1.0, effective_samples=0.5), 1),
        (TOO_OLD, 0),
        (VersionSignals(kl=0.0, idle=1.0), 2),  # nobody computes the ESS: KL alone decides
        (VersionSignals(kl=0.05, idle=0.0), 0),
        (VersionSignals(kl=float("nan"), idle=1.0, effective_samples=1.0), 0),
        (VersionSignals(kl=0.0, idle=1.0, effective_samples=float("nan")), 0),
        (VersionSignals(kl=float("inf"), idle=1.0), 0),
    ],
)
def test_one_decision_from_a_bound_of_one(signals, expected):
    assert controller(start=1).decide(signals) == expected


def test_a_new_bound_is_left_alone_until_its_data_arrives():
    # 0 → 1 is seen in the data 1 version later, 1 → 2 two, 2 → 3 three: that many decisions change nothing.
    rising = controller()
    assert [rising.decide(BORED) for _ in range(9)] == [1, 1, 2, 2, 2, 3, 3, 3, 3]
    # 3 → 2: what was issued under 3 is trained on in the 3 versions that follow.
    falling = controller(start=3)
    assert [falling.decide(TOO_OLD) for _ in range(9)] == [2, 2, 2, 2, 1, 1, 1, 0, 0]


def test_the_ends_hold_and_bumping_into_them_starts_no_wait():
    bounded = controller(max_staleness=2, min_staleness=1)
    assert bounded.max_staleness == 1
    assert [bounded.decide(TOO_OLD) for _ in range(3)] == [1, 1, 1]
    assert bounded.decide(BORED) == 2  # at once: nothing had changed
    assert [bounded.decide(BORED) for _ in range(4)] == [2, 2, 2, 2]
    assert bounded.decide(TOO_OLD) == 1


def test_targets_move_the_rule():
    # down above KL 2 or below ESS 0.1; up to KL 1, from ESS 0.55 and any idle time
    eager = controller(start=1, target_kl=1.0, target_effective_samples=0.1, target_idle=0.0)
    assert eager.decide(VersionSignals(kl=1.0, idle=0.0, effective_samples=0.55)) == 2
    calm = controller(start=1, target_idle=0.5)
    assert calm.decide(VersionSignals(kl=0.0, idle=0.49, effective_samples=1.0)) == 1


def test_it_travels_to_a_trainer_with_its_state():
    travelled = pickle.loads(pickle.dumps(controller(start=2)))
    assert travelled.max_staleness == 2
    assert travelled.decide(TOO_OLD) == 1


def test_the_meter_measures_each_version_by_itself():
    meter = SignalMeter()
    meter.begin(now=10.0, waited=1.0)
    meter.begin(now=12.0, waited=3.0)  # the second batch of the same version
    meter.add(kl=0.1, effective_samples=0.4)
    meter.add(kl=0.3, effective_samples=0.8)
    # 20 s since 10, of which 6 - 1 = 5 were waited
    first = meter.take(now=30.0, waited=6.0)
    assert (first.kl, first.effective_samples, first.idle) == pytest.approx((0.2, 0.6, 0.25))
    meter.add(kl=0.5, effective_samples=None)
    assert meter.take(now=40.0, waited=16.0) == VersionSignals(kl=0.5, idle=1.0)
    assert meter.take(now=40.0, waited=16.0) == VersionSignals(kl=0.0, idle=0.0)  # no time has passed


def test_a_bound_begins_with_its_version_and_an_older_one_never_comes_back():
    schedule = BoundSchedule()
    assert schedule.at(5) is None
    schedule.note(1, 2)
    schedule.note(2, None)  # says nothing, so the bound before stays
    schedule.note(3, 0)
    assert [schedule.at(version) for version in (1, 2, 3, 4)] == [2, 2, 0, 0]
    schedule.note(2, 7)  # came too late to serve
    assert schedule.at(4) == 0
    schedule.note(4, 1)
    assert schedule.at(4) == 1


def test_a_gate_follows_the_bound_up_to_that_of_its_share():
    # 4 rounds for each version: 4 · (η + v + 1) may be issued.
    gate = AdmissionGate(WorkShare(rounds_per_version=4, total_rounds=100, max_staleness=2))
    assert gate.admissible(100, version=0) == 12
    gate.limit_staleness(0)
    assert gate.admissible(100, version=0) == 4
    gate.limit_staleness(5)
    assert gate.admissible(100, version=0) == 12
    gate.issue(12)
    gate.limit_staleness(1)  # 8 would be allowed and 12 are out: wait until version 2 allows 16
    assert (gate.admissible(100, version=1), gate.version_needed()) == (0, 2)
    assert gate.admissible(100, version=2) == 4
    unbounded = AdmissionGate(WorkShare(rounds_per_version=4, total_rounds=100))
    unbounded.limit_staleness(0)
    assert unbounded.admissible(100, version=0) == 100


class _Run:
    """M makers and T trainers over the real gates and orders, stepped by dice.

    Trainers learn in step, as ranks do. Each tells its own makers of new weights, with a bound of its own choice; a
    maker takes what it was told whenever the dice say so.
    """

    per_version, total = 3, 17

    def __init__(self, num_makers, num_trainers, upper, dice, choose):
        self.dice, self.choose, self.upper = dice, choose, upper
        self.makers = [
            SimpleNamespace(
                share=share,
                gate=AdmissionGate(share),
                bounds=BoundSchedule(),
                version=0,
                inbox=deque(),
                trainer=share.maker_index % num_trainers,
                sent=[0] * num_trainers,
                turn=share.maker_index,
            )
            for share in (
                WorkShare(
                    rounds_per_version=self.per_version,
                    total_rounds=self.total,
                    max_staleness=upper,
                    maker_index=index,
                    num_makers=num_makers,
                    num_trainers=num_trainers,
                )
                for index in range(num_makers)
            )
        ]
        self.orders = [RoundOrder() for _ in range(num_trainers)]
        self.ready = [[] for _ in range(num_trainers)]
        self.version = self.num_trained = 0
        self.ages = []

    def moves(self):
        """Everything that somebody could do now."""
        for maker in self.makers:
            if maker.inbox:
                yield lambda maker=maker: self.take_weights(maker)
            bound = maker.bounds.at(maker.version)
            if bound is not None:
                maker.gate.limit_staleness(bound)
            if maker.gate.admissible(1, version=maker.version):
                yield lambda maker=maker: self.make_one(maker)
        wanted = min(self.per_version, self.total - self.num_trained)
        if wanted and all(len(ready) >= wanted for ready in self.ready):
            yield lambda: self.train(wanted)

    def take_weights(self, maker):
        maker.version, bound = maker.inbox.popleft()
        maker.bounds.note(maker.version, bound)

    def make_one(self, maker):
        maker.gate.issue(1)
        trainer = maker.turn % len(self.orders)
        maker.turn += 1
        made = SimpleNamespace(round_index=maker.share.round_of(maker.sent[trainer]), version=maker.version)
        maker.sent[trainer] += 1
        self.ready[trainer] += self.orders[trainer].add([made])

    def train(self, wanted):
        for ready in self.ready:
            self.ages += [self.version - made.version for made in ready[:wanted]]
            del ready[:wanted]
        self.num_trained += wanted
        self.version += 1
        for trainer in range(len(self.orders)):
            bound = self.choose(self.dice, self.upper)
            for maker in self.makers:
                if maker.trainer == trainer:
                    maker.inbox.append((self.version, bound))

    def finish(self):
        while self.num_trained < self.total:
            moves = list(self.moves())
            assert moves, f"deadlock at version {self.version} with {self.num_trained} of {self.total} rounds trained"
            self.dice.choice(moves)()


BOUNDS = {
    "any": lambda dice, upper: dice.randint(0, upper),
    "end to end": lambda dice, upper: dice.choice((0, upper)),
    "never lowered": lambda _dice, upper: upper,
    "always lowest": lambda _dice, _upper: 0,
}


@pytest.mark.parametrize("choose", BOUNDS.values(), ids=BOUNDS)
def test_however_bounds_move_nobody_waits_for_ever_and_no_sample_is_too_old(choose):
    for makers, trainers, upper in itertools.product((1, 2, 3, 5), (1, 2, 3), (0, 1, 3)):
        run = _Run(makers, trainers, upper, random.Random(f"{makers} {trainers} {upper}"), choose)
        run.finish()
        assert len(run.ages) == run.total * trainers
        assert min(run.ages) >= 0
        assert max(run.ages) <= upper
        assert all(maker.gate.is_done for maker in run.makers)


def test_the_bound_that_holds_shows_in_the_ages():
    # From version 1 on nothing may be ahead: only what was issued before, up to round 2 · 3, may be older than 0.
    ages = []
    for seed in range(20):
        run = _Run(2, 1, 1, random.Random(seed), BOUNDS["always lowest"])
        run.finish()
        ages.append(run.ages)
    assert max(max(early[:6]) for early in ages) == 1
    assert max(max(late[6:]) for late in ages) == 0
