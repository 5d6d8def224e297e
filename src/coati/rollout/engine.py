"""What every rollout engine does: prompts in, sampled responses with their log-probs out."""

import dataclasses
from collections.abc import Callable
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
    max_new_tokens: int | Tensor
    """Where responses are cut: one number, or [B] of each row."""
    version: int = 0
    """Version of the weights that generation starts with."""
    between_tokens: Callable[[], int] | None = None
    """Call it between two tokens: the model may take new weights here, and the next token is by the version returned.

    New weights are written into the memory that holds the old ones. Finished batches are delivered here too, so an
    engine that does not call it delays them. The native engine calls it every few tokens on a GPU, else at each.
    """

    @property
    def limits(self) -> Tensor:
        """Most new tokens of each row, [B]."""
        limits = torch.as_tensor(self.max_new_tokens, device=self.input_ids.device)
        return limits.expand(self.input_ids.shape[0])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rollout:
    """Prompts with their responses. `action_mask` includes the token that ended the response and nothing after it."""

    sequences: Tensor  # [B, P + A]
    attention_mask: Tensor  # [B, P + A]
    action_mask: Tensor  # [B, A] bool
    rollout_log_probs: Tensor  # [B, A] log-probs at the sampling temperature, before top-k/top-p cut anything
    is_cut: Tensor  # [B] bool: the length limit ended the response, and no end-of-sequence token or stop string
    token_versions: Tensor  # [B, A] int64: version of the weights that wrote each token


class RolloutEngine(Protocol):
    """Generates responses. Engines differ in speed only: the draws are keyed by sample id."""

    def generate(self, request: RolloutRequest) -> Rollout:
        """Continue every prompt."""
        ...
