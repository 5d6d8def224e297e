"""Where metrics go: JSON lines, TensorBoard, or both.

A tracker takes finished numbers (`MetricBag.flush()`) with the step they belong to. Losing a log must not
lose a run, so a `TrackerGroup` drops a tracker that fails, says so once, and goes on with the others.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from coati.errors import CoatiError, ConfigError, DataError

logger = logging.getLogger(__name__)

_OWN_KEYS: Final = frozenset({"step", "time", "tag", "text"})


class Tracker(Protocol):
    """What a run needs of a place to write metrics to."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of one step."""

    def text(self, step: int, tag: str, text: str) -> None:
        """Write a piece of text, such as a sample, under a tag."""

    def close(self) -> None:
        """Write out what is left and let go of the files. Closing twice does no harm."""


class JsonlTracker:
    """One JSON object a line, on disk as soon as the call returns.

    A line of metrics is flat, `{"step": 3, "time": 1730000000.0, "reward/mean": 0.5}`, so that
    `pandas.read_json(path, lines=True)` gives a table; a line of text has `tag` and `text` instead. JSON
    knows no NaN or infinity: both are written as null. An existing file is continued; if its last line was
    torn by a crash, that line is cut off first.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        _repair_tail(self.path)
        # Unbuffered: a failed write is raised here and now, and close() has nothing left that could fail.
        self._file = self.path.open("ab", buffering=0)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one line with the metrics of a step."""
        clash = sorted(_OWN_KEYS & metrics.keys())
        if clash:
            raise ConfigError(
                f"A metric must not be called {clash[0]!r}: every line has a key of that name. "
                f"Name it area/name, for example 'train/{clash[0]}'."
            )
        numbers = {name: _finite_or_none(value) for name, value in metrics.items()}
        self._append({"step": step, "time": time.time(), **numbers})

    def text(self, step: int, tag: str, text: str) -> None:
        """Append one line with a piece of text."""
        self._append({"step": step, "time": time.time(), "tag": tag, "text": text})

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _append(self, record: Mapping[str, Any]) -> None:
        # A lone surrogate (text cut inside a byte pair) cannot be UTF-8; backslashreplace writes \udcxx,
        # which is how JSON spells it anyway.
        line = json.dumps(record, ensure_ascii=False, allow_nan=False).encode("utf-8", "backslashreplace") + b"\n"
        start = os.fstat(self._file.fileno()).st_size
        try:
            written = 0
            while written < len(line):
                written += self._file.write(line[written:]) or 0
        except OSError:
            # Take back the half line, so that the file stays readable for whoever frees the disk.
            with contextlib.suppress(OSError):
                self._file.truncate(start)
            raise


class TensorBoardTracker:
    """Scalars and texts as TensorBoard event files in a folder.

    Needs the `tensorboard` extra. Lines reach the disk within `flush_seconds`.
    """

    def __init__(self, folder: str | Path, *, flush_seconds: int = 10) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                f"The TensorBoard tracker needs the tensorboard package, which cannot be imported ({error}). "
                f"Run: pip install 'coati[tensorboard]', or leave TensorBoard out of the trackers."
            ) from error
        self._writer: Any = SummaryWriter(log_dir=str(folder), flush_secs=flush_seconds)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one scalar per metric."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, float(value), global_step=step)

    def text(self, step: int, tag: str, text: str) -> None:
        """Write a text, shown on TensorBoard's Text page."""
        self._writer.add_text(tag, text, global_step=step)

    def close(self) -> None:
        """Flush the event file and close it."""
        self._writer.close()


class TrackerGroup:
    """Several trackers as one. A tracker that fails is reported once, dropped, and the run goes on.

    Errors of the caller (a `CoatiError`, such as a metric with a forbidden name) are not failures of a
    tracker and are raised.

    >>> group = TrackerGroup([])
    >>> group.log(0, {"reward/mean": 0.5})
    >>> group.close()
    """

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = list(trackers)

    @property
    def trackers(self) -> tuple[Tracker, ...]:
        """Those that still work."""
        return tuple(self._trackers)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of one step to every tracker."""
        self._each("log", lambda tracker: tracker.log(step, metrics))

    def text(self, step: int, tag: str, text: str) -> None:
        """Write a text to every tracker."""
        self._each("text", lambda tracker: tracker.text(step, tag, text))

    def close(self) -> None:
        """Close every tracker."""
        self._each("close", lambda tracker: tracker.close())

    def _each(self, what: str, call: Callable[[Tracker], None]) -> None:
        for tracker in tuple(self._trackers):
            try:
                call(tracker)
            except CoatiError:
                raise
            except Exception as error:  # whatever a tracker dies of, the run must not
                self._drop(tracker, what, error)

    def _drop(self, tracker: Tracker, what: str, error: Exception) -> None:
        self._trackers.remove(tracker)
        logger.warning(
            "%s.%s failed with %s: %s. It gets no further metrics; the run goes on without it.",
            type(tracker).__name__,
            what,
            type(error).__name__,
            error,
        )
        if what != "close":
            try:
                tracker.close()
            except Exception:
                logger.debug("closing the dropped %s failed too", type(tracker).__name__, exc_info=True)


def read_jsonl(path: str | Path) -> list[dict[str, Any]]:
    """Read what a `JsonlTracker` wrote, also while it is still writing.

    null comes back as NaN. A last line without its end (a writer at work, or a crash) is left out; a damaged
    line anywhere else is a `DataError`.
    """
    *lines, tail = Path(path).read_bytes().split(b"\n")
    records = []
    for number, line in enumerate(lines, start=1):
        record = _parse(line)
        if record is None:
            raise DataError(
                f"{path}, line {number}: every line must be a JSON object, got {line[:60]!r}. "
                f"Delete the line, or restore the file."
            )
        records.append(record)
    last = _parse(tail)
    if last is not None:
        records.append(last)
    return records


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:  # torn: not JSON, or cut inside a character
        return None
    if not isinstance(record, dict):
        return None
    return {key: math.nan if value is None else value for key, value in record.items()}


def _finite_or_none(value: float) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None


def _repair_tail(path: Path) -> None:
    """Cut off a torn last line, or end it if only its newline is missing."""
    if not path.exists():
        return
    content = path.read_bytes()
    start = content.rfind(b"\n") + 1
    tail = content[start:]
    if not tail:
        return
    with path.open("rb+") as file:
        if _parse(tail) is not None:
            file.seek(0, os.SEEK_END)
            file.write(b"\n")
            return
        file.truncate(start)
    logger.warning("%s ended in a torn line of %d bytes, which was cut off.", path, len(tail))
