"""Who may issue how many samples when: sums, bounds, and runs simulated to their end."""

import dataclasses
import itertools
import random
from collections import Counter

import pytest

from coati.errors import ConfigError, DataError
from coati.ledger import UNBOUNDED, AdmissionGate, WorkShare

SIZES = list(itertools.product(range(1, 9), range(1, 9)))  # M makers, T trainers


def shares_of(num_makers, num_trainers, *, per_version, total, max_staleness):
    return [
        WorkShare(
            rounds_per_version=per_version,
            total_rounds=total,
            max_staleness=max_staleness,
            maker_index=index,
            num_makers=num_makers,
            num_trainers=num_trainers,
        )
        for index in range(num_makers)
    ]


def test_limits_by_hand():
    # 2 makers, 3 trainers, 5 rounds for each version, 12 rounds in all, η = 1. A round is 3 samples.
    #   version 0: (1 + 0 + 1) · 5 = 10 rounds, 5 for each maker
    #   version 1: (1 + 1 + 1) · 5 = 15, but the run ends at 12: 6 for each
    first, second = shares_of(2, 3, per_version=5, total=12, max_staleness=1)
    assert [first.limit(version) for version in range(3)] == [15, 18, 18]
    assert [second.limit(version) for version in range(3)] == [15, 18, 18]
    # η = 0: 5 rounds, dealt as 0 1 0 1 0: three to the first maker
    first, second = shares_of(2, 3, per_version=5, total=12, max_staleness=0)
    assert [first.limit(version) for version in range(4)] == [9, 15, 18, 18]
    assert [second.limit(version) for version in range(4)] == [6, 15, 18, 18]
    assert (first.total, second.total) == (18, 18)


def test_shares_add_up_exactly():
    for (makers, trainers), total in itertools.product(SIZES, (1, 5, 8, 13)):
        shares = shares_of(makers, trainers, per_version=2, total=total, max_staleness=0)
        assert sum(share.total for share in shares) == total * trainers
        assert max(share.total for share in shares) - min(share.total for share in shares) <= trainers


def test_every_trainer_gets_exactly_its_rounds_from_round_robin():
    for (makers, trainers), total in itertools.product(SIZES, (1, 7, 12)):
        got: Counter[int] = Counter()
        for share in shares_of(makers, trainers, per_version=3, total=total, max_staleness=0):
            got.update((share.maker_index + turn) % trainers for turn in range(share.total))
        assert got == dict.fromkeys(range(trainers), total)


def test_limits_never_shrink_and_keep_to_the_bound_in_all():
    for (makers, trainers), per_version, staleness in itertools.product(SIZES, (1, 3, 4), (0, 1, 3)):
        total = 17
        shares = shares_of(makers, trainers, per_version=per_version, total=total, max_staleness=staleness)
        so_far = [0] * makers
        for version in range(total + 2):
            limits = [share.limit(version) for share in shares]
            assert all(new >= old for new, old in zip(limits, so_far, strict=True)), (makers, version)
            so_far = limits
            # Because limits never shrink, this is also all that can have been issued.
            assert sum(limits) == min(total, (staleness + version + 1) * per_version) * trainers
        assert so_far == [share.total for share in shares]


def test_the_version_needed_is_the_first_that_admits_one_more():
    for (makers, trainers), staleness in itertools.product(SIZES, (0, 2, UNBOUNDED)):
        for share in shares_of(makers, trainers, per_version=3, total=11, max_staleness=staleness):
            for num_issued in range(share.total):
                needed = share.version_needed(num_issued)
                assert share.limit(needed) > num_issued
                assert needed == 0 or share.limit(needed - 1) <= num_issued
            assert share.version_needed(share.total) is None


@pytest.mark.parametrize("max_staleness", [0, 1, 3, UNBOUNDED])
def test_no_trainer_starves_and_no_sample_is_too_old(max_staleness):
    """Makers issue whatever they may, one after the other; trainers train when all of them can."""
    per_version, total = 4, 10
    for makers, trainers in SIZES:
        shares = shares_of(makers, trainers, per_version=per_version, total=total, max_staleness=max_staleness)
        gates = [AdmissionGate(share) for share in shares]
        turns = [share.maker_index for share in shares]
        queues: list[list[int]] = [[] for _ in range(trainers)]  # versions that wrote what waits there
        version, num_trained = 0, 0
        while num_trained < total:
            for index, gate in enumerate(gates):
                for _ in range(gate.admissible(1000, version=version)):
                    queues[turns[index] % trainers].append(version)
                    turns[index] += 1
                    gate.issue(1)
            batch = min(per_version, total - num_trained)
            assert all(len(queue) >= batch for queue in queues), f"{makers} makers, {trainers} trainers stall"
            for queue in queues:
                ages = [version - written for written in queue[:batch]]
                assert max_staleness == UNBOUNDED or max(ages) <= max_staleness
                del queue[:batch]
            num_trained += batch
            version += 1
        assert all(gate.is_done for gate in gates)
        assert queues == [[] for _ in range(trainers)]


