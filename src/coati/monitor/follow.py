"""Sends a run's metrics and samples to its trackers. The run never waits for a tracker.

Each tracker reads `metrics.jsonl` and `samples.jsonl` while they grow, in its own process (a Python object: on a
thread). What it could not send is still in the files; `python -m coati.monitor.follow RUN NAME` sends it later.

    driver ── appends ──► metrics.jsonl, samples.jsonl ── reads ──► tracker process ──► wandb, mlflow, …
           ── end of the run, on stdin ───────────────────────────►
           ◄── error message, on stdout ───────────────────────────
"""

import contextlib
import functools
import json
import logging
import os
import select
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import IO, Any, BinaryIO, Final, NamedTuple

from coati.background import run_in_background
from coati.errors import error_text
from coati.monitor.metrics import parse_jsonl
from coati.monitor.trackers import TRACKERS, TrackedRun, Tracker

logger = logging.getLogger(__name__)

_POLL_SECONDS: Final = 1.0
_WAIT_SECONDS: Final = 30.0  # for all trackers together, after the end of the run
_STUCK_SECONDS: Final = 600
_SUCCESS: Final = b"."  # the driver writes it at the end of a run that did not fail
_FAILED: Final = "Tracker %s failed; training continues without it. %s"


class _Follower(NamedTuple):
    name: str
    end: IO[bytes]  # pipe through which the driver reports the end of the run
    work: Future[None]


@contextlib.contextmanager
def following(folder: Path, trackers: Sequence[str | Tracker]) -> Iterator[None]:
    """Send the run in `folder` to the trackers during the `with` block. A failure is one warning per tracker."""
    started = (_start(folder.resolve(), tracker) for tracker in trackers)
    followers, outcome = [follower for follower in started if follower is not None], b""
    try:
        yield
        outcome = _SUCCESS
    finally:
        for follower in followers:
            with contextlib.suppress(OSError):  # the tracker has failed
                follower.end.write(outcome)
                follower.end.close()
        wait([follower.work for follower in followers], _WAIT_SECONDS)
        if late := [follower.name for follower in followers if not follower.work.done()]:
            logger.warning("%s: still sending after %g s. The run ends anyway.", ", ".join(late), _WAIT_SECONDS)


def _start(folder: Path, tracker: str | Tracker) -> _Follower | None:
    if not isinstance(tracker, str):
        reading, writing = os.pipe()
        name, end = type(tracker).__name__, os.fdopen(writing, "wb")
        work = functools.partial(_follow_here, RowReader(folder, seen=time.time()), tracker, reading)
        return _Follower(name, end, run_in_background(work, name=f"tracker-{name}"))
    # A new session, because Ctrl-C in a terminal must not end it. -P: the working directory is not on sys.path.
    # -u: unbuffered, so that the log has what a package prints before it ends the process.
    command = [sys.executable, "-P", "-u", "-m", __name__, str(folder), tracker, "--live"]
    try:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    except OSError as error:  # out of memory, or too many processes
        logger.warning(_FAILED, tracker, f"Its process could not be started: {error}.")
        return None
    assert process.stdin is not None
    work = functools.partial(_watch, process, folder, tracker)
    return _Follower(tracker, process.stdin, run_in_background(work, name=f"tracker-{tracker}"))


def _watch(process: subprocess.Popen[bytes], folder: Path, name: str) -> None:
    assert process.stdout is not None
    with process.stdout:
        reason = process.stdout.read().decode(errors="replace").strip()
    if reason or process.wait():
        reason = reason or f"its process exited with code {process.returncode}"
        remedy = f"To send the rest later: python -m {__name__} {folder} {name}"
        logger.warning(_FAILED, name, f"{reason} (see {folder / 'trackers' / name}.log). {remedy}")


def _follow_here(reader: "RowReader", tracker: Tracker, end: int) -> None:
    try:
        follow(reader, tracker, end)
    except Exception as error:
        logger.warning(_FAILED, type(tracker).__name__, f"{type(error).__name__}: {error}")
    finally:
        os.close(end)


