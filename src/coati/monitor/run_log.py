"""What a run writes down while it runs: metrics, samples, and the snapshot that a person watches."""

import json
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from coati.monitor.metrics import Metric, MetricBag
from coati.monitor.progress import RunSnapshot
from coati.monitor.timeline import LEAVE, WORK, Span
from coati.monitor.trackers import Tracker

logger = logging.getLogger(__name__)

_PACE_SECONDS: Final = 60.0


class RunLog:
    """Takes the records of makers and trainers, hands them to trackers, and keeps what the live view shows.

    A maker's records are gathered by version and logged when the next version begins; a trainer's are logged
    one by one. `step` counts the trainer's batches; a maker's numbers stand at the step where their version began.
    """

    def __init__(
        self,
        tracker: Tracker,
        *,
        samples_path: Path,
        total_steps: int,
        samples_every_versions: int = 1,
        steps_per_version: int = 1,
        spans_path: Path | None = None,
        max_spans: int = 0,
        clock: Callable[[], float] = time.monotonic,
        on_begin: Callable[[], None] = lambda: None,
    ) -> None:
        self._tracker = tracker
        self._samples_path = samples_path
        self._samples_every = samples_every_versions
        self._steps_per_version = steps_per_version
        self._spans_path = spans_path
        self._num_spans_left = max_spans
        self._clock = clock
        self._bag = MetricBag()
        self._bag_version = 0
        self._total_steps = total_steps
        self._step = 0
        self._num_samples = 0
        self._next_sampled_version = 0
        self.rewards: list[tuple[float, float]] = []  # (version, mean reward)
        self.kls: list[tuple[float, float]] = []  # (version, KL per sample)
        self.num_dropped = 0
        self.num_skipped_prompts = 0
        self.trainer_version = 0
        self.buffer_batches = 0
        self.message = ""
        self._on_begin = on_begin
        self._unwritable: set[Path] = set()
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
            version = int(record["version"])
            if version > self._bag_version:
                self.flush()
                self._bag_version = version
            metrics: Mapping[str, Metric] = record["metrics"]
            for name, metric in metrics.items():
                self._bag.record(name, metric)
            self._num_samples += int(metrics["maker/samples"].value)
            self._keep_samples(version, record["samples"])

    def trainer_records(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Take a trainer's records: plain numbers for each batch."""
        for record in records:
            self._step = max(self._step, int(record["batch"]))
            self.trainer_version = max(self.trainer_version, int(record["version"]))
            metrics = {name: value for name, value in record["metrics"].items() if "/" in name}
            self._tracker.log(int(record["batch"]), metrics)

    def spans(self, actor: str, spans: Sequence[Span]) -> None:
        """Write down what an actor did when, one span a line, as long as there is room."""
        if self._spans_path is None or not spans or self._num_spans_left == 0:
            return
        kept = spans[: self._num_spans_left]
        self._append(self._spans_path, [{"actor": actor, **span._asdict()} for span in kept])
        self._num_spans_left -= len(kept)
        if self._num_spans_left == 0:
            logger.warning("%s is full; the run goes on without. Raise logging.spans_kept.", self._spans_path.name)

    def left(self, actor: str) -> None:
        """Write down that an actor has left: from now on it is not idle, but not there."""
        now = time.time()
        self.spans(actor, [Span(WORK, LEAVE, now, now, self.trainer_version)])

    def flush(self) -> None:
        """Log what the makers of the current version have reported."""
        values = self._bag.flush()
        if not values:
            return
        self.rewards.append((float(self._bag_version), values["reward/mean"]))
        self.kls.append((float(self._bag_version), values["kl/per_sample"]))
        self.num_dropped += int(values.get("maker/dropped", 0.0))
        self.num_skipped_prompts += int(values.get("maker/skipped_prompts", 0.0))
        extra = {"maker/version": float(self._bag_version), "buffer/batches": float(self.buffer_batches)}
        self._tracker.log(self._bag_version * self._steps_per_version, values | extra)

    def snapshot(self) -> RunSnapshot:
        """Where the run stands."""
        now = self._clock()
        self._pace.note(now, self._step, self._num_samples)
        return RunSnapshot(
            step=self._step,
            total_steps=self._total_steps,
            version=self.trainer_version,
            reward=self.rewards[-1][1] if self.rewards else None,
            kl=self.kls[-1][1] if self.kls else None,
            buffer_batches=self.buffer_batches,
            samples_per_second=self._pace.samples_per_second,
            seconds_per_step=self._pace.seconds_per_step,
            elapsed=now - self._started,
            startup=self._started - self._opened,
            message=self.message,
            reward_history=tuple(reward for _, reward in self.rewards),
        )

    @property
    def num_samples(self) -> int:
        """Samples made so far."""
        return self._num_samples

    def close(self) -> None:
        """Log the rest and close the trackers."""
        self.flush()
        self._tracker.close()

    def _keep_samples(self, version: int, samples: list[dict[str, Any]]) -> None:
        if not samples or self._samples_every <= 0 or version < self._next_sampled_version:
            return
        self._next_sampled_version = version - version % self._samples_every + self._samples_every
        self._append(self._samples_path, [{"version": version, **sample} for sample in samples])
        first = samples[0]
        text = f"{first['prompt']} **{first['response']}** (reward {first['reward']:.3f})"
        self._tracker.text(self._step, "samples/first", text)

    def _append(self, path: Path, records: Iterable[Mapping[str, Any]]) -> None:
        """Add a line for each record. Losing a log must not lose a run: a file that fails is said once, and let be."""
        if path in self._unwritable:
            return
        lines = (json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        try:
            # A lone surrogate cannot be UTF-8; backslashreplace writes it as JSON spells it.
            with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.writelines(lines)
        except OSError as error:
            self._unwritable.add(path)
            logger.warning("%s cannot be written, so the run goes on without it: %s", path, error)


class _Pace:
    """How quickly a run goes of late: its first steps compile and fill caches, and makers may have joined since."""

    def __init__(self, now: float, step: int = 0, num_samples: int = 0) -> None:
        self._marks = deque([_Mark(now, step, num_samples)])

    def note(self, now: float, step: int, num_samples: int) -> None:
        """Where the run stands now. What came before the last minute is forgotten, but for the mark that begins it."""
        self._marks.append(_Mark(now, step, num_samples))
        while len(self._marks) > 2 and self._marks[1].seconds <= now - _PACE_SECONDS:
            self._marks.popleft()

    @property
    def samples_per_second(self) -> float | None:
        first, last = self._marks[0], self._marks[-1]
        seconds = last.seconds - first.seconds
        return (last.num_samples - first.num_samples) / seconds if seconds > 0 else None

    @property
    def seconds_per_step(self) -> float | None:
        """None while no step was done."""
        first, last = self._marks[0], self._marks[-1]
        return (last.seconds - first.seconds) / (last.step - first.step) if last.step > first.step else None


class _Mark(NamedTuple):
    seconds: float
    step: int
    num_samples: int
