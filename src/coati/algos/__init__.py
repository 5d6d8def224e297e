"""The maths of training from feedback: pure functions of tensors and floats.

Shapes are `[B, T]`, batch times response tokens, with a bool mask that is True on response tokens. What lies
under a False never reaches a result or a gradient, whatever it is. Half-precision inputs are computed in
float32; float64 stays float64. Denominators come from outside, so micro-batches add up.
"""

from coati.algos.advantages import (
    discounted_returns,
    gae,
    grpo_advantages,
    has_signal,
    reinforce_returns,
    rloo_advantages,
    shaped_rewards,
)
from coati.algos.importance import (
    ImportanceKind,
    ImportanceLevel,
    RatioTails,
    VTraceOutput,
    WeightSums,
    importance_weights,
    ratio_tails,
    vtrace,
    weight_sums,
)
from coati.algos.kl import KLKind, k1, k2, k3, kl_estimate, kl_penalty
from coati.algos.logprobs import head_logprobs_and_entropy, logprobs_and_entropy
from coati.algos.losses import (
    LossNormalization,
    PolicyLossOutput,
    ValueLossOutput,
    clipped_policy_loss,
    clipped_value_loss,
    entropy_bonus,
    loss_weights,
    sequence_policy_loss,
)
from coati.algos.masked import MaskedMoments, masked_mean, masked_moments, masked_sum, masked_whiten, spread

__all__ = [
    "ImportanceKind",
    "ImportanceLevel",
    "KLKind",
    "LossNormalization",
    "MaskedMoments",
    "PolicyLossOutput",
    "RatioTails",
    "VTraceOutput",
    "ValueLossOutput",
    "WeightSums",
    "clipped_policy_loss",
    "clipped_value_loss",
    "discounted_returns",
    "entropy_bonus",
    "gae",
    "grpo_advantages",
    "has_signal",
    "head_logprobs_and_entropy",
    "importance_weights",
    "k1",
    "k2",
    "k3",
    "kl_estimate",
    "kl_penalty",
    "logprobs_and_entropy",
    "loss_weights",
    "masked_mean",
    "masked_moments",
    "masked_sum",
    "masked_whiten",
    "ratio_tails",
    "reinforce_returns",
    "rloo_advantages",
    "sequence_policy_loss",
    "shaped_rewards",
    "spread",
    "vtrace",
    "weight_sums",
]
