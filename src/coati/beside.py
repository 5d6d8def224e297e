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
