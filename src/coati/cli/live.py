"""Progress in the terminal: a live panel in a terminal, a plain line every few seconds elsewhere."""

import logging
import signal
import sys
import time
from types import FrameType, TracebackType
from typing import Any, Self

from rich.console import Console
from rich.live import Live

from coati.monitor import RunSnapshot, plain_line, render_progress

_PLAIN_EVERY_SECONDS = 3.0


class LiveView:
    """Shows snapshots while it is open."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self._last_line = 0.0
        self._last_message = ""
        self._has_ended = False

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.__enter__()
            _log_to_stderr()  # which prints above the panel while it is shown
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.__exit__(kind, error, traceback)
            _log_to_stderr()

    def show(self, snapshot: RunSnapshot) -> None:
        """Draw the snapshot."""
        if self._live is not None:
            self._live.update(render_progress(snapshot, self._console.width), refresh=True)
            return
        now = time.monotonic()
        is_end = snapshot.step == snapshot.total_steps and not self._has_ended
        self._has_ended = self._has_ended or is_end
        if self._has_ended and not is_end and not snapshot.message:
            return
        is_news = snapshot.message != self._last_message or is_end
        if is_news or now - self._last_line >= _PLAIN_EVERY_SECONDS:
            self._last_line, self._last_message = now, snapshot.message
            self._console.print(plain_line(snapshot), highlight=False, markup=False, soft_wrap=True)


class StopSignal:
    """The first SIGINT or SIGTERM asks the run to stop and save; the second ends it at once."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._is_set = False
        self._previous: dict[int, Any] = {}

    def __call__(self) -> bool:
        """Whether a stop was requested."""
        return self._is_set

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        if self._is_set:
            raise KeyboardInterrupt
        self._is_set = True
        self._console.print(
            "[yellow]Stopping: finishing the current batch and saving. Press Ctrl-C again to quit now.[/]"
        )


def _log_to_stderr() -> None:
    """Have log messages use what `sys.stderr` is now: the live panel replaces it."""
    for handler in logging.getLogger().handlers:
        if type(handler) is logging.StreamHandler:
            handler.setStream(sys.stderr)
