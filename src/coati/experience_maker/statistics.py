"""Metrics of samples and of their rewards, and a few samples as text."""

import re
from typing import Any

import numpy as np

from coati.experience import Experience
from coati.monitor.metrics import Mean, Metric, Sum
from coati.rewards import PendingScores
from coati.rewards.base import decode_completions, decode_prompts


def sample_metrics(experience: Experience, *, has_reference: bool = False) -> dict[str, float]:
    """Return metrics of rewards, KL and lengths. A response of at most one token that was not cut counts as empty.

    A KL of exactly 0 is a metric only if it was measured (`has_reference`).
    """
    if (num_samples := experience.num_samples) == 0:
        return {}
    mask = experience.full_action_mask()
    lengths, reward = mask.sum(dim=1), experience.reward.double()
    metrics = {
        "reward/mean": float(reward.mean()),
        "reward/std": float(reward.std(correction=0)),
        "reward/min": float(reward.min()),
        "reward/max": float(reward.max()),
        "response/length": float(lengths.double().mean()),
    }
    kl = float(experience.kl.double().masked_fill(~mask, 0.0).sum())
    if has_reference or kl:
        metrics |= {"kl/per_sample": kl / num_samples, "kl/per_token": kl / max(1.0, float(lengths.sum()))}
    if experience.group_ids is not None:
        groups: dict[int, list[float]] = {}
        for group, score in zip(experience.group_ids.tolist(), reward.tolist(), strict=True):
            groups.setdefault(group, []).append(score)
        if compared := [scores for scores in groups.values() if len(scores) > 1]:
            metrics["reward/group_std"] = float(np.mean([np.std(scores) for scores in compared]))
            metrics["reward/equal_groups"] = float(np.mean([len({*scores}) == 1 for scores in compared]))
    if (is_cut := experience.is_cut) is not None:
        metrics["response/cut_fraction"] = float(is_cut.double().mean())
        metrics["response/empty"] = float((~is_cut & (lengths <= 1)).sum())
    return metrics


def reward_metrics(scores: PendingScores) -> dict[str, Metric]:
    """Return the number of reward retries, and the mean score of each term of a sum of rewards.

    Terms without a finite score have no mean. Metric names allow only lower-case letters, digits and underscores.
    """
    metrics: dict[str, Metric] = {"reward/retries": Sum(float(scores.num_retries))}
    for term, values in scores.terms.items():
        if len(found := values[values.isfinite()].double()):
            name = re.sub("[^a-z0-9_]", "_", term.lower())
            metrics[f"reward/term_{name}"] = Mean(float(found.mean()), float(len(found)))
    return metrics


def sample_texts(experience: Experience, tokenizer: Any, count: int) -> list[dict[str, Any]]:
    """Return `count` samples as text, with rewards and ids, spread over the batch: samples of a prompt are adjacent."""
    count = min(count, experience.num_samples)
    rows = [index * experience.num_samples // count for index in range(count)]
    tokens = tuple(tensor[rows] for tensor in experience.tokens_and_masks())
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
