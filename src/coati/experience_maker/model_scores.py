"""The forward passes of scoring: actor, reference and critic over what was generated, a bounded part at a time."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from coati.errors import DataError
from coati.models import action_logprobs
from coati.models.actor import packed_scoring_problem
from coati.models.packing import row_parts, row_tokens

SCORED_TOKENS = 32768
"""Tokens that are scored in one pass: enough to keep a large GPU busy, and a bound on what it has to hold."""


class ModelScores(NamedTuple):
    """[B, A] each; values are 0 outside of responses, and everywhere without a critic."""

    logprobs: Tensor
    reference_logprobs: Tensor
    values: Tensor


@torch.no_grad()
def score_with_models(
    actor: nn.Module,
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
    costs = row_tokens(sequences, attention_mask, is_packed=not packed_scoring_problem(actor))
    parts = []
    for rows in row_parts(costs, max_tokens=max_tokens):
        forward = (sequences[rows], attention_mask[rows], num_actions)
        logprobs, _ = action_logprobs(actor, *forward, temperatures=temperatures[rows])
        reference, _ = action_logprobs(initial_model, *forward, temperatures=temperatures[rows])
        values = torch.zeros_like(logprobs)
        if critic is not None:
            values = action_values(critic, *forward).masked_fill(~action_mask[rows], 0.0)
        parts.append(ModelScores(logprobs, reference, values))
    if len(parts) == 1:
        return parts[0]
    return ModelScores(*(torch.cat(columns) for columns in zip(*parts, strict=True)))


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
