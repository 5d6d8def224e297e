"""Steps of training: their numbers, over all ranks, and whether there may be another.

Each rank sees its part of a batch, and all of them report what one rank with all of it would. What they have to tell
each other is a handful of scalars, which travel as one vector in one exchange.
"""

import dataclasses
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from coati.algos.masked import MaskedMoments
from coati.errors import CheckpointError, DataError, TrainingDiverged
from coati.experience import Experience
from coati.models.memory import local_part
from coati.trainer.strategies import Strategy

logger = logging.getLogger(__name__)

MAX_SKIPPED_IN_A_ROW = 10
"""Batches that may be skipped one after the other before training ends."""


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
        """Combine the numbers of all ranks' batches, by one exchange: `all_gather` makes [W, n] of [n]."""
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
    """Mean and variance of the entries of all parts, [W] each; of none, zeros."""
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
    """Turn a learner's metrics into floats, which logs and checkpoints hold."""
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


class TrainingHealth:
    """Counts steps and skipped batches, and ends training that cannot succeed. All ranks must call together."""

    def __init__(
        self, models: Mapping[str, nn.Module], optimizers: Mapping[str, Optimizer], strategy: Strategy
    ) -> None:
        self.num_steps = 0
        self.num_skipped = 0
        self._num_skipped_in_a_row = 0
        self._models = models
        self._optimizers = optimizers
        self._strategy = strategy
        broken = [label for label, model in models.items() if not _are_finite(model.parameters())]
        if self._strategy.any_rank(bool(broken)):
            raise CheckpointError(
                "models to train must have finite weights, got NaN or infinity in the "
                f"{' and the '.join(broken) or 'model of another rank'}. Use another copy of the model."
            )

    @property
    def counts(self) -> tuple[int, int, int]:
        """Steps, skipped batches, and those skipped in a row: what a checkpoint holds."""
        return self.num_steps, self.num_skipped, self._num_skipped_in_a_row

    @counts.setter
    def counts(self, counts: Iterable[int]) -> None:
        self.num_steps, self.num_skipped, self._num_skipped_in_a_row = counts

    def count_step(self) -> None:
        """Count an optimizer step, and end training if it has made a weight NaN or infinite."""
        self.num_steps += 1
        self._num_skipped_in_a_row = 0
        broken = [label for label, model in self._models.items() if not _are_finite(_trained(model))]
        if self._strategy.any_rank(bool(broken)):
            raise TrainingDiverged(
                f"weights of the {' and the '.join(broken) or 'model, on another rank,'} are NaN or infinite after "
                f"optimizer step {self.num_steps}. {self._remedy()}"
            )

    def count_skipped(self, experience: Experience, num_tokens: int, norms: Mapping[str, float]) -> None:
        """Count a batch that could not be trained on, and end training if too many come in a row."""
        self.num_skipped += 1
        self._num_skipped_in_a_row += 1
        found = ", ".join(f"{label} {norm}" for label, norm in norms.items())
        ids = experience.sample_ids.tolist() if experience.sample_ids is not None else "unknown"
        logger.warning(
            "batch skipped, optimizer untouched: %d response tokens, gradient norms are %s (sample ids %s)",
            num_tokens,
            found,
            ids,
        )
        if self._num_skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            raise TrainingDiverged(
                f"{self._num_skipped_in_a_row} batches in a row were skipped; the last had {num_tokens} response "
                f"tokens and gradient norms {found}. {self._remedy()}"
            )

    def check_progress(self) -> None:
        """Raise `TrainingDiverged` if every batch so far was skipped, so that nothing was learned."""
        if self.num_skipped > 0 and self.num_steps == 0:
            raise TrainingDiverged(
                f"all {self.num_skipped} batches were skipped, so nothing was learned. {self._remedy()}"
            )

    def _remedy(self) -> str:
        rates = ", ".join(
            f"train.{label}_lr is {optimizer.param_groups[0]['lr']:g}" for label, optimizer in self._optimizers.items()
        )
        return (
            f"The learning rate may be too high ({rates}): lower it, or check the model's weights, and rewards and "
            "advantages of the samples."
        )


def _trained(model: nn.Module) -> Iterable[nn.Parameter]:
    return (weight for weight in model.parameters() if weight.requires_grad)


def _are_finite(weights: Iterable[nn.Parameter]) -> bool:
    """Whether no weight, of those or the part of those that this rank holds, is NaN or infinite."""
    held = [local_part(weight.detach()) for weight in weights]
    return math.isfinite(nn.utils.get_total_norm([part for part in held if part.numel() > 0], math.inf))
