"""The policy's objective: the surrogate, the normalization over tokens, the KL term and the off-policy correction.

With the decoupled correction, the first step on a batch stores the log-probs of its starting weights in the batch. They
are the *proximal* policy, also in later epochs.
"""

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coati.algos.importance import effective_sample_size, importance_weights, weight_moments
from coati.algos.losses import (
    PolicyLossOutput,
    Surrogate,
    cispo,
    clipped,
    dppo,
    kl_penalty,
    largest,
    loss_weights,
    policy_loss,
    sapo,
)
from coati.algos.masked import divide_by_count, finite_exp, masked_sum, zero_padding
from coati.config import AlgorithmSettings
from coati.errors import ConfigError, DataError
from coati.experience import Experience
from coati.rewards.calling import load_reward_function
from coati.trainer.steps import StepNumbers


class StepCounts(NamedTuple):
    """Denominators of the whole optimizer step, over all micro-batches and ranks. Scalars."""

    tokens: Tensor
    sequences: Tensor
    max_response_tokens: int = 0  # the divisor of `algorithm.normalization = "constant"`
    positive_tokens: Tensor | float = 0.0  # tokens of responses with a reward above 0


def policy_objective(
    logprobs: Tensor,  # [B, A] current policy
    part: Experience,
    advantages: Tensor,  # [B, A]
    counts: StepCounts,
    algorithm: AlgorithmSettings,
) -> PolicyLossOutput:
    """Compute the policy loss of a micro-batch. `correction` must be resolved; "decoupled" needs proximal log-probs."""
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
    policy = policy_loss(
        logprobs,
        part.action_log_probs,
        advantages if proximal is None else advantages * token_weights(part, algorithm),
        mask,
        surrogate=_surrogate(part, mask, algorithm),
        num_tokens=counts.tokens,
        ratio=algorithm.loss_row.ratio,
        reduction=None if algorithm.normalization == "token" else shares,
        proximal_logprobs=proximal,
    )
    loss = policy.loss
    if algorithm.behavior_kl_coef:  # k2 is half the squared log-ratio
        to_behavior = kl_penalty(logprobs, part.action_log_probs, mask, kind="k2", weights=shares)
        loss = loss + 2 * algorithm.behavior_kl_coef * to_behavior
    if algorithm.nll_coef:
        is_positive = mask & (part.reward > 0).unsqueeze(1)
        loss = loss - algorithm.nll_coef * divide_by_count(masked_sum(logprobs, is_positive), counts.positive_tokens)
    if algorithm.kl_loss_coef:
        if part.reference_log_probs is None:
            raise DataError(
                f"kl_loss_coef is {algorithm.kl_loss_coef:g}, but the batch has no reference_log_probs to compute the "
                "KL from. Use a maker with an algorithm whose KL is in the loss, such as 'grpo'."
            )
        kl_term = kl_penalty(logprobs, part.reference_log_probs, mask, kind=algorithm.kl_estimator, weights=shares)
        policy = policy._replace(kl_term=kl_term)
    return policy._replace(loss=loss)


def _surrogate(part: Experience, mask: Tensor, algorithm: AlgorithmSettings) -> Surrogate:
    low, high = algorithm.eps_clip, algorithm.eps_clip_high
    known: dict[str, Callable[[], Surrogate]] = {
        "clipped": lambda: clipped(low, high),
        "cispo": lambda: cispo(low, high),
        "dppo": lambda: dppo(low, high, cap=algorithm.importance_cap),
        "sapo": lambda: sapo(algorithm.sapo_tau, algorithm.sapo_tau_negative),
        "own": lambda: custom_surrogate(algorithm.loss, part, mask),
    }
    return known[algorithm.loss_row.surrogate]()


LOSS_TENSORS = ("logprobs", "log_ratio", "advantages", "mask", "behavior_logprobs", "rewards")
"""The tensors that a custom loss can take."""


