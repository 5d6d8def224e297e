"""The reward as a network."""

import torch
from torch import Tensor

from coati.models.positions import last_real_position
from coati.models.value_head import ValueHeadModel


class RewardModel(ValueHeadModel):
    """One score for each sequence, [B], read at its last real token."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Scores, [B]."""
        values = self.token_values(input_ids, attention_mask)
        if attention_mask is None:
            return values[:, -1]
        rows = torch.arange(values.shape[0], device=values.device)
        return values[rows, last_real_position(attention_mask)]
