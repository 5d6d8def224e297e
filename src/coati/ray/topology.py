"""Who sends what to whom, for any number of makers and trainers.

Experience: every maker sends to every trainer, one item at a time in turn, so each trainer gets its share
whatever the numbers are. Weights: the trainers of a group hold the same weights, so each maker is updated by
exactly one of them, and the makers are spread over the trainers.
"""

from collections.abc import Sequence


def makers_updated_by(rank: int, maker_names: Sequence[str], num_trainers: int) -> list[str]:
    """The makers that the trainer of this rank sends weights to.

    >>> [makers_updated_by(rank, ["a", "b", "c"], 2) for rank in range(2)]
    [['a', 'c'], ['b']]
    """
    return [name for index, name in enumerate(maker_names) if index % num_trainers == rank]
