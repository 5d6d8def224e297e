"""Where samples wait for a trainer: whole batches come out, the next one prepared while the last is trained on."""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any

from coati.background import BackgroundThread
from coati.errors import ConfigError, DeadlineExceeded
from coati.experience import BufferItem, Experience
from coati.ledger.rules import Lease, LeaseRequest

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
        self._prepare: Callable[[Experience], Experience] | None = None  # of a prefetch whose batch is not there yet
        self._prefetched: Future[Experience] | None = None

    @abstractmethod
    def extend(self, items: Sequence[BufferItem]) -> None:
        """Take items in. If any of them is bad, none is taken."""

    @abstractmethod
    def get_length(self) -> int:
        """Whole batches waiting."""

    @property
    @abstractmethod
    def num_items_waiting(self) -> int:
        """Samples that wait for their batch to fill."""

    @abstractmethod
    def _next_batch(self) -> Callable[[], Experience] | None:
        """Take the next batch out and return what unpacks it, which is called without the lock; None if none is
        there."""

    # What a trainer tells its buffer and asks it.

    def lease(self, request: LeaseRequest) -> list[Lease]:  # noqa: ARG002
        """Grant a maker what it may make now."""
        raise ConfigError("this trainer has no leases to grant. Give it options.rules, or its makers none.")

    def release(self, maker: str, reason: str) -> list[int]:  # noqa: ARG002
        """Grant the leases of a maker that is gone to others; returns their numbers."""
        return []

    def mark_trained(self, version: int) -> None:  # noqa: B027
        """Note that the batches sampled so far made weights of this version."""

    def give_back(self, batch: Experience) -> None:  # noqa: B027
        """Note that a batch that was sampled is not trained on."""

    def begin_fit(self) -> None:  # noqa: B027
        """Note that a `fit` begins."""

    def describe_wait(self) -> str:
        """Say what the makers do that a trainer waits for."""
        return "unknown"

    def last_batch(self) -> "tuple[Experience | None] | None":
        """Return what is left if no more samples can come, (None,) if nothing is; None while more may come."""
        return None

    # Batches.

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
                prefetched = self._prefetched
                if prefetched is None:
                    if (unpack := self._next_batch()) is not None:
                        self._prepare = None  # this is the batch that it was for
                        self._changed.notify_all()
                        break
                    seconds = min(SLICE_SECONDS, deadline - time.monotonic())
                    if seconds <= 0:
                        return None
                    self._changed.wait(seconds)
                    continue
            wait([prefetched], timeout=max(0.0, deadline - time.monotonic()))
            if not prefetched.done():
                return None
            with self._lock:
                if self._prefetched is prefetched:  # else another consumer was quicker, or it was cleared
                    self._prefetched = None
                    self._changed.notify_all()
                    return prefetched.result()
        return unpack()

    def prefetch(self, prepare: Callable[[Experience], Experience] = lambda batch: batch) -> None:
        """Take the next batch as soon as it is there and prepare it in another thread, for the next `try_sample`.

        One batch at a time; it counts as waiting until it is sampled.
        """
        with self._lock:
            if self._prefetched is None:
                self._prepare = prepare
                self._notify()

    def stop_prefetching(self) -> None:
        """Take no batch ahead any more; one that was taken is prepared when this returns, for the next `try_sample`."""
        with self._lock:
            prefetched, self._prepare = self._prefetched, None
        if prefetched is not None:
            wait([prefetched], timeout=DEFAULT_WAIT_SECONDS)

    def close(self) -> None:
        """End its thread."""
        self.stop_prefetching()
        self._prefetching.close()

    @property
    def _num_prefetched(self) -> int:
        return int(self._prefetched is not None)

    def _notify(self) -> None:
        """Wake those who wait, and begin a prefetch that waited for its batch; called with the lock."""
        if self._prepare is not None and (unpack := self._next_batch()) is not None:
            prepare, self._prepare = self._prepare, None
            self._prefetched = self._prefetching.run(lambda: prepare(unpack()))
        self._changed.notify_all()
