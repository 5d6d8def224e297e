"""Reads the folder of a run, also of one that is still writing."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from coati.errors import ConfigError, DataError
from coati.monitor.timeline import Span
from coati.monitor.trackers import read_jsonl

_CONFIG: Final = "config.toml"
_METRICS: Final = "metrics.jsonl"
_SAMPLES: Final = "samples.jsonl"
_SPANS: Final = "spans.jsonl"


class ActorSpan(NamedTuple):
    """A span, and whose it is."""

    actor: str
    span: Span


@dataclass(frozen=True, kw_only=True)
class RunFolder:
    """What a run has written so far."""

    path: Path
    settings: Mapping[str, Any]
    """The resolved settings, by section; empty if the folder holds none."""
    metrics: list[dict[str, Any]]
    """One row of numbers per training step."""
    samples: list[dict[str, Any]]
    spans: list[ActorSpan]

    @property
    def name(self) -> str:
        """What the run calls itself, or its folder's name."""
        return str(self.settings.get("run", {}).get("name") or self.path.resolve().name)

    def series(self, metric: str, *, over: str = "step") -> list[tuple[float, float]]:
        """The finite values of one metric, with what they are drawn over."""
        points = ((row[over], row[metric]) for row in self.metrics if metric in row and over in row)
        return [(float(x), float(y)) for x, y in points if math.isfinite(x) and math.isfinite(y)]


def read_run(path: Path) -> RunFolder:
    """Read a run's folder; ConfigError if it is none, DataError if a file in it is damaged."""
    if not path.is_dir():
        what = "is a file" if path.exists() else "does not exist"
        raise ConfigError(f"RUN_FOLDER must be the output folder of a run, got {str(path)!r}, which {what}.")
    if not (path / _METRICS).exists() and not (path / _SPANS).exists():
        raise ConfigError(
            f"RUN_FOLDER must be the output folder of a run, got {str(path)!r}, which has neither {_METRICS} nor "
            f"{_SPANS}. Give the folder that the run calls run.output."
        )
    run = RunFolder(
        path=path,
        settings=_read_settings(path / _CONFIG),
        metrics=_read_lines(path / _METRICS),
        samples=_read_lines(path / _SAMPLES),
        spans=[_parse_span(path / _SPANS, row, number) for number, row in enumerate(_read_lines(path / _SPANS), 1)],
    )
    if not run.metrics and not run.spans:
        raise ConfigError(f"the run in {str(path)!r} has written nothing yet. Try again when its first step is done.")
    return run


def _read_lines(path: Path) -> list[dict[str, Any]]:
    try:
        return read_jsonl(path)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}. Restore the file, or its permissions.") from None


def _read_settings(path: Path) -> Mapping[str, Any]:
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise DataError(f"{path} must be the run's settings as TOML, but: {error}. Restore or delete it.") from None


def _parse_span(path: Path, row: Mapping[str, Any], number: int) -> ActorSpan:
    try:
        span = Span(str(row["lane"]), str(row["what"]), float(row["start"]), float(row["end"]), int(row["version"]))
        actor = str(row["actor"])
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{path}, line {number}: a span must have actor, lane, what, start, end and version, got {dict(row)} "
            f"({type(error).__name__}: {error}). Delete the line, or restore the file."
        ) from None
    if not (math.isfinite(span.start) and math.isfinite(span.end) and span.end >= span.start):
        raise DataError(
            f"{path}, line {number}: a span must end after it starts, got {span.start} to {span.end}. Delete the line."
        )
    return ActorSpan(actor, span)
