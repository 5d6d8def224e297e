"""Calls that run beside whatever their caller does meanwhile."""

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

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # for whoever asks for the result
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


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
        """Somebody knows what came of this call: those that come from now on do not depend on it."""
        if future is self._last and future.done():
            self._last = None
