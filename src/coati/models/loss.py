"""PPO's two losses as modules: thin wrappers around `coati.algos`."""

import torch
from torch import Tensor, nn

from coati.algos.losses import clipped, clipped_value_loss, policy_loss
from coati.algos.masked import at_least_float32
from coati.errors import ConfigError


class PolicyLoss(nn.Module):
    """Clipped surrogate loss of the actor.

    >>> loss_fn = PolicyLoss(clip_eps=0.2)
    >>> log_probs, advantages = torch.zeros(1, 2), torch.tensor([[1.0, 3.0]])
    >>> loss_fn(log_probs, log_probs, advantages).item()  # ratios are 1: minus the mean advantage
    -2.0
    """

    def __init__(self, clip_eps: float = 0.2) -> None:
        super().__init__()
        self.clip_eps = _positive(clip_eps, usual=0.2)

    def forward(
        self,
        log_probs: Tensor,  # [B, A] current policy
        old_log_probs: Tensor,  # [B, A] policy that sampled the tokens
        advantages: Tensor,  # [B, A]
        action_mask: Tensor | None = None,  # [B, A] True on response tokens; None: all of them
    ) -> Tensor:
        """Return the loss, a scalar mean over response tokens."""
        mask = _mask_or_all(action_mask, log_probs)
        return policy_loss(
            log_probs,
            old_log_probs,
            advantages,
            mask,
            surrogate=clipped(self.clip_eps, self.clip_eps),
            num_tokens=mask.sum(),
        ).loss


class ValueLoss(nn.Module):
    """Clipped squared error of the critic towards `advantages + old_values`.

    >>> loss_fn = ValueLoss(clip_eps=0.4)
    >>> zeros = torch.zeros(1, 2)
    >>> loss_fn(zeros, zeros, torch.tensor([[1.0, 2.0]])).item()  # 0.5 · (1² + 2²) / 2
    1.25
    """

    def __init__(self, clip_eps: float = 0.4) -> None:
        super().__init__()
        self.clip_eps = _positive(clip_eps, usual=0.4)

    def forward(
        self,
        values: Tensor,  # [B, A] current critic
        old_values: Tensor,  # [B, A] critic that the advantages were computed with
        advantages: Tensor,  # [B, A]
        action_mask: Tensor | None = None,  # [B, A] True on response tokens; None: all of them
    ) -> Tensor:
        """Return the loss, a scalar mean over response tokens."""
        mask = _mask_or_all(action_mask, values)
        return clipped_value_loss(
            values,
            old_values,
            at_least_float32(advantages) + at_least_float32(old_values),
            mask,
            clip=self.clip_eps,
            num_tokens=mask.sum(),
        ).loss


def _mask_or_all(action_mask: Tensor | None, like: Tensor) -> Tensor:
    # Code written against older versions of this contract passes masks of 0 and 1.
    return torch.ones_like(like, dtype=torch.bool) if action_mask is None else action_mask.bool()


def _positive(clip_eps: float, *, usual: float) -> float:
    if not clip_eps > 0:  # nan too
        raise ConfigError(f"clip_eps must be greater than 0, got {clip_eps}. The usual value is {usual}.")
    return clip_eps
