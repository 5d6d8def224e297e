"""From the scores of a batch to its advantages: what is dropped first, and how the algorithm compares the rest."""

import logging
from collections import Counter

import torch
from torch import Tensor

from coati.algos import gae, grpo_advantages, has_signal, reinforce_returns, rloo_advantages, shaped_rewards, spread
from coati.algos.masked import zero_padding
from coati.config.algorithm import AdvantageKind
from coati.errors import DataError
from coati.experience_maker.base import AllSamplesDropped, MakerBatch

logger = logging.getLogger(__name__)

DROPPED_PROMPT_TOO_LONG = "prompt_too_long"
DROPPED_REWARD_NOT_FINITE = "reward_not_finite"
DROPPED_GROUP_INCOMPLETE = "group_incomplete"
DROPPED_NO_SIGNAL = "no_signal"


class NoSignal(AllSamplesDropped):
    """Dynamic sampling left nothing: in each group of the batch all samples scored the same."""


def drop_bad_rewards(batch: MakerBatch, dropped: Counter[str], *, in_whole_groups: bool) -> None:
    """Drop samples whose reward is NaN or infinite: one of them would poison a whole training batch.

    With `in_whole_groups` a group that lost one is dropped too. `dropped` counts the samples by reason.
    """
    experience = batch.experience
    assert experience is not None
    is_good = experience.reward.isfinite()
    num_dropped = int((~is_good).sum())
    if num_dropped == 0:
        return
    dropped[DROPPED_REWARD_NOT_FINITE] += num_dropped
    ids = experience.sample_ids[~is_good].tolist() if experience.sample_ids is not None else []
    message = f"the reward of {num_dropped} of {len(is_good)} samples is not a finite number (sample ids {ids[:8]})"
    if not bool(is_good.any()):
        raise AllSamplesDropped(f"{message}. Make the reward return finite numbers for these samples.")
    logger.warning("%s; dropped", message)
    if in_whole_groups and experience.group_ids is not None:
        # An advantage among the rest of a group would be a different one.
        is_whole = is_good & ~torch.isin(experience.group_ids, experience.group_ids[~is_good])
        dropped[DROPPED_GROUP_INCOMPLETE] += int((is_good & ~is_whole).sum())
        if not bool(is_whole.any()):
            raise AllSamplesDropped(f"{message}, in every group of the batch. Make the reward return finite numbers.")
        is_good = is_whole
    batch.keep(is_good)


def drop_equal_scores(batch: MakerBatch, dropped: Counter[str]) -> None:
    """Dynamic sampling: drop the groups whose samples all score the same, and so have no advantage."""
    experience = batch.experience
    assert experience is not None
    assert experience.group_ids is not None
    teaches = has_signal(experience.reward, experience.group_ids)
    num_dropped = int((~teaches).sum())
    dropped[DROPPED_NO_SIGNAL] += num_dropped
    if num_dropped == len(teaches):
        raise NoSignal(
            f"all {num_dropped} samples of a batch scored the same as the others of their prompt, so dynamic "
            "sampling dropped them. Use prompts that are neither too easy nor too hard, more samples of each, or "
            "set algorithm.dynamic_sampling = false."
        )
    batch.keep(teaches)


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
        groups = _required(kind, group_ids) if kind == "returns_above_group" else None
        return reinforce_returns(rewards, mask, gamma=gamma, group_ids=groups)
    # The estimate may overflow to inf even where there is no penalty, and 0 * inf is nan.
    totals = scores - kl_coef * zero_padding(kl, mask, name="kl").sum(-1) if kl_coef else scores
    groups = _required(kind, group_ids)
    if kind == "leave_one_out":
        return spread(rloo_advantages(totals, groups), mask)
    return spread(grpo_advantages(totals, groups, normalize_std=kind == "group_normalized"), mask)


def _required(kind: str, group_ids: Tensor | None) -> Tensor:
    if group_ids is None:
        raise DataError(
            f"advantages of kind {kind} compare the samples of a prompt, but the batch has no group_ids. "
            "Give every sample of a prompt the same group id."
        )
    return group_ids
