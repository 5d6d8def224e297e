"""What a run writes down while it trains: metrics, samples, spans, and the snapshot that a person watches."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from coati.monitor.metrics import JsonlFile, Metric, MetricBag, Tracker
from coati.monitor.progress import RunSnapshot
from coati.monitor.records import without_numbers
from coati.monitor.timeline import LEAVE, WORK, Span

logger = logging.getLogger(__name__)

_PACE_SECONDS: Final = 60.0
_MAX_ROWS_HELD: Final = 64


@dataclasses.dataclass
class _Row:
    """One training step: what is known of it so far."""

    step: int
    version: int
    time: float
    metrics: dict[str, float]


class RunLog:
    """Takes the records of makers and trainers, writes them to the run's folder, and keeps what the live view shows.

    `metrics.jsonl` has one row per training step. Numbers of a weight version (what makers report of the samples it
    wrote, what the update to the next version took) stand in the row of its last step, which is written when makers
    have moved on to a later version. `samples.jsonl` has samples as text, `spans.jsonl` at most `max_spans` spans.
    Without a folder nothing is written.
    """

    def __init__(
        self,
        folder: Path | None,
        *,
        total_steps: int,
        trackers: Sequence[Tracker] = (),
        samples_every_versions: int = 1,
        max_spans: int = 0,
        clock: Callable[[], float] = time.monotonic,
        on_begin: Callable[[], None] = lambda: None,
    ) -> None:
        names = ("metrics", "samples", "spans") if folder is not None else ()
        self._files = {name: JsonlFile((folder or Path()) / f"{name}.jsonl") for name in names}
        self._trackers = list(trackers)
        self._samples_every = samples_every_versions
        self._num_spans_left = max_spans
        self._clock = clock
        self._rows: deque[_Row] = deque()  # not yet written
        self._bags: dict[int, MetricBag] = {}  # what makers report, by version, not yet in a row
        self._maker_version = 0
        self._total_steps = total_steps
        self._step = 0
        self._num_samples = 0
        self._next_sampled_version = 0
        self._warnings: set[str] = set()
        self.rewards: list[tuple[float, float]] = []  # (version, mean reward)
        self.kls: list[tuple[float, float]] = []  # (version, KL per sample)
        self.num_dropped = 0
        self.num_skipped_prompts = 0
        self.trainer_version = 0
        self.buffer_batches: int | None = None
        self.message = ""
        self._on_begin = on_begin
        self._opened = self._started = self._clock()
        self._pace = _Pace(self._started)

    def begin(self) -> None:
        """Training starts now: the pace and samples per second leave out what came before."""
        self._started = self._clock()
        self._pace = _Pace(self._started, self._step, self._num_samples)
        self._on_begin()

    def maker_records(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Take a maker's records: typed metrics, and a few samples."""
        for record in records:
            if "warning" in record:
                continue
            version = int(record["version"])
            if version > self._maker_version:
                self._complete_version()
                self._maker_version = version
            # A late record of an older version counts with the current one.
            bag = self._bags.setdefault(self._maker_version, MetricBag())
            metrics: Mapping[str, Metric] = record["metrics"]
            for name, metric in metrics.items():
                bag.record(name, metric)
            self._num_samples += int(metrics["maker/samples"].value)
            self._keep_samples(version, record["samples"])
        self._write_rows()

    def trainer_records(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Take a trainer's records: the numbers of each step, and those of each weight update under its last step."""
        for record in records:
            if "warning" in record:
                continue
            step, version = int(record["batch"]), int(record["version"])
            self.trainer_version = max(self.trainer_version, version)
            metrics = _numbers(record["metrics"])
            if step > self._step:
                if self.buffer_batches is not None:
                    metrics["buffer/batches"] = float(self.buffer_batches)
                self._rows.append(_Row(step, version, time.time(), metrics))
                self._step = step
            elif self._rows:  # of an update; one that took so long that its row is written goes to the next
                row = next((row for row in self._rows if row.step == step), self._rows[0])
                row.metrics.update(metrics)
        self._write_rows()

    def warnings(self, actor: str, records: Iterable[Mapping[str, Any]]) -> None:
        """Show each distinct warning among an actor's records once."""
        for record in records:
            if (text := record.get("warning")) and (key := without_numbers(text)) not in self._warnings:
                self._warnings.add(key)
                logger.warning("%s: %s", actor, text)

    def spans(self, actor: str, spans: Sequence[Span]) -> None:
        """Write down what an actor did when, one span a line, as long as there is room."""
        if not spans or self._num_spans_left == 0:
            return
        kept = spans[: self._num_spans_left]
        self._append("spans", [{"actor": actor, **span._asdict()} for span in kept])
        self._num_spans_left -= len(kept)
        if self._num_spans_left == 0:
            logger.warning("spans.jsonl is full; training continues without it. Raise logging.spans_kept.")

    def left(self, actor: str) -> None:
        """Write down that an actor has left: from now on it is not idle, but gone."""
        now = time.time()
        self.spans(actor, [Span(WORK, LEAVE, now, now, self.trainer_version)])

    def flush(self) -> None:
        """Write everything that was reported so far."""
        self._complete_version()
        self._write_rows(is_end=True)

    def close(self) -> None:
        """Write the rest and close the trackers."""
        self.flush()
        self._track("close")

    def snapshot(self) -> RunSnapshot:
        """Return where the run stands."""
        now = self._clock()
        samples_per_second, seconds_per_step = self._pace.note(now, self._step, self._num_samples)
        return RunSnapshot(
            step=self._step,
            total_steps=self._total_steps,
            version=self.trainer_version,
            reward=self.rewards[-1][1] if self.rewards else None,
            kl=self.kls[-1][1] if self.kls else None,
            buffer_batches=self.buffer_batches,
            samples_per_second=samples_per_second,
            seconds_per_step=seconds_per_step,
            elapsed=now - self._started,
            startup=self._started - self._opened,
            message=self.message,
            reward_history=tuple(reward for _, reward in self.rewards),
        )

    @property
    def num_samples(self) -> int:
        """Samples made so far."""
        return self._num_samples

    def _complete_version(self) -> None:
        """Note the numbers of the version that makers wrote last, for the live view."""
        bag = self._bags.get(self._maker_version)
        if bag is None or (self.rewards and self.rewards[-1][0] == self._maker_version):
            return
        values = bag.values()
        self.rewards.append((float(self._maker_version), values["reward/mean"]))
        self.kls.append((float(self._maker_version), values["kl/per_sample"]))
        self.num_dropped += int(values.get("maker/dropped", 0.0))
        self.num_skipped_prompts += int(values.get("maker/skipped_prompts", 0.0))

    def _write_rows(self, *, is_end: bool = False) -> None:
        """Write the rows that are complete, in order."""
        while self._rows:
            row = self._rows[0]
            if len(self._rows) > 1 and self._rows[1].version == row.version:
                self._write(self._rows.popleft())
                continue
            has_ended = len(self._rows) > 1 and self._maker_version > row.version
            if not (has_ended or is_end or len(self._rows) > _MAX_ROWS_HELD):
                return
            made = MetricBag()
            for version in sorted(version for version in self._bags if version <= row.version):
                made.merge(self._bags.pop(version))
            row.metrics = {**made.values(), **row.metrics}
            self._write(self._rows.popleft())

    def _write(self, row: _Row) -> None:
        self._append("metrics", [{"step": row.step, "version": row.version, "time": row.time, **row.metrics}])
        self._track("log", row.step, {"version": row.version, **row.metrics})

    def _keep_samples(self, version: int, samples: list[dict[str, Any]]) -> None:
        if not samples or self._samples_every <= 0 or version < self._next_sampled_version:
            return
        self._next_sampled_version = version - version % self._samples_every + self._samples_every
        self._append("samples", [{"version": version, **sample} for sample in samples])
        first = samples[0]
        text = f"{first['prompt']} **{first['response']}** (reward {first['reward']:.3f})"
        self._track("text", self._step, "samples/first", text)

    def _append(self, file: str, records: Iterable[Mapping[str, Any]]) -> None:
        if file in self._files:
            self._files[file].append(records)

    def _track(self, method: str, *args: Any) -> None:
        """Hand something to every tracker. Losing a log must not lose a run: one that fails is dropped."""
        for tracker in tuple(self._trackers):
            try:
                getattr(tracker, method)(*args)
            except Exception as error:
                self._trackers.remove(tracker)
                name = type(tracker).__name__
                logger.warning(
                    "%s.%s failed; training continues without it. %s: %s", name, method, type(error).__name__, error
                )


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return what has a name of the form area/name and is a number."""
    numbers = {}
    for name, value in metrics.items():
        with contextlib.suppress(TypeError, ValueError):
            if "/" in name:
                numbers[name] = float(value)
    return numbers


class _Pace:
    """The pace of the last minute: the first steps compile and fill caches, and makers may join later."""

    def __init__(self, now: float, step: int = 0, num_samples: int = 0) -> None:
        self._marks = deque([(now, step, num_samples)])

    def note(self, now: float, step: int, num_samples: int) -> tuple[float | None, float | None]:
        """Remember where the run stands; return samples per second, and seconds per step if a step was done."""
        self._marks.append((now, step, num_samples))
        while len(self._marks) > 2 and self._marks[1][0] <= now - _PACE_SECONDS:
            self._marks.popleft()
        seconds, steps, samples = (last - first for first, last in zip(self._marks[0], self._marks[-1], strict=True))
        return samples / seconds if seconds > 0 else None, seconds / steps if steps else None
