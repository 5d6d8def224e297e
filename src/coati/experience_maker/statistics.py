"""Numbers that describe a batch of experience."""

from collections.abc import Mapping
from typing import Any

import torch

from coati.experience import Experience
from coati.monitor.metrics import Max, Mean, Metric, Min, Sum
from coati.rewards.texts import decode_completions, decode_prompts


def describe(experience: Experience, eos_token_ids: tuple[int, ...] = ()) -> dict[str, Metric]:
    """Rewards, KL to the initial model, and lengths; `reward/std` is that of the batch.

    A response is cut if it does not end with an end-of-sequence token, and empty if it holds nothing else.
    """
    mask = experience.full_action_mask()
    lengths = mask.sum(dim=1)
    num_samples = float(experience.num_samples)
    num_tokens = max(1.0, float(lengths.sum()))
    reward = experience.reward.double()
    kl_sum = float(experience.kl.double().masked_fill(~mask, 0.0).sum())
    ends = _ends_by_itself(experience, eos_token_ids)
    metrics: dict[str, Metric] = {
        "reward/mean": Mean(float(reward.mean()), num_samples),
        "reward/std": Mean(float(reward.std(correction=0)), num_samples),
        "reward/min": Min(float(reward.min())),
        "reward/max": Max(float(reward.max())),
        "kl/per_sample": Mean(kl_sum / num_samples, num_samples),
        "kl/per_token": Mean(kl_sum / num_tokens, num_tokens),
        "response/length": Mean(float(lengths.double().mean()), num_samples),
        "maker/samples": Sum(num_samples),
    }
    if experience.group_ids is not None:
        _, members, sizes = torch.unique(experience.group_ids, return_inverse=True, return_counts=True)
        if int(sizes.max()) > 1:
            means = (
                torch.zeros(len(sizes), dtype=reward.dtype, device=reward.device).index_add(0, members, reward) / sizes
            )
            squares = torch.zeros_like(means).index_add(0, members, (reward - means[members]).square()) / sizes
            metrics["reward/group_std"] = Mean(float(squares.sqrt().mean()), float(len(sizes)))
    if eos_token_ids:
        metrics["response/cut_fraction"] = Mean(1.0 - sum(ends) / num_samples, num_samples)
        is_empty = [end and length == 1 for end, length in zip(ends, lengths.tolist(), strict=True)]
        metrics["response/empty"] = Sum(float(sum(is_empty)))
    return metrics


def _ends_by_itself(experience: Experience, eos_token_ids: tuple[int, ...]) -> list[bool]:
    lengths = experience.full_action_mask().sum(dim=1)
    places = (experience.num_prompt_tokens + lengths - 1).clamp(min=0)
    last_tokens = experience.sequences.gather(1, places.unsqueeze(1)).squeeze(1)
    pairs = zip(last_tokens.tolist(), lengths.tolist(), strict=True)
    return [length > 0 and token in eos_token_ids for token, length in pairs]


def maker_record(
    experience: Experience,
    *,
    version: int,
    make_seconds: float,
    num_dropped: int,
    eos_token_ids: tuple[int, ...],
    tokenizer: Any,
    samples_kept: int,
    extra: Mapping[str, Metric] | None = None,
) -> dict[str, Any]:
    """What a maker reports of one batch: its version, typed metrics, and a few samples as text."""
    metrics = describe(experience, eos_token_ids)
    num_samples = experience.num_samples
    metrics["maker/samples_per_second"] = Mean(num_samples / max(make_seconds, 1e-9), float(num_samples))
    metrics["maker/dropped"] = Sum(float(num_dropped))
    metrics.update(extra or {})
    return {
        "version": version,
        "metrics": metrics,
        "samples": sample_texts(experience, tokenizer, samples_kept) if tokenizer is not None else [],
    }


def sample_texts(experience: Experience, tokenizer: Any, count: int) -> list[dict[str, Any]]:
    """`count` samples as text, with rewards and ids, from all over the batch: those of one prompt are neighbours."""
    count = min(count, experience.num_samples)
    rows = [index * experience.num_samples // count for index in range(count)]
    attention_mask = experience.attention_mask
    tokens = (
        experience.sequences[rows],
        torch.ones_like(experience.sequences[rows]) if attention_mask is None else attention_mask[rows],
        experience.full_action_mask()[rows],
    )
    texts = zip(decode_prompts(tokenizer, *tokens), decode_completions(tokenizer, *tokens), strict=True)
    return [
        {
            "prompt": prompt,
            "response": response,
            "reward": float(experience.reward[row]),
            "sample_id": int(experience.sample_ids[row]) if experience.sample_ids is not None else None,
        }
        for row, (prompt, response) in zip(rows, texts, strict=True)
    ]
