"""The log of a run: metrics, samples and spans in its folder, and the snapshot that the live view shows."""

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
_EQUAL_STEPS: Final = 5  # after so many steps without any difference in reward, there is a warning
_MAX_QUARANTINED: Final = 1000


@dataclass(kw_only=True)
class RunSnapshot:
    """The state of a run at one moment. Values that are not known yet are None."""

    step: int = 0  # training steps done
    total_steps: int  # training steps planned; 0 if unknown
    version: int = 0  # version of the policy's weights
    reward: float | None = None  # mean reward of the last step's samples
    kl: float | None = None  # their KL to the initial model, in nats per sample
    buffer_batches: int | None = None  # batches waiting in the replay buffer
    num_made: int = 0  # samples that makers delivered and a trainer accepted
    num_trained: int = 0  # samples trained on; with several epochs, each epoch counts a fraction of a sample
    samples_per_second: float | None = None  # made, over the last steps
    seconds_per_step: float | None = None  # over the last steps
    elapsed: float = 0.0  # seconds since training began
    startup: float = 0.0  # seconds before that
    message: str = ""  # current activity, if the numbers do not show it
    restarts: Mapping[str, int] = field(default_factory=dict)  # number of restarts of "makers" and of "trainers"
    evaluation: str = ""  # result of the last evaluation

    @property
    def seconds_left(self) -> float | None:
        """Estimated time to the end. None before the first step, after the last, and if `total_steps` is unknown."""
        if self.seconds_per_step is None or self.step >= self.total_steps:
            return None
        return self.seconds_per_step * (self.total_steps - self.step)


