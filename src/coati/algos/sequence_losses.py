"""Losses that count responses and not only tokens: normalisations, and GSPO's sequence-level ratio.

As in `losses`, denominators are those of the whole optimizer step, over all micro-batches and ranks, and come
from outside, so that micro-batches add up. Rows are never split over micro-batches.
"""

from typing import Literal, get_args

import torch
from torch import Tensor

from coati.algos.groups import spread
from coati.algos.kl import k3
from coati.algos.losses import PolicyLossOutput, clipped_surrogate, largest
from coati.algos.masked import divide_by_count, zero_padding
from coati.errors import ConfigError

LossNormalization = Literal["token", "sequence", "constant"]


def loss_weights(
    mask: Tensor,  # [B, T] bool, True on response tokens
    *,
    mode: LossNormalization,
    num_tokens: Tensor | float | None = None,  # scalar: response tokens in the whole step, over all ranks
    num_sequences: Tensor | float | None = None,  # scalar: responses in the whole step, over all ranks
    max_length: int | None = None,  # most tokens that a response may have
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Weights `[B, T]`, zeros on padding, so that Σ weight · loss is a step's loss.

    - "token": 1 / num_tokens. Every token counts the same (PPO, DAPO).
    - "sequence": 1 / (length of its response · num_sequences). Every response counts the same (GRPO), so a
      token of a long one counts less.
    - "constant": 1 / (max_length · num_sequences). Every token counts the same, in this step and in any
      other, whatever the lengths (Dr. GRPO).

    Only what the mode divides by must be given. Responses without a token may be counted or not; whoever
    counts decides.

    >>> mask = torch.tensor([[True, True], [True, False]])
    >>> loss_weights(mask, mode="sequence", num_sequences=2).tolist()
    [[0.25, 0.25], [0.5, 0.0]]
    >>> loss_weights(mask, mode="constant", num_sequences=2, max_length=4).tolist()
    [[0.125, 0.125], [0.125, 0.0]]
    """
    if mode not in get_args(LossNormalization):
        raise ConfigError(
            f"the normalisation of a loss must be one of {', '.join(get_args(LossNormalization))}, got "
            f"{mode!r}. Use token unless responses should count the same whatever their length."
        )
    ones = zero_padding(torch.ones(mask.shape, dtype=dtype, device=mask.device), mask)
    if mode == "token":
        return divide_by_count(ones, _needed("num_tokens", num_tokens, mode))
    per_sequence = divide_by_count(ones, _needed("num_sequences", num_sequences, mode))
    if mode == "sequence":
        return divide_by_count(per_sequence, mask.sum(-1, keepdim=True))
    return divide_by_count(per_sequence, _needed("max_length", max_length, mode))


def sequence_policy_loss(
    logprobs: Tensor,  # [B, T] current policy
    behavior_logprobs: Tensor,  # [B, T] policy that sampled the tokens
    advantages: Tensor,  # [B] one per response, or [B, T]
    mask: Tensor,  # [B, T] bool, True on response tokens
    *,
    clip_low: float,
    clip_high: float,
    num_sequences: Tensor | float,  # scalar: responses in the whole step, over all ranks
) -> PolicyLossOutput:
    """GSPO: PPO's clipped surrogate with one ratio per response, s = exp(mean over its tokens of log ratio).

    With advantages `[B]` the loss is -Σ min(s · A, clip(s) · A) / num_sequences, and its gradient goes
    through s: each of the n tokens of a response gets s · A / n. With advantages `[B, T]` it is the paper's
    GSPO-token: the mean over a response of min(s · A_t, clip(s) · A_t), where the gradient s · A_t / n of a
    token comes from its own advantage. Where the advantages of a response are equal the two are the same.

    In the output `clip_fraction` and `approx_kl` are means over responses of means over their tokens, and
    `ratio_max` is of s. A clip range for s must be much narrower than one for tokens: 3e-4 and 4e-4 in the
    paper.

    >>> logprobs, behavior = torch.tensor([[4.0, 0.25], [2.25, 9.0]]).log(), torch.zeros(2, 2)
    >>> mask = torch.tensor([[True, True], [True, False]])
    >>> out = sequence_policy_loss(
    ...     logprobs, behavior, torch.tensor([3.0, 2.0]), mask, clip_low=0.5, clip_high=0.5, num_sequences=2
    ... )
    >>> out.loss.item(), out.clip_fraction.item()  # -(1 · 3 + 1.5 · 2) / 2
    (-3.0, 0.5)
    """
    current = zero_padding(logprobs, mask, name="logprobs")
    behavior = zero_padding(behavior_logprobs.detach(), mask, name="behavior_logprobs")
    gains = spread(advantages, mask) if advantages.dim() == 1 else advantages
    gains = zero_padding(gains.detach(), mask, name="advantages")
    lengths = mask.sum(-1, keepdim=True)  # [B, 1]
    log_s = divide_by_count((current.detach() - behavior).sum(-1, keepdim=True), lengths)  # [B, 1]
    # The value of log s at every token, and the gradient of the token's own log-prob. The weight 1 / n of the
    # token below then makes it the gradient through the mean.
    log_ratio = log_s + (current - current.detach())  # [B, T]
    surrogate, is_clipped = clipped_surrogate(log_ratio, gains, clip_low=clip_low, clip_high=clip_high)
    weights = loss_weights(mask, mode="sequence", num_sequences=num_sequences, dtype=surrogate.dtype)
    return PolicyLossOutput(
        loss=-(weights * surrogate).sum(),
        clip_fraction=zero_padding(weights, is_clipped).sum(),
        approx_kl=(weights * k3(behavior, current.detach())).sum(),
        ratio_max=largest(zero_padding(log_ratio.detach().exp(), mask)),
    )


def _needed(name: str, value: Tensor | float | None, mode: str) -> Tensor | float:
    if value is None:
        raise ConfigError(f"the normalisation {mode!r} divides by {name}, got none. Pass {name} of the whole step.")
    return value
