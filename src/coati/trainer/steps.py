"""The parts of a training step: passes that fit into memory, metrics reduced over all ranks, and health checks.

Each rank processes its part of a batch, and all ranks report the metrics of the joined batch. For that they gather one
vector of scalars, in one collective operation.
"""

import contextlib
import dataclasses
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from coati.algos.masked import MaskedMoments
from coati.config import TrainSettings
from coati.devices import HOST_MEMORY, device_errors_explained
from coati.errors import CheckpointError, ConfigError, DataError, OutOfMemory, TrainingDiverged
from coati.experience import Experience
from coati.models.actor import packed_scoring_problem
from coati.models.memory import local_part
from coati.models.packing import row_parts, row_tokens
from coati.models.value_head import packs
from coati.trainer.strategies import Strategy

logger = logging.getLogger(__name__)

LARGEST_PASS = 32768
FIXED_PASS = 16384
MAX_SKIPPED_IN_A_ROW = 10  # number of consecutive skipped batches that ends training


class PassTooLarge(Exception):
    """A pass ran out of memory; the memory per pass has been reduced, and the step must start over."""


class MicroBatch(NamedTuple):
    """The rows of one forward and backward pass."""

    part: Experience
    advantages: Tensor  # [B, A] of these rows, as the policy loss takes them
    tokens: int  # its cost in tokens; see `row_tokens`
    is_real: bool  # False for a dummy pass that keeps this rank in step with the others
    is_last: bool


class PassSize:
    """Maximum tokens per pass: `train.micro_batch_tokens` or, with "auto", the size that has fit into memory so far.

    "auto" starts with `LARGEST_PASS` on a GPU (larger passes are not faster) and halves it when a pass runs out of
    memory. If a single sample does, it calls `checkpoint` to turn on activation checkpointing, and starts again at the
    first size. Where a step cannot start over, "auto" is always `FIXED_PASS`: with several ranks, which wait for each
    other in a pass, and with sharded parameters, because FSDP2 cannot abort a pass. On a CPU it starts with that.
    """

    def __init__(self, train: TrainSettings, strategy: Strategy, checkpoint: Callable[[], None]) -> None:
        self._train = train
        self._checkpoint = None if train.activation_checkpointing else checkpoint
        setting = train.micro_batch_tokens
        self._starts_over = setting == "auto" and strategy.world_size == 1 and not strategy.shards_parameters
        auto = LARGEST_PASS if self._starts_over and strategy.device.type != "cpu" else FIXED_PASS
        self.tokens: int = auto if setting == "auto" else setting
        self._first_tokens = self.tokens

    @contextlib.contextmanager
    def guard(self, label: str, one: MicroBatch) -> Iterator[None]:
        """Convert device errors in a pass to coati's; raise `PassTooLarge` if less memory per pass may suffice."""
        is_single = one.part.num_samples < 2
        if is_single:
            remedy = "A pass has at least one sample: lower rollout.max_new_tokens or prompts.max_tokens"
        else:
            remedy = f"Set train.micro_batch_tokens, which is {self._train.micro_batch_tokens}, to {one.tokens // 2}"
        if not self._train.activation_checkpointing:
            remedy += ", or set train.activation_checkpointing"
        what = f"the {label}'s pass over {one.part.num_samples} samples, {one.tokens} tokens,"
        try:
            with device_errors_explained(what, f"{remedy}."):
                yield
        except OutOfMemory as error:
            if not self._starts_over or HOST_MEMORY in str(error) or (is_single and self._checkpoint is None):
                raise
            if is_single:
                self._turn_on_checkpointing(error)
            while not is_single and self.tokens >= one.tokens:
                self.tokens //= 2
            how = "activation checkpointing is now on (train.activation_checkpointing), "
            logger.warning(
                "%s; %spasses now have at most %d tokens, and the step starts over",
                str(error).partition(". ")[0],
                how * is_single,
                self.tokens,
            )
            raise PassTooLarge from None

    def _turn_on_checkpointing(self, error: OutOfMemory) -> None:
        assert self._checkpoint is not None
        checkpoint, self._checkpoint = self._checkpoint, None
        try:
            checkpoint()
        except ConfigError:  # the model does not support it
            raise error from None
        self.tokens = self._first_tokens


def micro_batches(
    experience: Experience,
    advantages: Tensor,  # [B, A] of the whole batch, as the policy loss takes them
    *,
    actor: nn.Module,
    critic: nn.Module | None,
    strategy: Strategy,
    max_rows: int,
    max_tokens: int,
) -> Iterator[MicroBatch]:
    """Split a batch into passes; all ranks run the same number, at least one, because each pass is collective."""
    parts: list[slice] = []
    costs: list[int] = []
    if experience.num_samples > 0 and experience.num_actions > 0:
        is_packed = not packed_scoring_problem(actor) and (critic is None or packs(critic))
        costs = row_tokens(experience.sequences, experience.attention_mask, is_packed=is_packed)
        parts = row_parts(costs, max_tokens=max_tokens, max_rows=max_rows)
    num_passes = int(strategy.all_gather(torch.tensor([max(1, len(parts))])).max())
    for index in range(num_passes):
        is_last = index == num_passes - 1
        if index < len(parts):
            rows = parts[index]
            part, tokens = experience.select(rows), sum(costs[rows])
            yield MicroBatch(part, advantages[rows], tokens, is_real=True, is_last=is_last)
        else:
            part = Experience.blank(1, like=experience.action_log_probs)
            part.proximal_log_probs = part.action_log_probs
            yield MicroBatch(part, part.advantages, part.sequences.numel(), is_real=False, is_last=is_last)


