"""The losses of PPO, as sums over response tokens divided by `num_tokens`.

`num_tokens` counts the response tokens of the whole optimizer step, over all micro-batches and ranks, and
comes from outside: then the losses, the fractions and the gradients of micro-batches simply add up. (With
gradients averaged over ranks, as DDP does, multiply the loss by the number of ranks.) A `num_tokens` of 0
gives 0, not nan.

Only the first argument of each loss is differentiated. Everything else is data, and is detached here.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from coati.algos.kl import k3
from coati.algos.masked import divide_by_count, masked_sum, zero_padding


class PolicyLossOutput(NamedTuple):
    """The loss and what to watch beside it. All scalars; all but `loss` are detached.

    Over the micro-batches of a step, `loss`, `clip_fraction` and `approx_kl` add up and `ratio_max` takes the
    maximum.
    """

    loss: Tensor
    """-Σ min(ratio · A, clip(ratio) · A) / num_tokens."""
    clip_fraction: Tensor
    """Tokens whose gradient the clip stopped (not all that lie outside the range), over num_tokens."""
    approx_kl: Tensor
    """Σ (ratio - 1 - log ratio) / num_tokens: the k3 estimate of KL(behavior || policy)."""
    ratio_max: Tensor
    """Largest policy/behavior ratio of a response token; 0 without any, which no ratio undercuts."""


class PolicyTokens(NamedTuple):
    """What the clipped objective makes of each token, all `[B, T]`; zeros, or False, on padding."""

    surrogate: Tensor
    """min(ratio · A, clip(ratio) · A), to be maximised. The only one with a gradient."""
    is_clipped: Tensor
    """True where the clip stopped the gradient."""
    kl: Tensor
    """ratio - 1 - log ratio, the k3 estimate of KL(behavior || policy)."""
    ratio: Tensor
    """policy / behavior."""


class ValueLossOutput(NamedTuple):
    """The loss and what to watch beside it. Both scalars, both add up over micro-batches."""

    loss: Tensor
    """0.5 · Σ max((v - R)², (clipped v - R)²) / num_tokens."""
    clip_fraction: Tensor
    """Tokens where the clipped term is larger, so that no gradient flows, over num_tokens. Detached."""


def clipped_policy_loss(
    logprobs: Tensor,  # [B, T] current policy
    behavior_logprobs: Tensor,  # [B, T] policy that sampled the tokens
    advantages: Tensor,  # [B, T]
    mask: Tensor,  # [B, T] bool, True on response tokens
    *,
    clip_low: float,
    clip_high: float,
    num_tokens: Tensor | float,  # scalar: response tokens in the whole step, over all ranks
) -> PolicyLossOutput:
    """PPO's clipped surrogate, to be minimised; ratios are clipped to [1 - clip_low, 1 + clip_high].

    >>> logprobs, behavior = torch.tensor([[1.5, 0.5]]).log(), torch.zeros(1, 2)
    >>> advantages, mask = torch.tensor([[1.0, -1.0]]), torch.tensor([[True, True]])
    >>> out = clipped_policy_loss(
    ...     logprobs, behavior, advantages, mask, clip_low=0.2, clip_high=0.2, num_tokens=mask.sum()
    ... )
    >>> round(out.loss.item(), 4), out.clip_fraction.item()  # -(1.2 - 0.8) / 2
    (-0.2, 1.0)
    """
    tokens = policy_tokens(logprobs, behavior_logprobs, advantages, mask, clip_low=clip_low, clip_high=clip_high)
    return reduce_policy_tokens(tokens, num_tokens=num_tokens)


def weighted_policy_loss(
    logprobs: Tensor,  # [B, T] current policy
    behavior_logprobs: Tensor,  # [B, T] policy that sampled the tokens
    advantages: Tensor,  # [B, T]
    mask: Tensor,  # [B, T] bool, True on response tokens
    *,
    clip_low: float,
    clip_high: float,
    weights: Tensor,  # [B, T] share of each token in the loss, such as `loss_weights` gives
    num_tokens: Tensor | float,  # scalar: response tokens in the whole step, over all ranks
) -> PolicyLossOutput:
    """`clipped_policy_loss` with another normalisation: the loss is -Σ weight · surrogate.

    `num_tokens` is the denominator of the numbers beside the loss, which stay means over tokens.

    >>> logprobs, mask = torch.zeros(1, 2), torch.tensor([[True, True]])
    >>> out = weighted_policy_loss(
    ...     logprobs, logprobs, torch.tensor([[1.0, 2.0]]), mask, clip_low=0.2, clip_high=0.2,
    ...     weights=torch.tensor([[0.5, 0.25]]), num_tokens=2,
    ... )
    >>> out.loss.item()  # -(0.5 · 1 + 0.25 · 2)
    -1.0
    """
    tokens = policy_tokens(logprobs, behavior_logprobs, advantages, mask, clip_low=clip_low, clip_high=clip_high)
    shares = zero_padding(weights.detach(), mask, name="weights")
    return reduce_policy_tokens(tokens, num_tokens=num_tokens, weights=shares)


def policy_tokens(
    logprobs: Tensor,  # [B, T] current policy
    behavior_logprobs: Tensor,  # [B, T] policy that sampled the tokens
    advantages: Tensor,  # [B, T]
    mask: Tensor,  # [B, T] bool, True on response tokens
    *,
    clip_low: float,
    clip_high: float,
) -> PolicyTokens:
    """The clipped surrogate and its company token by token, for losses that reduce it in their own way.

    >>> one = torch.ones(1, 1)
    >>> tokens = policy_tokens(one, one, 3 * one, one.bool(), clip_low=0.2, clip_high=0.2)
    >>> tokens.surrogate.item(), tokens.is_clipped.item(), tokens.ratio.item()
    (3.0, False, 1.0)
    """
    current = zero_padding(logprobs, mask, name="logprobs")
    behavior = zero_padding(behavior_logprobs.detach(), mask, name="behavior_logprobs")
    gains = zero_padding(advantages.detach(), mask, name="advantages")
    log_ratio = current - behavior  # [B, T], 0 on padding
    surrogate, is_clipped = clipped_surrogate(log_ratio, gains, clip_low=clip_low, clip_high=clip_high)
    return PolicyTokens(
        surrogate=surrogate,
        is_clipped=is_clipped,
        kl=k3(behavior, current.detach()),
        ratio=zero_padding(log_ratio.detach().exp(), mask),
    )


def clipped_surrogate(
    log_ratio: Tensor,  # [B, T] log of policy / behavior
    advantages: Tensor,  # [B, T] detached, zeros on padding
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[Tensor, Tensor]:
    """min(ratio · A, clip(ratio) · A), and whether the clip stopped its gradient, `[B, T]` each.

    An advantage of 0 gives 0 without a gradient, whatever the ratio: that is all the masking needed here.
    """
    ratio = log_ratio.detach().exp()
    above = (advantages > 0) & (ratio > 1 + clip_high)
    below = (advantages < 0) & (ratio < 1 - clip_low)
    is_clipped = above | below
    # Where the clip wins the surrogate is a constant. Selecting it before exp, instead of taking the minimum
    # of both after, keeps a ratio that overflows from turning its zero gradient into 0 * inf.
    bound = torch.where(above, torch.full_like(advantages, 1 + clip_high), 1 - clip_low)
    is_free = ~is_clipped & (advantages != 0)
    free_ratio = torch.where(is_free, log_ratio, torch.zeros_like(log_ratio)).exp()
    return torch.where(is_clipped, bound, free_ratio) * advantages, is_clipped


def reduce_policy_tokens(
    tokens: PolicyTokens,
    *,
    num_tokens: Tensor | float,  # scalar: response tokens in the whole step, over all ranks
    weights: Tensor | None = None,  # [B, T] zeros on padding
) -> PolicyLossOutput:
    """-Σ surrogate / num_tokens, or -Σ weight · surrogate given weights; the rest over num_tokens."""
    if weights is None:
        loss = divide_by_count(-tokens.surrogate.sum(), num_tokens)
    else:
        loss = -(weights * tokens.surrogate).sum()
    return PolicyLossOutput(
        loss=loss,
        clip_fraction=divide_by_count(tokens.is_clipped.to(tokens.surrogate.dtype).sum(), num_tokens),
        approx_kl=divide_by_count(tokens.kl.sum(), num_tokens),
        ratio_max=largest(tokens.ratio),
    )


def largest(ratios: Tensor) -> Tensor:
    """The maximum of ratios that are 0 on padding, a scalar; 0 without any, which no ratio undercuts."""
    return ratios.amax() if ratios.numel() else ratios.new_zeros(())


def clipped_value_loss(
    values: Tensor,  # [B, T] current critic
    old_values: Tensor,  # [B, T] critic that the advantages were made with
    returns: Tensor,  # [B, T] targets
    mask: Tensor,  # [B, T] bool, True on response tokens
    *,
    clip: float,
    num_tokens: Tensor | float,  # scalar: response tokens in the whole step, over all ranks
) -> ValueLossOutput:
    """Half the squared error to `returns`, where moving more than `clip` from `old_values` earns nothing.

    >>> one = torch.ones(1, 1)
    >>> out = clipped_value_loss(3 * one, one, 2 * one, one.bool(), clip=0.5, num_tokens=1)
    >>> out.loss.item()  # 0.5 · max((3 - 2)², (1.5 - 2)²)
    0.5
    """
    current = zero_padding(values, mask, name="values")
    old = zero_padding(old_values.detach(), mask, name="old_values")
    targets = zero_padding(returns.detach(), mask, name="returns")
    clipped = old + (current - old).clamp(-clip, clip)
    error = (current - targets).square()
    clipped_error = (clipped - targets).square()
    # Within the range the two errors are one, but for rounding.
    is_clipped = ((clipped_error > error) & ((current - old).abs() > clip)).to(error.dtype)
    return ValueLossOutput(
        loss=divide_by_count(0.5 * torch.maximum(error, clipped_error).sum(), num_tokens),
        clip_fraction=divide_by_count(is_clipped.sum(), num_tokens),
    )


def entropy_bonus(
    entropy: Tensor,  # [B, T]
    mask: Tensor,  # [B, T] bool, True on response tokens
    *,
    num_tokens: Tensor | float,  # scalar: response tokens in the whole step, over all ranks
) -> Tensor:
    """Σ entropy / num_tokens, a scalar to be subtracted from the loss, times its coefficient.

    >>> entropy_bonus(torch.tensor([[0.5, 1.5]]), torch.tensor([[True, True]]), num_tokens=2).item()
    1.0
    """
    return divide_by_count(masked_sum(entropy, mask), num_tokens)
