"""What a run writes down while it trains: metrics, samples, spans, and the snapshot that a person watches."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from coati.monitor.metrics import Metric, append_jsonl, cut_jsonl, merge_metrics, values_of
from coati.monitor.timeline import Span

logger = logging.getLogger(__name__)

_PACE_STEPS: Final = 20  # the first steps compile and fill caches, and makers may join later
_MAX_ROWS_HELD: Final = 64
_MAX_QUARANTINED: Final = 1000


@dataclass(kw_only=True)
class RunSnapshot:
    """A run at one moment, for the person in front of it. What is not known yet is None."""

    step: int = 0  # training steps done
    total_steps: int  # training steps planned; 0 if there is no plan
    version: int = 0  # version of the policy's weights
    reward: float | None = None  # mean reward of the newest samples
    kl: float | None = None  # KL to the initial model, in nats per sample
    buffer_batches: int | None = None  # batches waiting in the replay buffer
    num_made: int = 0  # samples that makers have made: delivered, and taken in by a trainer
    num_trained: int = 0  # samples that were trained on; the later epochs of a version count as a part of them
    samples_per_second: float | None = None  # made during the last steps
    seconds_per_step: float | None = None  # of the last steps
    elapsed: float = 0.0  # seconds since training began
    startup: float = 0.0  # seconds before that
    message: str = ""  # what the run is doing, if the numbers do not show it
    restarts: Mapping[str, int] = field(default_factory=dict)  # of makers and trainers that died
    evaluation: str = ""  # what the last evaluation found

    @property
    def seconds_left(self) -> float | None:
        """Time to the end at the latest pace; None before the first step, after the last, without a plan."""
        if self.seconds_per_step is None or self.step >= self.total_steps:
            return None
        return self.seconds_per_step * (self.total_steps - self.step)


class RunLog:
    """Takes the records of makers and trainers, writes them to the run's folder, and keeps what the live view shows.

    `metrics.jsonl` has one row per training step. Numbers of a weight version (what makers report of the samples it
    wrote, what the update to the next version took) stand in the row of its last step, which is written when makers
    have moved on to a later version; those of its evaluation in the first row of that version or a later one that is
    written after they came. Without a folder nothing is written.
    """

    def __init__(
        self,
        folder: Path | None,
        *,
        total_steps: int,
        total_samples: int = 0,
        max_spans: int = 0,
        shows_warnings: bool = True,
        clock: Callable[[], float] = time.monotonic,
        on_begin: Callable[[], None] = lambda: None,
    ) -> None:
        self.state = RunSnapshot(total_steps=total_steps)
        """Where the run stands. What the log does not see its owner writes there: message, restarts, buffer, made."""
        self.stop_reason = ""
        """Why an evaluation has ended the run."""
        self._folder = folder
        self._failed: set[str] = set()  # files that could not be written
        self._num_spans_left = max_spans
        self._shows_warnings = shows_warnings
        self._clock = clock
        self._rows: deque[dict[str, float]] = deque()  # one for each training step, not yet written
        self._made: dict[int, dict[str, Metric]] = {}  # what makers report, by version, not yet in a row
        self._maker_version = 0
        self._total_samples = total_samples
        self._last_row = 0  # the last step that has a row
        self._next_sampled_version = 0
        self._evaluated: set[tuple[str, int]] = set()  # sets and versions
        self._news: dict[int, dict[str, float]] = {}  # of evaluations, by version, not yet in a row
        self._quarantined: set[int] = set()  # ids of the samples in quarantine.jsonl
        self._restarted_at: list[int] = []  # versions from which trainers continued
        self._on_begin = on_begin
        self._opened = self._started = self._clock()
        self._note_pace()

    def begin(self) -> None:
        """Training starts now: the pace and samples per second leave out what came before."""
        self._on_begin()
        self._started = self._clock()
        self._note_pace()

    def stand_at(self, step: int, version: int) -> None:
        """So far has the run come before this start: the pace leaves it out."""
        self.state.step, self.state.version = step, version
        self._note_pace()

    def _note_pace(self) -> None:
        """Measure the pace from here on."""
        self._marks = deque([(self._clock(), self.state.step, self.state.num_made)], maxlen=_PACE_STEPS + 1)

    def continue_from(self, step: int, version: int, *, is_restart: bool = False) -> None:
        """Go on after a step: what is known of later ones, here and in the files of the run, is cut off.

        `is_restart`: makers have lived on, and what they made of later versions before is left out when it comes.
        """
        assert self._folder is not None
        if is_restart:
            self._restarted_at.append(version)
        rows = cut_jsonl(self._folder / "metrics.jsonl", lambda row: row["step"] <= step)
        cut_jsonl(self._folder / "samples.jsonl", lambda row: row["version"] < version)
        failed = cut_jsonl(self._folder / "quarantine.jsonl", lambda row: row["version"] < version)
        self._quarantined = {row["sample_id"] for row in failed}
        done = cut_jsonl(self._folder / "evaluations.jsonl", lambda row: row["version"] <= version)
        self._evaluated, self._news = {(row["name"], row["version"]) for row in done}, {}
        for found in done:  # their numbers may be in no row yet, or in one that was cut off
            if all(row.get(f"eval/{found['name']}/version", -1) < found["version"] for row in rows):
                self._note_news(found)
        self._rows = deque(row for row in self._rows if row["step"] <= step)
        self._made = {made_by: made for made_by, made in self._made.items() if made_by < version}
        self._last_row = int([{"step": 0}, *rows, *self._rows][-1]["step"])
        self._maker_version = self._next_sampled_version = version
        self._show(next((row for row in reversed(rows) if "reward/mean" in row), {}))
        self.stand_at(step, version)

    def take(self, actor: str, records: Iterable[Mapping[str, Any]], spans: Sequence[Span] = ()) -> None:
        """Take what an actor has recorded, of whatever kind, and what it did when."""
        for record in records:
            if "warning" in record:
                if self._shows_warnings:
                    logger.warning("%s: %s", actor, record["warning"], extra={"kind": record["kind"]})
            elif "quarantined" in record:
                self._quarantine({"version": record["version"], **record["quarantined"]})
            elif "evaluation" in record:
                self._take_evaluation(record["evaluation"])
            elif "batch" in record:
                self._take_step(int(record["batch"]), int(record["version"]), _numbers(record["metrics"]))
            else:
                self._take_made(int(record["version"]), record)
        self._write_rows()
        self._write_spans(actor, spans)

    def _take_made(self, version: int, record: Mapping[str, Any]) -> None:
        """Take a maker's typed metrics of a batch, and a few samples of it."""
        if any(start <= version for start in self._restarted_at[record.get("incarnation", 0) :]):
            return  # trainers continued from before it, and it is made again
        if version > self._maker_version:
            self._complete_version()
            self._maker_version = version
        # A late record of an older version counts with the current one, if the row of its own is written.
        made_by = version if version in self._made else self._maker_version
        merge_metrics(self._made.setdefault(made_by, {}), record["metrics"])
        if record["samples"] and version >= self._next_sampled_version:
            self._next_sampled_version = version + 1
            self._append("samples", [{"version": version, **sample} for sample in record["samples"]])

    def _take_step(self, step: int, version: int, metrics: dict[str, float]) -> None:
        """Take a trainer's numbers of a step, or of a weight update under its last step."""
        now = self.state
        now.step, now.version = max(now.step, step), max(now.version, version)
        if step > self._last_row:
            if now.buffer_batches is not None:
                metrics["buffer/batches"] = float(now.buffer_batches)
            metrics |= {f"restarts/{kind}": float(number) for kind, number in now.restarts.items()}
            self._rows.append({"step": step, "version": version, "time": time.time(), **metrics})
            self._last_row = step
        elif self._rows:  # of an update; one that took so long that its row is written goes to the next
            next((row for row in self._rows if row["step"] == step), self._rows[0]).update(metrics)

    def _write_spans(self, actor: str, spans: Sequence[Span]) -> None:
        """Write down what an actor did when, one span a line, as long as there is room."""
        if not spans or self._num_spans_left == 0:
            return
        kept = spans[: self._num_spans_left]
        self._append("spans", [{"actor": actor, **span._asdict()} for span in kept])
        self._num_spans_left -= len(kept)
        if self._num_spans_left == 0:
            logger.warning("spans.jsonl is full; training continues without it. Raise logging.spans_kept.")

    def flush(self) -> None:
        """Write everything that was reported so far."""
        self._complete_version()
        self._write_rows(is_end=True)

    def close(self) -> None:
        """Write all that is left; what evaluations found of the final model has a row of its own."""
        self.flush()
        if self._news:
            version = max(self.state.version, *self._news)
            self._write_row({"step": self.state.step, "version": version, "time": time.time()})

    def snapshot(self) -> RunSnapshot:
        """Return where the run stands."""
        clock, now = self._clock(), self.state
        if now.num_made < self._marks[-1][2]:  # trainers were started again from a checkpoint
            self._note_pace()
        if now.step > self._marks[-1][1]:
            self._marks.append((clock, now.step, now.num_made))
        (first, first_step, first_made), (last, last_step, _) = self._marks[0], self._marks[-1]
        return replace(
            now,
            num_trained=now.step * self._total_samples // max(1, now.total_steps),
            samples_per_second=(now.num_made - first_made) / (clock - first) if clock > first else None,
            seconds_per_step=(last - first) / (last_step - first_step) if last_step > first_step else None,
            elapsed=clock - self._started,
            startup=self._started - self._opened,
            restarts=dict(now.restarts),
        )

    def _complete_version(self) -> None:
        """Show the numbers of the version that makers wrote last."""
        if made := self._made.get(self._maker_version):
            self._show(values_of(made))

    def _show(self, made: Mapping[str, float]) -> None:
        self.state.reward, self.state.kl = made.get("reward/mean"), made.get("kl/per_sample")

    def _write_rows(self, *, is_end: bool = False) -> None:
        """Write the rows that are complete, in order."""
        while self._rows:
            version = self._rows[0]["version"]
            is_last_of_version = len(self._rows) == 1 or self._rows[1]["version"] != version
            if is_last_of_version:
                has_ended = len(self._rows) > 1 and self._maker_version > version
                if not (has_ended or is_end or len(self._rows) > _MAX_ROWS_HELD):
                    return
                made: dict[str, Metric] = {}
                for made_by in sorted(by for by in self._made if by <= version):
                    merge_metrics(made, self._made.pop(made_by))
                for name, value in values_of(made).items():
                    self._rows[0].setdefault(name, value)
            self._write_row(self._rows.popleft())

    def _write_row(self, row: dict[str, float]) -> None:
        for version in [version for version in self._news if version <= row["version"]]:
            row |= self._news.pop(version)
        self._append("metrics", [row])

    def _take_evaluation(self, found: Mapping[str, Any]) -> None:
        """Write down what an evaluation found, once: a checkpoint holds the last records too."""
        key = found["name"], found["version"]
        if key in self._evaluated:
            return
        self._evaluated.add(key)
        values = [f"{name} {value:.3f}" for name, value in found.items() if name.startswith("avg@")]
        said = values[0] if values else "without scores"
        self.state.evaluation = f"{found['name']} {said} (version {found['version']})"
        self.stop_reason = found.get("stop", self.stop_reason)
        self._append("evaluations", [{"step": self.state.step, "time": time.time(), **found}])
        self._note_news(found)

    def _note_news(self, found: Mapping[str, Any]) -> None:
        numbers = {f"eval/{found['name']}/{name}": found[name] for name in found.keys() - {"step", "time"}}
        self._news.setdefault(found["version"], {}).update(_numbers(numbers))

    def _quarantine(self, sample: Mapping[str, Any]) -> None:
        """Write a sample down, once: a group that is granted again has the same samples."""
        if sample["sample_id"] not in self._quarantined and len(self._quarantined) < _MAX_QUARANTINED:
            self._quarantined.add(sample["sample_id"])
            self._append("quarantine", [sample])

    def _append(self, name: str, records: Iterable[Mapping[str, Any]]) -> None:
        """Write to a file. Losing a log must not lose a run: a file that fails is left alone from then on."""
        if self._folder is None or name in self._failed:
            return
        try:
            append_jsonl(path := self._folder / f"{name}.jsonl", records)
        except Exception as error:
            self._failed.add(name)
            logger.warning("%s failed; training continues without it. %s: %s", path, type(error).__name__, error)


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return what has a name of the form area/name and is a number."""
    numbers = {}
    for name, value in metrics.items():
        with contextlib.suppress(TypeError, ValueError):
            if "/" in name:
                numbers[name] = float(value)
    return numbers
