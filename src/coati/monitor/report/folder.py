"""Reads the folder of a run, also of one that is still writing, and exports its spans as a trace."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from coati.errors import ConfigError, DataError
from coati.monitor.metrics import read_jsonl
from coati.monitor.timeline import WORK, Span, is_idle, label_of

T = TypeVar("T")

_METRICS: Final = "metrics.jsonl"
_SPANS: Final = "spans.jsonl"
_MICROSECONDS: Final = 1e6


@dataclass(frozen=True, kw_only=True)
class RunFolder:
    """What a run has written so far."""

    path: Path
    settings: str
    """config.toml; empty if the folder has none."""
    state: Mapping[str, Any]
    """state.json, which runs on Ray write."""
    metrics: list[dict[str, Any]]
    """One row of numbers per training step."""
    samples: list[dict[str, Any]]
    spans: dict[str, list[Span]]
    """What each actor did when."""

    @property
    def name(self) -> str:
        """What the folder is called: the name of the run, unless run.output says otherwise."""
        return self.path.resolve().name

    def series(self, metric: str) -> list[tuple[float, float]]:
        """Return the finite values of one metric, with their training steps."""
        points = ((row["step"], row[metric]) for row in self.metrics if metric in row and "step" in row)
        return [(float(x), float(y)) for x, y in points if math.isfinite(x) and math.isfinite(y)]


def read_run(path: Path) -> RunFolder:
    """Read a run's folder; ConfigError if it is none, DataError if a file in it is damaged."""
    rule = f"RUN_FOLDER must be the output folder of a run (its run.output), got {str(path)!r}"
    if not path.is_dir():
        raise ConfigError(f"{rule}, which {'is a file' if path.exists() else 'does not exist'}.")
    if not (path / _METRICS).exists() and not (path / _SPANS).exists():
        raise ConfigError(f"{rule}, which has neither {_METRICS} nor {_SPANS}.")
    run = RunFolder(
        path=path,
        settings=_read(path / "config.toml", lambda file: file.read_text(encoding="utf-8"), ""),
        state=_read(path / "state.json", lambda file: json.loads(file.read_bytes()), {}),
        metrics=_read(path / _METRICS, read_jsonl, []),
        samples=_read(path / "samples.jsonl", read_jsonl, []),
        spans=_read(path / _SPANS, _read_spans, {}),
    )
    if not run.metrics and not run.spans:
        raise ConfigError(f"the run in {str(path)!r} has written nothing yet. Try again after its first step.")
    return run


def _read(path: Path, parse: Callable[[Path], T], default: T) -> T:
    try:
        return parse(path) if path.exists() else default
    except DataError:
        raise
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{path} cannot be read: {error}. Restore the file, or its permissions.") from None


def _read_spans(path: Path) -> dict[str, list[Span]]:
    spans: dict[str, list[Span]] = {}
    for row in read_jsonl(path):
        spans.setdefault(row.pop("actor", ""), []).append(Span(**row))
    return spans


def trace_events(run: RunFolder) -> dict[str, Any]:
    """Return a trace for ui.perfetto.dev: a process for each actor, a thread for each of its lanes.

    Times are microseconds since the first span.
    """
    origin = min((span.start for spans in run.spans.values() for span in spans), default=0.0)
    events: list[dict[str, Any]] = []
    for process, (actor, spans) in enumerate(run.spans.items(), 1):
        threads = {lane: number for number, lane in enumerate(dict.fromkeys([WORK, *(span.lane for span in spans)]))}
        named = [("process_name", 0, actor), *(("thread_name", thread, lane) for lane, thread in threads.items())]
        events += [
            {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}
            for kind, thread, name in named
        ]
        events += [
            {
                "name": label_of(span.what),
                "cat": "idle" if is_idle(span.what) else "work",
                "ph": "X",
                "ts": (span.start - origin) * _MICROSECONDS,
                "dur": (span.end - span.start) * _MICROSECONDS,
                "pid": process,
                "tid": threads[span.lane],
                "args": {"version": span.version},
            }
            for span in spans
        ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}
