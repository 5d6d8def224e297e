"""What trainers and makers need as Ray actors: a name and peers, logging, and concurrency groups."""

import logging
from collections.abc import Sequence
from typing import Any

import ray

from coati import faults
from coati.actors.host import Host
from coati.monitor.records import RecordLog, WarningRecorder
from coati.ray.detached_replay_buffer import DetachedReplayBuffer
from coati.ray.peers import RayPeers


class ActorHost(Host):
    """The host of a Ray actor. Outside an actor, in a test for example, it has no name and does not set up logging."""

    can_share_gpu_memory = True

    def __init__(self) -> None:
        super().__init__("", RayPeers())
        self._is_actor = ray.is_initialized() and ray.get_runtime_context().get_actor_id() is not None
        if self._is_actor:
            context = ray.get_runtime_context()
            self.name = str(context.get_actor_name() or context.get_actor_id()[:8])

    def set_up_log(self, records: RecordLog[dict[str, Any]], *, debug: bool) -> None:
        """Set up logging, unless a level or handler is set already, and record warnings for the driver."""
        logger = logging.getLogger("coati")
        if debug:
            logger.setLevel(logging.DEBUG)
        if not self._is_actor:
            return
        faults.actor = self.name
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.INFO)
        logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
        logger.addHandler(WarningRecorder(records))

    def make_buffer(self, sample_batch_size: int, limit: int, **makers: Any) -> DetachedReplayBuffer:
        """Create the buffer of a trainer whose makers have their own data loaders."""
        return DetachedReplayBuffer(sample_batch_size, limit, **makers, peers=self.peers)


def run_in_groups(plain_class: type, **methods: Sequence[str]) -> None:
    """Assign methods of a class to concurrency groups, given as `group=(method names)`."""
    for group, names in methods.items():
        for name in names:
            ray.method(concurrency_group=group)(getattr(plain_class, name))


def remote(plain_class: type, *, groups: Sequence[str]) -> Any:
    """Turn a plain class into a Ray actor class with one thread per concurrency group; keeps its docstring."""
    actor_class = ray.remote(concurrency_groups=dict.fromkeys(groups, 1))(plain_class)
    type(actor_class).__doc__ = plain_class.__doc__  # shown by help()
    return actor_class
