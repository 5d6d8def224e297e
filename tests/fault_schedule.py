"""Faults on purpose, at the points of `coati.faults`.

    schedule = Schedule(folder, [Fault("maker.generating", "kill", actor="maker-1", nth=40)])

Processes that are started with `schedule.environment` follow it; this one does inside `with schedule.enabled()`. The
folder also gets a file for each fault that has happened, so each happens once, even if the process that it ended is
started again.
"""

import contextlib
import dataclasses
import itertools
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from coati import faults
from coati.faults import VARIABLE, Hook

POINTS = (
    "trainer.after_forward",
    "trainer.after_backward",
    "trainer.after_step",
    "trainer.after_ack",  # makers have acknowledged an update
    "trainer.after_delivery",  # a maker's samples are taken in, and it does not know yet
    "weights.before_chunk",  # in the sender; the index is the chunk's
    "receiver.before_chunk",
    "maker.generating",  # after each token
    "maker.before_deliver",
    "maker.evaluated",  # and not reported
    "checkpoint.before_rename",
    "journal.before_write",
)
ACTIONS = ("raise", "kill", "stop", "block", "sleep", "clock")
_RELEASE_SECONDS = 120.0
_POLL_SECONDS = 0.01


class InjectedFault(RuntimeError):
    """What a fault with the action "raise" raises."""


@dataclasses.dataclass(frozen=True)
class Fault:
    """What happens at a point, and when.

    "kill" and "stop" send SIGKILL and SIGSTOP to the own process; one that is stopped continues after `seconds`, if
    there are any. "block" waits for `Schedule.release`. "sleep" waits for `seconds`, "clock" adds them to `time.time`.
    """

    point: str
    action: str
    actor: str = ""
    """Name of the actor; "" for every process."""
    nth: int = 1
    """At which pass of the point in one process, counted from 1; 0 for every pass, more than once in a run."""
    index: int | None = None
    """Count only passes with this index, of a chunk for example."""
    after: float = 0.0
    """Count only passes so many seconds after the schedule's time began."""
    seconds: float = 0.0

    def __post_init__(self) -> None:
        for name, value, known in (("point", self.point, POINTS), ("action", self.action, ACTIONS)):
            if value not in known:
                raise ValueError(f"a fault's {name} must be one of {', '.join(known)}, got {value!r}.")


class Schedule:
    """Faults by number, and the folder that says which of them have happened."""

    def __init__(self, folder: Path, faults: Sequence[Fault] | None = None, *, begins: bool = True) -> None:
        """Write `faults` to a folder, whose time begins now, or with `begin`; or read what it holds."""
        self._folder = folder
        file = folder / "schedule.json"
        if faults is not None:
            folder.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps([dataclasses.asdict(fault) for fault in faults]))
            if begins:
                self.begin()
        self._began: float | None = None
        self.faults = [Fault(**fields) for fields in json.loads(file.read_text())]
        self._passes = [itertools.count(1) for _ in self.faults]  # which threads may share

    def begin(self) -> None:
        """Let the schedule's time begin; before, nothing happens."""
        part = self._folder / "began.part"
        part.write_text(str(time.monotonic()))  # the clock is the same in all processes of a machine
        part.rename(self._folder / "began")

    @contextlib.contextmanager
    def enabled(self) -> Iterator[None]:
        """Have the faults happen in this process, inside the `with` block."""
        before, faults.hook = faults.hook, self.reach
        try:
            yield
        finally:
            faults.hook = before

    @property
    def environment(self) -> dict[str, str]:
        """Variables of a process that follows the schedule."""
        return {VARIABLE: f"{Path(__file__).resolve()}:{self._folder.resolve()}"}

    def has_happened(self, number: int = 0) -> bool:
        """Whether a fault has happened."""
        return (self._folder / f"happened-{number}").exists()

    def release(self, number: int = 0) -> None:
        """Let the process that a fault has blocked go on."""
        (self._folder / f"released-{number}").touch()

    def reach(self, point: str, index: int | None, actor: str) -> None:
        """Do what is due at a point."""
        if self._began is None:
            if not (file := self._folder / "began").exists():
                return
            self._began = float(file.read_text())
        now = time.monotonic() - self._began
        for number, fault in enumerate(self.faults):
            is_meant = fault.actor in ("", actor) and fault.index in (None, index) and now >= fault.after
            if fault.point != point or not is_meant:
                continue
            if next(self._passes[number]) >= fault.nth and self._is_new(number, fault):
                self._happen(number, fault)

    def _is_new(self, number: int, fault: Fault) -> bool:
        """Note that a fault happens; False if it has happened before, and may only once."""
        try:
            (self._folder / f"happened-{number}").touch(exist_ok=fault.nth == 0)
        except FileExistsError:
            return False
        return True

    def _happen(self, number: int, fault: Fault) -> None:
        if fault.action == "raise":
            raise InjectedFault(f"fault {number} of {self._folder}, at {fault.point}")
        if fault.action == "block":
            deadline = time.monotonic() + _RELEASE_SECONDS
            while not (self._folder / f"released-{number}").exists():
                if time.monotonic() > deadline:
                    raise TimeoutError(f"fault {number} at {fault.point} was not released in {_RELEASE_SECONDS:g} s.")
                time.sleep(_POLL_SECONDS)
        elif fault.action == "sleep":
            time.sleep(fault.seconds)
        elif fault.action == "clock":
            real = time.time
            time.time = lambda: real() + fault.seconds
        else:
            if fault.action == "stop" and fault.seconds:
                subprocess.Popen(["sh", "-c", f"sleep {fault.seconds}; kill -CONT {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGKILL if fault.action == "kill" else signal.SIGSTOP)


def follow(folder: str) -> Hook:
    """What a process calls at every point, by the schedule in a folder."""
    return Schedule(Path(folder)).reach
