"""From the scores of a batch to its advantages, in the way that the algorithm asks for."""

from torch import Tensor

from coati.algos import (
    gae,
    grpo_advantages,
    reinforce_returns,
    rloo_advantages,
    shaped_rewards,
    spread,
)
from coati.algos.masked import zero_padding
from coati.config.algorithm import AdvantageKind
from coati.errors import DataError


def estimate_advantages(
    kind: AdvantageKind,
    *,
    scores: Tensor,  # [B]
    kl: Tensor,  # [B, A]
    values: Tensor,  # [B, A] zeros without a critic
    mask: Tensor,  # [B, A] bool
    group_ids: Tensor | None,  # [B]
    kl_coef: float,
    gamma: float,
    lam: float,
) -> Tensor:
    """Advantages `[B, A]`, not whitened, zeros on padding. `kl_coef` is that of the penalty in the reward.

    Where responses are compared as wholes, the penalty of a response is summed over its tokens.

    >>> import torch
    >>> kl, mask = torch.zeros(2, 1), torch.ones(2, 1, dtype=torch.bool)
    >>> estimate_advantages(
    ...     "group_centered", scores=torch.tensor([1.0, 2.0]), kl=kl, values=kl, mask=mask,
    ...     group_ids=torch.tensor([7, 7]), kl_coef=0.0, gamma=1.0, lam=1.0,
    ... ).tolist()
    [[-0.5], [0.5]]
    """
    if kind in ("gae", "returns", "returns_above_group"):
        rewards = shaped_rewards(scores, kl, mask, kl_coef=kl_coef)
        if kind == "gae":
            return gae(rewards, values, mask, gamma=gamma, lam=lam)
        groups = _needed(kind, group_ids) if kind == "returns_above_group" else None
        return reinforce_returns(rewards, mask, gamma=gamma, group_ids=groups)
    # An estimate may overflow to inf where nobody asked for a penalty, and 0 * inf is nan.
    totals = scores - kl_coef * zero_padding(kl, mask, name="kl").sum(-1) if kl_coef else scores
    groups = _needed(kind, group_ids)
    if kind == "leave_one_out":
        return spread(rloo_advantages(totals, groups), mask)
    return spread(grpo_advantages(totals, groups, normalize_std=kind == "group_normalized"), mask)


def _needed(kind: str, group_ids: Tensor | None) -> Tensor:
    if group_ids is None:
        raise DataError(
            f"advantages of kind {kind} compare the samples of a prompt, but the batch has no group_ids. "
            "Give every sample of a prompt the same group id."
        )
    return group_ids