def test_groups_stay_whole_and_everything_ends_for_any_makers_trainers_and_group_size():
    """Makers issue one group at a time, in a random order; each round of each trainer comes from one sample."""
    for (makers, trainers), size, eta in itertools.product([(1, 1), (2, 1), (3, 2), (2, 3), (5, 4)], (2, 3, 8), (0, 2)):
        per_version, total, dice = 24, 48, random.Random(size)
        shares = [
            dataclasses.replace(share, group_size=size)
            for share in shares_of(makers, trainers, per_version=per_version, total=total, max_staleness=eta)
        ]
        gates = [AdmissionGate(share) for share in shares]
        rounds: list[dict[int, int]] = [{} for _ in range(trainers)]  # of each trainer: round to version that wrote it
        numbers = [Counter() for _ in range(makers)]
        version, trained = 0, 0
        while trained < total:
            able = [index for index, gate in enumerate(gates) if gate.admissible(size, version=version)]
            if able:
                index = dice.choice(able)
                assert gates[index].admissible(4 * size, version=version) % size == 0
                for turn in range(gates[index].num_issued, gates[index].num_issued + size):
                    trainer = (index + turn) % trainers
                    round_index = shares[index].round_of(numbers[index][trainer])
                    numbers[index][trainer] += 1
                    assert round_index not in rounds[trainer]
                    rounds[trainer][round_index] = version
                gates[index].issue(size)
            while trained < total and all(trained in got for got in rounds):
                assert all(version - got[trained] <= eta for got in rounds)
                trained += 1
                version = trained // per_version
            assert able or trained == total, f"{makers} makers, {trainers} trainers, groups of {size} stall"
        assert all(gate.is_done for gate in gates)


def test_part_of_a_group_is_refused_and_so_are_versions_that_would_part_one():
    gate = AdmissionGate(WorkShare(rounds_per_version=8, total_rounds=8, max_staleness=0, group_size=4))
    assert gate.admissible(4, version=0) == 4
    with pytest.raises(DataError, match="whole groups of 4 samples, got 6"):
        gate.admissible(6, version=0)
    with pytest.raises(ConfigError, match="Make both a multiple of 4"):
        WorkShare(rounds_per_version=6, total_rounds=12, group_size=4)
    # Two trainers: 6 rounds are 12 samples, three groups.
    assert (
        WorkShare(rounds_per_version=6, total_rounds=12, max_staleness=0, group_size=4, num_trainers=2).limit(0) == 12
    )


def test_dropped_samples_are_given_back():
    gate = AdmissionGate(WorkShare(rounds_per_version=4, total_rounds=6, max_staleness=0))
    assert gate.admissible(10, version=0) == 4
    gate.issue(4)
    assert gate.admissible(10, version=0) == 0
    assert gate.version_needed() == 1
    gate.give_back(3)
    assert (gate.num_issued, gate.admissible(2, version=0), gate.version_needed()) == (1, 2, 0)
    gate.issue(3)
    assert gate.admissible(10, version=1) == 2
    gate.issue(2)
    assert gate.is_done
    assert gate.version_needed() is None
    gate.give_back(1)
    assert not gate.is_done


def test_a_maker_with_nothing_to_do_is_done_at_once():
    idle = shares_of(3, 1, per_version=1, total=2, max_staleness=0)[2]
    assert AdmissionGate(idle).is_done


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_staleness": -2}, "max_staleness must be 0 or more .* got -2"),
        ({"maker_index": 2, "num_makers": 2}, "got maker 2 of 2"),
        ({"num_trainers": 0}, "0 trainers"),
        ({"rounds_per_version": 0}, "must be 1 or more, got 0 and 6"),
        ({"total_rounds": 0}, "must be 1 or more, got 4 and 0"),
    ],
)
def test_impossible_shares_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        WorkShare(**{"rounds_per_version": 4, "total_rounds": 6, **settings})
