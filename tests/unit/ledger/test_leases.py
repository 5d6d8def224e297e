import random

import pytest
from lease_world import World
from ledger_events import replayed

from coati.errors import ConfigError
from coati.ledger.leases import Ledger
from coati.ledger.rules import Lease, LeaseRequest, LedgerRules


def random_world(seed: int) -> World:
    rng = random.Random(seed)
    num_makers = rng.randint(1, 5)
    max_staleness = rng.choice([0, 0, 1, 2, 3, 4, 8, None])
    world = World(
        seed=seed,
        speeds=[rng.choice([0.05, 0.3, 1, 3]) for _ in range(num_makers)],
        slots=[rng.randint(1, 12) for _ in range(num_makers)],
        versions=6,
        train_time=rng.choice([0.01, 1, 5]),
        commit_delay=rng.choice([0, 0.05, 2.0]),
        tail=rng.choice([0, 0.5, 1.5]),
        drop_rate=rng.choice([0, 0, 0.2]),
        num_streams=rng.randint(1, 4),
        group_size=rng.choice([1, 1, 4]),
        groups_per_version=rng.randint(1, 12),
        lead=rng.choice([0, 1, 2]),
        max_staleness=max_staleness,
    )
    for index in range(rng.randint(0, 3)):
        world.at(rng.uniform(0.1, 20), "stall", f"maker-{rng.randrange(num_makers)}", rng.uniform(1, 20))
        world.at(rng.uniform(0.1, 20), "join", f"late-{index}", rng.choice([0.3, 3]), rng.randint(1, 8))
        if num_makers > 1:
            world.at(rng.uniform(0.1, 20), "die", f"maker-{rng.randrange(1, num_makers)}")
    return world


@pytest.mark.parametrize("seeds", [range(20), pytest.param(range(20, 1000), marks=pytest.mark.long)], ids=len)
def test_random_runs_end_within_the_bound_and_give_every_group_one_fate(seeds: range) -> None:
    for seed in seeds:
        world = random_world(seed)
        assert world.run(), f"seed {seed} is stuck: {[ledger.blocked_by() for ledger in world.ledgers]}"
        bound = world.rules[0].max_staleness
        assert bound is None or max(world.ages) <= bound, f"seed {seed}"
        assert world.most_in_flight <= world.rules[0].limit, f"seed {seed}"
        assert set(world.fates.values()) == {1}, f"seed {seed}"
        trained = len(world.fates) - sum(ledger.num_dropped for ledger in world.ledgers)
        assert trained * world.rules[0].group_size == sum(rules.total_samples for rules in world.rules), f"seed {seed}"


@pytest.mark.parametrize("seed", range(10))
def test_events_and_state_restore_the_same_ledger(seed: int) -> None:
    world = random_world(seed)
    for ledger in world.ledgers:
        ledger.events.clear()
    world.run()
    for ledger in world.ledgers:
        again = replayed(ledger.rules, ledger.events)
        assert again.state() == ledger.state()
        restored = Ledger.restored(ledger.rules, ledger.state())
        assert restored.num_picked == ledger.num_picked
        assert all(record.state != "open" for record in restored._records.values())


def test_leases_granted_to_a_dead_maker_after_its_release_go_to_its_successor() -> None:
    ledger = Ledger(LedgerRules(samples_per_version=2, total_samples=2, lead=0, max_staleness=0))
    ledger.release("maker", "died")
    (early, _) = ledger.lease(LeaseRequest("maker", 7, 0, 2), now=0.0)  # sent before the maker died
    leases = ledger.lease(LeaseRequest("maker", 1, 0, 2), now=1.0)
    assert [lease.number for lease in leases] == [0, 1]
    assert ledger.lease(LeaseRequest("maker", 1, 0, 2), now=2.0) == leases  # a retry
    assert ledger.deliver([early, *leases], now=3.0) == leases


@pytest.mark.parametrize("first_epoch", [0, 5])
def test_deliveries_for_leases_from_before_a_restore_are_refused(first_epoch: int) -> None:
    ledger = Ledger(LedgerRules(samples_per_version=2, total_samples=2))
    before = ledger.lease(LeaseRequest("maker", 1, 0, 2), now=0.0)
    restored = Ledger.restored(ledger.rules, ledger.state(), first_epoch=first_epoch)
    again = restored.lease(LeaseRequest("maker", 1, 0, 2), now=1.0)
    assert [lease.number for lease in again] == [lease.number for lease in before]
    assert min(lease.epoch for lease in again) >= first_epoch
    assert restored.deliver([*before, *again], now=2.0) == again
    assert restored.events[1:] == [{"refuse": [0, 1]}, {"deliver": [0, 1]}]
    assert replayed(ledger.rules, restored.events).paces == {}  # replaying the events must work


