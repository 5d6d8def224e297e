"""Seeing what a run does: typed metrics, trackers, progress. Imports neither torch nor rich."""

from coati.monitor.metrics import (
    Max,
    Mean,
    Metric,
    Min,
    Sum,
    load_metrics,
    read_jsonl,
)
from coati.monitor.progress import RunSnapshot
from coati.monitor.run_log import RunLog
from coati.monitor.timeline import Timeline
from coati.monitor.trackers import Tracker

__all__ = [
    "Max",
    "Mean",
    "Metric",
    "Min",
    "RunLog",
    "RunSnapshot",
    "Sum",
    "Timeline",
    "Tracker",
    "load_metrics",
    "read_jsonl",
]
