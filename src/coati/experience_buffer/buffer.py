"""Where samples wait for a trainer, until whole batches of them come out."""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from coati.batching import pad_items
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
        self.last_progress = 0.0
        """When a maker last said that it is at work on something else, by the monotonic clock."""
        self.num_sampled = 0  # samples that have come out in batches
        # Guards everything; never held while waiting for room or for a batch.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)

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
    def close(self) -> None:
        """Release what it holds outside of this process's memory."""

    @abstractmethod
    def _next_batch(self) -> Sequence[BufferItem] | None:
        """Take the items of the next batch out, under the lock; None if it is not there."""

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
        with self._lock:
            while (items := self._next_batch()) is None:
                if (seconds := deadline - time.monotonic()) <= 0:
                    return None
                self._changed.wait(min(SLICE_SECONDS, seconds))
            self.num_sampled += len(items)
            self._changed.notify_all()  # there is room again
        return pad_items(items)