class RowReader:
    """Reads the rows of a run while it writes them, each with the samples that belong to it.

    The samples of a weight version belong to the row that has the makers' metrics of this version. When a run continues
    from an earlier step, its files are replaced. They are then read from the start, skipping times up to `seen`.
    """

    def __init__(self, folder: Path, seen: float = 0.0) -> None:
        self.seen = self._known = seen
        self._rows, self._texts = folder / "metrics.jsonl", folder / "samples.jsonl"
        self._files: dict[Path, BinaryIO] = {}
        self._samples: list[dict[str, Any]] = []  # of versions whose rows are not written yet

    def read(self) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
        """Yield the new rows, each with its samples."""
        if not all(path.exists() and os.path.samefile(path, file.fileno()) for path, file in self._files.items()):
            self._files, self._samples, self._known = {}, [], self.seen
        rows = self._new_lines(self._rows)
        self._samples += self._new_lines(self._texts)  # written before the rows that they belong to
        for row in rows:
            is_done = "maker/samples" in row  # the last row of a version
            mine = [sample for sample in self._samples if is_done and sample["version"] <= row["version"]]
            self._samples = [sample for sample in self._samples if sample not in mine]
            if row["time"] > self._known:
                self.seen = row["time"]
                yield row, mine

    def _new_lines(self, path: Path) -> list[dict[str, Any]]:
        if path not in self._files and path.exists():
            self._files[path] = path.open("rb")
        text = self._files[path].read() if path in self._files else b""
        whole = text[: text.rfind(b"\n") + 1]
        if whole != text:
            self._files[path].seek(len(whole) - len(text), os.SEEK_CUR)
        return parse_jsonl(path, whole)


def follow(reader: RowReader, tracker: Tracker, end: int | None, on_sent: Callable[[], None] = lambda: None) -> None:
    """Send rows to a tracker until the file descriptor `end` reports the end of the run. None: send what is there."""
    is_over = False
    while not is_over:
        on_sent()
        is_over = end is None or bool(select.select([end], [], [], _POLL_SECONDS)[0])
        for row, samples in reader.read():
            step = int(row["step"])
            tracker.log(step, {name: value for name, value in row.items() if name not in ("step", "time")})
            if samples:
                tracker.samples(step, samples)
    on_sent()
    tracker.close(end is not None and os.read(end, 1) != _SUCCESS)


def main(folder: Path, name: str, *, is_live: bool) -> None:
    """Send the rows of a run that tracker NAME does not have yet, and with `is_live` also those still to be written.

    `trackers/NAME.json` in the run's folder holds the tracker's id of the run, and the time of the last row sent.
    """
    path = folder / "trackers" / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    state = {"id": "", "seen": 0.0} | (json.loads(path.read_bytes()) if path.is_file() else {})
    settings = tomllib.loads((folder / "config.toml").read_text(encoding="utf-8"))
    run = TrackedRun(folder, settings, settings["logging"]["trackers"].get(name, {}), known_as=state["id"])
    signal.alarm(_STUCK_SECONDS)  # ends this process if a call takes longer
    tracker: Any = TRACKERS[name](run)
    reader = RowReader(folder, state["seen"])

    def write_state() -> None:
        signal.alarm(_STUCK_SECONDS)
        state = {"id": getattr(tracker, "id", name), "seen": reader.seen}
        written = path.with_suffix(".new")
        written.write_text(json.dumps(state), encoding="utf-8")
        written.replace(path)

    follow(reader, tracker, 0 if is_live else None, write_state)


def _main_of_process(folder: Path, name: str) -> None:
    """Run as a child of the driver: the package's output goes to a log file, an error message to the driver."""
    os.nice(5)
    report = os.dup(1)
    (folder / "trackers").mkdir(exist_ok=True)
    with (folder / "trackers" / f"{name}.log").open("a") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    try:
        main(folder, name, is_live=True)
    except BaseException as error:  # packages may call sys.exit
        os.write(report, error_text(error).encode(errors="backslashreplace"))
        os.close(report)  # the driver need not wait for the packages' exit handlers
        sys.exit(1)


if __name__ == "__main__":
    if "--live" in sys.argv:
        _main_of_process(Path(sys.argv[1]), sys.argv[2])
    else:
        main(Path(sys.argv[1]), sys.argv[2], is_live=False)
