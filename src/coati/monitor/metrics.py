"""Typed metric values, which say how two of them become one, and the files that they are written to.

docs/metrics.md describes every metric.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from coati.errors import ConfigError, DataError

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True)
class Metric:
    """A number, and how it merges with another of its kind."""

    value: float

    def merge(self, other: Self) -> Self:
        """Return the one number for both."""
        return type(self)(self._joined(self.value, other.value))

    @staticmethod
    def _joined(one: float, other: float) -> float:
        raise NotImplementedError


@dataclass(frozen=True)
class Mean(Metric):
    """A weighted mean. A weight of 0 says that nothing was seen: such a value never counts, even if it is NaN (0 / 0).

    >>> Mean(1.0, weight=3).merge(Mean(5.0, weight=1))
    Mean(value=2.0, weight=4)
    """

    weight: float = 1.0

    def merge(self, other: Self) -> Self:
        """Return the mean of all that both were made from."""
        if self.weight == 0 or other.weight == 0:
            return other if self.weight == 0 else self
        weight = self.weight + other.weight
        return type(self)((self.value * self.weight + other.value * other.weight) / weight, weight)


class Sum(Metric):
    """A total."""

    @staticmethod
    def _joined(one: float, other: float) -> float:
        return one + other


class Max(Metric):
    """The greatest value seen. NaN wins, in either order, because it is a fault that must be seen."""

    @staticmethod
    def _joined(one: float, other: float) -> float:
        return one if math.isnan(one) or one >= other else other


class Min(Metric):
    """The least value seen. NaN wins, as with `Max`."""

    @staticmethod
    def _joined(one: float, other: float) -> float:
        return one if math.isnan(one) or one <= other else other


def merge_metrics(held: dict[str, Metric], metrics: Mapping[str, Metric]) -> None:
    """Merge metrics by name into those that are held; a name keeps its kind."""
    for name, metric in metrics.items():
        old = held.get(name)
        assert old is None or type(old) is type(metric), f"{name} was {old} and is {metric} now"
        held[name] = metric if old is None else old.merge(metric)


def values_of(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Return the numbers by name. A `Mean` of weight 0 has seen nothing and is left out."""
    return {
        name: float(metric.value)
        for name, metric in metrics.items()
        if not (isinstance(metric, Mean) and metric.weight == 0)
    }


def append_jsonl(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Add a line for each record to a file. JSON has no NaN or infinity: as values they become null."""
    rows = ({key: _finite(value) for key, value in record.items()} for record in records)
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    # A lone surrogate cannot be UTF-8; backslashreplace writes it as JSON spells it.
    with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
        file.writelines(lines)


def read_jsonl(path: str | Path) -> list[dict[str, Any]]:
    """Read what `append_jsonl` wrote, without an incomplete last line; null becomes NaN. DataError if damaged."""
    return parse_jsonl(path, Path(path).read_bytes())


def parse_jsonl(path: str | Path, text: bytes) -> list[dict[str, Any]]:
    """Parse what was read from a file, as `read_jsonl` does."""
    records = []
    for number, line in enumerate(text.splitlines(keepends=True), start=1):
        try:
            record = json.loads(line)
            records.append({key: math.nan if value is None else value for key, value in record.items()})
        except (ValueError, AttributeError):  # not JSON, or not an object
            if line.endswith(b"\n"):
                raise DataError(
                    f"{path}, line {number}: every line must be a JSON object, got {line[:60]!r}. "
                    f"Delete the line, or restore the file."
                ) from None
    return records


def cut_jsonl(path: Path, keeps: Callable[[Mapping[str, Any]], bool]) -> list[dict[str, Any]]:
    """Leave the records in a file that are to be kept, and return them; a file that is not there has none."""
    kept = [record for record in read_jsonl(path) if keeps(record)] if path.is_file() else []
    if path.is_file():
        new = path.with_name(f".{path.name}.new")
        new.unlink(missing_ok=True)
        append_jsonl(new, kept)
        new.replace(path)
    return kept


def load_metrics(run: str | Path) -> pandas.DataFrame:
    """Load a run's metrics as a pandas DataFrame: a row per `step`; what is told once in a version is NaN elsewhere."""
    try:
        import pandas
    except ImportError as error:
        raise ConfigError(
            f"load_metrics needs pandas, which cannot be imported ({error}). pip install pandas"
        ) from None
    # The file has the evaluation of the final model in a row of its own, after that of the last step.
    return pandas.DataFrame(read_jsonl(Path(run) / "metrics.jsonl")).groupby("step").first()


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
