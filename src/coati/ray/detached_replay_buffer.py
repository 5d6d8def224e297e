"""The replay buffer between makers and a trainer: items in, whole batches out, through a Ray queue.

An item is always in exactly one of four places: the collector (it waits for its batch to fill), the outbox
(its batch is full but the queue has no room), the queue, or the batch that was taken ahead (`look_ahead`: unpacked and
prepared in another thread while the consumer works on the one before). A producer that gives up waiting for room loses
nothing: the consumer moves the outbox on.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any

import numpy as np

from coati.errors import ConfigError, DeadlineExceeded
from coati.experience import BufferItem, Experience, make_experience_batch, split_experience_batch
from coati.experience_buffer.collector import BatchCollector
from coati.ray.batch_queue import BatchQueue
from coati.wire import WireTensor, decode, encode

logger = logging.getLogger(__name__)

# Producers are in this process and say when a batch has come, so this is only how often we look all the same. The
# queue itself is never waited at: a consumer that dies inside `Queue.get` leaves a waiter that swallows the next batch.
_SLICE_SECONDS = 0.5
_POLL_SECONDS = 0.02
DEFAULT_WAIT_SECONDS = 1800.0

_Packed = dict[str, tuple[np.ndarray, str]]


class DetachedReplayBuffer:
    """Batches items to `sample_batch_size`; with `limit` > 0 batches waiting, producers block.

    The queue is an actor that reserves no CPU, so that a small machine cannot stall on it.
    """

    def __init__(self, sample_batch_size: int, limit: int = 0) -> None:
        if limit < 0:
            raise ConfigError(f"buffer limit must be 0 (no limit) or more batches, got {limit}.")
        self.sample_batch_size = sample_batch_size
        self.limit = limit
        self._collector = BatchCollector(sample_batch_size)
        self._outbox: deque[_Packed] = deque()
        # Guards everything below; never held while waiting for room or for a batch.
        self._lock = threading.RLock()
        self._arrived = threading.Condition(self._lock)
        self._num_clears = 0
        self._ahead: Future[Experience | None] | None = None
        self._num_ahead = 0  # batches taken out of the queue that nobody has got yet: 0 or 1
        self._should_look = False
        self._queue = BatchQueue(limit)

    def append(self, experience: Experience) -> None:
        """Split a batch into items and take them in; blocks while the buffer is full."""
        self.extend(split_experience_batch(experience))

    def extend(self, items: Sequence[BufferItem], *, timeout_seconds: float = DEFAULT_WAIT_SECONDS) -> None:
        """Take items in; blocks while the buffer is full. Bad items are refused before any is taken."""
        with self._lock:
            for batch in self._collector.add(items):
                self._outbox.append(_pack(make_experience_batch(batch)))
            num_clears = self._num_clears
        deadline = time.monotonic() + timeout_seconds
        while not self._move_outbox():
            if time.monotonic() >= deadline:
                raise DeadlineExceeded(
                    f"waited {timeout_seconds:g} s for room in the replay buffer (limit {self.limit} "
                    "batches). The items are taken in and nothing is lost, but the trainer does not "
                    "consume: is fit running?"
                )
            time.sleep(_POLL_SECONDS)
            if num_clears != self._num_clears:
                return  # what this call brought was cleared away with the rest

    def sample(
        self, worker_rank: int = 0, to_device: Any = "cpu", *, timeout_seconds: float = DEFAULT_WAIT_SECONDS
    ) -> Experience:
        """The oldest whole batch; blocks until there is one. DeadlineExceeded after `timeout_seconds`."""
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
        """The oldest whole batch, or None if none comes in time."""
        deadline = time.monotonic() + timeout_seconds
        while True:
            with self._lock:
                ahead = self._ahead
            if ahead is None:
                packed = self._take(deadline)
                return None if packed is None else _unpack(packed)
            wait([ahead], timeout=max(0.0, deadline - time.monotonic()))
            if not ahead.done():
                return None
            batch = self._hand_over(ahead)
            if batch is not None:
                return batch

    def look_ahead(self, prepare: Callable[[Experience], Experience] = lambda batch: batch) -> None:
        """Take the next batch as soon as it is there and prepare it in another thread, for `try_sample` to hand out.

        One batch at a time, in the order of the queue; it counts as waiting until somebody gets it.
        """
        with self._lock:
            if self._ahead is None:
                self._ahead = Future()
                self._should_look = True
                threading.Thread(
                    target=self._look, args=(self._ahead, prepare), name="coati-look-ahead", daemon=True
                ).start()

    def stop_looking(self) -> None:
        """End a look ahead that has found nothing; a batch that it has found is the next to be handed out."""
        with self._lock:
            ahead, self._should_look = self._ahead, False
            self._arrived.notify_all()
        if ahead is None:
            return
        wait([ahead], timeout=DEFAULT_WAIT_SECONDS)
        with self._lock:
            if self._ahead is ahead and ahead.exception() is None and ahead.result() is None:
                self._ahead = None

    def flush(self) -> Experience | None:
        """The samples that do not fill a batch, as a smaller one: they are trained on when no more come."""
        with self._lock:
            rest = self._collector.flush()
        return make_experience_batch(rest) if rest else None

    def clear(self) -> None:
        """Drop everything; the buffer goes on working."""
        with self._lock:
            self._num_clears += 1
            self._collector.clear()
            self._outbox.clear()
            self._queue.drop_all()
            self._num_ahead = 0

    def get_length(self) -> int:
        """Whole batches waiting."""
        with self._lock:
            return self._queue.size() + self._num_ahead

    @property
    def num_items_waiting(self) -> int:
        """Samples that wait for their batch to fill."""
        with self._lock:
            return len(self._collector)

    def close(self) -> None:
        """End the queue actor."""
        with self._lock:
            self._should_look = False
            self._arrived.notify_all()
        self._queue.close()

    def _move_outbox(self) -> bool:
        """Move full batches into the queue as far as there is room; True if none is left."""
        with self._lock:
            if not self._outbox:
                return True
            room = len(self._outbox) if self.limit == 0 else self.limit - self._queue.size() - self._num_ahead
            num_moved = min(room, len(self._outbox))
            if num_moved > 0:
                # We are the only producer (the lock is ours), so the room is still there.
                self._queue.put_all([self._outbox[index] for index in range(num_moved)])
                for _ in range(num_moved):
                    self._outbox.popleft()
                self._arrived.notify_all()
            return not self._outbox

    def _take(self, deadline: float | None, *, is_ahead: bool = False) -> _Packed | None:
        """The oldest whole batch of the queue; None after the deadline, or when looking ahead shall stop."""
        while True:
            self._move_outbox()
            with self._lock:
                packed: _Packed | None = self._queue.get(0.0)
                if packed is not None:
                    self._num_ahead += is_ahead
                    return packed
                seconds = _SLICE_SECONDS if deadline is None else min(_SLICE_SECONDS, deadline - time.monotonic())
                if seconds <= 0 or (is_ahead and not self._should_look):
                    return None
                self._arrived.wait(seconds)

    def _look(self, ahead: "Future[Experience | None]", prepare: Callable[[Experience], Experience]) -> None:
        try:
            packed = self._take(None, is_ahead=True)
            ahead.set_result(None if packed is None else prepare(_unpack(packed)))
        except BaseException as error:  # whatever it is, it is raised where the batch is asked for
            ahead.set_exception(error)

    def _hand_over(self, ahead: "Future[Experience | None]") -> Experience | None:
        with self._lock:
            if self._ahead is not ahead:  # another consumer was quicker
                return None
            was_cleared = self._num_ahead == 0
            self._ahead, self._num_ahead = None, 0
            batch = ahead.result()
            return None if was_cleared else batch


def _pack(experience: Experience) -> _Packed:
    """Arrays and strings only: the queue's process unpickles them, and does not import torch for that."""
    return {name: tuple(encode(tensor)) for name, tensor in experience.tensors()}  # type: ignore[misc]


def _unpack(packed: _Packed) -> Experience:
    fields = {name: decode(WireTensor(*wire), copy=True) for name, wire in packed.items()}
    return Experience(**{"attention_mask": None, "action_mask": None, **fields})  # type: ignore[arg-type]
