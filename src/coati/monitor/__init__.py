"""Seeing what a run does: typed metrics, trackers, performance, progress. Imports neither torch nor rich."""

from coati.monitor.metrics import METRICS, Last, Max, Mean, Metric, MetricBag, Min, Sum, undeclared
from coati.monitor.performance import WorkMeter
from coati.monitor.progress import RunSnapshot, plain_line, render_progress, sparkline
from coati.monitor.trackers import JsonlTracker, TensorBoardTracker, Tracker, TrackerGroup, read_jsonl

__all__ = [
    "METRICS",
    "JsonlTracker",
    "Last",
    "Max",
    "Mean",
    "Metric",
    "MetricBag",
    "Min",
    "RunSnapshot",
    "Sum",
    "TensorBoardTracker",
    "Tracker",
    "TrackerGroup",
    "WorkMeter",
    "plain_line",
    "read_jsonl",
    "render_progress",
    "sparkline",
    "undeclared",
]
