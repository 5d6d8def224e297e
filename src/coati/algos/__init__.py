"""The maths of training from feedback: pure functions of tensors and floats.

Shapes are `[B, T]`, batch times response tokens, with a bool mask that is True on response tokens. What lies
under a False never reaches a result or a gradient, whatever it is. Half-precision inputs are computed in
float32; float64 stays float64. Denominators come from outside, so micro-batches add up.
"""

from coati.algos.advantages import discounted_returns, gae, shaped_rewards
from coati.algos.groups import (
    grpo_advantages,
    has_signal,
    reinforce_plus_plus_advantages,
    reinforce_returns,
    rloo_advantages,
    spread,
)
from coati.algos.head_logprobs import head_logprobs_and_entropy
from coati.algos.importance import (
    ImportanceKind,
    ImportanceLevel,
    RatioTails,
    WeightSums,
    effective_sample_size,
    importance_weights,
    ratio_tails,
    weight_sums,
)
from coati.algos.kl import KLKind, k1, k2, k3, kl_estimate, kl_penalty
from coati.algos.logprobs import entropy_of, logprobs_and_entropy, logprobs_of
from coati.algos.losses import (
    PolicyLossOutput,
    PolicyTokens,
    ValueLossOutput,
    clipped_policy_loss,
    clipped_value_loss,
    entropy_bonus,
    policy_tokens,
    weighted_policy_loss,
)
from coati.algos.masked import MaskedMoments, masked_mean, masked_moments, masked_sum, masked_whiten
from coati.algos.off_policy import VTraceOutput, decoupled_policy_loss, vtrace
from coati.algos.sequence_losses import LossNormalization, loss_weights, sequence_policy_loss

__all__ = [
    "ImportanceKind",
    "ImportanceLevel",
    "KLKind",
    "LossNormalization",
    "MaskedMoments",
    "PolicyLossOutput",
    "PolicyTokens",
    "RatioTails",
    "VTraceOutput",
    "ValueLossOutput",
    "WeightSums",
    "clipped_policy_loss",
    "clipped_value_loss",
    "decoupled_policy_loss",
    "discounted_returns",
    "effective_sample_size",
    "entropy_bonus",
    "entropy_of",
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
    "logprobs_of",
    "loss_weights",
    "masked_mean",
    "masked_moments",
    "masked_sum",
    "masked_whiten",
    "policy_tokens",
    "ratio_tails",
    "reinforce_plus_plus_advantages",
    "reinforce_returns",
    "rloo_advantages",
    "sequence_policy_loss",
    "shaped_rewards",
    "spread",
    "vtrace",
    "weight_sums",
    "weighted_policy_loss",
]
