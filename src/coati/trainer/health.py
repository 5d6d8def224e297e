"""Guards of a training run: weights that are not finite, batches that are skipped."""

import logging
import math
from collections.abc import Iterable, Mapping

from torch import nn
from torch.optim import Optimizer

from coati.errors import CheckpointError, TrainingDiverged
from coati.experience import Experience
from coati.models.memory import local_part
from coati.trainer.strategies import Strategy

logger = logging.getLogger(__name__)

MAX_SKIPPED_IN_A_ROW = 10
"""Batches that may be skipped one after the other before training ends."""


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
        return f"The learning rate may be too high ({rates}): lower it, or check rewards and advantages of the samples."


def _trained(model: nn.Module) -> Iterable[nn.Parameter]:
    return (weight for weight in model.parameters() if weight.requires_grad)


def _are_finite(weights: Iterable[nn.Parameter]) -> bool:
    """Whether no weight, of those or the part of those that this rank holds, is NaN or infinite."""
    held = [local_part(weight.detach()) for weight in weights]
    return math.isfinite(nn.utils.get_total_norm([part for part in held if part.numel() > 0], math.inf))
