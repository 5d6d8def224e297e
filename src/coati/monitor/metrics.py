"""Typed metric values: the way to reduce a number travels with the number.

`Mean(loss, weight=tokens)` says how two such numbers become one, so no reader has to guess from the name whether to add
or to average. `METRICS` is the table of every metric; docs/metrics.md is made from it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

_NAME: Final = re.compile(r"[a-z][a-z0-9_]*/[a-z][a-z0-9_]*")

_AGES: Final = {
    "0": "0 versions",
    "1": "1 version",
    "2": "2 versions",
    "3": "3 versions",
    "4": "4 versions",
    "5_to_8": "5 to 8 versions",
    "9_up": "9 or more versions",
}

METRICS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "reward/mean": "Mean score of the samples, without the KL penalty.",
        "reward/std": "Standard deviation of the scores.",
        "reward/min": "Lowest score.",
        "reward/max": "Highest score.",
        "reward/group_std": "Standard deviation of the scores of one prompt's samples, mean over prompts.",
        "kl/per_sample": "KL estimate against the initial model, summed over each response (nats).",
        "kl/per_token": "KL estimate against the initial model, mean over response tokens (nats).",
        "response/length": "Mean number of response tokens, the end-of-sequence token included.",
        "response/cut_fraction": "Fraction of responses cut at the length limit.",
        "response/empty": "Number of responses that ended before their first word.",
        "policy/loss": "Clipped policy loss over response tokens, normalized as algorithm.normalization says.",
        "policy/clip_fraction": "Fraction of response tokens whose ratio was clipped.",
        "policy/approx_kl": "KL estimate between the behaviour policy and the current one (nats per token).",
        "policy/entropy": "Mean entropy of the policy over response tokens (nats).",
        "policy/kl_loss": "KL term of the loss, before its coefficient, where the algorithm has one.",
        "policy/ratio_max": "Largest ratio of current to behaviour probability of a token, before clipping. With a "
        "correction for old data: of current to proximal probability, which is 1 in the first step on a batch.",
        "policy/grad_norm": "Norm of the actor's gradient before clipping.",
        "value/loss": "Clipped value loss, mean over response tokens.",
        "value/clip_fraction": "Fraction of value estimates limited by the clip range.",
        "value/explained_variance": "1 - Var(return - value) / Var(return): 1 is perfect, 0 a constant.",
        "value/grad_norm": "Norm of the critic's gradient before clipping.",
        "optim/actor_lr": "Learning rate of the actor.",
        "optim/critic_lr": "Learning rate of the critic.",
        "optim/skipped_batches": "Batches skipped because a loss or gradient was NaN or infinite.",
        "train/samples": "Samples that this trainer trained on in the step.",
        "train/tokens": "Response tokens trained on, over all trainers.",
        "train/age_mean": "Mean age of the trained samples: versions since they were written.",
        "train/age_max": "Greatest age among the trained samples, in versions.",
        "train/token_age_mean": "Mean age of the trained tokens; below train/age_mean where samples mix versions.",
        **{
            f"age/{what}_{bucket}": f"Share of the trained {what} that are {age} old."
            for what in ("samples", "tokens")
            for bucket, age in _AGES.items()
        },
        "staleness/bound": "Versions that data may lag behind, as the controller of an adaptive run decided.",
        "off_policy/effective_samples": "Effective share of the batch under sequence weights; 1 is on-policy.",
        "off_policy/effective_tokens": "Effective share of the batch under token weights; 1 is on-policy.",
        "off_policy/ratio_max": "Largest ratio of proximal to behaviour probability of a token.",
        "off_policy/above_cap": "Fraction of response tokens whose importance weight is above the cap.",
        "off_policy/log_ratio": "Mean |log(proximal / behaviour)| over response tokens.",
        "buffer/batches": "Whole batches waiting in the replay buffer.",
        "maker/samples": "Samples made.",
        "maker/samples_per_second": "Samples made per second of one maker's work.",
        "maker/generate_seconds": "Time makers spent generating, summed over makers.",
        "maker/score_seconds": "Time makers spent on reward models, values and log-probs, summed over makers.",
        "maker/send_seconds": "Time makers spent sending samples, without waiting for room, summed over makers.",
        "maker/busy_share": "Share of their time in which makers generated, scored or sent.",
        "maker/dropped": "Samples dropped: no room for a response, a reward that is not a finite number (and the rest "
        "of its group, where the algorithm compares them), or dynamic sampling.",
        "maker/no_signal": "Samples that dynamic sampling replaced, because all of their prompt scored the same.",
        "maker/skipped_prompts": "Prompts skipped because they do not fit the context or the limit.",
        "rollout/logprob_gap": "Mean |log-prob in the engine - log-prob in the learner's forward pass| of tokens in "
        "a few samples of each batch, without samples during which weights changed.",
        "rollout/logprob_gap_max": "The largest of these differences.",
        "trainer/samples_per_second": "Samples trained per second of the step.",
        "trainer/train_seconds": "Time that the training steps of the version took.",
        "trainer/busy_share": "Share of the version's time in which the trainer trained.",
        "weights/bytes": "Bytes of one weight update.",
        "weights/publish_seconds": "From the moment the trainer had a new version until all its makers had verified "
        "it. Training continues meanwhile.",
        "weights/commit_seconds": "Longest time a maker paused to put a verified update into use.",
        "wait/data_seconds": "Time the trainer has waited for batches since the run began.",
        "wait/data_share": "Share of the version's time in which the trainer waited for data.",
        "wait/ranks_seconds": "Time the trainer waited for the other ranks of its group, in the version.",
        "wait/delivery_seconds": "Time the trainer waited to send new weights, because makers had not verified the "
        "earlier ones, in the version.",
        "wait/room_seconds": "Time makers waited for room in a trainer's buffer, summed over makers.",
        "wait/room_share": "Share of their time in which makers waited for room.",
        "wait/weights_seconds": "Time makers waited for weights, summed over makers.",
        "wait/weights_share": "Share of their time in which makers waited for weights.",
        "wait/prompts_seconds": "Time makers waited for prompts, summed over makers.",
        "wait/prompts_share": "Share of their time in which makers waited for prompts.",
        "wait/rewards_seconds": "Time makers waited for reward functions with nothing else to do, summed over makers.",
        "wait/rewards_share": "Share of their time in which makers waited for reward functions.",
    }
)
"""Every metric name the system reports, with its meaning in one line."""


@dataclass(frozen=True)
class Mean:
    """A weighted mean; two of them merge into the mean of all they were made from.

    A weight of 0 says that nothing was seen: such a value never counts, even if it is NaN (0 / 0).

    >>> Mean(1.0, weight=3).merge(Mean(5.0, weight=1))
    Mean(value=2.0, weight=4)
    """

    value: float
    weight: float = 1.0

    def __post_init__(self) -> None:
        assert self.weight >= 0, "the weight of a Mean is a count"

    def merge(self, other: Mean) -> Mean:
        """Return the mean over both."""
        if self.weight == 0:
            return other
        if other.weight == 0:
            return self
        weight = self.weight + other.weight
        return Mean((self.value * self.weight + other.value * other.weight) / weight, weight)


@dataclass(frozen=True)
class Sum:
    """A total.

    >>> Sum(2.0).merge(Sum(3.0))
    Sum(value=5.0)
    """

    value: float

    def merge(self, other: Sum) -> Sum:
        """Return the total of both."""
        return Sum(self.value + other.value)


@dataclass(frozen=True)
class Max:
    """The greatest value seen. NaN wins, in either order, because it is a fault that must be seen."""

    value: float

    def merge(self, other: Max) -> Max:
        """Return the greater."""
        return self if math.isnan(self.value) or self.value >= other.value else other


@dataclass(frozen=True)
class Min:
    """The least value seen. NaN wins, in either order, because it is a fault that must be seen."""

    value: float

    def merge(self, other: Min) -> Min:
        """Return the lesser."""
        return self if math.isnan(self.value) or self.value <= other.value else other


Metric = Mean | Sum | Max | Min
"""Any of the typed values a bag holds."""


class MetricBag:
    """Metrics by name, merged as they come.

    >>> bag = MetricBag()
    >>> bag.record("reward/mean", Mean(0.5, weight=2))
    >>> bag.record("reward/mean", Mean(0.8, weight=1))
    >>> bag.record("maker/samples", Sum(3))
    >>> bag.values()
    {'reward/mean': 0.6, 'maker/samples': 3.0}
    """

    def __init__(self) -> None:
        self._metrics: dict[str, Metric] = {}

    def record(self, name: str, metric: Metric) -> None:
        """Merge `metric` into what `name` holds; a name is `area/name`, and keeps the kind of its first metric."""
        assert _NAME.fullmatch(name), f"{name!r} is not area/name of lower-case letters, digits and _"
        held = self._metrics.get(name, metric)
        assert type(held) is type(metric), f"{name} was a {type(held).__name__} and is a {type(metric).__name__} now"
        self._metrics[name] = held.merge(metric) if name in self._metrics else metric  # type: ignore[arg-type]

    def merge(self, other: MetricBag) -> None:
        """Merge everything that `other` holds into this bag; `other` stays as it is."""
        for name, metric in other._metrics.items():
            self.record(name, metric)

    def values(self) -> dict[str, float]:
        """Return the numbers, in the order in which their names were first recorded.

        A `Mean` of total weight 0 has seen nothing and is left out.
        """
        return {
            name: float(metric.value)
            for name, metric in self._metrics.items()
            if not (isinstance(metric, Mean) and metric.weight == 0)
        }
