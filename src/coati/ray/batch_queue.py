"""A Ray queue whose every call has a deadline."""

import asyncio
from typing import Any

import ray
from ray.util.queue import Empty, Queue
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from coati.peers import answer
from coati.ray.peers import RayPeer

_ANSWER_SECONDS = 60.0


class BatchQueue:
    """First in, first out. The queue is an actor that reserves no CPU, so that a small machine cannot stall on it.

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
