"""Training on data that an older policy sampled: decoupled PPO for the policy, V-trace for the critic too.

Three policies are told apart. The *behavior* policy sampled the tokens, perhaps several versions ago; the
*proximal* policy is the one the step starts from, whose neighbourhood the clip keeps; the *current* policy is
being trained. On-policy, behavior and proximal are the same, and both functions here become, bit for bit, the
ones they stand in for: `clipped_policy_loss` and `gae`.
"""

from typing import NamedTuple

from torch import Tensor

from coati.algos.advantages import discounted_sums, one_later, td_errors
from coati.algos.importance import finite_ratio
from coati.algos.kl import k3
from coati.algos.losses import PolicyLossOutput, policy_tokens, reduce_policy_tokens
from coati.algos.masked import zero_padding
from coati.errors import ConfigError, DataError


class VTraceOutput(NamedTuple):
    """Both `[B, T]`, zeros on padding."""

    targets: Tensor
    """What the critic should answer."""
    advantages: Tensor
    """What the policy loss should weigh the tokens by, before any importance weight."""


def decoupled_policy_loss(
    logprobs: Tensor,  # [B, T] current policy
    proximal_logprobs: Tensor,  # [B, T] policy that the step started from
    behavior_logprobs: Tensor,  # [B, T] policy that sampled the tokens
    advantages: Tensor,  # [B, T]
    mask: Tensor,  # [B, T] bool, True on response tokens
    *,
    clip_low: float,
    clip_high: float,
    weights: Tensor,  # [B, T] proximal / behavior, cut: see `importance_weights`
    num_tokens: Tensor | float,  # scalar: response tokens in the whole step, over all ranks
    reduction: Tensor | None = None,  # [B, T] from `loss_weights`; None divides by num_tokens
) -> PolicyLossOutput:
    """-Σ w · min(ratio · A, clip(ratio) · A) / num_tokens, where ratio = current / proximal.

    The clip then bounds the step and not the age of the data, and `weights` correct for the age. In the
    output `clip_fraction` and `ratio_max` are about current / proximal, and a token of weight 0 counts as not
    clipped; `approx_kl` is of KL(behavior || current), the whole way.

    >>> import torch
    >>> zero, mask = torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool)
    >>> out = decoupled_policy_loss(
    ...     zero, zero, zero - 0.7, zero + 3, mask, clip_low=0.2, clip_high=0.2,
    ...     weights=zero + 2, num_tokens=1,
    ... )
    >>> out.loss.item(), out.ratio_max.item()  # -(2 · 1 · 3)
    (-6.0, 1.0)
    """
    shares = zero_padding(weights.detach(), mask, name="weights")
    if bool((shares < 0).any()):  # NaN and infinity pass: a loss that is not finite says so itself
        raise DataError(f"weights must be 0 or more on response tokens, got {shares.min().item()}.")
    # w · min(x, y) = min(w · x, w · y) for w ≥ 0, so weighted advantages are all it takes. A weight of 0 then
    # stops the token before its ratio is taken, which may overflow: 0 · inf would be nan.
    gains = shares * zero_padding(advantages.detach(), mask, name="advantages")
    tokens = policy_tokens(logprobs, proximal_logprobs, gains, mask, clip_low=clip_low, clip_high=clip_high)
    # The tokens are samples of the behavior policy, so only a KL from there can be estimated from them.
    behavior = zero_padding(behavior_logprobs.detach(), mask, name="behavior_logprobs")
    tokens = tokens._replace(kl=k3(behavior, zero_padding(logprobs.detach(), mask)))
    return reduce_policy_tokens(
        tokens,
        num_tokens=num_tokens,
        weights=None if reduction is None else zero_padding(reduction.detach(), mask, name="reduction"),
    )


def vtrace(
    rewards: Tensor,  # [B, T]
    values: Tensor,  # [B, T] value of the state before each token
    log_ratios: Tensor,  # [B, T] proximal - behavior
    mask: Tensor,  # [B, T] bool, a prefix of True in each row
    *,
    gamma: float,
    lam: float,
    rho_bar: float,
    c_bar: float,
) -> VTraceOutput:
    """IMPALA's corrected targets with a λ on the traces, and advantages to go with them.

    With w_t = exp(log_ratio_t), ρ_t = min(rho_bar, w_t), c_t = min(c_bar, w_t), V = 0 after the last response
    token and δ_t = r_t + γ V_{t+1} - V_t,

        D_t       = Σ_{s ≥ t} (γλ)^{s-t} · (c_t ⋯ c_{s-1}) · ρ_s δ_s
        target_t  = V_t + D_t
        A_t       = δ_t + γλ · D_{t+1}

    `rho_bar` decides which policy's value the targets converge to (∞: the proximal one's), `c_bar` only how
    fast.

    The advantage is IMPALA's r_t + γ target_{t+1} - V_t at λ = 1; at smaller λ the bootstrap is the mixture
    (1 - λ) V_{t+1} + λ target_{t+1}. That makes A the GAE of the same λ when all ratios are 1, where IMPALA's
    own would be short of one λ. Its leading ρ_t is left out: the importance weight of the token
    itself belongs to the loss (`weights` of `decoupled_policy_loss`, or the ratio of `clipped_policy_loss`),
    and would count twice.

    >>> import torch
    >>> mask = torch.tensor([[True, True]])
    >>> rewards, values = torch.tensor([[0.0, 1.0]]), torch.tensor([[0.5, 0.5]])
    >>> out = vtrace(
    ...     rewards, values, torch.zeros(1, 2), mask, gamma=1.0, lam=1.0, rho_bar=1.0, c_bar=1.0
    ... )
    >>> out.targets.tolist(), out.advantages.tolist()
    ([[1.0, 1.0]], [[0.5, 0.5]])
    """
    if not rho_bar >= c_bar >= 0:
        raise ConfigError(
            f"V-trace needs rho_bar ≥ c_bar ≥ 0, got rho_bar {rho_bar} and c_bar {c_bar}. "
            "Use 1.0 for both; without the order the targets need not converge."
        )
    deltas = td_errors(rewards, values, mask, gamma=gamma)  # [B, T]
    # In the dtype of the deltas, so that γλ · 1 is rounded as it is in `gae`.
    clean_log_ratios = zero_padding(log_ratios.detach(), mask, name="log_ratios").to(deltas.dtype)
    ratios = finite_ratio(clean_log_ratios)  # [B, T], 1 on padding
    corrections = discounted_sums(
        ratios.clamp(max=rho_bar) * deltas, mask, decay=gamma * lam * ratios.clamp(max=c_bar)
    )  # [B, T] D_t
    return VTraceOutput(
        targets=corrections + zero_padding(values, mask, name="values"),
        advantages=deltas + gamma * lam * one_later(corrections),
    )
