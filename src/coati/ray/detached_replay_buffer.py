"""The replay buffer between makers and a trainer: items in, whole batches out, through a Ray queue.

An item is always in exactly one of four places: the collector (its batch is not full yet), the outbox (its batch is
full but the queue has no room), the queue, or the prefetched batch (`prefetch`: unpacked and prepared in another thread
while the consumer works on the one before). A producer that gives up waiting for room loses nothing: the consumer
empties the outbox.
"""

import asyncio
import functools
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import ray
from ray.util.queue import Empty, Queue
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from coati.errors import ConfigError, DeadlineExceeded
from coati.experience import BufferItem, Experience, split_experience_batch
from coati.experience_buffer import BatchCollector
from coati.experience_buffer.buffer import DEFAULT_WAIT_SECONDS, SampleBuffer
from coati.peers import answer
from coati.ray.peers import RayPeer
from coati.wire import WireTensor, decode, encode

_POLL_SECONDS = 0.02
_ANSWER_SECONDS = 60.0

_Packed = dict[str, tuple[np.ndarray, str]]


class BatchQueue:
    """A Ray queue whose every call has a deadline, and in which nothing blocks: a consumer that dies inside `Queue.get`
    leaves a waiter that swallows the next batch. Its actor reserves no CPU: a small machine cannot stall on it.

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


class DetachedReplayBuffer(SampleBuffer):
    """Batches items to `sample_batch_size`; with `limit` > 0 batches waiting, producers block."""

    def __init__(self, sample_batch_size: int, limit: int = 0, *, queue: BatchQueue | None = None) -> None:
        if limit < 0:
            raise ConfigError(f"buffer limit must be 0 (no limit) or more batches, got {limit}.")
        super().__init__(sample_batch_size)
        self.limit = limit
        self._collector = BatchCollector(sample_batch_size)
        self._outbox: deque[_Packed] = deque()
        self._num_clears = 0
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
        super().close()
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

    def _next_batch(self) -> Callable[[], Experience] | None:
        self._move_outbox()
        packed: _Packed | None = self._queue.get()
        return None if packed is None else functools.partial(_unpack, packed)


def _pack(experience: Experience) -> _Packed:
    """Arrays and strings only: the queue's process unpickles them, and does not import torch for that."""
    return {name: tuple(encode(tensor)) for name, tensor in experience.tensors()}  # type: ignore[misc]


def _unpack(packed: _Packed) -> Experience:
    fields = {name: decode(WireTensor(*wire), copy=True) for name, wire in packed.items()}
    return Experience(**{"attention_mask": None, "action_mask": None, **fields})  # type: ignore[arg-type]
