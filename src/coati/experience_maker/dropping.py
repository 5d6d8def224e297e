"""Samples that cannot be trained on: why they are dropped, and what is left of a batch without them."""

import logging
from collections import Counter

import torch
from torch import Tensor

from coati.algos import has_signal
from coati.errors import DataError
from coati.experience import Experience

logger = logging.getLogger(__name__)

DROPPED_PROMPT_TOO_LONG = "prompt_too_long"
DROPPED_REWARD_NOT_FINITE = "reward_not_finite"
DROPPED_GROUP_INCOMPLETE = "group_incomplete"
DROPPED_NO_SIGNAL = "no_signal"


class AllSamplesDropped(DataError):
    """Every sample of a batch had to be dropped; the message says why."""


class NoSignal(AllSamplesDropped):
    """Dynamic sampling left nothing: in each group of the batch all samples scored the same."""


def without_bad_rewards(experience: Experience, dropped: Counter[str], *, in_whole_groups: bool) -> Experience:
    """Drop samples whose reward is NaN or infinite: one of them would poison a whole training batch.

    With `in_whole_groups` a group that lost one goes with it. What is dropped is counted in `dropped`, by reason.
    """
    is_good = experience.reward.isfinite()
    num_dropped = int((~is_good).sum())
    if num_dropped == 0:
        return experience
    dropped[DROPPED_REWARD_NOT_FINITE] += num_dropped
    ids = experience.sample_ids[~is_good].tolist() if experience.sample_ids is not None else []
    message = f"the reward of {num_dropped} of {len(is_good)} samples is not a finite number (sample ids {ids[:8]})"
    if not bool(is_good.any()):
        raise AllSamplesDropped(f"{message}. Make the reward return finite numbers for these samples.")
    logger.warning("%s; dropped", message)
    if in_whole_groups and experience.group_ids is not None:
        is_whole = _in_whole_groups(experience.group_ids, is_good)
        dropped[DROPPED_GROUP_INCOMPLETE] += int((is_good & ~is_whole).sum())
        if not bool(is_whole.any()):
            raise AllSamplesDropped(f"{message}, in every group of the batch. Make the reward return finite numbers.")
        is_good = is_whole
    return experience.select(is_good)


def _in_whole_groups(group_ids: Tensor, is_good: Tensor) -> Tensor:
    """The good samples whose groups are whole, [B] bool: an advantage among what is left would be another one."""
    return is_good & ~torch.isin(group_ids, group_ids[~is_good])


def without_equal_scores(experience: Experience, dropped: Counter[str]) -> Experience:
    """Dynamic sampling: leave out the groups whose samples all score the same, and so have no advantage."""
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
    return experience.select(teaches)
