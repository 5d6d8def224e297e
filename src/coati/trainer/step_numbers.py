"""Numbers of the joined batch: each rank sees its part, and all of them report what one rank with all of it would.

Everything that ranks have to tell each other about a batch is a handful of scalars. They travel as one vector in one
exchange; how two ranks' numbers combine (a sum, a maximum, moments, sums of weights) is arithmetic that needs no
process group, so it is tested in one process.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor

from coati.algos import MaskedMoments, WeightSums

_AllGather = Callable[[Tensor], Tensor]


@dataclasses.dataclass
class StepNumbers:
    """This rank's part of the numbers of a step; `over_all_ranks` gives those of all. All scalars.

    Ranks must fill in the same names in the same order.
    """

    shares: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    """Add up over micro-batches and ranks."""
    maxima: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    moments: dict[str, MaskedMoments] = dataclasses.field(default_factory=dict)
    weights: dict[str, WeightSums] = dataclasses.field(default_factory=dict)

    def add(self, name: str, value: Tensor) -> None:
        """Add a micro-batch's share."""
        value = value.detach().double()
        self.shares[name] = self.shares[name] + value if name in self.shares else value

    def largest(self, name: str, value: Tensor) -> None:
        """Keep the larger of what was there and a micro-batch's value."""
        value = value.detach().double()
        self.maxima[name] = torch.maximum(self.maxima[name], value) if name in self.maxima else value

    def over_all_ranks(self, all_gather: _AllGather) -> "StepNumbers":
        """The numbers of all ranks' batches joined, by one exchange: `all_gather` makes [W, n] of [n].

        One rank keeps its numbers to the last bit.

        Example:
            >>> mine, other = StepNumbers(), StepNumbers()
            >>> mine.add("tokens", torch.tensor(3)), other.add("tokens", torch.tensor(4))
            (None, None)
            >>> mine.over_all_ranks(lambda vector: torch.stack([vector, other.as_vector()])).shares["tokens"].item()
            7.0
        """
        rows = all_gather(self.as_vector())
        if len(rows) == 1:
            return self
        return functools.reduce(StepNumbers._merge, [self._filled_from(row) for row in rows])

    def as_vector(self) -> Tensor:
        """All numbers in float64, which holds every count and float exactly, in the order of their names' arrival."""
        scalars = [
            *self.shares.values(),
            *self.maxima.values(),
            *(scalar for moments in self.moments.values() for scalar in moments),
            *(scalar for sums in self.weights.values() for scalar in sums),
        ]
        return torch.stack([scalar.detach().double() for scalar in scalars])

    def values(self) -> dict[str, float]:
        """Shares and maxima as plain numbers."""
        scalars = {**self.shares, **self.maxima}
        return dict(zip(scalars, torch.stack(list(scalars.values())).tolist(), strict=True))  # one wait for the device

    def _filled_from(self, row: Tensor) -> Self:
        """Another rank's numbers, from its vector; the names are this rank's."""
        scalars = iter(row.unbind())

        def take(count: int) -> list[Tensor]:
            return [next(scalars) for _ in range(count)]

        return type(self)(
            shares=dict(zip(self.shares, take(len(self.shares)), strict=True)),
            maxima=dict(zip(self.maxima, take(len(self.maxima)), strict=True)),
            moments={name: MaskedMoments(*take(3)) for name in self.moments},
            weights={name: WeightSums(*take(3)) for name in self.weights},
        )

    def _merge(self, other: "StepNumbers") -> "StepNumbers":
        return StepNumbers(
            shares={name: value + other.shares[name] for name, value in self.shares.items()},
            maxima={name: torch.maximum(value, other.maxima[name]) for name, value in self.maxima.items()},
            moments={name: merge_moments(value, other.moments[name]) for name, value in self.moments.items()},
            weights={name: value.merge(other.weights[name]) for name, value in self.weights.items()},
        )


def merge_moments(one: MaskedMoments, other: MaskedMoments) -> MaskedMoments:
    """Mean and variance of the entries of both; of none, zeros.

    Example:
        >>> def moments(*numbers: float) -> MaskedMoments:
        ...     return MaskedMoments(*(torch.tensor(number, dtype=torch.float64) for number in numbers))
        >>> merged = merge_moments(moments(1.0, 0.0, 1.0), moments(4.0, 1.0, 2.0))  # of 1, and of 3 and 5
        >>> merged.mean.item(), round(merged.variance.item(), 4), merged.num_entries.item()
        (3.0, 2.6667, 3.0)
    """
    count = one.num_entries + other.num_entries
    share = other.num_entries / count.clamp(min=1)
    distance = other.mean - one.mean
    # From differences of means, not of sums of squares: those of advantages far from 0 would cancel to noise.
    variance = (1 - share) * one.variance + share * other.variance + share * (1 - share) * distance.square()
    return MaskedMoments(mean=one.mean + share * distance, variance=variance, num_entries=count)


def explained_variance(target: MaskedMoments, residual: MaskedMoments) -> float:
    """1 - Var(target - value) / Var(target): 1 is a perfect critic, 0 one that knows only the mean."""
    return float(1.0 - residual.variance / target.variance) if float(target.variance) > 0.0 else 0.0
