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


class InTurn:
    """Runs calls beside their caller, but one after the other, in the order in which they come.

    A call that fails takes along those that came before anybody knew of it: they are not made, and fail with the same
    error.

    >>> in_turn, order = InTurn(), []
    >>> futures = [in_turn.run(lambda number=number: order.append(number), name="count") for number in range(3)]
    >>> [future.result(timeout=10) for future in futures] and order
    [0, 1, 2]
    """

    def __init__(self) -> None:
        self._last: Future[object] | None = None

    def run(self, call: Callable[[], T], *, name: str) -> "Future[T]":
        """Make the call when the one before has ended."""
        before = self._last

        def call_after() -> T:
            if before is not None:
                before.result()
            return call()

        future = beside(call_after, name=name)
        self._last = future  # type: ignore[assignment]  # whatever it returns
        return future

    def has_seen(self, future: "Future[T]") -> None:
        """Somebody knows what came of this call, or that it is stuck: those that come from now on do not wait."""
        if future is self._last:
            self._last = None
