"""Runs calls in the background on daemon threads, which do not keep a process alive."""

import functools
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


def run_in_background(call: Callable[[], T], *, name: str) -> "Future[T]":
    """Run one call on a new thread."""
    return BackgroundThread(name=name).run(call)


class BackgroundThread:
    """Runs calls on one thread, one at a time, in the order of submission.

    >>> worker = BackgroundThread(name="worker")
    >>> len({worker.run(threading.get_ident).result(timeout=10) for _ in range(3)})
    1
    >>> worker.close()
    """

    def __init__(self, *, name: str) -> None:
        self._name, self._is_closed = name, False
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=_work, args=(self._calls,), name=name, daemon=True).start()

    def run(self, call: Callable[[], T]) -> "Future[T]":
        """Queue the call; it runs when all earlier calls have finished."""
        future: Future[T] = Future()

        def resolve() -> None:
            try:
                future.set_result(call())
            except BaseException as error:  # `Future.result` raises it
                future.set_exception(error)

        assert not self._is_closed, f"thread {self._name} was closed"
        self._calls.put(resolve)
        return future

    def close(self) -> None:
        """Let the thread end after its queued calls; no more calls may follow."""
        self._is_closed = True
        self._calls.put(None)

    __del__ = close

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(type(self), name=self._name), ()  # a copy starts its own thread


def _work(calls: "queue.SimpleQueue[Callable[[], None] | None]") -> None:
    while (resolve := calls.get()) is not None:
        resolve()
        del resolve  # otherwise the objects that the call refers to would live until the next call
