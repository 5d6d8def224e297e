"""From scores to advantages: the KL-shaped reward, returns, GAE with a critic, and groups without one.

A row's response is a prefix of its mask; the value after its last token is 0. `group_ids` say which responses answer
the same prompt: all of a group must be in the same call. Scores are data, and results are detached.
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
    """-kl_coef · kl on each response token, plus the score on the last one, `[B, T]`; nothing without a token.

    >>> mask = torch.tensor([[True, True, False]])
    >>> shaped_rewards(torch.tensor([1.0]), torch.tensor([[0.5, 0.25, 9.0]]), mask, kl_coef=1.0).tolist()
    [[-0.5, 0.75, 0.0]]
    """
    assert scores.shape == mask.shape[:1]
    clean_kl = zero_padding(kl, mask, name="kl")
    # An estimate may overflow to inf where there is no penalty, and 0 * inf is nan.
    penalty = clean_kl * -kl_coef if kl_coef != 0 else torch.zeros_like(clean_kl)
    tokens_from_here = mask.flip(-1).cumsum(-1).flip(-1)  # [B, T] counts this token and all after it
    is_last = mask & (tokens_from_here == 1)
    return penalty + zero_padding(scores.unsqueeze(-1).expand(mask.shape), is_last, name="scores")


def gae(
    rewards: Tensor,  # [B, T]
    values: Tensor,  # [B, T] value of the state before each token
    mask: Tensor,  # [B, T] bool, a prefix of True in each row
    *,
    gamma: float,
    lam: float | Tensor,  # of all rows, or [B]
) -> Tensor:
    """Generalised advantage estimates A_t = Σ_l (γλ)^l δ_{t+l}, δ_t = r_t + γ V_{t+1} - V_t, `[B, T]`, 0 on padding.

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
    """VAPO's λ for GAE, 1 - 1 / (alpha · length) or 0, `[B]`: the longer a response, the further its score reaches."""
    return (1 - 1 / (alpha * mask.sum(-1).clamp(min=1))).clamp(min=0.0)


def discounted_sums(
    terms: Tensor,  # [B, T] zeros on padding
    mask: Tensor,  # [B, T] bool, a prefix of True in each row
    *,
    decay: float | Tensor,  # of all rows, or [B]
) -> Tensor:
    """S_t = terms_t + decay · S_{t+1} for each t, `[B, T]`, and 0 after the end."""
    if terms.is_cuda:  # hundreds of sums so small that the host is done with all of them before a GPU has begun them
        decay = decay.cpu() if isinstance(decay, Tensor) else decay
        return discounted_sums(terms.cpu(), mask.cpu(), decay=decay).to(terms.device)
    if bool((mask[:, 1:] & ~mask[:, :-1]).any()):
        raise DataError(
            "the mask must be True on a prefix of each row and False after it, got a row where True follows "
            "False. Move padding behind the response."
        )
    if terms.shape[1] == 0:
        return terms
    columns = terms.unbind(dim=1)
    sums = [columns[-1]]
    # Backwards through the padding first: its terms are zero, so each row starts at its own last token.
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
    """(score - group mean) / (population standard deviation of the group + eps), `[B]`.

    Or undivided (Dr. GRPO), or divided by the mean (MaxRL, arXiv 2602.02710), where hard prompts weigh more and scores
    must be 0 or more. A group of equal scores, or of one, gets exact zeros.

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
                "Use a reward such as 1 for right and 0 for wrong, or another algorithm."
            )
        mean = groups.lowest + groups.mean_of(groups.above_lowest)
        return centered / torch.where(mean > 0, mean, torch.ones_like(mean))
    variance = groups.mean_of(centered.square())
    # Zeros over anything are zeros, but 0 / 0 is not.
    divisor = torch.where(variance > 0, variance.sqrt() + eps, torch.ones_like(variance))
    return centered / divisor


def rloo_advantages(
    scores: Tensor,  # [B] one score per response
    group_ids: Tensor,  # [B] integers
) -> Tensor:
    """Score minus the mean score of the *other* responses of its group, `[B]`; 0 for a response alone in its group.

    >>> rloo_advantages(torch.tensor([1.0, 2.0, 6.0, 9.0]), torch.tensor([7, 7, 7, 8])).tolist()
    [-3.0, -1.5, 4.5, 0.0]
    """
    groups = _groups(scores, group_ids)
    # Counted from the lowest score of the group, which drops out of the difference; alone, that is oneself.
    others = groups.sum_of(groups.above_lowest) - groups.above_lowest
    return groups.above_lowest - divide_by_count(others, groups.size - 1)


def reinforce_returns(
    token_rewards: Tensor,  # [B, T] KL penalties and score: see `shaped_rewards`
    mask: Tensor,  # [B, T] bool, a prefix of True in each row
    *,
    gamma: float,
    group_ids: Tensor | None = None,  # [B] integers
) -> Tensor:
    """Discounted returns, `[B, T]`, zeros on padding: REINFORCE++ before it whitens them over the batch.

    With `group_ids` every token gives up the mean return, at first tokens, of the responses of its group.
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
    """False for responses of groups whose scores are all equal, so that all advantages are zero, `[B]` bool."""
    groups = _groups(scores, group_ids)
    return groups.sum_of(groups.above_lowest) > 0


class _Groups(NamedTuple):
    """Scores `[B]` counted from the lowest of their group, so that equal scores are exact zeros, and not noise."""

    members: Tensor  # [B] 0, 1, ... in place of the ids
    size: Tensor  # [B] responses in the group
    lowest: Tensor  # [B] score
    above_lowest: Tensor  # [B]

    def sum_of(self, values: Tensor) -> Tensor:
        return _group_sums(values, self.members)

    def mean_of(self, values: Tensor) -> Tensor:
        return divide_by_count(self.sum_of(values), self.size)


def _groups(scores: Tensor, group_ids: Tensor) -> _Groups:
    assert scores.dim() == 1
    assert group_ids.shape == scores.shape
    assert not group_ids.is_floating_point()
    assert bool(scores.isfinite().all()), "what has no finite reward is dropped before it is compared"
    wide = at_least_float32(scores.detach())
    members = torch.unique(group_ids, return_inverse=True)[1]  # [B]
    # There are never more groups than responses, so [B] has room for one number per group.
    lowest = torch.zeros_like(wide).scatter_reduce(0, members, wide, "amin", include_self=False)[members]
    return _Groups(
        members=members,
        size=_group_sums(torch.ones_like(members), members),
        lowest=lowest,
        above_lowest=wide - lowest,
    )


def _group_sums(values: Tensor, members: Tensor) -> Tensor:
    return torch.zeros_like(values).index_add(0, members, values)[members]
