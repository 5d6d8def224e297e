"""From a rollout to advantages: reference log-probs, values, a check of the engine's log-probs, drops, advantages."""

import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from coati.algos.advantages import (
    adaptive_lambda,
    gae,
    grpo_advantages,
    reinforce_returns,
    rloo_advantages,
    shaped_rewards,
)
from coati.algos.masked import spread, zero_padding
from coati.config import AlgorithmSettings
from coati.errors import counted
from coati.experience import Experience
from coati.experience_maker.base import AllSamplesDropped, MakerBatch
from coati.models import action_logprobs, action_values
from coati.models.actor import max_rounding_gap, packed_scoring_problem
from coati.models.packing import SCORED_TOKENS, row_parts, row_tokens
from coati.monitor.metrics import Max, Mean, Metric

logger = logging.getLogger(__name__)

# Log-probs of two rows are recomputed for each of the first ten versions, then for every tenth. With a small model, a
# pass over two rows takes as long as one over ten.
_PROBED_ROWS = 2
_PROBED_EVERY = 10


Tokens = tuple[Tensor, Tensor, Tensor]  # sequences and attention mask, [B, S] each, and action mask, [B, A] bool


@torch.no_grad()
def values_of(critic: nn.Module | None, tokens: Tokens, *, max_tokens: int = SCORED_TOKENS) -> Tensor:
    """Return values, [B, A], computed in passes of at most `max_tokens` tokens; 0 without a critic."""
    mask = tokens[-1]
    if critic is None:
        return torch.zeros_like(mask, dtype=torch.float32)
    values = [action_values(critic, *part) for _, part in _parts(critic, tokens, max_tokens)]
    return torch.cat(values).masked_fill(~mask, 0.0)


@torch.no_grad()
def logprobs_of(model: nn.Module, tokens: Tokens, temperatures: Tensor, *, max_tokens: int = SCORED_TOKENS) -> Tensor:
    """Return log-probs, [B, A], at these temperatures [B], computed in passes of at most `max_tokens` tokens."""
    parts = _parts(model, tokens, max_tokens)
    return torch.cat([action_logprobs(model, *part, temperatures=temperatures[rows])[0] for rows, part in parts])


def _parts(model: nn.Module, tokens: Tokens, max_tokens: int) -> Iterator[tuple[slice, tuple[Tensor, Tensor, int]]]:
    sequences, attention_mask, mask = tokens
    costs = row_tokens(sequences, attention_mask, is_packed=not packed_scoring_problem(model))
    for rows in row_parts(costs, max_tokens=max_tokens):
        yield rows, (sequences[rows], attention_mask[rows], mask.shape[1])


class GapWatch:
    """Compares the engine's log-probs with recomputed ones, and warns once if the gap exceeds rounding error."""

    def __init__(self) -> None:
        self._has_warned = False
        self._measured = -1  # the last version that was measured

    @torch.no_grad()
    def measure(self, actor: nn.Module, experience: Experience, *, version: int) -> dict[str, Metric]:
        """Return metrics of the gap, for some versions, of rows that one pass can recompute: without older tokens."""
        if version == self._measured or version >= _PROBED_EVERY > abs(version - self._measured):
            return {}
        sequences, attention_mask, mask = experience.tokens_and_masks()
        assert experience.policy_versions is not None
        assert experience.temperatures is not None
        is_old = ((experience.policy_versions != version) & mask).any(dim=1)
        rows = (mask.any(dim=1) & ~is_old).nonzero().flatten()[:_PROBED_ROWS]
        if not len(rows):
            return {}
        self._measured = version
        forward = (sequences[rows], attention_mask[rows], mask.shape[1])
        logprobs, _ = action_logprobs(actor, *forward, temperatures=experience.temperatures[rows])
        gaps = (logprobs.float() - experience.action_log_probs[rows]).abs()[mask[rows]]
        mean = float(gaps.mean())
        dtype = next((parameter.dtype for parameter in actor.parameters()), torch.float32)
        limit = max_rounding_gap(dtype)
        if not mean <= limit and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "the engine's log-probs differ from the learner's by %.3g on average, more than %s rounding explains "
                '(%g), so the data is more off-policy than its age suggests. Try rollout.engine = "reference".',
                mean,
                str(dtype).removeprefix("torch."),
                limit,
            )
        return {"rollout/logprob_gap": Mean(mean, float(len(gaps))), "rollout/logprob_gap_max": Max(float(gaps.max()))}


class NoSignal(AllSamplesDropped):
    """Dynamic sampling dropped the whole batch: in every group, all samples have the same score."""


