"""The contract's replay buffer: takes items, yields whole batches, and stores them in a Ray queue.

Trainers whose makers have their own data loaders use it; `coati train` leases work and uses `LeasedBuffer` instead.
"""

import asyncio
import contextlib
import pickle
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from typing import Any

import ray
from ray.util.queue import Empty, Queue
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from coati.batching import check_items, pad_items, split_experience_batch
from coati.config import Deadlines
from coati.errors import ConfigError, DeadlineExceeded, PeerDied, PeerUnavailable
from coati.experience import BufferItem, Experience, ItemBundle
from coati.experience_buffer.buffer import SLICE_SECONDS, SampleBuffer
from coati.peers import Peers, wait_for_answer
from coati.ray.peers import RayPeer, RayPeers

_ANSWER_SECONDS = 60.0
# Number of delivery ids that are remembered, to recognize retries; a maker has at most two unacknowledged deliveries.
_DELIVERIES_KEPT = 1000
_POLL_SECONDS = 2.0
# A maker in one of these states makes no more experience, unless its loop is restarted.
_ENDED = frozenset({"finished", "failed", "gone"})


class BatchQueue:
    """A Ray queue on this node that reserves no CPU. Entries are bytes, so its process need not import torch.

    Every call has a deadline, and none blocks in the queue: a consumer that died in `Queue.get` would lose a batch.
    """

    def __init__(self) -> None:
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        self._queue = Queue(actor_options={"num_cpus": 0, "scheduling_strategy": here})
        self._peer = RayPeer("the replay buffer's queue", self._queue.actor)

    def size(self) -> int:
        """Return the number of entries waiting."""
        return int(self._call("qsize"))

    def put_all(self, entries: list[bytes]) -> None:
        """Add entries."""
        self._call("put_nowait_batch", entries)

    def get(self) -> bytes | None:
        """Remove and return the oldest entry; None if the queue is empty."""
        try:
            entry: bytes = self._call("get_nowait")
        except (Empty, asyncio.QueueEmpty):
            return None
        return entry

    def close(self) -> None:
        """Kill the queue's actor."""
        self._queue.shutdown(force=True)

    def _call(self, method: str, *args: Any) -> Any:
        call = self._peer.call(method, *args)
        return wait_for_answer(call, f"its answer to {method}", seconds=_ANSWER_SECONDS, who=self._peer.name)


