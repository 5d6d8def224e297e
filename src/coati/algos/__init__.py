"""The maths of training from feedback: pure functions of tensors and floats.

Shapes are `[B, T]`, batch times response tokens, with a bool mask that is True on response tokens. What lies
under a False never reaches a result or a gradient, whatever it is. Half-precision inputs are computed in
float32; float64 stays float64. Denominators come from outside, so micro-batches add up.
"""

from coati.algos.advantages import discounted_returns, gae, shaped_rewards
from coati.algos.kl import KLKind, k1, k2, k3, kl_estimate
from coati.algos.logprobs import entropy_of, logprobs_and_entropy, logprobs_of
from coati.algos.losses import (
    PolicyLossOutput,
    ValueLossOutput,
    clipped_policy_loss,
    clipped_value_loss,
    entropy_bonus,
)
from coati.algos.masked import MaskedMoments, masked_mean, masked_moments, masked_sum, masked_whiten

__all__ = [
    "KLKind",
    "MaskedMoments",
    "PolicyLossOutput",
    "ValueLossOutput",
    "clipped_policy_loss",
    "clipped_value_loss",
    "discounted_returns",
    "entropy_bonus",
    "entropy_of",
    "gae",
    "k1",
    "k2",
    "k3",
    "kl_estimate",
    "logprobs_and_entropy",
    "logprobs_of",
    "masked_mean",
    "masked_moments",
    "masked_sum",
    "masked_whiten",
    "shaped_rewards",
]
