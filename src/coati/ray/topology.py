"""Who sends what to whom, for any number of makers and trainers.

Experience: every maker sends to every trainer, one item at a time in turn, so each trainer gets its share
whatever the numbers are. Weights: the trainers of a group hold the same weights, so each maker is updated by
exactly one of them, and the makers are spread over the trainers. That stays so when makers join and leave: nobody
is moved from one trainer to another, because the two would change their lists at different versions and the maker
might miss one.
"""

from collections import Counter
from collections.abc import Mapping, Sequence


def first_updaters(maker_names: Sequence[str], num_trainers: int) -> dict[str, int]:
    """The rank of the trainer that sends weights to each maker.

    >>> first_updaters(["a", "b", "c"], 2)
    {'a': 0, 'b': 1, 'c': 0}
    """
    return {name: index % num_trainers for index, name in enumerate(maker_names)}


def makers_updated_by(rank: int, maker_names: Sequence[str], num_trainers: int) -> list[str]:
    """The makers that the trainer of this rank sends weights to, when a run begins.

    >>> [makers_updated_by(rank, ["a", "b", "c"], 2) for rank in range(2)]
    [['a', 'c'], ['b']]
    """
    return [name for name, updater in first_updaters(maker_names, num_trainers).items() if updater == rank]


def trainer_for_newcomer(updaters: Mapping[str, int], num_trainers: int) -> int:
    """The rank of the trainer that updates one maker more; `updaters` says who updates whom so far.

    >>> trainer_for_newcomer({"a": 0, "b": 1, "c": 0}, 2)
    1
    """
    load = Counter(updaters.values())
    return min(range(num_trainers), key=lambda rank: load[rank])


def makers_to_leave(updaters: Mapping[str, int], count: int) -> list[str]:
    """Which makers go, so that the rest stays evenly spread: each time the newest of the trainer that has most.

    >>> makers_to_leave({"a": 0, "b": 1, "c": 0}, 2)
    ['c', 'b']
    """
    names, left = list(updaters), dict(updaters)
    for _ in range(count):
        load = Counter(left.values())
        del left[next(name for name in reversed(left) if load[left[name]] == max(load.values()))]
    return [name for name in reversed(names) if name not in left]
