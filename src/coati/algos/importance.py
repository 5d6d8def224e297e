"""Importance weights, for training on data that an older policy sampled.

The *behavior* policy sampled the tokens, the *proximal* policy is the one that the step starts from, and the *current*
policy is being trained. Decoupled PPO takes ratios to the proximal policy, and multiplies advantages by these weights.

With d = log policy(token) - log behavior(token), the weight of a token is w = exp(d). The weight of a response is
exp(Σ d), or the geometric mean exp(Σ d / n). Unbiased weights have high variance, so w is truncated to min(w, cap)
(TIS), or masked: w if floor ≤ w ≤ cap, else 0 (MIS, IcePop). Weights are never differentiated. On-policy data has a
weight of exactly 1 for every kind and level.
"""

from typing import Literal

import torch
from torch import Tensor

from coati.algos.masked import MaskedMoments, divide_by_count, finite_exp, masked_moments, zero_padding

ImportanceLevel = Literal["token", "sequence", "geometric"]
ImportanceKind = Literal["truncate", "mask", "none"]


def importance_weights(
    logprobs: Tensor,  # [B, T] target policy: proximal or current
    behavior_logprobs: Tensor,  # [B, T] policy that sampled the tokens
    mask: Tensor,  # [B, T] bool, True on response tokens
    *,
    level: ImportanceLevel,
    kind: ImportanceKind,
    cap: float,
    floor: float = 0.0,
) -> Tensor:
    """Return the weight of each response token, `[B, T]`, detached, zeros on padding.

    `cap` must be at least 1 and `floor` (only used by kind "mask") at most 1, so on-policy data is never cut. A weight
    that would overflow its dtype becomes the largest integer power of e that fits.

    >>> logprobs, behavior = torch.tensor([[4.0, 0.5]]).log(), torch.zeros(1, 2)
    >>> mask = torch.ones(1, 2, dtype=torch.bool)
    >>> importance_weights(logprobs, behavior, mask, level="token", kind="truncate", cap=2.0).tolist()
    [[2.0, 0.5]]
    """
    assert floor <= 1 <= cap, f"the bounds must include 1, the weight of on-policy data, got {floor} and {cap}"
    current = zero_padding(logprobs.detach(), mask, name="logprobs")
    behavior = zero_padding(behavior_logprobs.detach(), mask, name="behavior_logprobs")
    log_ratio = current - behavior  # [B, T], 0 on padding
    if kind == "none":
        return zero_padding(torch.ones_like(log_ratio), mask)
    if level != "token":
        total = log_ratio.sum(-1, keepdim=True)
        total = total if level == "sequence" else divide_by_count(total, mask.sum(-1, keepdim=True))
        log_ratio = total.expand_as(log_ratio)
    weights = finite_exp(log_ratio)
    if kind == "truncate":
        return zero_padding(weights.clamp(max=cap), mask)
    assert kind == "mask", f"unknown kind {kind!r}"
    return zero_padding(weights, mask & (weights >= floor) & (weights <= cap))


def weight_moments(
    log_ratios: Tensor,  # [B, T] policy - behavior
    mask: Tensor,  # [B, T] bool, True on response tokens
    *,
    level: Literal["token", "sequence"],
) -> MaskedMoments:
    """Return the mean and variance of the uncut weights over all tokens, or all responses, in float64."""
    log_weights, is_sample = zero_padding(log_ratios.detach(), mask, name="log_ratios"), mask
    if level == "sequence":
        log_weights, is_sample = log_weights.sum(-1), mask.any(-1)
    # Squares of weights beyond e^±300 would overflow or underflow float64.
    return masked_moments(log_weights.double().clamp(-300, 300).exp(), is_sample)


def effective_sample_size(weights: MaskedMoments) -> Tensor:
    """Return (Σ w)² / (n Σ w²), the effective sample size as a fraction of n, a scalar; 0 if n is 0.

    >>> weights = torch.tensor([[3.0, 1.0, 2.0]])  # 36 / (3 · 14)
    >>> round(effective_sample_size(weight_moments(weights.log(), weights > 0, level="token")).item(), 4)
    0.8571
    """
    square = weights.mean.square()
    return torch.where(weights.num_entries > 0, square / (square + weights.variance), 0.0)
