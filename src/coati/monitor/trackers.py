"""Experiment trackers: TensorBoard, wandb, mlflow, trackio, swanlab.

Each class adapts one package to the protocol `Tracker`. Each runs in its own process (`coati.monitor.follow`), because
these packages start threads, install signal handlers and block on the network.
"""

import importlib
import json
import math
import re
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

_PROJECT: Final = "coati"  # default project
_MAX_PARAMS: Final = 100  # that mlflow accepts in one call


class Tracker(Protocol):
    """Receives the metrics and samples of a run. One that raises is dropped with a warning; training continues."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of one step. After a restart or resume, some steps are written again."""

    def samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Write the samples of the weight version that ended with this step."""

    def close(self, failed: bool, /) -> None:
        """Flush and close. `failed` is True if the run ended with an error."""


class TrackedRun(NamedTuple):
    """The run that a tracker writes."""

    folder: Path
    settings: Mapping[str, Any]
    options: Mapping[str, Any]  # the tracker's own, from `[logging.trackers]`
    known_as: str  # name or id that the tracker gave the run before; empty for a new run


class _TensorBoard:
    """Writes event files to the folder `tensorboard` of the run; samples are on the Text page."""

    def __init__(self, run: TrackedRun) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(run.folder / "tensorboard"), flush_secs=10)
        self._next_step = math.inf

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary

        if step < self._next_step:  # START hides what was written earlier for this step and later ones
            self._add(step, session_log=SessionLog(status=SessionLog.START))
        self._next_step = step + 1
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._add(step, summary=Summary(value=values))

    def samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        from tensorboard.plugins.text.summary_v2 import text_pb

        columns, rows = _table_of(samples)
        lines = [[str(cell).replace("|", "\\|").replace("\n", "<br>") for cell in row] for row in rows]
        table = "\n".join("|".join(["", *line, ""]) for line in [columns, ["---"] * len(columns), *lines])
        self._add(step, summary=text_pb("samples", table.encode(errors="backslashreplace")))

    def _add(self, step: int, **content: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._writer.add_event(Event(step=step, wall_time=time.time(), **content))

    def close(self, _failed: bool) -> None:
        self._writer.close()


class _Mlflow:
    """Writes an MLflow run. Options: those of `mlflow.start_run`, `experiment` and `tracking_uri`."""

    def __init__(self, run: TrackedRun) -> None:
        self._mlflow = importlib.import_module("mlflow")
        options = dict(run.options)
        if uri := options.pop("tracking_uri", ""):
            self._mlflow.set_tracking_uri(uri)
        self._mlflow.set_experiment(options.pop("experiment", _PROJECT))
        named = {"run_id": run.known_as} if run.known_as else {"run_name": run.settings["run"]["name"]}
        self.id = self._mlflow.start_run(**{**named, **options}).info.run_id
        sections = {**run.settings, "eval": {"sets": run.settings.get("eval", [])}}  # `eval` is a list of tables
        tables = {} if run.known_as else sections  # parameters of an existing run cannot change
        params = [(f"{section}.{key}", value) for section, table in tables.items() for key, value in table.items()]
        for first in range(0, len(params), _MAX_PARAMS):
            self._mlflow.log_params(dict(params[first : first + _MAX_PARAMS]))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        named = {re.sub(r"[^\w. :/-]", "_", name): value for name, value in metrics.items()}  # others are refused
        self._mlflow.log_metrics(named, step=step)

    def samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        columns, rows = _table_of(samples)
        self._mlflow.log_dict({"columns": columns, "data": rows}, f"samples/step-{step:06}.json")

    def close(self, failed: bool) -> None:
        self._mlflow.end_run("FAILED" if failed else "FINISHED")


class _Experiment:
    """The common part of wandb, trackio and swanlab."""

    def __init__(self, package: str, run: TrackedRun, **given: Any) -> None:
        self._package = importlib.import_module(package)
        given = {"project": _PROJECT, "name": run.settings["run"]["name"], "config": run.settings, **given}
        self._run = self._package.init(**{**given, **run.options})
        self.id = str(self._run.id)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self, _failed: bool) -> None:
        self._run.finish()


class _Wandb(_Experiment):
    """Writes a Weights & Biases run: charts over `step`, and one table to which each version's samples are added."""

    def __init__(self, run: TrackedRun) -> None:
        name = run.known_as or uuid.uuid4().hex
        super().__init__("wandb", run, id=name, resume="allow", dir=str(run.folder / "trackers"))
        self._run.define_metric("*", step_metric="step")  # wandb's own step cannot go back
        self._table: Any = None

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._run.log({"step": step, **metrics})

    def samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        columns, rows = _table_of([{"step": step, **sample} for sample in samples])
        if self._table is None or self._table.columns != columns:
            self._table = self._package.Table(columns, log_mode="INCREMENTAL", allow_mixed_types=True)
        for row in rows:
            self._table.add_data(*row)
        self.log(step, {"samples": self._table})

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class _Trackio(_Experiment):
    """Writes a Trackio run, which is identified by its name; each sample is a trace."""

    def __init__(self, run: TrackedRun) -> None:
        name = run.known_as or f"{run.settings['run']['name']}-{uuid.uuid4().hex[:6]}"
        super().__init__("trackio", run, name=name, resume="allow" if run.known_as else "never", embed=False)
        self.id = self._run.name

    def samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        self.log(step, {"samples": [self._trace(**sample) for sample in samples]})

    def _trace(self, prompt: str, response: str, **metadata: Any) -> Any:
        messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
        return self._package.Trace(messages, metadata=metadata)


class _Swanlab(_Experiment):
    """Writes a SwanLab experiment, with a table of samples for each version."""

    def __init__(self, run: TrackedRun) -> None:
        name = run.known_as or uuid.uuid4().hex
        super().__init__("swanlab", run, id=name, resume="allow", log_dir=str(run.folder / "trackers" / "swanlog"))

    def samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        self.log(step, {"samples": self._package.echarts.Table().add(*_table_of(samples))})

    def close(self, failed: bool) -> None:
        self._run.finish(**({"state": "crashed", "error": "the run failed"} if failed else {}))


TRACKERS: Final = {
    "tensorboard": _TensorBoard,
    "wandb": _Wandb,
    "mlflow": _Mlflow,
    "trackio": _Trackio,
    "swanlab": _Swanlab,
}


def _table_of(samples: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    """Return the columns and rows of a table of samples. Values other than strings and numbers become JSON."""
    columns = list(dict.fromkeys(name for sample in samples for name in sample))
    rows = [[sample.get(name) for name in columns] for sample in samples]
    plain = (str, int, float)
    return columns, [
        [value if isinstance(value, plain) else json.dumps(value, default=str) for value in row] for row in rows
    ]
