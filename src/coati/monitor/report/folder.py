"""Reads the folder of a run, also of one that is still writing, and exports its spans as a trace."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from coati.errors import ConfigError, DataError
from coati.monitor.metrics import read_jsonl
from coati.monitor.timeline import WORK, Span, activity, is_idle

_METRICS: Final = "metrics.jsonl"
_SPANS: Final = "spans.jsonl"
_MICROSECONDS: Final = 1e6
_COUNTERS: Final = ("reward/mean", "kl/per_sample", "buffer/batches", "trainer/busy_share", "maker/busy_share")


class ActorSpan(NamedTuple):
    """A span, and whose it is."""

    actor: str
    span: Span


class Processors(NamedTuple):
    """Cores that all actors share, and how many of them each uses when it works."""

    cores: int
    threads_per_actor: int


@dataclass(frozen=True, kw_only=True)
class RunFolder:
    """What a run has written so far."""

    path: Path
    settings_text: str
    """config.toml; empty if the folder has none."""
    state: Mapping[str, Any]
    """state.json, which runs on Ray write."""
    metrics: list[dict[str, Any]]
    """One row of numbers per training step."""
    samples: list[dict[str, Any]]
    spans: list[ActorSpan]

    @property
    def settings(self) -> dict[str, Any]:
        """The resolved settings, by section."""
        return tomllib.loads(self.settings_text)

    @property
    def name(self) -> str:
        """The name of the run, or of its folder."""
        return str(self.settings.get("run", {}).get("name") or self.path.resolve().name)

    @property
    def processors(self) -> Processors | None:
        """The processors of a run without GPUs on one machine; None of any other run."""
        topology, cores = self.settings.get("topology", {}), int(self.state.get("cores", 0))
        if not cores or topology.get("gpus_per_maker") or topology.get("gpus_per_trainer"):
            return None
        num_actors = topology.get("makers", 1) + topology.get("trainers", 1)
        return Processors(cores, topology.get("threads_per_actor") or max(1, cores // num_actors))

    def series(self, metric: str, *, over: str = "step") -> list[tuple[float, float]]:
        """Return the finite values of one metric, with what they are drawn over."""
        points = ((row[over], row[metric]) for row in self.metrics if metric in row and over in row)
        return [(float(x), float(y)) for x, y in points if math.isfinite(x) and math.isfinite(y)]


def read_run(path: Path) -> RunFolder:
    """Read a run's folder; ConfigError if it is none, DataError if a file in it is damaged."""
    rule = f"RUN_FOLDER must be the output folder of a run (its run.output), got {str(path)!r}"
    if not path.is_dir():
        raise ConfigError(f"{rule}, which {'is a file' if path.exists() else 'does not exist'}.")
    if not (path / _METRICS).exists() and not (path / _SPANS).exists():
        raise ConfigError(f"{rule}, which has neither {_METRICS} nor {_SPANS}.")
    spans = _read_lines(path / _SPANS)
    run = RunFolder(
        path=path,
        settings_text=_read_text(path / "config.toml"),
        state=_read_state(path / "state.json"),
        metrics=_read_lines(path / _METRICS),
        samples=_read_lines(path / "samples.jsonl"),
        spans=[_parse_span(path / _SPANS, row, number) for number, row in enumerate(spans, 1)],
    )
    if not run.metrics and not run.spans:
        raise ConfigError(f"the run in {str(path)!r} has written nothing yet. Try again after its first step.")
    try:
        _ = run.settings
    except ValueError as error:
        raise DataError(f"{path / 'config.toml'} must be the run's settings as TOML: {error}. Restore it.") from None
    return run


def trace_events(run: RunFolder) -> dict[str, Any]:
    """Return a trace for ui.perfetto.dev: a process for each actor, a thread for each of its lanes, some metrics.

    Times are microseconds since the first span.
    """
    origin = min((span.start for _, span in run.spans), default=0.0)
    actors: dict[str, int] = {}
    lanes: dict[tuple[str, str], int] = {}
    events: list[dict[str, Any]] = []
    for actor, span in run.spans:
        process = actors.setdefault(actor, len(actors) + 1)
        if (actor, span.lane) not in lanes:
            num_lanes = sum(owner == actor for owner, _ in lanes)
            lanes[actor, span.lane] = 0 if span.lane == WORK else num_lanes + 1
        events.append(
            {
                "name": activity(span.what).label,
                "cat": "idle" if is_idle(span.what) else "work",
                "ph": "X",
                "ts": (span.start - origin) * _MICROSECONDS,
                "dur": (span.end - span.start) * _MICROSECONDS,
                "pid": process,
                "tid": lanes[actor, span.lane],
                "args": {"version": span.version},
            }
        )
    names = [_trace_name("process_name", name, process) for name, process in actors.items()]
    names += [_trace_name("thread_name", lane, actors[actor], thread) for (actor, lane), thread in lanes.items()]
    counters = [
        {"name": metric, "ph": "C", "ts": (at - origin) * _MICROSECONDS, "pid": 0, "args": {"value": value}}
        for metric in _COUNTERS
        for at, value in run.series(metric, over="time")
    ]
    return {"traceEvents": names + events + counters, "displayTimeUnit": "ms"}


def _trace_name(kind: str, name: str, process: int, thread: int = 0) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}


def _read_lines(path: Path) -> list[dict[str, Any]]:
    try:
        return read_jsonl(path) if path.exists() else []
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}. Restore the file, or its permissions.") from None


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8") if path.exists() else ""
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}. Restore the file, or its permissions.") from None


def _read_state(path: Path) -> dict[str, Any]:
    try:
        state = json.loads(_read_text(path) or "{}")
    except ValueError:
        return {}  # the report does without it
    return state if isinstance(state, dict) else {}


def _parse_span(path: Path, row: Mapping[str, Any], number: int) -> ActorSpan:
    try:
        span = Span(str(row["lane"]), str(row["what"]), float(row["start"]), float(row["end"]), int(row["version"]))
        actor = str(row["actor"])
        if not (math.isfinite(span.start) and math.isfinite(span.end) and span.end >= span.start):
            raise ValueError("its end must not be before its start")
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{path}, line {number}: not a span, with actor, lane, what, start, end and version ({error!r}). "
            "Delete the line, or restore the file."
        ) from None
    return ActorSpan(actor, span)