def test_a_version_trains_on_the_groups_picked_for_it() -> None:
    ledger = Ledger(LedgerRules(samples_per_version=2, total_samples=8))
    ledger.deliver(ledger.lease(LeaseRequest("maker", 1, 0, 3), now=0.0), now=1.0)
    assert [ledger.pick() for _ in range(3)] == [0, 1, 2]
    ledger.mark_trained(1)
    assert list(ledger.picked) == [2]  # one of the two groups of the next version


def test_an_overtaken_request_is_not_granted() -> None:
    ledger = Ledger(LedgerRules(samples_per_version=8, total_samples=8))

    def request(ask: int, incarnation: int) -> list[Lease]:
        return ledger.lease(LeaseRequest("maker", ask, 0, 1, incarnation=incarnation), now=0.0)

    assert [lease.number for lease in request(ask=1, incarnation=4)] == [0]
    assert [lease.number for lease in request(ask=3, incarnation=4)] == [1]
    assert request(ask=2, incarnation=4) == []
    successor = request(ask=1, incarnation=9)
    assert [lease.number for lease in successor] == [0]
    for ask in (1, 4):  # of its dead predecessor
        assert request(ask=ask, incarnation=4) == []
    assert request(ask=1, incarnation=9) == successor
    assert [lease.number for lease in request(ask=2, incarnation=9)] == [1]
    ledger.release("maker", "does not respond")
    assert request(ask=2, incarnation=9) == [], "it was released since"
    assert [lease.number for lease in request(ask=3, incarnation=9)] == [0]


def ledger_of_a_quick_and_a_slow_maker() -> tuple[Ledger, list[int]]:
    """`quick` delivers 8 groups in 8 seconds, `slow` none of its 4; then nothing new may be granted."""
    ledger = Ledger(LedgerRules(samples_per_version=6, total_samples=60, lead=1, max_staleness=4))
    slow = ledger.lease(LeaseRequest("slow", 1, 0, 4), now=0.0)
    for second in range(8):
        (lease,) = ledger.lease(LeaseRequest("quick", second + 1, 0, 1), now=float(second))
        ledger.deliver([lease], now=second + 1.0)
    assert ledger.lease(LeaseRequest("quick", 9, 0, 3), now=8.0) == []
    return ledger, [lease.number for lease in slow]


def test_a_fast_maker_with_room_gets_the_oldest_leases_of_a_slow_one() -> None:
    ledger, slow = ledger_of_a_quick_and_a_slow_maker()
    assert ledger.take_back(now=8.0) == slow[:3]
    assert ledger.take_back(now=8.0) == []  # no maker has more room
    assert ledger.lease(LeaseRequest("slow", 2, 0, 3), now=8.0) == []
    again = ledger.lease(LeaseRequest("quick", 10, 0, 3), now=8.0)
    assert [lease.number for lease in again] == slow[:3]
    assert ledger.lease(LeaseRequest("quick", 11, 0, 1), now=8.0) == []
    assert ledger.take_back(now=8.0) == slow[3:]


def test_leases_taken_back_go_to_any_maker_when_the_fast_one_is_gone() -> None:
    ledger, slow = ledger_of_a_quick_and_a_slow_maker()
    ledger.take_back(now=8.0)
    ledger.release("quick", "died")
    assert [lease.number for lease in ledger.lease(LeaseRequest("slow", 2, 0, 3), now=8.0)] == slow[:3]


def test_a_maker_that_regains_a_lease_taken_back_holds_it_once() -> None:
    ledger, slow = ledger_of_a_quick_and_a_slow_maker()
    ledger.take_back(now=8.0)
    ledger.release("quick", "died")
    again = ledger.lease(LeaseRequest("slow", 2, 0, 3), now=8.0)  # for the same groups
    assert len(ledger.deliver([*again, Lease(slow[3], 0)], now=9.0)) == 4
    for version in (1, 2):
        assert None not in [ledger.pick() for _ in range(6)]
        ledger.mark_trained(version)
    assert len(ledger.lease(LeaseRequest("slow", 3, 2, 12), now=9.0)) == 12, "it holds nothing and has no rivals"


def test_long_groups_of_equal_makers_are_left_alone() -> None:
    world = World(seed=0, speeds=[1, 1, 1], slots=[16] * 3, versions=10, groups_per_version=48, max_staleness=4)
    assert world.run()
    assert not any("return" in event for ledger in world.ledgers for event in ledger.events)


