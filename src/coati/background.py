"""Calls that run in the background, on daemon threads that no process waits for at its end."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def run_in_background(call: Callable[[], T], *, name: str) -> "Future[T]":
    """Run one call on a thread of its own."""
    worker = BackgroundThread(name=name)
    future = worker.run(call)
    worker.close()
    return future


class BackgroundThread:
    """Runs calls one after the other, in the order they come, all on one thread.

    >>> worker = BackgroundThread(name="worker")
    >>> len({worker.run(threading.get_ident).result(timeout=10) for _ in range(3)})
    1
    >>> worker.close()
    """

    def __init__(self, *, name: str) -> None:
        self._name = name
        self._calls: queue.SimpleQueue[Callable[[], None] | None] | None = None

    def run(self, call: Callable[[], T]) -> "Future[T]":
        """Make the call when those before it have ended."""
        future: Future[T] = Future()

        def resolve() -> None:
            try:
                future.set_result(call())
            except BaseException as error:  # raised where the result is asked for
                future.set_exception(error)

        if self._calls is None:
            self._calls = queue.SimpleQueue()
            threading.Thread(target=_work, args=(self._calls,), name=self._name, daemon=True).start()
        self._calls.put(resolve)
        return future

    def close(self) -> None:
        """Let the thread end after the calls it has; later calls get a new one, past a call that is stuck."""
        if self._calls is not None:
            self._calls.put(None)
            self._calls = None

    def __del__(self) -> None:
        self.close()

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_calls": None}  # a copy starts a thread of its own


def _work(calls: "queue.SimpleQueue[Callable[[], None] | None]") -> None:
    while (resolve := calls.get()) is not None:
        resolve()
        del resolve  # or what the call refers to would live until the next one
