"""The forward passes of scoring: reference and critic over what was generated, a bounded part at a time.

The actor's own log-probs come from the rollout engine, which drew the tokens by them; a few rows of each batch are
computed again, to see how far the two are apart.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from coati.errors import DataError
from coati.models import action_logprobs
from coati.models.actor import packed_scoring_problem
from coati.models.packing import row_parts, row_tokens
from coati.rollout import Rollout

SCORED_TOKENS = 32768
"""Tokens that are scored in one pass: enough to keep a large GPU busy, and a bound on what it has to hold."""


class ModelScores(NamedTuple):
    """[B, A] each; values are 0 outside of responses, and everywhere without a critic."""

    reference_logprobs: Tensor
    values: Tensor


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
    """What the models say of each response token."""
    num_actions = action_mask.shape[1]
    costs = row_tokens(sequences, attention_mask, is_packed=not packed_scoring_problem(initial_model))
    parts = []
    for rows in row_parts(costs, max_tokens=max_tokens):
        forward = (sequences[rows], attention_mask[rows], num_actions)
        reference, _ = action_logprobs(initial_model, *forward, temperatures=temperatures[rows])
        values = torch.zeros_like(reference)
        if critic is not None:
            values = action_values(critic, *forward).masked_fill(~action_mask[rows], 0.0)
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


def action_values(critic: nn.Module, sequences: Tensor, attention_mask: Tensor | None, num_actions: int) -> Tensor:
    """V(state before each response token), [B, A]: the critic's output one position earlier.

    A critic that already returns [B, A] (a hand-written module) is taken at its word.
    """
    values = critic(sequences, attention_mask)
    batch, length = sequences.shape
    came = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
    if came == (batch, length) and num_actions < length:
        values = values[:, length - num_actions - 1 : length - 1]
    elif came != (batch, num_actions):
        raise DataError(
            f"the critic {type(critic).__name__} must return [{batch}, {length}] (one value for each token) "
            f"or [{batch}, {num_actions}] (one for each response token), got {came}."
        )
    return values  # type: ignore[no-any-return]
