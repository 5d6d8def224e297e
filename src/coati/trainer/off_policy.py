"""Correcting for the age of training data, in the policy loss and in the critic's targets.

A batch is prepared once, when the learner first sees it: the log-probs of the weights it starts from are the
*proximal* policy, and the ratio proximal / behavior says how far the policy has moved since the tokens were sampled.
The prepared fields stay on the batch, so that later epochs are held to the same proximal policy.
"""

from torch import Tensor

from coati.algos import (
    importance_weights,
    ratio_tails,
    shaped_rewards,
    vtrace,
    weight_sums,
)
from coati.config import AlgorithmSettings
from coati.experience import Experience
from coati.trainer.step_numbers import StepNumbers


def prepare(
    experience: Experience,
    algorithm: AlgorithmSettings,
    *,
    proximal_log_probs: Tensor,  # [B, A] under the weights that the step starts from
    values: Tensor,  # [B, A] by the critic that the step starts from
) -> None:
    """Write the proximal log-probs onto the batch and, for V-trace, advantages, values and targets anew."""
    mask = experience.full_action_mask()
    proximal = proximal_log_probs.masked_fill(~mask, 0.0)
    experience.proximal_log_probs = proximal
    if algorithm.estimator == "vtrace":
        rewards = shaped_rewards(experience.reward, experience.kl, mask, kl_coef=algorithm.kl_reward_coef)
        corrected = vtrace(
            rewards,
            values,
            proximal - experience.action_log_probs,
            mask,
            gamma=algorithm.gamma,
            lam=algorithm.lam,
            rho_bar=1.0,
            c_bar=1.0,
        )
        experience.values = values.masked_fill(~mask, 0.0)
        experience.advantages = corrected.advantages
        experience.returns = corrected.targets


def token_weights(part: Experience, algorithm: AlgorithmSettings) -> Tensor:
    """Importance weight of each response token of a prepared batch, [B, A]."""
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
    """Add this rank's part of how far the data is from the policy that learns from it, if the batch was prepared."""
    if experience.proximal_log_probs is None:
        return
    mask = experience.full_action_mask()
    log_ratios = experience.proximal_log_probs - experience.action_log_probs
    tails = ratio_tails(log_ratios, mask, level="token", cap=algorithm.importance_cap, num_samples=num_tokens)
    numbers.weights["off_policy/effective_samples"] = weight_sums(log_ratios, mask, level="sequence")
    numbers.weights["off_policy/effective_tokens"] = weight_sums(log_ratios, mask, level="token")
    numbers.largest("off_policy/ratio_max", tails.ratio_max)
    numbers.add("off_policy/above_cap", tails.fraction_above_cap)
    numbers.add("off_policy/log_ratio", tails.mean_abs_log_ratio)


def off_policy_metrics(joined: StepNumbers) -> dict[str, float]:
    """The effective share of the joined batch, of samples and of tokens."""
    return {name: float(sums.effective_sample_size()) for name, sums in joined.weights.items()}
