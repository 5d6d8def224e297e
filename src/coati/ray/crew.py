"""The actors of a run: making them as the settings say, where they are placed, and ending them."""

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from coati import assembly
from coati.config import RunConfig
from coati.errors import DeadlineExceeded, PeerDied, ScalingRefused
from coati.ledger import Membership, PromptPart, WorkShare
from coati.ray.cluster import actor_options, rendezvous
from coati.ray.detached_trainer_ppo import DetachedPPOTrainer
from coati.ray.experience_maker_holder import ExperienceMakerHolder
from coati.ray.peers import death_reason, original_error
from coati.ray.placement import Placement
from coati.ray.topology import first_updaters, makers_updated_by

logger = logging.getLogger(__name__)

# ray.remote makes actor classes of these, which mypy cannot see.
_MAKER: Any = ExperienceMakerHolder
_TRAINER: Any = DetachedPPOTrainer


class Crew:
    """Makers and trainers by name, who updates whom, and which makers have a part in what is to come."""

    def __init__(self, config: RunConfig, *, checkpoints: Path) -> None:
        self._config = config
        self._checkpoints = checkpoints
        self._deadlines = assembly.deadlines_of(config)
        topology = config.topology
        names = [f"maker-{index}" for index in range(topology.makers)]
        self._next_maker = topology.makers
        self._maker_names = names
        self._trainer_names = [f"trainer-{rank}" for rank in range(topology.trainers)]
        self._placement = Placement(config, trainers=self._trainer_names, makers=names)
        self.makers: dict[str, Any] = {}
        self.joining: dict[str, Any] = {}
        self.trainers: dict[str, Any] = {}
        self.membership = Membership(
            {name: assembly.work_share(config, maker_index=index) for index, name in enumerate(names)}
        )
        self.updaters = first_updaters(names, topology.trainers)

    def create(self, *, should_stop: Callable[[], bool]) -> None:
        """Reserve their places and make all actors; they load their models after this."""
        self._placement.reserve(deadline_seconds=self._deadlines.start, should_stop=should_stop)
        for rank, env_info in enumerate(self._meeting()):
            self._create_trainer(rank, env_info)
        for index, name in enumerate(self._maker_names):
            options = actor_options(name, self._config.topology.gpus_per_maker, **self._placement.options(name))
            share = assembly.work_share(self._config, maker_index=index)
            self.makers[name] = self._create_maker(options, share)

    def create_newcomers(self, count: int, *, is_private: bool) -> list[str]:
        """Make makers that will join; they are in `joining` until they do. ScalingRefused if there is no room."""
        gpus = self._config.topology.gpus_per_maker
        # A private Ray was given as many CPUs as the run began with. They are a number and no cores.
        cpus = 0 if is_private else 1
        free = ray.available_resources()
        for kind, need in (("CPU", float(count * cpus)), ("GPU", count * gpus)):
            if need > free.get(kind, 0.0):
                raise ScalingRefused(
                    f"{count} more {'maker needs' if count == 1 else 'makers need'} {need:g} {kind}s, but "
                    f"{free.get(kind, 0.0):g} are free. Ask for fewer, or add nodes."
                )
        names = [f"maker-{self._next_maker + index}" for index in range(count)]
        self._next_maker += count
        for name in names:
            options = {**actor_options(name, gpus), "num_cpus": cpus, **self._placement.newcomer_options()}
            self.joining[name] = self._create_maker(options, self.membership.share_in_waiting())
        return names

    def dismiss(self, names: Sequence[str]) -> None:
        """End makers that nobody counts on."""
        for name in names:
            self.updaters.pop(name, None)
            actor = self.makers.pop(name, None) or self.joining.pop(name, None)
            if actor is not None:
                _kill(actor)

    def prompts(self, part: PromptPart) -> Callable[[], Any]:
        """What makes the prompt stream of a maker, in the maker."""
        return functools.partial(assembly.make_prompts, self._config, **part._asdict())

    def end(self) -> None:
        """End everybody and give their places back."""
        for actor in (*self.trainers.values(), *self.makers.values(), *self.joining.values()):
            _kill(actor)
        try:
            self._placement.release()
        except RayError as error:
            logger.debug("could not release the placement group: %s", error)

    def _create_trainer(self, rank: int, env_info: Mapping[str, str] | None) -> None:
        config, topology, name = self._config, self._config.topology, self._trainer_names[rank]
        places = self._placement.options(name)
        if env_info is not None and rank == 0 and not places:  # where the group meets
            places = {"scheduling_strategy": NodeAffinitySchedulingStrategy(self._meeting_node, soft=False)}
        self.trainers[name] = _TRAINER.options(**actor_options(name, topology.gpus_per_trainer, **places)).remote(
            experience_maker_holder_name_list=self._maker_names,
            strategy_fn=functools.partial(assembly.make_strategy, config, "trainer"),
            model_fn=functools.partial(assembly.trainer_models, config),
            env_info=env_info,
            train_batch_size=config.train.batch_size,
            buffer_limit=topology.buffer_limit,
            eps_clip=config.algorithm.eps_clip,
            value_clip=config.algorithm.value_clip,
            update_lora_weights=topology.update_lora_weights,
            settings=assembly.ppo_settings(config),
            deadlines=self._deadlines,
            seed=config.run.seed,
            num_threads=assembly.threads_per_actor(config),
            max_staleness=topology.max_staleness if topology.max_staleness >= 0 else None,
            staleness=assembly.staleness_controller(config),
            updated_makers=makers_updated_by(rank, self._maker_names, topology.trainers),
            save_every=config.train.save_every,
            save_folder=self._checkpoints,
            verify_updates=topology.verify_updates,
            chunk_mib=topology.chunk_mib,
        )

    def _create_maker(self, options: dict[str, Any], share: WorkShare) -> Any:
        config = self._config
        return _MAKER.options(**options).remote(
            detached_trainer_name_list=self._trainer_names,
            strategy_fn=functools.partial(assembly.make_strategy, config, "maker"),
            model_fn=functools.partial(assembly.maker_models, config),
            sync_models_from_trainers=True,
            update_lora_weights=config.topology.update_lora_weights,
            **assembly.maker_settings(config),
            seed=config.run.seed,
            share=share,
            deadlines=self._deadlines,
            num_threads=assembly.threads_per_actor(config),
            samples_kept=config.logging.samples_kept,
            in_flight=config.rollout.in_flight,
            **assembly.generate_options(config),
        )

    def _meeting(self) -> list[dict[str, str] | None]:
        """`env_info` of each trainer; several meet on the node that the first of them is placed on."""
        names = self._trainer_names
        if len(names) == 1:
            return [None]
        task = rendezvous.options(**self._placement.options(names[0]))
        place = get(task.remote(), "a node for the trainers to meet at", seconds=self._deadlines.start)
        self._meeting_node, address, port = place
        return [
            {
                "rank": str(rank),
                "local_rank": "0",  # each actor sees only its own GPU
                "world_size": str(len(names)),
                "master_addr": address,
                "master_port": str(port),
            }
            for rank in range(len(names))
        ]


def get(refs: Any, what: str, *, seconds: float, who: str = "an actor") -> Any:
    """`ray.get` with a deadline, and errors that a person can read."""
    try:
        return ray.get(refs, timeout=seconds)
    except GetTimeoutError:
        raise DeadlineExceeded(f"waited {seconds:g} s for {what}.") from None
    except RayTaskError as error:
        raise original_error(error) from None
    except RayActorError as error:
        raise PeerDied(f"{who} died while waiting for {what}: {death_reason(error)}") from None


def _kill(actor: Any) -> None:
    try:
        ray.kill(actor)
    except RayError as error:
        logger.debug("could not kill an actor: %s", error)
