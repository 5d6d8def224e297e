"""Creates the actors of a run from its settings, and kills them.

All trainers of a group hold the same weights, so one trainer updates each maker. The maker's number decides which: an
assignment that changed when others join or leave could miss an update, as trainers switch lists at different versions.
"""

import functools
import logging
import socket
from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from coati import build
from coati.actors.options import MakerOptions, TrainerOptions
from coati.build import Parts
from coati.config import RunSettings
from coati.peers import Peer, wait_for_answer
from coati.ray.detached_trainer_ppo import DetachedPPOTrainer
from coati.ray.experience_maker_holder import ExperienceMakerHolder
from coati.ray.peers import RayPeer, ray_call

logger = logging.getLogger(__name__)

# ray.remote turned these into actor classes, which mypy cannot see.
_MAKER: Any = ExperienceMakerHolder
_TRAINER: Any = DetachedPPOTrainer


class ActorFactory:
    """Creates makers and trainers by name."""

    def __init__(self, config: RunSettings, *, parts: Parts | None = None) -> None:
        self._config = config
        self._parts = parts or Parts()
        self.trainer_names = [f"trainer-{rank}" for rank in range(config.topology.trainers)]
        self._num_created = 0  # makers
        self.is_private = False
        """Whether Ray was started for this run; makers then reserve no CPU, so one more always fits."""

    def create_trainers(self, resume: Path | None, *, makers: Iterable[str], incarnation: int) -> list[Peer]:
        """Create the trainers, which then load their models or a checkpoint; `incarnation` counts earlier restarts."""
        config, makers = self._config, list(makers)
        return [
            self._start(
                _TRAINER,
                ray_options,
                experience_maker_holder_name_list=self.updated_by(rank, makers),
                strategy_fn=functools.partial(build.make_strategy, config, "trainer"),
                model_fn=functools.partial(build.trainer_models, config),
                env_info=env_info,
                update_lora_weights=config.lora.rank > 0,
                options=TrainerOptions.from_run(config, self._parts, rank=rank, resume=resume, incarnation=incarnation),
            )
            for rank, (ray_options, env_info) in enumerate(self._place_trainers())
        ]

    def create_maker(self, name: str) -> Peer:
        """Create a maker; it may reuse the name of one that is gone."""
        config = self._config
        self._num_created += 1
        return self._start(
            _MAKER,
            self._options(name, config.topology.gpus_per_maker) | ({"num_cpus": 0} if self.is_private else {}),
            detached_trainer_name_list=self.trainer_names,
            strategy_fn=functools.partial(build.make_strategy, config, "maker"),
            model_fn=functools.partial(build.maker_models, config, self._parts.reward),
            sync_models_from_trainers=True,
            options=MakerOptions.from_run(config, self._parts, incarnation=self._num_created),
        )

    def updated_by(self, rank: int, makers: Iterable[str]) -> list[str]:
        """Return the makers that the trainer of this rank updates."""
        return [name for name in makers if number_of(name) % len(self.trainer_names) == rank]

    def kill(self, peer: Peer) -> None:
        """Kill an actor's process."""
        assert isinstance(peer, RayPeer)
        try:
            ray.kill(peer.handle)
        except RayError as error:
            logger.debug("could not kill %s: %s", peer.name, error)

    def _start(self, actor_class: Any, ray_options: dict[str, Any], /, **arguments: Any) -> Peer:
        return RayPeer(ray_options["name"], actor_class.options(**ray_options).remote(**arguments))

    def _find_rendezvous(self, name: str, num_gpus: float) -> "Future[Any]":
        """Find a node for rank 0 of a group: the call returns its id, its address and a free port."""
        return ray_call(name, _rendezvous.options(num_gpus=num_gpus).remote())

    def _place_trainers(self) -> list[tuple[dict[str, Any], dict[str, str] | None]]:
        """Return the actor options and env_info of each rank; a group meets on the node of rank 0."""
        names, num_gpus = self.trainer_names, self._config.topology.gpus_per_trainer
        options = [self._options(name, num_gpus) for name in names]
        if len(names) == 1:
            return [(options[0], None)]
        seconds, who = self._config.deadlines.start_seconds, names[0]
        call = self._find_rendezvous(who, num_gpus)
        node_id, address, port = wait_for_answer(call, "a node for the trainers to meet on", seconds=seconds, who=who)
        options[0]["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node_id, soft=False)
        rendezvous = {"world_size": str(len(names)), "master_addr": address, "master_port": str(port)}
        # Each actor sees only its own GPU, so its local rank is 0.
        return [(own, {"rank": str(rank), "local_rank": "0", **rendezvous}) for rank, own in enumerate(options)]

    def _options(self, name: str, num_gpus: float) -> dict[str, Any]:
        options = {"name": name, "num_cpus": 1, "num_gpus": num_gpus}
        return options | ({"scheduling_strategy": "SPREAD"} if self._config.topology.placement == "spread" else {})


def maker_names(count: int) -> list[str]:
    """Return the names of `count` makers."""
    return [f"maker-{number}" for number in range(count)]


def number_of(name: str) -> int:
    """Return the number in the name of a maker or trainer."""
    return int(name.rpartition("-")[2])


@ray.remote(num_cpus=0)
def _rendezvous() -> tuple[str, str, int]:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), port
