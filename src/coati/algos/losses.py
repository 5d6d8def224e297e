"""Losses: surrogates for the policy, the critic's loss, KL estimates, and the weighting of tokens.

A surrogate is a token's contribution to the objective, given its ratio r = policy / behavior and its advantage A
(docs/algorithms.md compares them). On-policy, where r = 1, all have the gradient A · ∇log π. Denominators count the
whole optimizer step and are passed in, so that losses, fractions and gradients of micro-batches add up; a denominator
of 0 gives 0, not nan. Only the first argument of each loss is differentiated.
"""

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from coati.algos.masked import divide_by_count, finite_exp, zero_padding

LossNormalization = Literal["token", "sequence", "constant"]
RatioLevel = Literal["token", "sequence"]
KLKind = Literal["k1", "k2", "k3"]
Surrogate = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Maps log-ratios and log-probs of the policy (differentiable) and advantages (detached, 0 on padding) to the surrogate
of each token and whether its ratio was limited, all [B, T]. An advantage of 0 gives a surrogate and a gradient of 0.
"""


class PolicyLossOutput(NamedTuple):
    """Scalars. All but `loss` and `kl_term` are detached; all but `ratio_max` add up over micro-batches."""

    loss: Tensor  # -Σ surrogate / num_tokens
    clip_fraction: Tensor
    """Tokens whose ratio the surrogate limited (for PPO: whose gradient the clip stopped), over num_tokens."""
    approx_kl: Tensor  # Σ (ratio - 1 - log ratio) / num_tokens: the k3 estimate of KL(behavior || policy)
    ratio_max: Tensor  # largest policy/behavior ratio of a response token; 0 without response tokens
    kl_term: Tensor | None = None
    """KL to the reference, differentiable and not yet multiplied by its coefficient; None without a KL loss."""


class ValueLossOutput(NamedTuple):
    """Scalars that add up over micro-batches."""

    loss: Tensor  # 0.5 · Σ max((v - R)², (clipped v - R)²) / num_tokens
    clip_fraction: Tensor  # tokens whose clipped term is larger, so that no gradient flows, over num_tokens. Detached.


def policy_loss(
    logprobs: Tensor,  # [B, T] current policy
    behavior_logprobs: Tensor,  # [B, T] policy that sampled the tokens
    advantages: Tensor,  # [B, T]
    mask: Tensor,  # [B, T] bool, True on response tokens
    *,
    surrogate: Surrogate,
    num_tokens: Tensor | float,  # scalar: response tokens in the whole step, over all ranks
    ratio: RatioLevel = "token",
    reduction: Tensor | None = None,  # [B, T] share of each token, from `loss_weights`; None divides by num_tokens
    proximal_logprobs: Tensor | None = None,  # [B, T] policy that ratios are relative to; None: behavior
) -> PolicyLossOutput:
    """Return -Σ surrogate / num_tokens, to be minimised, and its statistics.

    With `reduction` the loss is -Σ share · surrogate; the statistics stay means over tokens. With `proximal_logprobs`
    ratios are policy / proximal; `approx_kl` still estimates KL(behavior || policy), because the behavior policy
    sampled the tokens. Multiply importance weights into the advantages: every surrogate scales with a factor w ≥ 0, and
    a weight of 0 excludes a token before its ratio, which may overflow, is computed.

    With `ratio` "sequence" this is GSPO: every token of a response has the ratio s = exp(mean log-ratio of its tokens).
    `reduction` must then come from `loss_weights` with mode "sequence", so that each of the n tokens gets the gradient
    s · A / n. If advantages differ within a response, this is the paper's GSPO-token. The clip range for s must be much
    narrower than for token ratios: 3e-4 and 4e-4 in the paper.

    >>> logprobs, behavior = torch.tensor([[1.5, 0.5]]).log(), torch.zeros(1, 2)
    >>> advantages, mask = torch.tensor([[1.0, -1.0]]), torch.tensor([[True, True]])
    >>> out = policy_loss(logprobs, behavior, advantages, mask, surrogate=clipped(0.2, 0.2), num_tokens=mask.sum())
    >>> round(out.loss.item(), 4), out.clip_fraction.item()  # -(1.2 - 0.8) / 2
    (-0.2, 1.0)
    """
    current = zero_padding(logprobs, mask, name="logprobs")
    behavior = zero_padding(behavior_logprobs.detach(), mask, name="behavior_logprobs")
    center = behavior
    if proximal_logprobs is not None:
        center = zero_padding(proximal_logprobs.detach(), mask, name="proximal_logprobs")
    clean_advantages = zero_padding(advantages.detach(), mask, name="advantages")
    log_ratio = current - center  # [B, T], 0 on padding
    if ratio == "sequence":
        log_s = divide_by_count(log_ratio.detach().sum(-1, keepdim=True), mask.sum(-1, keepdim=True))  # [B, 1]
        # The value of log s at every token, and the gradient of the token's own log-prob.
        log_ratio = log_s + (current - current.detach())
    surrogates, is_limited = surrogate(log_ratio, current, clean_advantages)
    if reduction is None:
        loss = divide_by_count(-surrogates.sum(), num_tokens)
    else:
        loss = -(zero_padding(reduction.detach(), mask, name="reduction") * surrogates).sum()
    return PolicyLossOutput(
        loss=loss,
        clip_fraction=divide_by_count(is_limited.to(surrogates.dtype).sum(), num_tokens),
        approx_kl=divide_by_count(kl_estimate(behavior, current.detach(), mask, kind="k3").sum(), num_tokens),
        ratio_max=largest(zero_padding(log_ratio.detach().exp(), mask)),
    )


def clipped(clip_low: float, clip_high: float) -> Surrogate:
    """Return PPO's surrogate: min(r · A, clip(r) · A), with ratios clipped to [1 - clip_low, 1 + clip_high]."""

    def surrogate(log_ratio: Tensor, _: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
        ratio = log_ratio.detach().exp()
        above = (advantages > 0) & (ratio > 1 + clip_high)
        below = (advantages < 0) & (ratio < 1 - clip_low)
        is_clipped = above | below
        # Where the clip wins, the surrogate is a constant. Selecting it before exp, instead of taking the minimum
        # afterwards, prevents a ratio that overflows from turning its zero gradient into 0 * inf.
        bound = torch.where(above, torch.full_like(advantages, 1 + clip_high), 1 - clip_low)
        is_free = ~is_clipped & (advantages != 0)
        free_ratio = torch.where(is_free, log_ratio, torch.zeros_like(log_ratio)).exp()
        return torch.where(is_clipped, bound, free_ratio) * advantages, is_clipped

    return surrogate


def cispo(clip_low: float, clip_high: float) -> Surrogate:
    """Return CISPO's surrogate, sg(clip(r)) · A · log π: every token keeps its gradient, weighted by clip(r)."""

    def surrogate(log_ratio: Tensor, logprobs: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
        ratio = log_ratio.detach().exp()
        weight = ratio.clamp(1 - clip_low, 1 + clip_high)
        return weight * advantages * logprobs, (weight != ratio) & (advantages != 0)

    return surrogate


def dppo(mask_low: float, mask_high: float, *, cap: float) -> Surrogate:
    """Return DPPO's surrogate: mask a token if its probability (not its ratio) has already moved too far.

    Too far is up by more than `mask_high` where A > 0, or down by more than `mask_low` where A < 0. `cap` bounds r.
    """

    def surrogate(log_ratio: Tensor, logprobs: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
        moved = logprobs.detach().exp() - (logprobs - log_ratio).detach().exp()
        is_masked = ((advantages > 0) & (moved > mask_high)) | ((advantages < 0) & (moved < -mask_low))
        weight = log_ratio.detach().exp().clamp(max=cap).masked_fill(is_masked, 0.0)
        return weight * advantages * logprobs, is_masked

    return surrogate


def sapo(tau: float, tau_negative: float) -> Surrogate:
    """Return SAPO's surrogate, A · σ(τ(r - 1)) · 4/τ: a gate that closes smoothly, with a τ for each sign of A."""

    def surrogate(log_ratio: Tensor, _: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
        temperature = torch.where(advantages > 0, torch.full_like(advantages, tau), tau_negative)
        gate = torch.sigmoid(temperature * (finite_exp(log_ratio) - 1)) * 4 / temperature
        return gate * advantages, torch.zeros_like(advantages, dtype=torch.bool)

    return surrogate


def largest(ratios: Tensor) -> Tensor:
    """Return the maximum of ratios that are 0 on padding, a scalar; 0 for an empty tensor."""
    return ratios.amax() if ratios.numel() else ratios.new_zeros(())


def clipped_value_loss(
    values: Tensor,  # [B, T] current critic
    old_values: Tensor,  # [B, T] critic that the advantages were computed with
    returns: Tensor,  # [B, T] targets
    mask: Tensor,  # [B, T] bool, True on response tokens
    *,
    clip: float,
    num_tokens: Tensor | float,  # scalar: response tokens in the whole step, over all ranks
) -> ValueLossOutput:
    """Return half the squared error to `returns`; moving more than `clip` from `old_values` does not lower it."""
    current = zero_padding(values, mask, name="values")
    old = zero_padding(old_values.detach(), mask, name="old_values")
    targets = zero_padding(returns.detach(), mask, name="returns")
    clipped = old + (current - old).clamp(-clip, clip)
    error = (current - targets).square()
    clipped_error = (clipped - targets).square()
    # Within the range both errors are equal up to rounding.
    is_clipped = ((clipped_error > error) & ((current - old).abs() > clip)).to(error.dtype)
    return ValueLossOutput(
        loss=divide_by_count(0.5 * torch.maximum(error, clipped_error).sum(), num_tokens),
        clip_fraction=divide_by_count(is_clipped.sum(), num_tokens),
    )


def loss_weights(
    mask: Tensor,  # [B, T] bool, True on response tokens
    *,
    mode: LossNormalization,
    num_tokens: Tensor | float,  # scalar: response tokens in the whole step, over all ranks
    num_sequences: Tensor | float,  # scalar: responses in the whole step, over all ranks
    max_length: int,  # maximum number of response tokens
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return weights `[B, T]`, zeros on padding, such that Σ weight · loss is the loss of a step.

    - "token": 1 / num_tokens (PPO, DAPO).
    - "sequence": 1 / (response length · num_sequences) (GRPO).
    - "constant": 1 / (max_length · num_sequences) (Dr. GRPO).

    >>> mask = torch.tensor([[True, True], [True, False]])
    >>> loss_weights(mask, mode="sequence", num_tokens=3, num_sequences=2, max_length=2).tolist()
    [[0.25, 0.25], [0.5, 0.0]]
    """
    ones = zero_padding(torch.ones(mask.shape, dtype=dtype, device=mask.device), mask)
    if mode == "token":
        return divide_by_count(ones, num_tokens)
    per_sequence = divide_by_count(ones, num_sequences)
    if mode == "sequence":
        return divide_by_count(per_sequence, mask.sum(-1, keepdim=True))
    assert mode == "constant", f"unknown mode {mode!r}"
    return divide_by_count(per_sequence, max_length)


def kl_estimate(
    logprobs: Tensor,  # [B, T] policy that sampled the tokens
    reference_logprobs: Tensor,  # [B, T]
    mask: Tensor,  # [B, T] bool, True on response tokens
    *,
    kind: KLKind,
) -> Tensor:
    """Return Schulman's per-token estimate of KL(policy || reference), `[B, T]`, zeros on padding.

    With d = log policy(token) - log reference(token), k1 is d (unbiased), k2 is d² / 2 (never negative) and k3 is
    exp(-d) - 1 + d (both). In a loss only k2 has the KL's gradient: k1's averages to zero, k3's follows the reverse KL.

    >>> logprobs, reference = torch.tensor([[-1.0, 7.0]]), torch.tensor([[-1.5, float("nan")]])
    >>> kl_estimate(logprobs, reference, torch.tensor([[True, False]]), kind="k1").tolist()
    [[0.5, 0.0]]
    """
    # All estimates are 0 at d = 0, so masking the inputs is enough.
    reference = zero_padding(reference_logprobs, mask, name="reference_logprobs")
    difference = zero_padding(logprobs, mask, name="logprobs") - reference
    if kind == "k1":
        return difference
    if kind == "k2":
        return 0.5 * difference.square()
    # expm1 keeps the digits that exp(-d) - 1 loses for small d. CUDA's may be off by one ulp; hence the clamp.
    return ((-difference).expm1() + difference).clamp(min=0.0)


def adapted_coefficient(coefficient: float, kl: float, target: float) -> float:
    """Return the coefficient for the next step: up to 2 % larger if `kl` is above `target`, up to 2 % smaller if below.

    >>> adapted_coefficient(0.5, kl=0.11, target=0.1), adapted_coefficient(0.5, kl=9.0, target=0.1)
    (0.505, 0.51)
    """
    error = max(-0.2, min(0.2, kl / target - 1)) if math.isfinite(kl) else 0.0
    return coefficient * (1 + 0.1 * error)


def kl_penalty(
    logprobs: Tensor,  # [B, T] current policy
    reference_logprobs: Tensor,  # [B, T]
    mask: Tensor,  # [B, T] bool, True on response tokens
    *,
    kind: KLKind,
    weights: Tensor,  # [B, T] share of each token: see `loss_weights`
) -> Tensor:
    """Return Σ weight · KL estimate, a scalar to multiply by its coefficient and add to the loss; not for k1."""
    assert kind != "k1"
    shares = zero_padding(weights.detach(), mask, name="weights")
    return (shares * kl_estimate(logprobs, reference_logprobs.detach(), mask, kind=kind)).sum()
