"""The reward as a network."""

import torch
from torch import Tensor

from coati.models.packing import SCORED_TOKENS, row_parts, row_tokens
from coati.models.positions import last_real_position
from coati.models.value_head import ValueHeadModel, packs


class RewardModel(ValueHeadModel):
    """One score for each sequence, [B], read at its last real token."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Scores, [B]. Without gradients a large batch is scored a part at a time."""
        costs = row_tokens(input_ids, attention_mask, is_packed=packs(self))
        parts = row_parts(costs, max_tokens=0 if torch.is_grad_enabled() else SCORED_TOKENS)
        if len(parts) > 1:
            masks = [None if attention_mask is None else attention_mask[rows] for rows in parts]
            return torch.cat([self._scores(input_ids[rows], mask) for rows, mask in zip(parts, masks, strict=True)])
        return self._scores(input_ids, attention_mask)

    def _scores(self, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        return self.last_values(self.token_values(input_ids, attention_mask), attention_mask)

    def last_values(self, values: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Scores, [B], from the values at each token, [B, S]."""
        if attention_mask is None:
            return values[:, -1]
        rows = torch.arange(values.shape[0], device=values.device)
        return values[rows, last_real_position(attention_mask)]
