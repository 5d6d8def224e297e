"""From a rollout to advantages: reference and critic, the check of the engine, what is dropped, and the estimates."""

import logging
from collections import Counter
from typing import NamedTuple

import torch
from torch import Tensor, nn

from coati.algos import gae, grpo_advantages, has_signal, reinforce_returns, rloo_advantages, shaped_rewards, spread
from coati.algos.masked import zero_padding
from coati.config.algorithm import AdvantageKind
from coati.errors import DataError
from coati.experience_maker.base import AllSamplesDropped, MakerBatch
from coati.models import action_logprobs, action_values
from coati.models.actor import packed_scoring_problem
from coati.models.packing import SCORED_TOKENS, joined_once, row_parts, row_tokens
from coati.monitor.metrics import Max, Mean, Metric
from coati.rollout import Rollout

logger = logging.getLogger(__name__)

DROPPED_PROMPT_TOO_LONG = "prompt_too_long"
DROPPED_REWARD_NOT_FINITE = "reward_not_finite"
DROPPED_GROUP_INCOMPLETE = "group_incomplete"
DROPPED_NO_SIGNAL = "no_signal"

# Rows of each batch whose log-probs are recomputed, and the mean gap that rounding cannot explain.
_PROBED_ROWS = 2
_EXACT_GAP, _ROUNDED_GAP = 1e-3, 0.1


class ModelScores(NamedTuple):
    """The models' outputs for a batch."""

    reference_logprobs: Tensor
    """[B, A]"""
    values: Tensor
    """[B, A]; 0 outside of responses, and everywhere without a critic."""


@torch.no_grad()
def score_with_models(
    initial_model: nn.Module,
    critic: nn.Module | None,
    sequences: Tensor,  # [B, S]
    attention_mask: Tensor,  # [B, S]
    action_mask: Tensor,  # [B, A] bool
    temperatures: Tensor,  # [B]
    *,
    max_tokens: int = SCORED_TOKENS,
) -> ModelScores:
    """Run reference and critic over the batch, a part at a time."""
    num_actions = action_mask.shape[1]
    costs = row_tokens(sequences, attention_mask, is_packed=not packed_scoring_problem(initial_model))
    slices = row_parts(costs, max_tokens=max_tokens)
    parts = []
    for rows in slices:
        # One part is the tensors themselves, so that a reward model gets the rows that are joined here.
        whole = (sequences, attention_mask) if len(slices) == 1 else (sequences[rows], attention_mask[rows])
        part = (*whole, num_actions)
        with joined_once():
            reference = action_logprobs(initial_model, *part, temperatures=temperatures[rows])[0]
            values = torch.zeros_like(reference)
            if critic is not None:
                values = action_values(critic, *part).masked_fill(~action_mask[rows], 0.0)
        parts.append(ModelScores(reference, values))
    if len(parts) == 1:
        return parts[0]
    return ModelScores(*(torch.cat(columns) for columns in zip(*parts, strict=True)))


class GapWatch:
    """Recomputes a few rows of each batch, and warns once if the engine's log-probs are off by more than rounding."""

    def __init__(self) -> None:
        self._has_warned = False

    @torch.no_grad()
    def measure(self, actor: nn.Module, rollout: Rollout, temperatures: Tensor, *, version: int) -> dict[str, Metric]:
        """The gap as metrics; none where older weights wrote some of the tokens, which no single pass can recompute."""
        rows = slice(0, _PROBED_ROWS)
        mask = rollout.action_mask[rows]
        written_by = rollout.token_versions[rows][mask]
        if not len(written_by) or bool((written_by != version).any()):
            return {}
        forward = (rollout.sequences[rows], rollout.attention_mask[rows], mask.shape[1])
        logprobs, _ = action_logprobs(actor, *forward, temperatures=temperatures[rows])
        gaps = (logprobs.float() - rollout.rollout_log_probs[rows]).abs()[mask]
        mean = float(gaps.mean())
        dtype = next((parameter.dtype for parameter in actor.parameters()), torch.float32)
        limit = _EXACT_GAP if dtype in (torch.float32, torch.float64) else _ROUNDED_GAP
        if not mean <= limit and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "the engine's log-probs are %.3g from the learner's on average, more than %s arithmetic explains "
                '(%g): the data is more off-policy than its age says. Try rollout.engine = "reference".',
                mean,
                str(dtype).removeprefix("torch."),
                limit,
            )
        return {
            "rollout/logprob_gap": Mean(mean, float(len(gaps))),
            "rollout/logprob_gap_max": Max(float(gaps.max())),
        }


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
