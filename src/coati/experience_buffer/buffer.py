"""Where samples wait for a trainer: whole batches come out, the next one prepared while the last is trained on."""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

from coati.background import BackgroundThread
from coati.errors import DeadlineExceeded
from coati.experience import Experience

DEFAULT_WAIT_SECONDS = 1800.0
# Producers and consumers notify each other, so this is only a fallback, and how often a consumer looks whether to stop.
SLICE_SECONDS = 0.5


class SampleBuffer(ABC):
    """Batches of `sample_batch_size`. A subclass says where they come from."""

    def __init__(self, sample_batch_size: int) -> None:
        self.sample_batch_size = sample_batch_size
        # Guards everything; never held while waiting for room or for a batch.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._prefetching = BackgroundThread(name="prefetch")
        self._prefetched: Future[Experience | None] | None = None
        self._num_prefetched = 0  # batches taken out and not sampled yet: 0 or 1
        self._should_prefetch = False

    @abstractmethod
    def _next_batch(self) -> Callable[[], Experience] | None:
        """Take the next batch out and return what unpacks it, which is called without the lock; None if none is
        there."""

    @property
    @abstractmethod
    def num_items_waiting(self) -> int:
        """Samples that wait for their batch to fill."""

    def sample(
        self, worker_rank: int = 0, to_device: Any = "cpu", *, timeout_seconds: float = DEFAULT_WAIT_SECONDS
    ) -> Experience:
        """Return the next whole batch; blocks until there is one, at most `timeout_seconds`."""
        experience = self.try_sample(timeout_seconds)
        if experience is None:
            raise DeadlineExceeded(
                f"worker {worker_rank} waited {timeout_seconds:g} s for a batch of {self.sample_batch_size} "
                f"samples in the replay buffer; {self.num_items_waiting} samples of the next one are there. "
                "Do makers deliver?"
            )
        experience.to_device(to_device)
        return experience

    def try_sample(self, timeout_seconds: float) -> Experience | None:
        """Return the next whole batch, or None if none comes in time."""
        deadline = time.monotonic() + timeout_seconds
        while True:
            with self._lock:
                future = self._prefetched
            if future is None:
                return self._take(deadline)
            wait([future], timeout=max(0.0, deadline - time.monotonic()))
            if not future.done():
                return None
            batch = self._hand_over(future)
            if batch is not None:
                return batch

    def prefetch(self, prepare: Callable[[Experience], Experience] = lambda batch: batch) -> None:
        """Take the next batch as soon as it is there and prepare it in another thread, for the next `try_sample`.

        One batch at a time; it counts as waiting until it is sampled.
        """
        with self._lock:
            if self._prefetched is None:
                self._should_prefetch = True
                self._prefetched = self._prefetching.run(lambda: self._prefetch(prepare))

    def stop_prefetching(self) -> None:
        """End a prefetch that waits for a batch; one that has a batch keeps it for the next `try_sample`."""
        with self._lock:
            future, self._should_prefetch = self._prefetched, False
            self._changed.notify_all()
        if future is None:
            return
        wait([future], timeout=DEFAULT_WAIT_SECONDS)
        with self._lock:
            is_empty = future.done() and future.exception() is None and future.result() is None
            if self._prefetched is future and is_empty:
                self._prefetched = None

    def close(self) -> None:
        """End its thread."""
        with self._lock:
            self._should_prefetch = False
            self._changed.notify_all()
        self._prefetching.close()

    def _take(self, deadline: float | None, *, is_prefetch: bool = False) -> Experience | None:
        """The next whole batch; None after the deadline, or when prefetching stops."""
        while True:
            with self._lock:
                unpack = self._next_batch()
                if unpack is not None:
                    self._num_prefetched += is_prefetch
                    self._changed.notify_all()
                    break
                seconds = SLICE_SECONDS if deadline is None else min(SLICE_SECONDS, deadline - time.monotonic())
                if seconds <= 0 or (is_prefetch and not self._should_prefetch):
                    return None
                self._changed.wait(seconds)
        return unpack()

    def _prefetch(self, prepare: Callable[[Experience], Experience]) -> Experience | None:
        batch = self._take(None, is_prefetch=True)
        return None if batch is None else prepare(batch)

    def _hand_over(self, future: "Future[Experience | None]") -> Experience | None:
        with self._lock:
            if self._prefetched is not future:  # another consumer was quicker
                return None
            was_cleared = self._num_prefetched == 0
            self._prefetched, self._num_prefetched = None, 0
            self._changed.notify_all()
            batch = future.result()
            return None if was_cleared else batch
