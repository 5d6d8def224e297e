"""A network as a reward."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from coati.errors import RewardError
from coati.rewards.base import Reward, RewardRequest


class ModelReward(Reward):
    """Scores tokens with a module called as `model(sequences, attention_mask)`, which returns [B].

    The module is switched to evaluation mode: dropout would make its scores noisy.
    """

    def __init__(self, model: nn.Module, name: str = "model") -> None:
        self.name = name
        self._model = model.eval()

    def score(self, request: RewardRequest) -> Tensor:
        """Return one score per sample, [B] float32, on the device of the sequences; NaN for non-finite ones.

        Raises:
            RewardError: when the model does not return one score per sequence.
        """
        device = next((parameter.device for parameter in self._model.parameters()), request.sequences.device)
        with torch.no_grad():
            scores = self._model(request.sequences.to(device), request.attention_mask.to(device))  # [B]
        if not isinstance(scores, Tensor) or scores.shape != (len(request),):
            came = f"shape {tuple(scores.shape)}" if isinstance(scores, Tensor) else type(scores).__name__
            raise RewardError(
                f"Reward model {self.name!r} must return one score per sequence, shape ({len(request)},), got {came}. "
                "Use coati.models.RewardModel, or a module that squeezes its output to [B]."
            )
        scores = scores.to(request.sequences.device, torch.float32)
        return torch.where(scores.isfinite(), scores, torch.full_like(scores, math.nan))
