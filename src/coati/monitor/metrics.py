"""Typed metric values: the way to reduce a number travels with the number.

Makers and trainers report through a `MetricBag`. Whoever records `Mean(loss, weight=tokens)` has said once
and for all how two such numbers become one, so nobody downstream has to guess from the name whether to add or
to average. `METRICS` is the one table of every name the system reports; the docs are made from it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from coati.errors import ConfigError

_NAME: Final = re.compile(r"[a-z][a-z0-9_]*/[a-z][a-z0-9_]*")

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
        "policy/loss": "Clipped policy loss, over response tokens in the way of algorithm.normalization.",
        "policy/clip_fraction": "Fraction of response tokens whose ratio was clipped.",
        "policy/approx_kl": "KL estimate between the behaviour policy and the current one (nats per token).",
        "policy/entropy": "Mean entropy of the policy over response tokens (nats).",
        "policy/kl_loss": "KL term of the loss, before its coefficient, where the algorithm has one.",
        "policy/ratio_max": "Largest ratio, before it is clipped: of current to behaviour probability of a token or, "
        "where a correction for old data is on, of current to proximal, which is 1 in the first step on a batch.",
        "policy/grad_norm": "Norm of the actor's gradient before clipping.",
        "value/loss": "Clipped value loss, mean over response tokens.",
        "value/clip_fraction": "Fraction of value estimates held back by the clip range.",
        "value/explained_variance": "1 - Var(return - value) / Var(return): 1 is perfect, 0 a constant.",
        "value/grad_norm": "Norm of the critic's gradient before clipping.",
        "optim/actor_lr": "Learning rate of the actor.",
        "optim/critic_lr": "Learning rate of the critic.",
        "optim/skipped_batches": "Batches skipped because a loss or gradient was NaN or infinite.",
        "train/samples": "Samples this trainer trained on; one that is used in two epochs counts twice.",
        "train/tokens": "Response tokens trained on, over all trainers.",
        "train/version": "Policy version the trainer has reached.",
        "train/age_mean": "Mean age of the trained samples: versions since they were written.",
        "train/age_max": "Greatest age among the trained samples, in versions.",
        "train/token_age_mean": "Mean age of the trained tokens; below train/age_mean where samples mix versions.",
        "age/samples_0": "Share of the trained samples whose oldest token the newest weights wrote.",
        "age/samples_1": "Share of the samples that are 1 version old.",
        "age/samples_2": "Share of the samples that are 2 versions old.",
        "age/samples_3": "Share of the samples that are 3 versions old.",
        "age/samples_4": "Share of the samples that are 4 versions old.",
        "age/samples_5_to_8": "Share of the samples that are 5 to 8 versions old.",
        "age/samples_9_up": "Share of the samples that are 9 or more versions old.",
        "age/tokens_0": "Share of the trained tokens that the newest weights wrote.",
        "age/tokens_1": "Share of the tokens that are 1 version old.",
        "age/tokens_2": "Share of the tokens that are 2 versions old.",
        "age/tokens_3": "Share of the tokens that are 3 versions old.",
        "age/tokens_4": "Share of the tokens that are 4 versions old.",
        "age/tokens_5_to_8": "Share of the tokens that are 5 to 8 versions old.",
        "age/tokens_9_up": "Share of the tokens that are 9 or more versions old.",
        "staleness/bound": "Versions that data may be behind, in an adaptive run: what the controller decided.",
        "off_policy/effective_samples": "Effective share of the batch under sequence weights; 1 is on-policy.",
        "off_policy/effective_tokens": "Effective share of the batch under token weights; 1 is on-policy.",
        "off_policy/ratio_max": "Largest ratio of proximal to behaviour probability of a token.",
        "off_policy/above_cap": "Fraction of response tokens whose importance weight is above the cap.",
        "off_policy/log_ratio": "Mean |log(proximal / behaviour)| over response tokens.",
        "buffer/batches": "Whole batches waiting in the replay buffer.",
        "maker/samples": "Samples made.",
        "maker/version": "Policy version that the makers' numbers beside this one are of.",
        "maker/samples_per_second": "Samples made per second.",
        "maker/generate_seconds": "Time makers spent writing text, over all of them.",
        "maker/score_seconds": "Time makers spent on reward models, values and log-probs.",
        "maker/send_seconds": "Time makers spent handing items over, without waiting for room.",
        "rollout/logprob_gap": "Mean |log-prob by which the engine drew a token - the same by a learner's "
        "forward pass|, in a few samples of each batch; not for samples during which weights changed in flight.",
        "rollout/logprob_gap_max": "The largest of these differences.",
        "maker/busy_share": "Share of their time in which makers wrote, scored or sent.",
        "maker/dropped": "Samples dropped, for whatever reason: no room for a response, a reward that is not a finite "
        "number (and the rest of its group, where the algorithm compares them), or dynamic sampling.",
        "maker/no_signal": "Samples that dynamic sampling replaced: all of their prompt scored the same.",
        "maker/skipped_prompts": "Prompts passed over because they do not fit the context or the limit.",
        "trainer/samples_per_second": "Samples trained per second.",
        "trainer/train_seconds": "Time the trainer spent on the training steps of the last version.",
        "trainer/busy_share": "Share of the last version's time that the trainer trained.",
        "weights/bytes": "Bytes of one weight update.",
        "weights/publish_seconds": "From the moment the trainer had a new version until all its makers had "
        "verified it. Training goes on meanwhile.",
        "weights/commit_seconds": "Time a maker stood still to take a staged update into use.",
        "wait/data_seconds": "Time the trainer waited for a batch.",
        "wait/data_share": "Share of the last version's time that the trainer waited for data.",
        "wait/ranks_seconds": "Time the trainer waited for the other ranks of its group before a batch, in the last "
        "version.",
        "wait/delivery_seconds": "Time the trainer waited to send new weights, because makers had not verified those "
        "before, in the last version.",
        "wait/room_seconds": "Time makers waited for room in a trainer's buffer, over all of them.",
        "wait/room_share": "Share of their time that makers waited for room.",
        "wait/weights_seconds": "Time makers waited for weights, over all of them.",
        "wait/weights_share": "Share of their time that makers waited for weights.",
        "wait/prompts_seconds": "Time makers waited for prompts, over all of them.",
        "wait/prompts_share": "Share of their time that makers waited for prompts.",
        "wait/rewards_seconds": "Time makers waited for reward functions with nothing else to do, over all of them.",
        "wait/rewards_share": "Share of their time that makers waited for reward functions.",
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
        if not self.weight >= 0:
            raise ConfigError(
                f"The weight of a Mean must be 0 or more, got {self.weight}. Pass a count or leave it out."
            )

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


@dataclass(frozen=True)
class Last:
    """The newest value: a learning rate, a version, the length of a queue."""

    value: float

    def merge(self, other: Last) -> Last:
        """Return `other`, which came later."""
        return other


Metric = Mean | Sum | Max | Min | Last
"""Any of the typed values a bag holds."""


class MetricBag:
    """Metrics by name, merged as they come and emptied by `flush`.

    A bag pickles, so a maker can hand one to whoever writes the log.

    >>> bag = MetricBag()
    >>> bag.record("reward/mean", Mean(0.5, weight=2))
    >>> bag.record("reward/mean", Mean(0.8, weight=1))
    >>> bag.record("maker/samples", Sum(3))
    >>> bag.flush()
    {'reward/mean': 0.6, 'maker/samples': 3.0}
    >>> bag.flush()
    {}
    """

    def __init__(self) -> None:
        self._metrics: dict[str, Metric] = {}

    def record(self, name: str, metric: Metric) -> None:
        """Merge `metric` into what `name` holds; a name is `area/name`, and keeps the kind it began with."""
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"A metric name must be area/name of lower-case letters, digits and _, got {name!r}. "
                f"Call it, for example, 'reward/mean'."
            )
        held = self._metrics.get(name)
        self._metrics[name] = metric if held is None else _merge(name, held, metric)

    def merge(self, other: MetricBag) -> None:
        """Merge everything `other` holds into this bag, as the later of the two; `other` stays as it is."""
        for name, metric in other._metrics.items():
            self.record(name, metric)

    def flush(self) -> dict[str, float]:
        """Return the numbers in the order their names were first recorded, and start anew.

        A `Mean` of total weight 0 has seen nothing and is left out.
        """
        flushed = {
            name: float(metric.value)
            for name, metric in self._metrics.items()
            if not (isinstance(metric, Mean) and metric.weight == 0)
        }
        self._metrics.clear()
        return flushed

    def __len__(self) -> int:
        return len(self._metrics)


def undeclared(names: Iterable[str]) -> list[str]:
    """Return the names that `METRICS` does not describe, sorted.

    >>> undeclared(["reward/mean", "reward/brevity"])
    ['reward/brevity']
    """
    return sorted(set(names) - METRICS.keys())


def _merge(name: str, held: Metric, metric: Metric) -> Metric:
    if type(metric) is not type(held):
        raise ConfigError(
            f"Metric {name!r} must keep one kind, was {type(held).__name__} and got {type(metric).__name__}. "
            f"Record it under another name or with the first kind."
        )
    return held.merge(metric)  # type: ignore[arg-type]  # of one kind, as just checked
