"""Estimates of KL(policy || reference) at tokens that the policy sampled.

With d = log policy(token) - log reference(token), the three estimators of Schulman's note are

| name | formula           | unbiased | never negative |
|------|-------------------|----------|----------------|
| k1   | d                 | yes      | no             |
| k2   | d² / 2            | no       | yes            |
| k3   | exp(-d) - 1 + d   | yes      | yes            |

"Unbiased" is about the value. As a loss to differentiate, only k2 has the gradient of the KL in expectation:
the gradient of k1 averages to zero, and that of k3 follows the reversed KL. As a penalty inside the reward,
where no gradient flows, any of them will do.
"""

import math
from typing import Literal

from torch import Tensor

from coati.algos.masked import zero_padding

KLKind = Literal["k1", "k2", "k3"]


def kl_estimate(
    logprobs: Tensor,  # [B, T] policy that sampled the tokens
    reference_logprobs: Tensor,  # [B, T]
    mask: Tensor,  # [B, T] bool, True on response tokens
    *,
    kind: KLKind,
) -> Tensor:
    """Per-token KL estimate, `[B, T]`, zeros on padding.

    >>> import torch
    >>> logprobs, reference = torch.tensor([[-1.0, 7.0]]), torch.tensor([[-1.5, float("nan")]])
    >>> kl_estimate(logprobs, reference, torch.tensor([[True, False]]), kind="k1").tolist()
    [[0.5, 0.0]]
    """
    # All estimates are zero at d = 0, so clean inputs are all the masking there is to do.
    reference = zero_padding(reference_logprobs, mask, name="reference_logprobs")
    difference = zero_padding(logprobs, mask, name="logprobs") - reference
    if kind == "k1":
        return difference
    if kind == "k2":
        return 0.5 * difference.square()
    # expm1 keeps the digits that exp(-d) - 1 loses for small d. CPUs round it so that the sum is never negative; CUDA's
    # may be one unit off in the last place, and the clamp keeps the promise there.
    return ((-difference).expm1() + difference).clamp(min=0.0)


def adapted_coefficient(coefficient: float, kl: float, target: float) -> float:
    """Return the coefficient for the next step: up to 2 % larger if the KL was above `target`, smaller if below.

    A proportional controller (Ziegler et al. 2019). A KL that is not finite changes nothing.

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
    """Σ weight · KL estimate, a scalar to be added to the loss times its coefficient. The gradient is of `logprobs`.

    Not with k1: its gradient averages to zero whatever the policy does.
    """
    assert kind != "k1"
    shares = zero_padding(weights.detach(), mask, name="weights")
    return (shares * kl_estimate(logprobs, reference_logprobs.detach(), mask, kind=kind)).sum()