def keep_scored(batch: MakerBatch, algorithm: AlgorithmSettings) -> Experience:
    """Drop samples with a missing or non-finite number, which would spoil a whole training batch; return the others.

    If the algorithm compares samples, the whole group is dropped, because its advantages would be biased.
    """
    experience = batch.experience
    assert experience is not None
    mask = experience.full_action_mask()
    of_tokens = {"log-prob": experience.action_log_probs, "value": experience.values}
    if algorithm.kl_coef:
        of_tokens["KL"] = experience.kl
    bad = {"reward": ~experience.reward.isfinite()}  # [B] each
    bad |= {name: (~numbers.isfinite() & mask).any(dim=1) for name, numbers in of_tokens.items()}
    is_bad = torch.stack(list(bad.values())).any(dim=0)
    if not bool(is_bad.any()):
        return experience
    samples = batch.kept_samples()
    for name, rows in bad.items():
        for row in rows.nonzero().flatten().tolist():
            # The reward's own reason says more.
            samples[row].drop_reason = samples[row].drop_reason or f"no finite {name}"
    bad_units = {sample.unit for sample in samples if sample.drop_reason}
    failed_units = {sample.unit for sample in samples if sample.is_quarantined}
    lost: dict[str, list[int]] = {}
    for sample in samples:
        if sample.drop_reason and not sample.is_quarantined:
            lost.setdefault(sample.drop_reason, []).append(sample.id)
        sample.is_quarantined = sample.unit in failed_units
    parts = [
        f"{reason}: {len(ids)} of {counted(len(samples), 'sample')} (sample ids {sorted(ids)[:8]})"
        for reason, ids in sorted(lost.items())
    ]
    if failed := batch.quarantined:
        what = f"the reward failed on {counted(len(failed), 'sample')}, now in quarantine"
        parts.insert(0, f"{what} (the last: {failed[-1]['error'].rstrip('.')})")
    message = "; ".join(parts)
    is_good = torch.tensor([sample.unit not in bad_units for sample in samples], device=is_bad.device)
    if not bool(is_good.any()):
        remedy = "The learning rates (train.actor_lr, train.critic_lr) may be too high, or the models' weights damaged."
        if batch.quarantined:
            remedy = "Correct the function, or return None for samples without a score."
        elif bool(bad["reward"].any()):
            remedy = "Return a finite number for each sample, 0.0 if the reward does not apply to it."
        raise AllSamplesDropped(f"{message}, so none is left. {remedy}")
    num_lost = int((~is_good).sum())
    others = f" {counted(num_lost, 'sample')}, whole groups" if num_lost > int(is_bad.sum()) else ""
    logger.warning(
        "%s; dropped%s%s", message, others, ". A reward of 0.0 would keep them" if "no score" in message else ""
    )
    return batch.keep(is_good)


def estimate_advantages(experience: Experience, algorithm: AlgorithmSettings) -> tuple[Tensor, Tensor | None]:
    """Return advantages, [B, A], not whitened and 0 on padding, and the critic's targets; None: advantages + values."""
    kind, kl_coef = algorithm.advantages, algorithm.kl_reward_coef
    scores, kl, mask, group_ids = experience.reward, experience.kl, experience.full_action_mask(), experience.group_ids
    if kind in ("gae", "returns", "returns_above_group"):
        rewards = shaped_rewards(scores, kl, mask, kl_coef=kl_coef)
        if kind == "gae":
            values, alpha, gamma = experience.values, algorithm.adaptive_lam, algorithm.gamma
            lam = adaptive_lambda(mask, alpha=alpha) if alpha else algorithm.lam
            advantages = gae(rewards, values, mask, gamma=gamma, lam=lam)
            if not alpha and algorithm.critic_lam == algorithm.lam:
                return advantages, None
            return advantages, gae(rewards, values, mask, gamma=gamma, lam=algorithm.critic_lam) + values
        compared = group_ids if kind == "returns_above_group" else None
        return reinforce_returns(rewards, mask, gamma=algorithm.gamma, group_ids=compared), None
    # Skip the KL if its coefficient is 0: the estimate may overflow to inf, and 0 * inf is nan.
    totals = scores - kl_coef * zero_padding(kl, mask, name="kl").sum(-1) if kl_coef else scores
    assert group_ids is not None  # checked by `NaiveExperienceMaker.start_samples`
    if kind == "leave_one_out":
        return spread(rloo_advantages(totals, group_ids), mask), None
    divide_by: Any = {"group_normalized": "deviation", "group_over_mean": "mean"}.get(kind, "nothing")
    return spread(grpo_advantages(totals, group_ids, divide_by=divide_by), mask), None
