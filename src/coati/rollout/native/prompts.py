"""The prompts of a request that wait for a slot."""

from typing import Any

import torch
from torch import Tensor

from coati.randomness import keyed_uniforms
from coati.rollout.engine import RolloutRequest


class PromptQueue:
    """Hands out prompts in order. B rows, A the most tokens of a response."""

    def __init__(self, request: RolloutRequest, model: Any) -> None:
        self._request = request
        self.num_rows = int(request.input_ids.shape[0])
        self.lengths = request.attention_mask.sum(dim=1)  # [B]
        # Prompts are read without their left padding, so a slot needs room for real tokens only.
        self.num_positions = int(self.lengths.max()) + request.max_new_tokens
        self.pad_token = request.options.pad_token(model)
        self.eos_token_ids = request.options.eos_token_ids(model)
        draws = keyed_uniforms(request.seed, request.sample_ids.tolist(), request.max_new_tokens)
        self.uniforms = torch.from_numpy(draws).to(request.input_ids.device)  # [B, A]
        self._next_row = 0

    @property
    def has_waiting(self) -> bool:
        """Whether prompts are left."""
        return self._next_row < self.num_rows

    def next_rows(self, count: int) -> Tensor:
        """At most so many of the prompts in line, [n]."""
        first, self._next_row = self._next_row, min(self.num_rows, self._next_row + count)
        return torch.arange(first, self._next_row, device=self.lengths.device)

    def prompts_of(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The different prompts among the rows, right-padded [U, T], their lengths [U], and each row's prompt."""
        ids, mask = self._request.input_ids[rows], self._request.attention_mask[rows].bool()
        lengths = self.lengths[rows]
        width = int(lengths.max())
        # Left padding off: position t of a row is its t-th real token.
        source = (ids.shape[1] - lengths).unsqueeze(1) + torch.arange(width, device=ids.device)
        is_real = source < ids.shape[1]
        tokens = ids.masked_fill(~mask, 0).gather(1, source.clamp(max=ids.shape[1] - 1)).masked_fill(~is_real, 0)
        keys = torch.cat([lengths.unsqueeze(1), tokens], dim=1)  # a prompt that ends in token 0 is not its prefix
        distinct, which = torch.unique(keys, dim=0, return_inverse=True)
        return distinct[:, 1:], distinct[:, 0], which
