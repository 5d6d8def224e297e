"""Monitoring of a run: typed metrics, trackers, progress. Imports neither torch nor rich."""

from coati.monitor.metrics import Max as Max
from coati.monitor.metrics import Mean as Mean
from coati.monitor.metrics import Sum as Sum
from coati.monitor.metrics import load_metrics as load_metrics
from coati.monitor.metrics import read_jsonl as read_jsonl
from coati.monitor.run_log import RunLog as RunLog
from coati.monitor.run_log import RunSnapshot as RunSnapshot
from coati.monitor.trackers import Tracker as Tracker
