"""From scores to advantages: the KL-shaped reward, returns, and generalised advantage estimation.

A row's response is a prefix: True in the mask up to the last response token, False after it. The episode ends
there, so the value after the last response token is 0.
"""

import torch
from torch import Tensor

from coati.algos.masked import zero_padding
from coati.errors import DataError


def shaped_rewards(
    scores: Tensor,  # [B] one score per response
    kl: Tensor,  # [B, T] per-token KL estimate
    mask: Tensor,  # [B, T] bool, True on response tokens
    *,
    kl_coef: float,
) -> Tensor:
    """-kl_coef · kl on each response token, plus the score on the last one, `[B, T]`.

    A row without a response token gets nothing, its score included.

    >>> mask = torch.tensor([[True, True, False]])
    >>> shaped_rewards(torch.tensor([1.0]), torch.tensor([[0.5, 0.25, 9.0]]), mask, kl_coef=1.0).tolist()
    [[-0.5, 0.75, 0.0]]
    """
    if scores.shape != mask.shape[:1]:
        raise DataError(
            f"scores must be [{mask.shape[0]}], one for each row of the mask, got shape "
            f"{tuple(scores.shape)}. Reduce per-token scores to one number per response first."
        )
    clean_kl = zero_padding(kl, mask, name="kl")
    # An estimate may overflow to inf where nobody asked for a penalty, and 0 * inf is nan.
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
    lam: float,
) -> Tensor:
    """Generalised advantage estimates, `[B, T]`, zeros on padding.

    With δ_t = r_t + γ V_{t+1} - V_t, and V = 0 after the last response token,
    A_t = Σ_l (γλ)^l δ_{t+l}. The targets for the critic are `gae(...) + values`.

    >>> mask = torch.tensor([[True, True]])
    >>> gae(torch.tensor([[0.0, 1.0]]), torch.tensor([[0.5, 0.5]]), mask, gamma=1.0, lam=1.0).tolist()
    [[0.5, 0.5]]
    """
    return discounted_sums(td_errors(rewards, values, mask, gamma=gamma), mask, decay=gamma * lam)


def discounted_returns(
    rewards: Tensor,  # [B, T]
    mask: Tensor,  # [B, T] bool, a prefix of True in each row
    *,
    gamma: float,
) -> Tensor:
    """Discounted sum of the rewards from each token on, `[B, T]`, zeros on padding.

    >>> discounted_returns(torch.tensor([[1.0, 2.0]]), torch.tensor([[True, True]]), gamma=0.5).tolist()
    [[2.0, 2.0]]
    """
    return discounted_sums(zero_padding(rewards, mask, name="rewards"), mask, decay=gamma)


def td_errors(
    rewards: Tensor,  # [B, T]
    values: Tensor,  # [B, T] value of the state before each token
    mask: Tensor,  # [B, T] bool, a prefix of True in each row
    *,
    gamma: float,
) -> Tensor:
    """δ_t = r_t + γ V_{t+1} - V_t, `[B, T]`, with V = 0 after the last response token; zeros on padding."""
    clean_rewards = zero_padding(rewards, mask, name="rewards")
    clean_values = zero_padding(values, mask, name="values")
    return clean_rewards + gamma * one_later(clean_values) - clean_values


def one_later(values: Tensor) -> Tensor:
    """At each position what `values` `[B, T]` hold one position later, and 0 at the last."""
    return torch.nn.functional.pad(values, (0, 1))[:, 1:]


def discounted_sums(
    terms: Tensor,  # [B, T] zeros on padding
    mask: Tensor,  # [B, T] bool, a prefix of True in each row
    *,
    decay: float | Tensor,  # one number, or [B, T]
) -> Tensor:
    """S_t = terms_t + decay_t · S_{t+1} for each t, `[B, T]`, and 0 after the end.

    >>> terms, mask = torch.tensor([[1.0, 1.0]]), torch.tensor([[True, True]])
    >>> discounted_sums(terms, mask, decay=torch.tensor([[0.25, 9.0]])).tolist()
    [[1.25, 1.0]]
    """
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
    decays = (decay if isinstance(decay, Tensor) else torch.full_like(terms, decay)).unbind(dim=1)
    sums = [columns[-1]]
    # Backwards through the padding first: its terms are zero, so each row starts at its own last token.
    for column, factor in zip(columns[-2::-1], decays[-2::-1], strict=True):
        sums.append(column + factor * sums[-1])
    return torch.stack(sums[::-1], dim=1)
