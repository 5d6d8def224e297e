"""The policy's objective: which ratio is clipped around what, how tokens add up, the KL term, the correction for age.

The first step on a batch writes the log-probs of the weights that it starts from onto it: they are the *proximal*
policy, and the ratio proximal / behavior says how far the policy has moved since the tokens were sampled. Later epochs
are held to the same proximal policy.
"""

from typing import NamedTuple

from torch import Tensor

from coati.algos.importance import effective_sample_size, importance_weights, ratio_tails, weight_moments
from coati.algos.kl import kl_penalty
from coati.algos.losses import clipped_policy_loss, loss_weights
from coati.config import AlgorithmSettings
from coati.errors import DataError
from coati.experience import Experience
from coati.trainer.step_numbers import StepNumbers


class StepCounts(NamedTuple):
    """Denominators of the whole optimizer step, over all micro-batches and ranks. Scalars."""

    tokens: Tensor
    sequences: Tensor
    max_response_tokens: int = 0
    """What the normalisation "constant" divides by."""


class PolicyObjective(NamedTuple):
    """Shares of one micro-batch in the numbers of the step; only the first two have a gradient. `ratio_max` takes the
    maximum, all others add up.
    """

    loss: Tensor
    kl_term: Tensor
    """Before its coefficient; 0 where the loss has none."""
    clip_fraction: Tensor
    approx_kl: Tensor
    ratio_max: Tensor


def policy_objective(
    logprobs: Tensor,  # [B, A] current policy
    part: Experience,
    advantages: Tensor,  # [B, A]
    counts: StepCounts,
    algorithm: AlgorithmSettings,
) -> PolicyObjective:
    """Apply the algorithm, its `correction` resolved, to a micro-batch; a decoupled one needs proximal log-probs."""
    mask = part.full_action_mask()
    shares = loss_weights(
        mask,
        mode=algorithm.normalization,
        num_tokens=counts.tokens,
        num_sequences=counts.sequences,
        max_length=counts.max_response_tokens,
        dtype=logprobs.dtype,
    )
    proximal = part.proximal_log_probs if algorithm.correction == "decoupled" else None
    policy = clipped_policy_loss(
        logprobs,
        part.action_log_probs,
        advantages if proximal is None else advantages * token_weights(part, algorithm),
        mask,
        clip_low=algorithm.eps_clip,
        clip_high=algorithm.eps_clip_high,
        num_tokens=counts.tokens,
        ratio=algorithm.ratio,
        reduction=None if algorithm.normalization == "token" else shares,
        proximal_logprobs=proximal,
    )
    kl_term = logprobs.new_zeros(())
    if algorithm.kl_loss_coef:
        reference = _reference_of(part, algorithm)
        kl_term = kl_penalty(logprobs, reference, mask, kind=algorithm.kl_estimator, weights=shares)
    return PolicyObjective(policy.loss, kl_term, policy.clip_fraction, policy.approx_kl, policy.ratio_max)


def _reference_of(part: Experience, algorithm: AlgorithmSettings) -> Tensor:
    if part.reference_log_probs is None:
        raise DataError(
            f"kl_loss_coef is {algorithm.kl_loss_coef:g}, but the batch has no reference_log_probs to measure the KL "
            "against. Use a maker with an algorithm whose KL is in the loss, such as 'grpo'."
        )
    return part.reference_log_probs


def token_weights(part: Experience, algorithm: AlgorithmSettings) -> Tensor:
    """Importance weight of each response token of a batch with proximal log-probs, [B, A]."""
    assert part.proximal_log_probs is not None
    return importance_weights(
        part.proximal_log_probs,
        part.action_log_probs,
        part.full_action_mask(),
        level=algorithm.importance_level,
        kind=algorithm.importance,
        cap=algorithm.importance_cap,
    )


def measure_off_policy(
    numbers: StepNumbers, experience: Experience, algorithm: AlgorithmSettings, *, num_tokens: Tensor
) -> None:
    """Add this rank's part of how far the data is from the policy that learns from it, if the batch says so."""
    if experience.proximal_log_probs is None:
        return
    mask = experience.full_action_mask()
    log_ratios = experience.proximal_log_probs - experience.action_log_probs
    tails = ratio_tails(log_ratios, mask, cap=algorithm.importance_cap, num_tokens=num_tokens)
    numbers.moments["off_policy/effective_samples"] = weight_moments(log_ratios, mask, level="sequence")
    numbers.moments["off_policy/effective_tokens"] = weight_moments(log_ratios, mask, level="token")
    numbers.largest("off_policy/ratio_max", tails.ratio_max)
    numbers.add("off_policy/above_cap", tails.fraction_above_cap)
    numbers.add("off_policy/log_ratio", tails.mean_abs_log_ratio)


def off_policy_metrics(joined: StepNumbers) -> dict[str, float]:
    """The effective share of the joined batch, of samples and of tokens."""
    shares = {
        name: joined.moments.get(name) for name in ("off_policy/effective_samples", "off_policy/effective_tokens")
    }
    return {name: float(effective_sample_size(weights)) for name, weights in shares.items() if weights is not None}
