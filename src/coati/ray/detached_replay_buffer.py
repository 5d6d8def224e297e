"""The replay buffer between makers and a trainer: items in, whole batches out, through a Ray queue.

An item is always in exactly one of four places: the collector (its batch is not full yet), the outbox (its batch is
full but the queue has no room), the queue, or the prefetched batch (`prefetch`: unpacked and prepared in another thread
while the consumer works on the one before). A producer that gives up waiting for room loses nothing: the consumer
empties the outbox.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any

import numpy as np
import ray
from ray.util.queue import Empty, Queue
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from coati.background import BackgroundThread
from coati.errors import ConfigError, DeadlineExceeded
from coati.experience import BufferItem, Experience, split_experience_batch
from coati.experience_buffer import BatchCollector
from coati.peers import answer
from coati.ray.peers import RayPeer
from coati.wire import WireTensor, decode, encode

# Producers are in this process and notify consumers, so this is only a fallback. Nothing blocks in the queue itself: a
# consumer that dies inside `Queue.get` leaves a waiter that swallows the next batch.
_SLICE_SECONDS = 0.5
_POLL_SECONDS = 0.02
_ANSWER_SECONDS = 60.0
DEFAULT_WAIT_SECONDS = 1800.0

_Packed = dict[str, tuple[np.ndarray, str]]


class BatchQueue:
    """A Ray queue whose every call has a deadline. Its actor reserves no CPU: a small machine cannot stall on it.

    It runs on the node of the process that creates it: batches travel once, and no other node's death affects it.
    """

    def __init__(self, maxsize: int) -> None:
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        self._queue = Queue(maxsize=maxsize, actor_options={"num_cpus": 0, "scheduling_strategy": here})
        self._peer = RayPeer("the replay buffer's queue", self._queue.actor)

    def size(self) -> int:
        """Entries waiting."""
        return int(self._call("qsize"))

    def put_all(self, entries: list[Any]) -> None:
        """Add entries; the caller has made sure that there is room."""
        self._call("put_nowait_batch", entries)

    def get(self) -> Any | None:
        """Remove and return the oldest entry; None if the queue is empty."""
        try:
            return self._call("get_nowait")
        except (Empty, asyncio.QueueEmpty):
            return None

    def drop_all(self) -> None:
        """Remove all entries."""
        while (size := self.size()) > 0:
            try:
                self._call("get_nowait_batch", size)
            except (Empty, asyncio.QueueEmpty):  # a consumer was quicker
                continue

    def close(self) -> None:
        """End the actor."""
        self._queue.shutdown(force=True)

    def _call(self, method: str, *args: Any) -> Any:
        call = self._peer.call(method, *args)
        return answer(call, f"its answer to {method}", seconds=_ANSWER_SECONDS, who=self._peer.name)


class DetachedReplayBuffer:
    """Batches items to `sample_batch_size`; with `limit` > 0 batches waiting, producers block."""

    def __init__(self, sample_batch_size: int, limit: int = 0, *, queue: BatchQueue | None = None) -> None:
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
        self._prefetching = BackgroundThread(name="prefetch")
        self._prefetched: Future[Experience | None] | None = None
        self._num_prefetched = 0  # batches taken out of the queue and not sampled yet: 0 or 1
        self._should_prefetch = False
        self._queue = queue or BatchQueue(limit)

    def append(self, experience: Experience) -> None:
        """Split a batch into items and add them; blocks while the buffer is full."""
        self.extend(split_experience_batch(experience))

    def extend(
        self,
        items: Sequence[BufferItem],
        *,
        timeout_seconds: float = DEFAULT_WAIT_SECONDS,
        checked: bool = False,
        waits: bool = True,
    ) -> None:
        """Add items; blocks while the buffer is full. If any item is bad, none is added, unless they were `checked`.

        Without `waits`, batches beyond the limit are kept aside until there is room: for the consumer itself.
        """
        with self._lock:
            for batch in self._collector.add(items, checked=checked):
                self._outbox.append(_pack(batch))
            num_clears = self._num_clears
        deadline = time.monotonic() + timeout_seconds
        while not self._move_outbox() and waits:
            if time.monotonic() >= deadline:
                raise DeadlineExceeded(
                    f"waited {timeout_seconds:g} s for room in the replay buffer (limit {self.limit} batches). "
                    "The items are kept and nothing is lost, but the trainer does not consume: is fit running?"
                )
            time.sleep(_POLL_SECONDS)
            if num_clears != self._num_clears:
                return  # these items were cleared with the rest

    def sample(
        self, worker_rank: int = 0, to_device: Any = "cpu", *, timeout_seconds: float = DEFAULT_WAIT_SECONDS
    ) -> Experience:
        """Return the oldest whole batch; blocks until there is one, at most `timeout_seconds`."""
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
        """Return the oldest whole batch, or None if none comes in time."""
        deadline = time.monotonic() + timeout_seconds
        while True:
            with self._lock:
                future = self._prefetched
            if future is None:
                packed = self._take(deadline)
                return None if packed is None else _unpack(packed)
            wait([future], timeout=max(0.0, deadline - time.monotonic()))
            if not future.done():
                return None
            batch = self._hand_over(future)
            if batch is not None:
                return batch

    def prefetch(self, prepare: Callable[[Experience], Experience] = lambda batch: batch) -> None:
        """Take the next batch as soon as it arrives and prepare it in another thread, for the next `try_sample`.

        One batch at a time, in the order of the queue; it counts as waiting until it is sampled.
        """
        with self._lock:
            if self._prefetched is None:
                self._should_prefetch = True
                self._prefetched = self._prefetching.run(lambda: self._prefetch(prepare))

    def stop_prefetching(self) -> None:
        """End a prefetch that waits for a batch; one that has a batch keeps it for the next `try_sample`."""
        with self._lock:
            future, self._should_prefetch = self._prefetched, False
            self._arrived.notify_all()
        if future is None:
            return
        wait([future], timeout=DEFAULT_WAIT_SECONDS)
        with self._lock:
            is_empty = future.done() and future.exception() is None and future.result() is None
            if self._prefetched is future and is_empty:
                self._prefetched = None

    def flush(self) -> Experience | None:
        """Return the samples that do not fill a batch as a smaller one, to be trained on when no more come."""
        with self._lock:
            return self._collector.flush()

    def clear(self) -> None:
        """Drop everything. The buffer stays usable."""
        with self._lock:
            self._num_clears += 1
            self._collector.clear()
            self._outbox.clear()
            self._queue.drop_all()
            self._num_prefetched = 0

    def get_length(self) -> int:
        """Whole batches waiting."""
        with self._lock:
            return self._queue.size() + self._num_prefetched

    @property
    def num_items_waiting(self) -> int:
        """Samples that wait for their batch to fill."""
        with self._lock:
            return len(self._collector)

    def close(self) -> None:
        """End the queue actor."""
        with self._lock:
            self._should_prefetch = False
            self._arrived.notify_all()
        self._prefetching.close()
        self._queue.close()

    def _move_outbox(self) -> bool:
        """Move full batches into the queue as far as there is room; True if none is left."""
        with self._lock:
            if not self._outbox:
                return True
            room = len(self._outbox) if self.limit == 0 else self.limit - self._queue.size() - self._num_prefetched
            num_moved = min(room, len(self._outbox))
            if num_moved > 0:
                # We are the only producer (the lock is ours), so the room is still there.
                self._queue.put_all([self._outbox[index] for index in range(num_moved)])
                for _ in range(num_moved):
                    self._outbox.popleft()
                self._arrived.notify_all()
            return not self._outbox

    def _take(self, deadline: float | None, *, is_prefetch: bool = False) -> _Packed | None:
        """The oldest whole batch of the queue; None after the deadline, or when prefetching stops."""
        while True:
            self._move_outbox()
            with self._lock:
                packed: _Packed | None = self._queue.get()
                if packed is not None:
                    self._num_prefetched += is_prefetch
                    return packed
                seconds = _SLICE_SECONDS if deadline is None else min(_SLICE_SECONDS, deadline - time.monotonic())
                if seconds <= 0 or (is_prefetch and not self._should_prefetch):
                    return None
                self._arrived.wait(seconds)

    def _prefetch(self, prepare: Callable[[Experience], Experience]) -> Experience | None:
        packed = self._take(None, is_prefetch=True)
        return None if packed is None else prepare(_unpack(packed))

    def _hand_over(self, future: "Future[Experience | None]") -> Experience | None:
        with self._lock:
            if self._prefetched is not future:  # another consumer was quicker
                return None
            was_cleared = self._num_prefetched == 0
            self._prefetched, self._num_prefetched = None, 0
            batch = future.result()
            return None if was_cleared else batch


def _pack(experience: Experience) -> _Packed:
    """Arrays and strings only: the queue's process unpickles them, and does not import torch for that."""
    return {name: tuple(encode(tensor)) for name, tensor in experience.tensors()}  # type: ignore[misc]


def _unpack(packed: _Packed) -> Experience:
    fields = {name: decode(WireTensor(*wire), copy=True) for name, wire in packed.items()}
    return Experience(**{"attention_mask": None, "action_mask": None, **fields})  # type: ignore[arg-type]
