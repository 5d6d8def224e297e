"""Advantages from scores: KL-shaped rewards, returns, GAE with a critic, and group baselines without one.

The response tokens of a row are a prefix of its mask; the value after the last token is 0. Responses with the same
group id answer the same prompt, and a call must contain all of them. Group scores carry no gradient.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from coati.algos.masked import at_least_float32, divide_by_count, spread, zero_padding
from coati.errors import DataError


def shaped_rewards(
    scores: Tensor,  # [B] one score per response
    kl: Tensor,  # [B, T] per-token KL estimate
    mask: Tensor,  # [B, T] bool, True on response tokens
    *,
    kl_coef: float,
) -> Tensor:
    """Return -kl_coef · kl on each response token plus the score on the last one, `[B, T]`, zeros on padding.

    >>> mask = torch.tensor([[True, True, False]])
    >>> shaped_rewards(torch.tensor([1.0]), torch.tensor([[0.5, 0.25, 9.0]]), mask, kl_coef=1.0).tolist()
    [[-0.5, 0.75, 0.0]]
    """
    assert scores.shape == mask.shape[:1]
    clean_kl = zero_padding(kl, mask, name="kl")
    # Without a penalty the estimate may still have overflowed to inf, and 0 * inf is nan.
    penalty = clean_kl * -kl_coef if kl_coef != 0 else torch.zeros_like(clean_kl)
    tokens_from_here = mask.flip(-1).cumsum(-1).flip(-1)  # [B, T] from this token to the last
    is_last = mask & (tokens_from_here == 1)
    return penalty + zero_padding(scores.unsqueeze(-1).expand(mask.shape), is_last, name="scores")


def gae(
    rewards: Tensor,  # [B, T]
    values: Tensor,  # [B, T] value of the state before each token
    mask: Tensor,  # [B, T] bool, a prefix of True in each row
    *,
    gamma: float,
    lam: float | Tensor,  # one for all rows, or [B]
) -> Tensor:
    """Return GAE: A_t = Σ_l (γλ)^l δ_{t+l} with δ_t = r_t + γ V_{t+1} - V_t, `[B, T]`, zeros on padding.

    >>> mask = torch.tensor([[True, True]])
    >>> gae(torch.tensor([[0.0, 1.0]]), torch.tensor([[0.5, 0.5]]), mask, gamma=1.0, lam=1.0).tolist()
    [[0.5, 0.5]]
    """
    clean_rewards = zero_padding(rewards, mask, name="rewards")
    clean_values = zero_padding(values, mask, name="values")
    next_values = torch.nn.functional.pad(clean_values, (0, 1))[:, 1:]
    return discounted_sums(clean_rewards + gamma * next_values - clean_values, mask, decay=gamma * lam)


def adaptive_lambda(
    mask: Tensor,  # [B, T] bool, True on response tokens
    *,
    alpha: float,
) -> Tensor:
    """Return VAPO's length-adaptive λ for GAE, max(0, 1 - 1 / (alpha · length)), `[B]`."""
    return (1 - 1 / (alpha * mask.sum(-1).clamp(min=1))).clamp(min=0.0)


def discounted_sums(
    terms: Tensor,  # [B, T] zeros on padding
    mask: Tensor,  # [B, T] bool, a prefix of True in each row
    *,
    decay: float | Tensor,  # one for all rows, or [B]
) -> Tensor:
    """Return S_t = terms_t + decay · S_{t+1} for each t, `[B, T]`; S is 0 after the last token."""
    if terms.is_cuda:  # hundreds of tiny kernels would take longer to launch than the sums take on the CPU
        decay = decay.cpu() if isinstance(decay, Tensor) else decay
        return discounted_sums(terms.cpu(), mask.cpu(), decay=decay).to(terms.device)
    if bool((mask[:, 1:] & ~mask[:, :-1]).any()):
        raise DataError(
            "the mask must be True on a prefix of each row and False after it, got a row where True follows "
            "False. Pad responses on the right."
        )
    if terms.shape[1] == 0:
        return terms
    columns = terms.unbind(dim=1)
    sums = [columns[-1]]
    # Going backwards, padding comes first. Its terms are zero, so the sum of each row starts at its last token.
    for column in columns[-2::-1]:
        sums.append(column + decay * sums[-1])
    return torch.stack(sums[::-1], dim=1)


