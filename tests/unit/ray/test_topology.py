"""Who updates whom, when makers come and go."""

from hypothesis import given
from hypothesis import strategies as st

from coati.ray.run_actors import first_updaters, makers_to_leave, trainer_for_newcomer


@given(num_makers=st.integers(0, 12), num_trainers=st.integers(1, 12))
def test_each_maker_is_updated_by_exactly_one_trainer_and_evenly(num_makers, num_trainers):
    updaters = first_updaters([f"maker-{index}" for index in range(num_makers)], num_trainers)
    assert len(updaters) == num_makers
    assert spread_over(updaters, num_trainers) <= 1


def spread_over(updaters, num_trainers):
    parts = [sum(updater == rank for updater in updaters.values()) for rank in range(num_trainers)]
    return max(parts) - min(parts)


@given(changes=st.lists(st.integers(-4, 4), max_size=6), num_trainers=st.integers(1, 5))
def test_makers_stay_evenly_spread_and_with_their_trainer_when_others_come_and_go(changes, num_trainers):
    updaters = first_updaters(["a", "b", "c"], num_trainers)
    for number, change in enumerate(changes):
        before = dict(updaters)
        for index in range(change):
            updaters[f"{number}-{index}"] = trainer_for_newcomer(updaters, num_trainers)
        leaving = makers_to_leave(updaters, min(-change, len(updaters) - 1)) if change < 0 else []
        assert len(set(leaving)) == len(leaving) == min(max(0, -change), len(before) - 1)
        updaters = {name: rank for name, rank in updaters.items() if name not in leaving}
        assert spread_over(updaters, num_trainers) <= 1
        assert all(updaters[name] == before[name] for name in updaters.keys() & before.keys())
