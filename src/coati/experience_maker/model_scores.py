"""The forward passes of scoring: reference and critic over what was generated, a bounded part at a time.

The actor's log-probs come from the rollout engine, which drew the tokens by them; a few rows of each batch are
recomputed to measure how far the two are apart.
"""

import logging
from typing import NamedTuple

import torch
from torch import Tensor, nn

from coati.models import action_logprobs, action_values
from coati.models.actor import packed_scoring_problem
from coati.models.packing import SCORED_TOKENS, joined_once, row_parts, row_tokens
from coati.monitor.metrics import Max, Mean, Metric
from coati.rollout import Rollout

logger = logging.getLogger(__name__)

# Mean gap between engine and learner that rounding cannot explain.
_EXACT_GAP, _ROUNDED_GAP = 1e-3, 0.1


class ModelScores(NamedTuple):
    """The models' outputs for a batch."""

    reference_logprobs: Tensor
    """[B, A]"""
    values: Tensor
    """[B, A]; 0 outside of responses, and everywhere without a critic."""


@torch.no_grad()
def score_with_models(
    initial_model: nn.Module,
    critic: nn.Module | None,
    sequences: Tensor,  # [B, S]
    attention_mask: Tensor,  # [B, S]
    action_mask: Tensor,  # [B, A] bool
    temperatures: Tensor,  # [B]
    *,
    max_tokens: int = SCORED_TOKENS,
) -> ModelScores:
    """Run reference and critic over the batch, a part at a time."""
    num_actions = action_mask.shape[1]
    costs = row_tokens(sequences, attention_mask, is_packed=not packed_scoring_problem(initial_model))
    slices = row_parts(costs, max_tokens=max_tokens)
    parts = []
    for rows in slices:
        # One part is the tensors themselves, so that a reward model gets the rows that are joined here.
        whole = (sequences, attention_mask) if len(slices) == 1 else (sequences[rows], attention_mask[rows])
        part = (*whole, num_actions)
        with joined_once():
            reference = action_logprobs(initial_model, *part, temperatures=temperatures[rows])[0]
            values = torch.zeros_like(reference)
            if critic is not None:
                values = action_values(critic, *part).masked_fill(~action_mask[rows], 0.0)
        parts.append(ModelScores(reference, values))
    if len(parts) == 1:
        return parts[0]
    return ModelScores(*(torch.cat(columns) for columns in zip(*parts, strict=True)))


class LogprobGap(NamedTuple):
    """|log-prob of the engine - log-prob of a forward pass|, over response tokens."""

    mean: float
    largest: float
    num_tokens: int


@torch.no_grad()
def logprob_gap(actor: nn.Module, rollout: Rollout, temperatures: Tensor, *, num_rows: int) -> LogprobGap:
    """How far the engine's log-probs are from those that a learner with these weights computes, in a few rows."""
    rows = slice(0, num_rows)
    mask = rollout.action_mask[rows]
    forward = (rollout.sequences[rows], rollout.attention_mask[rows], mask.shape[1])
    logprobs, _ = action_logprobs(actor, *forward, temperatures=temperatures[rows])
    gaps = (logprobs.float() - rollout.rollout_log_probs[rows]).abs()[mask]
    if not len(gaps):
        return LogprobGap(0.0, 0.0, 0)
    return LogprobGap(float(gaps.mean()), float(gaps.max()), len(gaps))


class GapWatch:
    """Recomputes a few rows of each batch, and warns once if the engine is off by more than rounding."""

    num_rows = 2

    def __init__(self) -> None:
        self._has_warned = False

    def measure(self, actor: nn.Module, rollout: Rollout, temperatures: Tensor, *, version: int) -> dict[str, Metric]:
        """The gap as metrics; none where older weights wrote some of the tokens, which no single pass can recompute."""
        written_by = rollout.token_versions[: self.num_rows][rollout.action_mask[: self.num_rows]]
        if bool((written_by != version).any()):
            return {}
        gap = logprob_gap(actor, rollout, temperatures, num_rows=self.num_rows)
        if not gap.num_tokens:
            return {}
        dtype = next((parameter.dtype for parameter in actor.parameters()), torch.float32)
        limit = _EXACT_GAP if dtype in (torch.float32, torch.float64) else _ROUNDED_GAP
        if not gap.mean <= limit and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "the engine's log-probs are %.3g from the learner's on average, more than %s arithmetic explains "
                '(%g): the data is more off-policy than its age says. Try rollout.engine = "reference".',
                gap.mean,
                str(dtype).removeprefix("torch."),
                limit,
            )
        return {
            "rollout/logprob_gap": Mean(gap.mean, float(gap.num_tokens)),
            "rollout/logprob_gap_max": Max(gap.largest),
        }