def test_equal_makers_share_the_lead_however_much_they_ask_for() -> None:
    ledger = Ledger(LedgerRules(samples_per_version=4, total_samples=40, lead=1, max_staleness=4))
    alone = ledger.lease(LeaseRequest("one", 1, 0, 8), now=0.0)
    assert len(alone) == 8
    assert ledger.lease(LeaseRequest("other", 1, 0, 8), now=0.0) == []
    ledger.deliver(alone, now=1.0)
    assert [ledger.pick() for _ in range(4)] == [0, 1, 2, 3]
    ledger.mark_trained(version=1)
    assert len(ledger.lease(LeaseRequest("one", 2, 1, 8), now=1.0)) == 4
    assert ledger.lease(LeaseRequest("one", 3, 1, 8), now=1.0) == []


def test_a_maker_without_measured_time_keeps_its_share() -> None:
    ledger = Ledger(LedgerRules(samples_per_version=4, total_samples=40, lead=1, max_staleness=4))
    assert ledger.lease(LeaseRequest("busy", 1, 0, 0), now=0.0) == []
    assert len(ledger.lease(LeaseRequest("first", 1, 0, 8), now=0.0)) == 4
    assert len(ledger.lease(LeaseRequest("busy", 2, 0, 8), now=1.0)) == 4


@pytest.mark.parametrize("makers", [2, 4])
def test_equal_makers_with_batches_of_the_whole_lead_duplicate_little_work(makers: int) -> None:
    world = World(
        seed=0, speeds=[1] * makers, slots=[128] * makers, versions=20, groups_per_version=64, in_batches=True
    )
    assert world.run()
    events = world.ledgers[0].events
    granted, returned = (sum(len(event.get(kind, ())) for event in events) for kind in ("grant", "return"))
    assert returned < 0.2 * granted


def test_a_maker_is_not_slow_because_another_delivers_first() -> None:
    ledger = Ledger(LedgerRules(samples_per_version=8, total_samples=800, lead=1, max_staleness=1))
    first = ledger.lease(LeaseRequest("first", 1, 0, 8), now=0.0)
    second = ledger.lease(LeaseRequest("second", 1, 0, 8), now=0.0)
    ledger.deliver(first[:4], now=1.0)
    assert ledger.lease(LeaseRequest("first", 2, 0, 4), now=1.0) == []  # it has room
    assert ledger.take_back(now=1.1) == []
    ledger.deliver(first[4:], now=1.2)
    assert ledger.take_back(now=1.5) == []
    assert ledger.take_back(now=10.0) == [lease.number for lease in second[:4]]


def test_late_deliveries_count_towards_a_makers_speed() -> None:
    ledger = Ledger(LedgerRules(samples_per_version=8, total_samples=800, lead=1, max_staleness=1))
    first = ledger.lease(LeaseRequest("first", 1, 0, 8), now=0.0)
    second = ledger.lease(LeaseRequest("second", 1, 0, 8), now=0.0)
    ledger.deliver(first, now=1.0)
    assert ledger.lease(LeaseRequest("first", 2, 0, 8), now=1.0) == []
    assert ledger.take_back(now=2.5) == [lease.number for lease in second]
    assert ledger.deliver(second, now=2.5) == []
    for version in range(1, 20):
        now = 2.5 + version
        while ledger.num_picked < 8 * version:
            if ledger.pick() is None:
                for maker in ("first", "second"):
                    ask = 10 * version + (maker == "first")
                    leases = ledger.lease(LeaseRequest(maker, ask, version - 1, 8), now=now - 1.0)
                    ledger.deliver(leases, now=now)
        ledger.mark_trained(version)
    granted = dict.fromkeys(("first", "second"), 0)
    for event in ledger.events:
        granted[event.get("maker", "first")] += len(event.get("grant", ()))
    assert granted["second"] > 0.4 * granted["first"]


def test_a_maker_that_started_slowly_gets_all_it_requests_if_none_is_faster() -> None:
    ledger = Ledger(LedgerRules(samples_per_version=4, total_samples=400, lead=1, max_staleness=1))
    now = 100.0  # its first groups took long, because it compiled
    leases = ledger.lease(LeaseRequest("maker", 1, 0, 8), now=0.0)
    for version in range(3):
        ledger.deliver(leases, now=now)
        while ledger.num_picked < 4 * (version + 1):
            ledger.pick()
        now += 1.0
        ledger.mark_trained(version + 1)
        leases = ledger.lease(LeaseRequest("maker", 2 + version, version + 1, 8), now=now)
        assert len(leases) == 4


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"group_size": 0}, "group_size must be 1 or more, got 0"),
        ({"lead": -1}, "lead and max_staleness must be 0 or more, got -1"),
        ({"max_staleness": -1}, "max_staleness to None for no bound"),
        ({"group_size": 3}, "whole groups of 3 samples"),
    ],
)
def test_rules_made_by_hand_are_checked(wrong, message):
    with pytest.raises(ConfigError, match=message):
        LedgerRules(**{"samples_per_version": 4, "total_samples": 8, **wrong})