@dataclasses.dataclass
class StepNumbers:
    """This rank's scalars of a step, the same names in the same order on all ranks; `over_all_ranks` reduces them."""

    shares: dict[str, Tensor] = dataclasses.field(default_factory=dict)  # summed over micro-batches and ranks
    maxima: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    moments: dict[str, MaskedMoments] = dataclasses.field(default_factory=dict)

    def add(self, name: str, value: Tensor) -> None:
        """Add a micro-batch's share to the sum."""
        self.shares[name] = self.shares.get(name, 0.0) + value.detach().double()

    def add_maximum(self, name: str, value: Tensor) -> None:
        """Update a maximum with a micro-batch's value."""
        value = value.detach().double()
        self.maxima[name] = torch.maximum(self.maxima.get(name, value), value)

    def over_all_ranks(self, all_gather: Callable[[Tensor], Tensor]) -> "StepNumbers":
        """Reduce the numbers over all ranks, in one collective; `all_gather` turns [n] into [W, n]."""
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
        """Return all numbers in one float64 vector, which holds every count and float32 exactly, in insertion order."""
        scalars = [
            *self.shares.values(),
            *self.maxima.values(),
            *(scalar for moments in self.moments.values() for scalar in moments),
        ]
        return torch.stack([scalar.detach().double() for scalar in scalars])

    def values(self) -> dict[str, float]:
        """Return shares and maxima as plain floats."""
        scalars = {**self.shares, **self.maxima}
        return dict(zip(scalars, torch.stack(list(scalars.values())).tolist(), strict=True))  # one synchronization


def joined_moments(means: Tensor, variances: Tensor, counts: Tensor) -> MaskedMoments:
    """Return the moments of the union of W parts from theirs, [W] each; zeros if there are no entries."""
    count = counts.sum()
    shares = counts / count.clamp(min=1)
    # Relative to one part's mean, so that the mean of equal means is exact.
    pivot = means[counts.argmax()]
    mean = pivot + (shares * (means - pivot)).sum()
    # From differences of means, because sums of squares would cancel to noise for advantages far from 0.
    variance = (shares * (variances + (means - mean).square())).sum()
    return MaskedMoments(mean=torch.where(count > 0, mean, 0.0), variance=variance, num_entries=count)


def explained_variance(target: MaskedMoments, residual: MaskedMoments) -> float:
    """Return 1 - Var(target - value) / Var(target): 1 for a perfect critic, 0 for one that predicts only the mean."""
    return float(1.0 - residual.variance / target.variance) if float(target.variance) > 0.0 else 0.0


def plain_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Convert a learner's metrics to floats, for logs and checkpoints."""
    plain = {}
    for name, value in metrics.items():
        try:
            plain[name] = float(value)
        except (TypeError, ValueError, RuntimeError):
            raise DataError(
                f"a learner's metrics must be single numbers, got {name!r}, a {type(value).__name__}. Return its "
                "mean or sum from `step`, or leave it out."
            ) from None
    return plain


class TrainingHealth:
    """Counts steps and skipped batches, and raises if training cannot succeed. All ranks must call it together."""

    def __init__(
        self, models: Mapping[str, nn.Module], optimizers: Mapping[str, Optimizer], strategy: Strategy
    ) -> None:
        self.num_steps = 0
        self.num_skipped = 0
        self.num_skipped_in_a_row = 0
        self._models = models
        self._optimizers = optimizers
        self._strategy = strategy
        broken = [label for label, model in models.items() if not _are_finite(model.parameters())]
        if self._strategy.any_rank(bool(broken)):
            raise CheckpointError(
                "models to train must have finite weights, got NaN or infinity in the "
                f"{' and the '.join(broken) or 'model of another rank'}. Use another copy of the model."
            )

    def count_step(self) -> None:
        """Count an optimizer step; raise `TrainingDiverged` if it has made a weight NaN or infinite."""
        self.num_steps += 1
        self.num_skipped_in_a_row = 0
        trained = {label: [p for p in model.parameters() if p.requires_grad] for label, model in self._models.items()}
        broken = [label for label, weights in trained.items() if not _are_finite(weights)]
        if self._strategy.any_rank(bool(broken)):
            raise TrainingDiverged(
                f"weights of the {' and the '.join(broken) or 'model, on another rank,'} are NaN or infinite after "
                f"optimizer step {self.num_steps}. {self._remedy()}"
            )

    def count_skipped(self, experience: Experience, num_tokens: int, norms: Mapping[str, float]) -> None:
        """Count and log a skipped batch; raise `TrainingDiverged` after `MAX_SKIPPED_IN_A_ROW` in a row."""
        self.num_skipped += 1
        self.num_skipped_in_a_row += 1
        found = ", ".join(f"{label} {norm}" for label, norm in norms.items())
        ids = experience.sample_ids.tolist() if experience.sample_ids is not None else "unknown"
        logger.warning(
            "batch skipped, optimizer untouched: %d response tokens, gradient norms are %s (sample ids %s)",
            num_tokens,
            found,
            ids,
        )
        if self.num_skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            raise TrainingDiverged(
                f"{self.num_skipped_in_a_row} batches in a row were skipped; the last had {num_tokens} response "
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
            f"The learning rate may be too high ({rates}): lower it, or check the model's weights, and the samples' "
            "rewards and advantages."
        )


def _are_finite(weights: Iterable[nn.Parameter]) -> bool:
    """Whether all weights are finite; of sharded ones, this rank's part."""
    held = [local_part(weight.detach()) for weight in weights]
    return math.isfinite(nn.utils.get_total_norm([part for part in held if part.numel() > 0], math.inf))
