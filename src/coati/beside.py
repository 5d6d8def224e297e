"""Calls that run beside whatever their caller does meanwhile."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def beside(call: Callable[[], T], *, name: str) -> "Future[T]":
    """Run a call on a daemon thread of its own, which no process waits for at its end.

    >>> beside(lambda: 6 * 7, name="sum").result(timeout=10)
    42
    """
    future: Future[T] = Future()
    threading.Thread(target=_settle, args=(future, call), name=name, daemon=True).start()
    return future


def _settle(future: "Future[T]", call: Callable[[], T]) -> None:
    try:
        future.set_result(call())
    except BaseException as error:  # for whoever asks for the result
        future.set_exception(error)


class OneThread:
    """Runs calls beside their caller, all on one daemon thread: some things may not leave the one they began on.

    >>> one_thread = OneThread(name="worker")
    >>> len({one_thread.run(threading.get_ident).result(timeout=10) for _ in range(3)})
    1
    >>> one_thread.close()
    """

    def __init__(self, *, name: str) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def run(self, call: Callable[[], T]) -> "Future[T]":
        """Make the call when those before have ended."""
        future: Future[T] = Future()
        self._calls.put(lambda: _settle(future, call))
        return future

    def close(self) -> None:
        """Let the thread end when it has made the calls that it has."""
        self._calls.put(None)

    def _work(self) -> None:
        while (settle := self._calls.get()) is not None:
            settle()
