"""What a run left in its folder, for a person: a table, a page with pictures, and a trace for Perfetto."""

from coati.monitor.report.folder import ActorSpan, RunFolder, read_run
from coati.monitor.report.page import render_page
from coati.monitor.report.time_use import ActorTime, RunTimes, run_times
from coati.monitor.report.trace import trace_events

__all__ = [
    "ActorSpan",
    "ActorTime",
    "RunFolder",
    "RunTimes",
    "read_run",
    "render_page",
    "run_times",
    "trace_events",
]
