"""Progress on a console: a live line with a bar in a terminal, elsewhere a new line every few seconds; and Ctrl-C."""

import datetime
import logging
import signal
import sys
import time
from types import FrameType
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.text import Text

from coati.errors import counted
from coati.monitor.run_log import RunSnapshot

_PLAIN_EVERY_SECONDS = 3.0


class LiveView:
    """Context manager that shows snapshots of a run on a console."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.seconds_per_step: float | None = None
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self._last_line = 0.0
        self._last_shown = ("", 0)  # message and step
        self._unprinted: RunSnapshot | None = None

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.__enter__()
            _log_to_stderr()  # messages then appear above the live line
        return self

    def __exit__(self, *exc_info: Any) -> None:
        if self._live is not None:
            self._live.__exit__(*exc_info)
            _log_to_stderr()
        elif self._unprinted is not None:
            self._print(self._unprinted)

    def show(self, snapshot: RunSnapshot) -> None:
        """Show a snapshot; without a terminal, only if one is due."""
        self.seconds_per_step = snapshot.seconds_per_step
        if self._live is not None:
            bar = ProgressBar(total=snapshot.total_steps or None, completed=snapshot.step)
            self._live.update(Group(Text(plain_line(snapshot)), bar), refresh=True)
            return
        shown, now = (snapshot.message, snapshot.step), time.monotonic()
        if snapshot.message and shown == self._last_shown:
            return
        self._unprinted = snapshot
        is_due = snapshot.message != self._last_shown[0] or now - self._last_line >= _PLAIN_EVERY_SECONDS
        # The line of the last step waits for the weight update after it.
        if is_due and (snapshot.step != snapshot.total_steps or snapshot.message):
            self._last_line, self._last_shown, self._unprinted = now, shown, None
            self._print(snapshot)

    def _print(self, snapshot: RunSnapshot) -> None:
        self.console.print(plain_line(snapshot), highlight=False, markup=False, soft_wrap=True)


class StopSignal:
    """Makes the first signal of these numbers stop and save a run; a second, or one before training, ends it."""

    def __init__(self, view: LiveView, *numbers: int) -> None:
        self.has_begun = self._is_set = False
        self._view, self._numbers = view, numbers

    def begin(self) -> None:
        """Record that training has begun: from now on a signal stops and saves the run."""
        self.has_begun = True

    def __call__(self) -> bool:
        """Return whether a stop was requested."""
        return self._is_set

    def __enter__(self) -> Self:
        self._previous = {number: signal.signal(number, self._handle) for number in self._numbers}
        return self

    def __exit__(self, *exc_info: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        is_second, self._is_set = self._is_set, True
        if is_second or not self.has_begun:
            raise KeyboardInterrupt
        seconds = self._view.seconds_per_step
        pace = "" if seconds is None else f" (a step takes about {seconds:.2g} s)"
        self._view.console.print(
            f"[yellow]Stopping: finishing the current batch{pace} and saving. Press Ctrl-C again to quit now.[/]"
        )


def _log_to_stderr() -> None:
    """Point log handlers at the current `sys.stderr`, which the live view replaces."""
    for handler in logging.getLogger().handlers:
        if type(handler) is logging.StreamHandler:
            handler.setStream(sys.stderr)


def plain_line(snapshot: RunSnapshot) -> str:
    """Format a snapshot as one line. Unknown numbers are left out.

    >>> plain_line(RunSnapshot(step=30, total_steps=60, version=29, reward=0.5, seconds_per_step=0.4))
    'step 30/60 (50%), reward 0.500, version 29, 0:00:00 elapsed, 0:00:12 left'
    """
    message, step, total = " ".join(snapshot.message.split()), snapshot.step, snapshot.total_steps
    times = [f"{_clock(snapshot.startup + snapshot.elapsed)} elapsed"]
    if snapshot.seconds_left is not None:
        times.append(f"{_clock(snapshot.seconds_left)} left")
    if message and step == 0:
        return ", ".join([message, *times])
    # Rounded down: 100% means that the last step is done.
    facts = [f"step {step}/{total} ({min(100 * step // total, 100)}%)" if total > 0 else f"step {step}"]
    if snapshot.reward is not None:
        facts.append(f"reward {snapshot.reward:.3f}")
    if snapshot.kl is not None:
        facts.append(f"KL {snapshot.kl:.2f}")
    facts.append(f"version {snapshot.version}")
    if snapshot.evaluation:
        facts.append(snapshot.evaluation)
    if snapshot.buffer_batches is not None:
        facts.append(f"buffer {snapshot.buffer_batches}")
    if snapshot.num_made and snapshot.samples_per_second is not None:
        digits = 0 if snapshot.samples_per_second >= 10 else 1
        rate = f"{snapshot.samples_per_second:,.{digits}f}/s"
        facts.append(f"{counted(snapshot.num_trained, 'sample')} trained, {snapshot.num_made:,} made ({rate})")
    if restarts := sum(snapshot.restarts.values()):
        facts.append(counted(restarts, "restart"))
    return ", ".join([*facts, *times]) + (f" - {message}" if message else "")


def _clock(seconds: float) -> str:
    return str(datetime.timedelta(seconds=round(seconds)))
