"""Spans as a trace that chrome://tracing and ui.perfetto.dev read (the trace-event format)."""

from __future__ import annotations

from typing import Any, Final

from coati.monitor.report.folder import RunFolder
from coati.monitor.report.time_use import is_idle, label_of
from coati.monitor.timeline import WORK

_MICROSECONDS: Final = 1e6
_COUNTERS: Final = ("reward/mean", "kl/per_sample", "buffer/batches", "trainer/busy_share", "maker/busy_share")


def trace_events(run: RunFolder) -> dict[str, Any]:
    """The trace: a process for each actor, a thread for each of its lanes, and counters for some metrics.

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
                "name": label_of(span.what),
                "cat": "idle" if is_idle(span.what) else "work",
                "ph": "X",
                "ts": (span.start - origin) * _MICROSECONDS,
                "dur": (span.end - span.start) * _MICROSECONDS,
                "pid": process,
                "tid": lanes[actor, span.lane],
                "args": {"version": span.version},
            }
        )
    names = [_name("process_name", name, process) for name, process in actors.items()]
    names += [_name("thread_name", lane, actors[actor], thread) for (actor, lane), thread in lanes.items()]
    return {"traceEvents": names + events + _counters(run, origin), "displayTimeUnit": "ms"}


def _name(kind: str, name: str, process: int, thread: int = 0) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}


def _counters(run: RunFolder, origin: float) -> list[dict[str, Any]]:
    """Metrics over the time at which they were written, which is up to a second after they were measured."""
    if not run.spans:
        return []
    return [
        {"name": metric, "ph": "C", "ts": (at - origin) * _MICROSECONDS, "pid": 0, "args": {"value": value}}
        for metric in _COUNTERS
        for at, value in run.series(metric, over="time")
    ]
