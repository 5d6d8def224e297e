"""Training on data that an older policy sampled: importance weights.

Three policies are told apart. The *behavior* policy sampled the tokens, perhaps several versions ago; the *proximal*
policy is the one the step starts from, whose neighbourhood the clip keeps; the *current* policy is being trained.
Decoupled PPO is `clipped_policy_loss` around the proximal policy, its advantages times importance weights. On-policy,
behavior and proximal are the same, and it becomes, bit for bit, plain PPO.

With d = log policy(token) - log behavior(token), a token's weight is w = exp(d), and a response's is the
product over its tokens, exp(Σ d). Weighted by w, data of an older policy is unbiased for the newer one; the
variance that this costs is why w is cut:

| kind       | weight                      | known as |
|------------|-----------------------------|----------|
| "truncate" | min(w, cap)                 | TIS      |
| "mask"     | w if w ≤ cap else 0         | MIS      |
| "none"     | 1                           |          |

Weights are data or numbers to watch, and never differentiated. On-policy data has log-ratio 0, weight exactly 1
whatever the kind and level, and effective sample size 1.
"""

import math
from typing import Literal, NamedTuple, assert_never

import torch
from torch import Tensor

from coati.algos.losses import largest
from coati.algos.masked import divide_by_count, zero_padding
from coati.errors import ConfigError

ImportanceLevel = Literal["token", "sequence"]
ImportanceKind = Literal["truncate", "mask", "none"]


class RatioTails(NamedTuple):
    """How far the policies are apart at the far end. Detached scalars.

    Over the micro-batches of a step, `ratio_max` takes the maximum and the others add up.
    """

    ratio_max: Tensor
    """Largest weight before any cut; 0 without any sample."""
    fraction_above_cap: Tensor
    """Samples whose weight is above the cap, over num_samples."""
    mean_abs_log_ratio: Tensor
    """Σ |log w| / num_samples."""


class WeightSums(NamedTuple):
    """Sums of weights w, as logarithms because w itself may overflow. Detached scalars.

    The sums of two micro-batches, or ranks, combine with `merge`; their effective sample sizes would not.
    """

    log_sum: Tensor
    """log Σ w; -inf without any sample."""
    log_sum_of_squares: Tensor
    """log Σ w²; -inf without any sample."""
    num_samples: Tensor

    def merge(self, other: "WeightSums") -> "WeightSums":
        """The sums over the samples of both."""
        return WeightSums(
            log_sum=torch.logaddexp(self.log_sum, other.log_sum),
            log_sum_of_squares=torch.logaddexp(self.log_sum_of_squares, other.log_sum_of_squares),
            num_samples=self.num_samples + other.num_samples,
        )

    def effective_sample_size(self) -> Tensor:
        """(Σ w)² / (n Σ w²), a scalar: the share of the data that the weights leave.

        1 on-policy, 1/n when one weight dwarfs all others, 0 without any sample.
        """
        log_share = 2 * self.log_sum - self.log_sum_of_squares - self.num_samples.to(self.log_sum.dtype).log()
        # Rounding may step over 1; -inf - -inf of an empty sum is nan.
        share = log_share.exp().clamp(max=1.0)
        return torch.where(self.log_sum == -math.inf, torch.zeros_like(share), share)


def importance_weights(
    logprobs: Tensor,  # [B, T] the policy to correct to: proximal or current
    behavior_logprobs: Tensor,  # [B, T] policy that sampled the tokens
    mask: Tensor,  # [B, T] bool, True on response tokens
    *,
    level: ImportanceLevel,
    kind: ImportanceKind,
    cap: float,
) -> Tensor:
    """Weight of each response token, `[B, T]`, detached, zeros on padding.

    At level "sequence" all tokens of a response carry the weight of the whole response. `cap` must be 1 or more
    (`math.inf` for none), so that on-policy data is never cut. A weight too large for its dtype becomes the largest
    power of e that is not.

    >>> logprobs, behavior = torch.tensor([[4.0, 0.5]]).log(), torch.zeros(1, 2)
    >>> mask = torch.ones(1, 2, dtype=torch.bool)
    >>> importance_weights(logprobs, behavior, mask, level="token", kind="truncate", cap=2.0).tolist()
    [[2.0, 0.5]]
    >>> importance_weights(logprobs, behavior, mask, level="sequence", kind="mask", cap=1.5).tolist()
    [[0.0, 0.0]]
    """
    if not cap >= 1:
        raise ConfigError(f"the cap of importance weights must be 1 or more, got {cap}. On-policy data has weight 1.")
    current = zero_padding(logprobs.detach(), mask, name="logprobs")
    behavior = zero_padding(behavior_logprobs.detach(), mask, name="behavior_logprobs")
    log_ratio = current - behavior  # [B, T], 0 on padding
    if kind == "none":
        return zero_padding(torch.ones_like(log_ratio), mask)
    if level == "sequence":
        log_ratio = log_ratio.sum(-1, keepdim=True).expand_as(log_ratio)
    weights = finite_ratio(log_ratio)
    if kind == "truncate":
        return zero_padding(weights.clamp(max=cap), mask)
    if kind == "mask":
        return zero_padding(weights, mask & (weights <= cap))
    assert_never(kind)


def weight_sums(
    log_ratios: Tensor,  # [B, T] policy - behavior
    mask: Tensor,  # [B, T] bool, True on response tokens
    *,
    level: ImportanceLevel,
) -> WeightSums:
    """Sums of the uncut weights of all tokens, or all responses, to be merged over micro-batches."""
    log_weights, is_sample = _samples(log_ratios, mask, level)
    real = torch.where(is_sample, log_weights, torch.full_like(log_weights, -math.inf)).flatten()
    return WeightSums(
        log_sum=real.logsumexp(0),
        log_sum_of_squares=(2 * real).logsumexp(0),
        num_samples=is_sample.sum(),
    )


def ratio_tails(
    log_ratios: Tensor,  # [B, T] policy - behavior
    mask: Tensor,  # [B, T] bool, True on response tokens
    *,
    level: ImportanceLevel,
    cap: float,
    num_samples: Tensor | float,  # scalar: tokens, or responses, in the whole step, over all ranks
) -> RatioTails:
    """Largest weight, share of weights above `cap`, and mean |log w|, of tokens or responses."""
    log_weights, is_sample = _samples(log_ratios, mask, level)
    ratios = zero_padding(finite_ratio(log_weights), is_sample)
    return RatioTails(
        ratio_max=largest(ratios),
        fraction_above_cap=divide_by_count((ratios > cap).to(ratios.dtype).sum(), num_samples),
        mean_abs_log_ratio=divide_by_count(log_weights.abs().sum(), num_samples),
    )


def finite_ratio(log_ratio: Tensor) -> Tensor:
    """exp(log_ratio), but a little below the largest float where it would overflow: inf · 0 is nan."""
    return log_ratio.clamp(max=math.floor(math.log(torch.finfo(log_ratio.dtype).max))).exp()


def _samples(log_ratios: Tensor, mask: Tensor, level: ImportanceLevel) -> tuple[Tensor, Tensor]:
    """Log-weights, 0 where there is no sample, and where there is: `[B, T]` tokens or `[B]` responses."""
    clean = zero_padding(log_ratios.detach(), mask, name="log_ratios")
    return (clean, mask) if level == "token" else (clean.sum(-1), mask.any(-1))
