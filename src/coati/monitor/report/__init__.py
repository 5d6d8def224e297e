"""What a run left in its folder, for people: a table, a page with pictures, and a trace for Perfetto."""

from coati.monitor.report.folder import ActorSpan, RunFolder, read_run, trace_events
from coati.monitor.report.page import headline, render_page
from coati.monitor.report.time_use import RunTimes, run_times

__all__ = [
    "ActorSpan",
    "RunFolder",
    "RunTimes",
    "headline",
    "read_run",
    "render_page",
    "run_times",
    "trace_events",
]
