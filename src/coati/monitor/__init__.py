"""Seeing what a run does: typed metrics, trackers, performance, progress. Imports neither torch nor rich."""

from coati.monitor.metrics import (
    Max,
    Mean,
    Metric,
    MetricBag,
    Min,
    Sum,
    TensorBoardTracker,
    Tracker,
    load_metrics,
    read_jsonl,
)
from coati.monitor.progress import RunSnapshot, plain_line, render_progress
from coati.monitor.run_log import RunLog
from coati.monitor.timeline import Timeline

__all__ = [
    "Max",
    "Mean",
    "Metric",
    "MetricBag",
    "Min",
    "RunLog",
    "RunSnapshot",
    "Sum",
    "TensorBoardTracker",
    "Timeline",
    "Tracker",
    "load_metrics",
    "plain_line",
    "read_jsonl",
    "render_progress",
]
