"""Numbers of the joined batch: each rank sees its part, and all of them report what one rank with all of it would.

Everything that ranks have to tell each other about a batch is a handful of scalars. They travel as one vector in one
exchange; how two ranks' numbers combine (a sum, a maximum, moments) is arithmetic that needs no
process group, so it is tested in one process.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from coati.algos.masked import MaskedMoments
from coati.errors import DataError


@dataclasses.dataclass
class StepNumbers:
    """This rank's part of the numbers of a step; `over_all_ranks` gives those of all. All scalars.

    Ranks must fill in the same names in the same order.
    """

    shares: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    """Add up over micro-batches and ranks."""
    maxima: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    moments: dict[str, MaskedMoments] = dataclasses.field(default_factory=dict)

    def add(self, name: str, value: Tensor) -> None:
        """Add a micro-batch's share."""
        value = value.detach().double()
        self.shares[name] = self.shares[name] + value if name in self.shares else value

    def largest(self, name: str, value: Tensor) -> None:
        """Keep the larger of what was there and a micro-batch's value."""
        value = value.detach().double()
        self.maxima[name] = torch.maximum(self.maxima[name], value) if name in self.maxima else value

    def over_all_ranks(self, all_gather: Callable[[Tensor], Tensor]) -> "StepNumbers":
        """Combine the numbers of all ranks' batches, by one exchange: `all_gather` makes [W, n] of [n].

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
        of_ranks = iter(rows.unbind(1))  # [W] each
        return StepNumbers(
            shares={name: next(of_ranks).sum() for name in self.shares},
            maxima={name: next(of_ranks).max() for name in self.maxima},
            moments={name: joined_moments(next(of_ranks), next(of_ranks), next(of_ranks)) for name in self.moments},
        )

    def as_vector(self) -> Tensor:
        """All numbers in float64, which holds every count and float exactly, in the order of their names' arrival."""
        scalars = [
            *self.shares.values(),
            *self.maxima.values(),
            *(scalar for moments in self.moments.values() for scalar in moments),
        ]
        return torch.stack([scalar.detach().double() for scalar in scalars])

    def values(self) -> dict[str, float]:
        """Shares and maxima as plain numbers."""
        scalars = {**self.shares, **self.maxima}
        return dict(zip(scalars, torch.stack(list(scalars.values())).tolist(), strict=True))  # one wait for the device


def joined_moments(means: Tensor, variances: Tensor, counts: Tensor) -> MaskedMoments:
    """Mean and variance of the entries of all parts, [W] each; of none, zeros.

    Example:
        >>> parts = torch.tensor([[1.0, 0.0, 1.0], [4.0, 1.0, 2.0]])  # of 1, and of 3 and 5
        >>> joined = joined_moments(*parts.unbind(1))
        >>> joined.mean.item(), round(joined.variance.item(), 4), joined.num_entries.item()
        (3.0, 2.6667, 3.0)
    """
    count = counts.sum()
    shares = counts / count.clamp(min=1)
    # Relative to one of the parts: the mean of equal means is then exact.
    pivot = means[counts.argmax()]
    mean = pivot + (shares * (means - pivot)).sum()
    # From differences of means, not of sums of squares: those of advantages far from 0 would cancel to noise.
    variance = (shares * (variances + (means - mean).square())).sum()
    return MaskedMoments(mean=torch.where(count > 0, mean, 0.0), variance=variance, num_entries=count)


def explained_variance(target: MaskedMoments, residual: MaskedMoments) -> float:
    """1 - Var(target - value) / Var(target): 1 is a perfect critic, 0 one that knows only the mean."""
    return float(1.0 - residual.variance / target.variance) if float(target.variance) > 0.0 else 0.0


def plain_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Turn a learner's metrics into floats, which logs and checkpoints hold.

    Example:
        >>> plain_metrics({"policy/loss": torch.tensor(0.5), "policy/steps": 3})
        {'policy/loss': 0.5, 'policy/steps': 3.0}
    """
    plain = {}
    for name, value in metrics.items():
        try:
            plain[name] = float(value)
        except (TypeError, ValueError, RuntimeError):
            raise DataError(
                f"metrics of a learner must be single numbers, got {name!r}: a {type(value).__name__}. Return its mean "
                "or sum from `step`, or leave it out."
            ) from None
    return plain
