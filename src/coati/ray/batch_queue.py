"""A Ray queue whose every call has a deadline, and whose death has a name."""

import asyncio
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError
from ray.util.queue import Empty, Queue
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from coati.errors import DeadlineExceeded, PeerDied

_ANSWER_SECONDS = 60.0


class BatchQueue:
    """First in, first out. The queue is an actor that reserves no CPU, so that a small machine cannot stall on it.

    It is on the node of whoever makes it: batches travel once, and no third machine's death can take it away.
    """

    def __init__(self, maxsize: int) -> None:
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        self._queue = Queue(maxsize=maxsize, actor_options={"num_cpus": 0, "scheduling_strategy": here})

    def size(self) -> int:
        """Entries waiting."""
        return int(self._call("qsize"))

    def put_all(self, entries: list[Any]) -> None:
        """Add entries; the caller has made sure that there is room."""
        self._call("put_nowait_batch", entries)

    def get(self, seconds: float) -> Any | None:
        """The oldest entry, or None if there is none within `seconds`."""
        try:
            return self._call("get", seconds, wait=seconds) if seconds > 0 else self._call("get_nowait")
        except (Empty, asyncio.QueueEmpty):
            return None

    def drop_all(self) -> None:
        """Remove what is there."""
        while (size := self.size()) > 0:
            try:
                self._call("get_nowait_batch", size)
            except (Empty, asyncio.QueueEmpty):  # a consumer was quicker
                continue

    def close(self) -> None:
        """End the actor."""
        self._queue.shutdown(force=True)

    def _call(self, method: str, *args: Any, wait: float = 0.0) -> Any:
        try:
            return ray.get(getattr(self._queue.actor, method).remote(*args), timeout=wait + _ANSWER_SECONDS)
        except GetTimeoutError:
            raise DeadlineExceeded(
                f"the replay buffer's queue did not answer {method} within {wait + _ANSWER_SECONDS:g} s."
            ) from None
        except RayActorError as error:
            raise PeerDied(
                f"the replay buffer's queue is gone, and the batches in it with it: {str(error).splitlines()[0]}"
            ) from None