class DetachedReplayBuffer(SampleBuffer):
    """Groups items into batches of `sample_batch_size`; producers block while `limit` > 0 batches are waiting.

    A trainer's buffer knows the makers by name. While the trainer waits for a batch, it polls them every two seconds to
    find out whether more experience can still come. A maker's state is the one it reports, or "busy" (no answer yet),
    "unknown" (it has no `progress` method), "missing" (it has not appeared) or "gone".
    """

    def __init__(
        self,
        sample_batch_size: int,
        limit: int = 0,
        *,
        maker_names: Sequence[str] = (),
        peers: Peers | None = None,
        deadlines: Deadlines | None = None,
        queue: BatchQueue | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if sample_batch_size < 1:
            raise ConfigError(f"sample_batch_size must be 1 or more samples, got {sample_batch_size}.")
        if limit < 0:
            raise ConfigError(f"buffer limit must be 0 (no limit) or more batches, got {limit}.")
        super().__init__(sample_batch_size)
        self.limit = limit
        self._deadlines = deadlines or Deadlines()
        self._clock = clock
        self._items: list[BufferItem] = []  # fewer than a batch
        self._queue = queue or BatchQueue()
        self._deliveries: deque[str] = deque(maxlen=_DELIVERIES_KEPT)
        self._maker_names, self._peers = maker_names, peers or RayPeers()
        self.begin_fit()

    def append(self, experience: Experience) -> None:
        """Split a batch into items and add them; blocks while the buffer is full."""
        self.extend(split_experience_batch(experience))

    def extend(self, items: Sequence[BufferItem], *, timeout_seconds: float | None = None) -> None:
        """Add items, ignoring deliveries that were added before; blocks while the buffer is full.

        Adds all items or none: none if any item is invalid, or if there is no room within `timeout_seconds` (default
        `deadlines.batch_seconds`).
        """
        check_items(items)
        timeout_seconds = self._deadlines.batch_seconds if timeout_seconds is None else timeout_seconds
        deadline = time.monotonic() + timeout_seconds
        with self._lock:
            while (fresh := self._fresh(items)) and self.limit and self.get_length() >= self.limit:
                if (seconds := deadline - time.monotonic()) <= 0:
                    raise DeadlineExceeded(
                        f"waited {timeout_seconds:g} s for room in the replay buffer (limit {self.limit} batches) and "
                        "added nothing, because the trainer takes no batches out. Check that its fit is running."
                    )
                self._changed.wait(min(SLICE_SECONDS, seconds))
            waiting, size = [*self._items, *fresh], self.sample_batch_size
            num_whole = len(waiting) // size * size
            batches = [ItemBundle(waiting[start : start + size]) for start in range(0, num_whole, size)]
            if batches:  # before anything changes here, because the call may fail
                self._queue.put_all([pickle.dumps(batch, protocol=pickle.HIGHEST_PROTOCOL) for batch in batches])
            self._items = waiting[num_whole:]
            self._deliveries.extend({item.delivery_id for item in fresh if item.delivery_id is not None})
            self._changed.notify_all()

    def _fresh(self, items: Sequence[BufferItem]) -> list[BufferItem]:
        return [item for item in items if item.delivery_id not in self._deliveries]

    def clear(self) -> None:
        """Drop all items and batches; the buffer stays usable."""
        with self._lock:
            self._items.clear()
            while self._queue.get() is not None:
                pass
            self._changed.notify_all()

    def get_length(self) -> int:
        """Return the number of whole batches waiting."""
        with self._lock:
            return self._queue.size()

    @property
    def num_items_waiting(self) -> int:
        """Number of samples that do not fill a batch yet."""
        with self._lock:
            return len(self._items)

    def close(self) -> None:
        """Kill the queue actor."""
        self._queue.close()

    def _next_batch(self) -> list[BufferItem] | None:
        entry = self._queue.get()
        return None if entry is None else pickle.loads(entry)

    def begin_fit(self) -> None:
        """Look up the makers again, because those of an earlier `fit` may be gone."""
        self._states = {name: "unknown" if self._peers.find_now(name) else "missing" for name in self._maker_names}
        self._last_poll = float("-inf")
        self._ended_since: float | None = None

    def describe_wait(self) -> str:
        """List the makers and their states."""
        return ", ".join(f"{name} is {state}" for name, state in self._states.items()) or "none are named"

    def last_batch(self) -> "tuple[Experience | None] | None":
        """Return the remaining samples once all makers have finished, `(None,)` if there are none; None before that."""
        if not self.all_finished():
            return None
        if (batch := self.try_sample(0.0)) is not None:
            return (batch,)
        with self._lock:  # finished makers have all deliveries acknowledged, so all their samples are here
            rest = [*self._items]
            self._items.clear()
        return (pad_items(rest) if rest else None,)

    def all_finished(self) -> bool:
        """Whether every maker has been done for `deadlines.grace_seconds`; PeerDied if none of them finished."""
        now = self._clock()
        if now - self._last_poll >= _POLL_SECONDS:
            self._last_poll = now
            self._poll()
            has_ended = bool(self._states) and _ENDED.issuperset(self._states.values())
            self._ended_since = (now if self._ended_since is None else self._ended_since) if has_ended else None
        if self._ended_since is None:
            return False
        states = set(self._states.values())
        is_over = states == {"gone"} or now - self._ended_since >= self._deadlines.grace_seconds
        if is_over and "finished" not in states:
            raise PeerDied(f"no maker is left ({self.describe_wait()}), so no experience will come. See their logs.")
        return is_over

    def _poll(self) -> None:
        calls = {}
        for name, state in self._states.items():
            peer = self._peers.find_now(name)
            if peer is None:  # Ray frees the name of a dead actor; one never seen may still be created
                self._states[name] = "missing" if state == "missing" else "gone"
                continue
            self._states[name] = "unknown"
            with contextlib.suppress(AttributeError):  # a user-defined maker may have no `progress` method
                calls[name] = peer.call("progress")
        wait(calls.values(), _POLL_SECONDS)
        for name, call in calls.items():
            if not call.done() or isinstance(call.exception(), PeerUnavailable):
                self._states[name] = "busy"  # it is loading its models, or its connection is interrupted
            elif isinstance(call.exception(), PeerDied):
                self._states[name] = "gone"
                self._peers.forget(name)  # a successor may take its name
            elif call.exception() is None:
                self._states[name] = getattr(call.result(), "state", "unknown")
