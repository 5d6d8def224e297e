"""The soak's choice of faults."""

from collections import Counter
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


@pytest.mark.parametrize("makers", [1, 2, 3])
def test_one_fault_in_four_is_the_trainers_at_each_of_its_points_as_often(makers, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import chaos

    counts = Counter(chaos.choices(makers, trainer=True))
    of_trainer = {fault.point: count for fault, count in counts.items() if fault.actor == "trainer-0"}
    assert set(of_trainer) == set(chaos.TRAINER_POINTS)
    assert len(set(of_trainer.values())) == 1
    assert 4 * sum(of_trainer.values()) == counts.total()
    assert len({count for fault, count in counts.items() if fault.actor != "trainer-0"}) == 1
