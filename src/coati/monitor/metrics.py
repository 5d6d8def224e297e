"""Typed metrics (docs/metrics.md), each with its reduction, and the JSONL files that hold them."""

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
    """A number with its reduction."""

    value: float

    def merge(self, other: Self) -> Self:
        """Combine both values into one metric."""
        raise NotImplementedError


@dataclass(frozen=True)
class Mean(Metric):
    """A weighted mean. A weight of 0 means no data: such a value never counts, even if it is NaN (0 / 0).

    >>> Mean(1.0, weight=3).merge(Mean(5.0, weight=1))
    Mean(value=2.0, weight=4)
    """

    weight: float = 1.0

    def merge(self, other: Self) -> Self:
        """Combine both into their weighted mean."""
        if self.weight == 0 or other.weight == 0:
            return other if self.weight == 0 else self
        weight = self.weight + other.weight
        return type(self)((self.value * self.weight + other.value * other.weight) / weight, weight)


class Sum(Metric):
    """A total."""

    def merge(self, other: Self) -> Self:
        """Add both."""
        return type(self)(self.value + other.value)


class Max(Metric):
    """The largest value. NaN wins in either order: it is a fault that must stay visible."""

    def merge(self, other: Self) -> Self:
        """Return the larger one."""
        return self if math.isnan(self.value) or self.value >= other.value else other


def merge_metrics(held: dict[str, Metric], metrics: Mapping[str, Metric]) -> None:
    """Merge `metrics` into `held` by name. The type of a metric must not change."""
    for name, metric in metrics.items():
        old = held.get(name)
        assert old is None or type(old) is type(metric), f"{name} was {old} and is {metric} now"
        held[name] = metric if old is None else old.merge(metric)


def values_of(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Return the values by name, without means of weight 0, which have no data."""
    return {name: float(metric.value) for name, metric in metrics.items() if getattr(metric, "weight", 1.0) != 0}


def append_jsonl(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Append one line per record to a file. NaN and infinity, which JSON lacks, become null (top level only)."""
    lines = []
    for record in records:
        bad = {key: None for key, value in record.items() if isinstance(value, float) and not math.isfinite(value)}
        lines.append(json.dumps({**record, **bad}, ensure_ascii=False) + "\n")
    # UTF-8 cannot encode a lone surrogate; backslashreplace writes it as the JSON escape.
    with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
        file.writelines(lines)


def read_jsonl(path: str | Path) -> list[dict[str, Any]]:
    """Read a file of `append_jsonl`. null becomes NaN, an incomplete last line is ignored. DataError if damaged."""
    return parse_jsonl(path, Path(path).read_bytes())


def parse_jsonl(path: str | Path, text: bytes) -> list[dict[str, Any]]:
    """Parse the content of a file as `read_jsonl` does; `path` is for errors."""
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
    """Remove the records that `keeps` rejects from a file, atomically. Return the others, none if there is no file."""
    kept = [record for record in read_jsonl(path) if keeps(record)] if path.is_file() else []
    if path.is_file():
        new = path.with_name(f".{path.name}.new")
        new.unlink(missing_ok=True)
        append_jsonl(new, kept)
        new.replace(path)
    return kept


def load_metrics(run: str | Path) -> "pandas.DataFrame":
    """Load a run's metrics as a DataFrame, one row per `step`; those of a whole version are NaN in its other rows."""
    try:
        import pandas
    except ImportError as error:
        raise ConfigError(
            f"load_metrics needs pandas, which cannot be imported ({error}). Run pip install pandas."
        ) from None
    # The evaluation of the final model has a row of its own, with the number of the last step.
    return pandas.DataFrame(read_jsonl(Path(run) / "metrics.jsonl") or {"step": []}).groupby("step").first()