def custom_surrogate(name: str, part: Experience, mask: Tensor) -> Surrogate:
    """Wrap the custom loss "module:name" (docs/algorithms.md), which takes tensors by their names, as a surrogate."""
    function = load_loss(name)
    declared = inspect.signature(function).parameters

    def surrogate(log_ratio: Tensor, logprobs: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
        given = {"logprobs": logprobs, "log_ratio": log_ratio, "advantages": advantages, "mask": mask}
        given |= {"behavior_logprobs": zero_padding(part.action_log_probs, mask), "rewards": part.reward}
        losses = function(**{key: tensor for key, tensor in given.items() if key in declared})
        if not isinstance(losses, Tensor) or losses.shape != mask.shape:
            came = f"shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else type(losses).__name__
            raise DataError(
                f"algorithm.loss {name!r} must return the loss of each token, {tuple(mask.shape)}, got {came}. Return "
                "it without a sum or mean: algorithm.normalization reduces it."
            )
        return -zero_padding(losses, mask), torch.zeros_like(mask)

    return surrogate


@functools.cache
def load_loss(name: str, search_paths: tuple[Path, ...] = ()) -> Callable[..., Any]:
    """Import the loss "module:function". Once imported, it is found without `search_paths`."""
    try:
        function = load_reward_function(name, search_paths)
    except ConfigError as error:
        raise ConfigError(f"algorithm.loss: {error}") from None
    needed = [one for one in inspect.signature(function).parameters.values() if one.default is one.empty]
    if unknown := [one.name for one in needed if one.kind is not one.VAR_KEYWORD and one.name not in LOSS_TENSORS]:
        raise ConfigError(
            f"algorithm.loss {name!r} needs {unknown[0]!r}, but a loss can take only {', '.join(LOSS_TENSORS)}. Rename "
            "the parameter, or give it a default."
        )
    return function


def token_weights(part: Experience, algorithm: AlgorithmSettings) -> Tensor:
    """Return the importance weight of each response token, [B, A]; needs proximal log-probs."""
    assert part.proximal_log_probs is not None
    return importance_weights(
        part.proximal_log_probs,
        part.action_log_probs,
        part.full_action_mask(),
        level=algorithm.importance_level,
        kind=algorithm.importance,
        cap=algorithm.importance_cap,
        floor=algorithm.importance_floor,
    )


def measure_off_policy(
    numbers: StepNumbers, experience: Experience, algorithm: AlgorithmSettings, *, num_tokens: Tensor
) -> None:
    """Add this rank's share of the off-policy metrics to `numbers`, if the batch has proximal log-probs."""
    if experience.proximal_log_probs is None:
        return
    mask = experience.full_action_mask()
    log_ratios = zero_padding(experience.proximal_log_probs - experience.action_log_probs, mask).double()
    ratios = zero_padding(finite_exp(log_ratios), mask)
    numbers.moments["off_policy/effective_samples"] = weight_moments(log_ratios, mask, level="sequence")
    numbers.moments["off_policy/effective_tokens"] = weight_moments(log_ratios, mask, level="token")
    numbers.add_maximum("off_policy/ratio_max", largest(ratios))
    shares = {"above_cap": ratios > algorithm.importance_cap, "log_ratio": log_ratios.abs()}
    if algorithm.importance == "mask":
        shares["dropped"] = mask & (token_weights(experience, algorithm) == 0)
    for name, of_tokens in shares.items():
        numbers.add(f"off_policy/{name}", divide_by_count(of_tokens.double().sum(), num_tokens))


def off_policy_metrics(joined: StepNumbers) -> dict[str, float]:
    """Return the effective sample size of the joined batch as a fraction, by samples and by tokens."""
    shares = {name: weights for name, weights in joined.moments.items() if name.startswith("off_policy/")}
    return {name: float(effective_sample_size(weights)) for name, weights in shares.items()}
