"""The soak's choice of faults."""

import itertools
from collections import Counter
from pathlib import Path

import pytest
from fault_schedule import Schedule

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


@pytest.fixture
def chaos(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import chaos

    return chaos


@pytest.mark.parametrize("makers", [1, 2, 3])
def test_one_fault_in_four_is_the_trainers_at_each_of_its_points_as_often(makers, chaos):
    counts = Counter(chaos.choices(makers, trainer=True))
    of_trainer = {fault.point: count for fault, count in counts.items() if fault.actor == "trainer-0"}
    assert set(of_trainer) == set(chaos.TRAINER_POINTS)
    assert len(set(of_trainer.values())) == 1
    assert 4 * sum(of_trainer.values()) == counts.total()
    assert len({count for fault, count in counts.items() if fault.actor != "trainer-0"}) == 1


def test_a_seed_draws_the_same_schedule_again(chaos, tmp_path):
    first, again, other = (
        chaos.seeded(seed, chaos.choices(3, trainer=False), seconds=600, every=(10, 20)) for seed in (7, 7, 8)
    )
    assert first == again != other
    times = [0.0, *(fault.after for fault in first)]
    assert 30 <= len(first) <= 60
    assert all(9.9 <= later - earlier <= 20.1 for earlier, later in itertools.pairwise(times))
    Schedule(tmp_path, first)
    assert Schedule(tmp_path).faults == first