def grpo_advantages(
    scores: Tensor,  # [B] one score per response
    group_ids: Tensor,  # [B] integers
    *,
    divide_by: Literal["deviation", "mean", "nothing"] = "deviation",
    eps: float = 1e-6,
) -> Tensor:
    """Return (score - group mean) / (population standard deviation of the group + eps), `[B]`.

    With `divide_by` "nothing" the difference is not divided (Dr. GRPO). With "mean" it is divided by the group mean
    (MaxRL, arXiv 2602.02710), which gives hard prompts more weight and requires scores of 0 or more. Groups with equal
    scores, or with a single response, get exact zeros.

    >>> scores, group_ids = torch.tensor([1.0, 5.0, 3.0, 7.0]), torch.tensor([0, 1, 0, 1])
    >>> grpo_advantages(scores, group_ids, eps=0.0).tolist()
    [-1.0, -1.0, 1.0, 1.0]
    """
    groups = _groups(scores, group_ids)
    centered = groups.above_lowest - groups.mean_of(groups.above_lowest)
    if divide_by == "nothing":
        return centered
    if divide_by == "mean":
        if bool((groups.lowest < 0).any()):
            raise DataError(
                f"scores must be 0 or more to be divided by their mean (MaxRL), got {float(groups.lowest.min()):g}. "
                "Use a reward that is never negative, such as 1 for correct and 0 for wrong, or another algorithm."
            )
        mean = groups.lowest + groups.mean_of(groups.above_lowest)
        return centered / torch.where(mean > 0, mean, torch.ones_like(mean))
    variance = groups.mean_of(centered.square())
    # Where all scores are equal the result is 0, but with eps = 0 it would be 0 / 0.
    divisor = torch.where(variance > 0, variance.sqrt() + eps, torch.ones_like(variance))
    return centered / divisor


def rloo_advantages(
    scores: Tensor,  # [B] one score per response
    group_ids: Tensor,  # [B] integers
) -> Tensor:
    """Return each score minus the mean score of the *other* responses of its group, `[B]`; 0 in a group of one.

    >>> rloo_advantages(torch.tensor([1.0, 2.0, 6.0, 9.0]), torch.tensor([7, 7, 7, 8])).tolist()
    [-3.0, -1.5, 4.5, 0.0]
    """
    groups = _groups(scores, group_ids)
    # Scores relative to the lowest of the group, which cancels out. In a group of one this is 0 - 0.
    others = groups.sum_of(groups.above_lowest) - groups.above_lowest
    return groups.above_lowest - divide_by_count(others, groups.size - 1)


def reinforce_returns(
    token_rewards: Tensor,  # [B, T] KL penalties and score: see `shaped_rewards`
    mask: Tensor,  # [B, T] bool, a prefix of True in each row
    *,
    gamma: float,
    group_ids: Tensor | None = None,  # [B] integers
) -> Tensor:
    """Return discounted returns, `[B, T]`, zeros on padding, which REINFORCE++ then whitens over the batch.

    With `group_ids`, subtract the mean return of the group, taken at the first token of each response.
    """
    returns = discounted_sums(zero_padding(token_rewards.detach(), mask, name="rewards"), mask, decay=gamma)  # [B, T]
    if group_ids is not None:
        has_tokens = mask.any(-1)
        firsts = returns[:, :1].sum(-1)  # [B], 0 for a row without a token
        baseline = torch.zeros_like(firsts)
        groups = _groups(firsts[has_tokens], group_ids[has_tokens])
        baseline[has_tokens] = groups.lowest + groups.mean_of(groups.above_lowest)
        returns = returns - spread(baseline, mask)
    return returns


def has_signal(
    scores: Tensor,  # [B] one score per response
    group_ids: Tensor,  # [B] integers
) -> Tensor:
    """Return False for responses in groups with equal scores, whose advantages are all zero, `[B]` bool."""
    groups = _groups(scores, group_ids)
    return groups.sum_of(groups.above_lowest) > 0


class _Groups(NamedTuple):
    """Scores relative to the lowest of their group, so that equal scores give exact zeros, not rounding noise."""

    members: Tensor  # [B] group index: 0, 1, ...
    size: Tensor  # [B] number of responses in the group
    lowest: Tensor  # [B] lowest score of the group
    above_lowest: Tensor  # [B] score - lowest

    def sum_of(self, values: Tensor) -> Tensor:
        return torch.zeros_like(values).index_add(0, self.members, values)[self.members]

    def mean_of(self, values: Tensor) -> Tensor:
        return divide_by_count(self.sum_of(values), self.size)


def _groups(scores: Tensor, group_ids: Tensor) -> _Groups:
    assert scores.dim() == 1
    assert group_ids.shape == scores.shape
    assert not group_ids.is_floating_point()
    assert bool(scores.isfinite().all()), "responses without a finite reward must be dropped before groups are compared"
    wide = at_least_float32(scores.detach())
    _, members, sizes = torch.unique(group_ids, return_inverse=True, return_counts=True)  # members [B]
    # There are at most B groups, so a [B] tensor has room for one number per group.
    lowest = torch.zeros_like(wide).scatter_reduce(0, members, wide, "amin", include_self=False)[members]
    return _Groups(members, size=sizes[members], lowest=lowest, above_lowest=wide - lowest)
