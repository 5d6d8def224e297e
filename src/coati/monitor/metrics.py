"""Typed metric values: the way to reduce a number travels with the number.

`Mean(loss, weight=tokens)` says how two such numbers become one, so no reader has to guess from the name whether to add
or to average. docs/metrics.md describes every metric.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Final

_NAME: Final = re.compile(r"[a-z][a-z0-9_]*/[a-z][a-z0-9_]*")


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
