"""What every rollout engine does: prompts in, sampled responses with their log-probs out."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from coati.config.generate import GenerateOptions


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutRequest:
    """A batch of prompts, and how to continue them."""

    input_ids: Tensor  # [B, P], left-padded
    attention_mask: Tensor  # [B, P]
    sample_ids: Tensor  # [B] int64: key of each row's randomness
    seed: int
    options: GenerateOptions
    max_new_tokens: int
    version: int = 0
    """Version of the weights that generation starts with."""
    between_tokens: Callable[[], int] | None = None
    """Call it between two tokens: the model may take new weights here, and the next token is by the version returned.

    New weights are written into the memory that holds the old ones. Finished batches are delivered here too, so an
    engine that does not call it delays them. The native engine calls it every few tokens on a GPU, else at each.
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rollout:
    """Prompts with their responses. `action_mask` includes the token that ended the response and nothing after it."""

    sequences: Tensor  # [B, P + A]
    attention_mask: Tensor  # [B, P + A]
    action_mask: Tensor  # [B, A] bool
    rollout_log_probs: Tensor  # [B, A] log-probs at the sampling temperature, before top-k/top-p cut anything
    is_cut: Tensor  # [B] bool: the length limit ended the response, and no end-of-sequence token or stop string
    token_versions: Tensor  # [B, A] int64: version of the weights that wrote each token

    def shortened(self, limits: Tensor) -> "Rollout":
        """Cut each response to its own limit [B], and the batch to the longest that is left."""
        width = int(self.action_mask.sum(dim=1).minimum(limits).max())
        first = self.sequences.shape[1] - self.action_mask.shape[1]
        fits = torch.arange(width, device=limits.device) < limits.unsqueeze(1)  # [B, width]
        attention_mask = self.attention_mask[:, : first + width].clone()
        attention_mask[:, first:].masked_fill_(~fits, 0)
        return Rollout(
            sequences=self.sequences[:, : first + width],
            attention_mask=attention_mask,
            action_mask=self.action_mask[:, :width] & fits,
            rollout_log_probs=self.rollout_log_probs[:, :width].masked_fill(~fits, 0.0),
            is_cut=self.is_cut | (self.action_mask.sum(dim=1) > limits),
            token_versions=self.token_versions[:, :width],
        )


def merge_rollouts(rollouts: Sequence[Rollout], parts: Sequence[Tensor], num_prompt_tokens: int) -> Rollout:
    """Put rows that were generated in separate calls back into one batch, in their old order."""
    num_rows = parts[0].shape[0]
    num_actions = max(rollout.action_mask.shape[1] for rollout in rollouts)
    first = rollouts[0]

    def joined(name: str, width: int) -> Tensor:
        example: Tensor = getattr(first, name)
        result = example.new_zeros((num_rows, width))
        for rows, rollout in zip(parts, rollouts, strict=True):
            values: Tensor = getattr(rollout, name)
            padded = values.new_zeros((values.shape[0], width))
            padded[:, : values.shape[1]] = values
            result[rows] = padded
        return result

    is_cut = first.is_cut.new_zeros(num_rows)
    for rows, rollout in zip(parts, rollouts, strict=True):
        is_cut[rows] = rollout.is_cut
    return Rollout(
        sequences=joined("sequences", num_prompt_tokens + num_actions),
        attention_mask=joined("attention_mask", num_prompt_tokens + num_actions),
        action_mask=joined("action_mask", num_actions),
        rollout_log_probs=joined("rollout_log_probs", num_actions),
        token_versions=joined("token_versions", num_actions),
        is_cut=is_cut,
    )


class RolloutEngine(Protocol):
    """Generates responses. Engines differ in speed only: the draws are keyed by sample id."""

    def generate(self, request: RolloutRequest) -> Rollout:
        """Continue every prompt."""
        ...


def mask_after_end(responses: Tensor, eos_token_ids: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Which tokens belong to the response [B, A], and whether each ended by itself [B].

    The first end-of-sequence token ends the response and is part of it. Works where pad and eos are one
    token, because it goes by position and not by value.

    >>> mask_after_end(torch.tensor([[5, 2, 2], [5, 6, 7]]), (2,))
    (tensor([[ True,  True, False],
            [ True,  True,  True]]), tensor([ True, False]))
    """
    is_end = torch.zeros_like(responses, dtype=torch.bool)
    for token in eos_token_ids:
        is_end |= responses == token
    ends_before = is_end.long().cumsum(dim=1) - is_end.long()
    return ends_before == 0, is_end.any(dim=1)