class RunLog:
    """Writes the records of makers and trainers to the run's folder, and keeps the state that the live view shows.

    `metrics.jsonl` has one row per training step. Metrics of a weight version (from the makers that sampled with it,
    and of the update to the next version) are in the row of its last step, which is written when makers have moved on
    to a later version. Metrics of an evaluation are in the first row of its version or a later one that is written
    after the evaluation. Without a folder, nothing is written.
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
        """The current state. The log's owner sets `message`, `restarts`, `buffer_batches` and `num_made`."""
        self.stop_reason = ""  # why an evaluation ended the run; empty if none did
        self._folder = folder
        self._failed: set[str] = set()  # files that could not be written
        self._num_spans_left = max_spans
        self._shows_warnings = shows_warnings
        self._clock = clock
        self._rows: deque[dict[str, float]] = deque()  # one per training step, not written yet
        self._made: dict[int, dict[str, Metric]] = {}  # metrics of makers by version, not in a row yet
        self._maker_version = 0
        self._total_samples = total_samples
        self._last_row = 0  # the last step that has a row
        self._next_sampled_version = 0
        self._evaluated: set[tuple[str, int]] = set()  # (set, version)
        self._evaluations: dict[int, dict[str, float]] = {}  # metrics of evaluations by version, not in a row yet
        self._quarantined: set[int] = set()  # ids of the samples in quarantine.jsonl
        self._num_equal = 0  # steps in a row whose samples all had the same reward
        self._restarted_at: list[int] = []  # the version that each restart of the trainers continued from
        self._on_begin = on_begin
        self._opened = self._started = self._clock()
        self._reset_pace()

    def begin(self) -> None:
        """Start the clock of training: pace and samples per second exclude what came before."""
        self._on_begin()
        self._started = self._clock()
        self._reset_pace()

    def set_position(self, step: int, version: int) -> None:
        """Set the step and version from which the run continues; the pace excludes them."""
        self.state.step, self.state.version = step, version
        self._reset_pace()

    def _reset_pace(self) -> None:
        self._marks = deque([(self._clock(), self.state.step, self.state.num_made)], maxlen=_PACE_STEPS + 1)

    def continue_from(self, step: int, version: int, *, is_restart: bool = False) -> None:
        """Continue after `step`: drop the records of later steps, here and in the run's files.

        With `is_restart`, makers have kept running: what they report of the dropped versions is ignored.
        """
        assert self._folder is not None
        if is_restart:
            self._restarted_at.append(version)
        rows = cut_jsonl(self._folder / "metrics.jsonl", lambda row: row["step"] <= step)
        cut_jsonl(self._folder / "samples.jsonl", lambda row: row["version"] < version)
        failed = cut_jsonl(self._folder / "quarantine.jsonl", lambda row: row["version"] < version)
        self._quarantined = {row["sample_id"] for row in failed}
        done = cut_jsonl(self._folder / "evaluations.jsonl", lambda row: row["version"] <= version)
        self._evaluated, self._evaluations = {(row["name"], row["version"]) for row in done}, {}
        for found in done:  # their metrics may be in no row yet, or in one that was dropped
            if all(row.get(f"eval/{found['name']}/version", -1) < found["version"] for row in rows):
                self._add_evaluation_metrics(found)
        self._rows = deque(row for row in self._rows if row["step"] <= step)
        self._made = {made_by: made for made_by, made in self._made.items() if made_by < version}
        self._last_row = int([{"step": 0}, *rows, *self._rows][-1]["step"])
        self._maker_version = self._next_sampled_version = version
        self._show(next((row for row in reversed(rows) if "reward/mean" in row), {}))
        self.set_position(step, version)

    def add_report(self, actor: str, records: Iterable[Mapping[str, Any]], spans: Sequence[Span] = ()) -> None:
        """Process the records and spans of an actor."""
        for record in records:
            if "warning" in record:
                if self._shows_warnings:
                    logger.warning("%s: %s", actor, record["warning"], extra={"kind": record["kind"]})
            elif "quarantined" in record:
                sample = {"version": record["version"], **record["quarantined"]}
                # Once: a group that is leased again has the same samples.
                if sample["sample_id"] not in self._quarantined and len(self._quarantined) < _MAX_QUARANTINED:
                    self._quarantined.add(sample["sample_id"])
                    self._append("quarantine", [sample])
            elif "evaluation" in record:
                self._add_evaluation(record["evaluation"])
            elif "batch" in record:
                self._add_step(int(record["batch"]), int(record["version"]), _numbers(record["metrics"]))
            else:
                self._add_maker_metrics(int(record["version"]), record)
        self._write_rows()
        self._write_spans(actor, spans)

    def _add_maker_metrics(self, version: int, record: Mapping[str, Any]) -> None:
        if any(start <= version for start in self._restarted_at[record.get("incarnation", 0) :]):
            return  # trainers restarted from before this version, so it is sampled again
        self._maker_version = max(self._maker_version, version)
        # A late record counts for the current version if the row of its own is already written.
        made_by = version if version in self._made else self._maker_version
        merge_metrics(self._made.setdefault(made_by, {}), record["metrics"])
        if record["samples"] and version >= self._next_sampled_version:
            self._next_sampled_version = version + 1
            self._append("samples", [{"version": version, **sample} for sample in record["samples"]])

    def _add_step(self, step: int, version: int, metrics: dict[str, float]) -> None:
        """Add a trainer's metrics of a step, or of the weight update that follows it."""
        now = self.state
        now.step, now.version = max(now.step, step), max(now.version, version)
        if step > self._last_row:
            if now.buffer_batches is not None:
                metrics["buffer/batches"] = float(now.buffer_batches)
            metrics |= {f"restarts/{kind}": float(number) for kind, number in now.restarts.items()}
            self._rows.append({"step": step, "version": version, "time": time.time(), **metrics})
            self._show(metrics)
            self._last_row = step
            self._num_equal = self._num_equal + 1 if metrics.get("reward/std") == 0.0 else 0
            if self._num_equal == _EQUAL_STEPS:
                logger.warning(
                    "all samples of %d steps in a row had the same reward (%g), so there was nothing to learn from "
                    "them. Test the reward with `coati reward check`, and read samples.jsonl.",
                    _EQUAL_STEPS,
                    metrics["reward/mean"],
                )
        elif (row := next((row for row in self._rows if row["step"] == step), None)) is not None:
            row.update(metrics)  # of a weight update
        elif self._rows:  # the row of its step is already written, so they go into the next, unless that has its own
            self._rows[0] = metrics | self._rows[0]

    def _write_spans(self, actor: str, spans: Sequence[Span]) -> None:
        if not spans or self._num_spans_left == 0:
            return
        kept = spans[: self._num_spans_left]
        self._append("spans", [{"actor": actor, **span._asdict()} for span in kept])
        self._num_spans_left -= len(kept)
        if self._num_spans_left == 0:
            logger.warning("spans.jsonl is full; no more spans are written. Raise logging.spans_kept to keep more.")

    def flush(self) -> None:
        """Write everything reported so far."""
        self._write_rows(is_end=True)

    def close(self) -> None:
        """Write all that is left. Metrics of the final model's evaluation have a row of their own."""
        self.flush()
        if self._evaluations:
            version = max(self.state.version, *self._evaluations)
            self._write_row({"step": self.state.step, "version": version, "time": time.time()})

    def snapshot(self) -> RunSnapshot:
        """Return the current state of the run."""
        clock, now = self._clock(), self.state
        if now.num_made < self._marks[-1][2]:  # trainers restarted from a checkpoint
            self._reset_pace()
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

    def _show(self, row: Mapping[str, float]) -> None:
        if "reward/mean" in row:
            self.state.reward, self.state.kl = row["reward/mean"], row.get("kl/per_sample")

    def _write_rows(self, *, is_end: bool = False) -> None:
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
        for version in [version for version in self._evaluations if version <= row["version"]]:
            row |= self._evaluations.pop(version)
        self._append("metrics", [row])

    def _add_evaluation(self, found: Mapping[str, Any]) -> None:
        """Write the result of an evaluation, once: a trainer restored from a checkpoint reports its last ones again."""
        key = found["name"], found["version"]
        if key in self._evaluated:
            return
        self._evaluated.add(key)
        values = [f"{name} {value:.3f}" for name, value in found.items() if name.startswith("avg@")]
        result = values[0] if values else "without scores"
        self.state.evaluation = f"{found['name']} {result} (version {found['version']})"
        self.stop_reason = found.get("stop", self.stop_reason)
        self._append("evaluations", [{"step": self.state.step, "time": time.time(), **found}])
        self._add_evaluation_metrics(found)

    def _add_evaluation_metrics(self, found: Mapping[str, Any]) -> None:
        numbers = {f"eval/{found['name']}/{name}": found[name] for name in found.keys() - {"step", "time"}}
        self._evaluations.setdefault(found["version"], {}).update(_numbers(numbers))

    def _append(self, name: str, records: Iterable[Mapping[str, Any]]) -> None:
        """Append to a file. Losing a log must not end a run: after an error, the file is not written any more."""
        if self._folder is None or name in self._failed:
            return
        try:
            append_jsonl(path := self._folder / f"{name}.jsonl", records)
        except Exception as error:
            self._failed.add(name)
            logger.warning(
                "%s cannot be written; training continues without it. %s: %s", path, type(error).__name__, error
            )


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the entries whose names have the form area/name and whose values are numbers."""
    numbers = {}
    for name, value in metrics.items():
        with contextlib.suppress(TypeError, ValueError):
            if "/" in name:
                numbers[name] = float(value)
    return numbers
