"""The actors of a run: creating them from the settings, placing them, and ending them.

Every maker sends experience to every trainer. The trainers of a group hold the same weights, so each maker is updated
by exactly one of them, by its number, and keeps it when others join or leave: two trainers would change their lists at
different versions, and the maker might miss one.
"""

import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from coati import build
from coati.build import Parts
from coati.config import RunSettings
from coati.counting import counted
from coati.errors import DeadlineExceeded, PeerDied, PeerUnavailable, RemoteError, ScalingRefused
from coati.peers import Peer, PendingCall, answer
from coati.ray.detached_trainer_ppo import DetachedPPOTrainer
from coati.ray.experience_maker_holder import ExperienceMakerHolder
from coati.ray.options import MakerOptions, TrainerOptions
from coati.ray.peers import RayHost
from coati.ray.placement import Placement

logger = logging.getLogger(__name__)

# ray.remote makes actor classes of these, which mypy cannot see.
_MAKER: Any = ExperienceMakerHolder
_TRAINER: Any = DetachedPPOTrainer

# Name, actor options and env_info of one actor.
_Place = tuple[str, dict[str, Any], dict[str, str] | None]


@dataclasses.dataclass
class Followed:
    """What the driver has read of an actor, and what it has asked."""

    record_cursor: int = 0
    span_cursor: int = 0
    calls: list[PendingCall] = dataclasses.field(default_factory=list)
    asked_at: float = 0.0
    is_stalled: bool = False


class RunActors:
    """Makers and trainers by name."""

    def __init__(
        self,
        config: RunSettings,
        *,
        checkpoints: Path,
        host: RayHost | None = None,
        parts: Parts | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._host = host or RayHost()
        self._clock = clock
        self._config = config
        self._parts = parts or Parts()
        self._checkpoints = checkpoints
        self._deadlines = config.deadlines
        topology = config.topology
        names = [f"maker-{index}" for index in range(topology.makers)]
        self._next_maker = topology.makers
        self._num_created = 0  # makers
        self._maker_names = names
        self._trainer_names = [f"trainer-{rank}" for rank in range(topology.trainers)]
        self._placement = Placement(config, trainers=self._trainer_names, makers=names)
        self.makers: dict[str, Peer] = {}
        self.trainers: dict[str, Peer] = {}
        self.loading: dict[str, tuple[PendingCall, float]] = {}
        """Makers that joined and load their models: what they were asked, and when they were created."""
        self._is_private = False
        # What actors were told without waiting for it, by actor, method and the maker that it is about.
        self._orders: dict[tuple[str, str, str], tuple[PendingCall, Peer, tuple[Any, ...]]] = {}

    @property
    def running(self) -> dict[str, Peer]:
        """All makers and trainers."""
        return {**self.makers, **self.trainers}

    def create(self, resume: Path | None = None, *, should_stop: Callable[[], bool], is_private: bool = False) -> None:
        """Reserve resources and create all actors; they load their models after this, or a checkpoint.

        A private Ray was started with one CPU for each actor of the run, so makers that join later get none.
        """
        self._is_private = is_private
        self._placement.reserve(deadline_seconds=self._deadlines.start_seconds, should_stop=should_stop)
        self.create_trainers(resume, makers=self._maker_names)
        for name in self._maker_names:
            self.makers[name] = self._create_maker(self._maker_options(name))

    @property
    def _loaded(self) -> list[str]:
        return [name for name in self.makers if name not in self.loading]

    def create_trainers(
        self, resume: Path | None, *, makers: Iterable[str] | None = None, incarnation: int = 0
    ) -> None:
        """Create the trainers, to continue from a checkpoint. `incarnation` counts how often they were before."""
        makers = self._loaded if makers is None else makers
        places = self._places(self._trainer_names, self._config.topology.gpus_per_trainer)
        for rank, place in enumerate(places):
            self._create_trainer(rank, place, self._updated_by(rank, makers), resume, incarnation)

    def dismiss_trainers(self) -> None:
        """Kill all trainers."""
        for trainer in self.trainers.values():
            self._host.kill(trainer)
        self.trainers = {}

    def name_newcomers(self, count: int) -> list[str]:
        """Return names for makers that are to join. Raises ScalingRefused if the cluster has no room for them."""
        free = self._host.free_resources()
        num_gpus = count * self._config.topology.gpus_per_maker
        for kind, need in (("CPU", 0.0 if self._is_private else float(count)), ("GPU", num_gpus)):
            room = free.get(kind, 0.0)
            if need > room:
                raise ScalingRefused(
                    f"{counted(count, 'more maker needs', 'more makers need')} {counted(need, kind)}, but "
                    f"{room:g} {'is' if room == 1 else 'are'} free. Ask for fewer, or add nodes."
                )
        names = [f"maker-{self._next_maker + index}" for index in range(count)]
        self._next_maker += count
        return names

    def create_newcomer(self, name: str) -> None:
        """Create a maker that joins, or one that takes the place and the name of one that died."""
        options = self._maker_options(name)
        if "scheduling_strategy" not in options:
            options |= self._placement.newcomer_options()
        if self._is_private:
            options["num_cpus"] = 0
        self.makers[name] = self._create_maker(options)
        self.loading[name] = self.makers[name].call("progress"), self._clock()

    def note_loaded(self) -> None:
        """Have trainers update the makers that have loaded their models, and not before: an update would wait for it.

        One that takes too long is killed, so that its loop ends.
        """
        limit = self._deadlines.start_seconds
        for name, (call, since) in list(self.loading.items()):
            if call.done():
                del self.loading[name]
                try:
                    call.result(0.0)
                except PeerUnavailable:  # it was lost
                    self.loading[name] = self.makers[name].call("progress"), since
                except (PeerDied, RemoteError) as error:
                    logger.debug("%s did not load: %s", name, error)  # its loop fails too, and says why
                else:
                    self.tell_trainers()
            elif self._clock() - since > limit:
                logger.error("%s did not load within %g s (deadlines.start_seconds) and is killed", name, limit)
                self.loading[name] = call, float("inf")
                self._host.kill(self.makers[name])

    def dismiss(self, name: str) -> None:
        """Kill a maker."""
        self.loading.pop(name, None)
        if (actor := self.makers.pop(name, None)) is not None:
            self._host.kill(actor)

    def release(self, name: str, reason: str) -> None:
        """Have the trainers grant a maker's leases to others, and not wait for it."""
        for trainer in self.trainers.values():
            self.order(trainer, "release_maker", name, reason, about=name)

    def tell_trainers(self) -> None:
        """Send each trainer the names of the makers that it updates now."""
        for rank, trainer in enumerate(self.trainers.values()):
            self.order(trainer, "change_makers", self._updated_by(rank, self._loaded))

    def order(self, actor: Peer, method: str, *args: Any, about: str = "") -> None:
        """Call a method that may be repeated, and do not wait for it. A later order `about` the same replaces it."""
        self._orders[actor.name, method, about] = actor.call(method, *args), actor, args

    def repeat_lost_orders(self) -> None:
        """Give orders again whose connection broke."""
        for (name, method, about), (call, actor, args) in list(self._orders.items()):
            if call.done():
                del self._orders[name, method, about]
                try:
                    call.result(0.0)
                except PeerUnavailable:
                    self.order(actor, method, *args, about=about)
                except PeerDied as error:
                    logger.debug("%s did not take %s: %s", name, method, error)
                except RemoteError as error:
                    if not isinstance(error.cause, DeadlineExceeded):  # that of a step it waited for, for example
                        error.cause.add_note(f"raised in {name} by {method}")
                        raise error.cause from None
                    logger.warning("%s is told again: %s", name, error.cause)
                    self.order(actor, method, *args, about=about)

    def _updated_by(self, rank: int, makers: Iterable[str]) -> list[str]:
        """The makers whose number falls to a trainer, as in dealing cards."""
        return [name for name in makers if int(name.rpartition("-")[2]) % len(self._trainer_names) == rank]

    def kill_all(self) -> None:
        """Kill all actors and release their resources."""
        for actor in self.running.values():
            self._host.kill(actor)
        try:
            self._placement.release()
        except RayError as error:
            logger.debug("could not release the placement group: %s", error)

    def _create_trainer(
        self, rank: int, place: _Place, makers: list[str], resume: Path | None, incarnation: int
    ) -> None:
        config = self._config
        name, options, env_info = place
        self.trainers[name] = self._host.start(
            _TRAINER,
            options,
            experience_maker_holder_name_list=makers,
            strategy_fn=functools.partial(build.make_strategy, config, "trainer"),
            model_fn=functools.partial(build.trainer_models, config),
            env_info=env_info,
            train_batch_size=config.train.batch_size,
            options=TrainerOptions(
                train=config.train,
                algorithm=config.algorithm,
                topology=config.topology,
                deadlines=self._deadlines,
                seed=config.run.seed,
                num_threads=build.threads_per_actor(config),
                max_response_tokens=config.rollout.max_new_tokens,
                save_folder=self._checkpoints,
                resume=resume,
                incarnation=incarnation,
                tokenizer=functools.partial(build.load_tokenizer, config),
                rules=build.ledger_rules(config, stream=rank),
                journal=build.journal_path(config, stream=rank),
                run_name=config.run.name,
                learner=self._parts.learner,
            ),
        )

    def _create_maker(self, options: dict[str, Any]) -> Peer:
        config = self._config
        self._num_created += 1
        maker: Peer = self._host.start(
            _MAKER,
            options,
            detached_trainer_name_list=self._trainer_names,
            strategy_fn=functools.partial(build.make_strategy, config, "maker"),
            model_fn=functools.partial(build.maker_models, config, self._parts.reward),
            sync_models_from_trainers=True,
            update_lora_weights=config.topology.update_lora_weights,
            options=MakerOptions(
                algorithm=config.algorithm,
                rollout=config.rollout,
                deadlines=self._deadlines,
                logging=config.logging,
                seed=config.run.seed,
                num_threads=build.threads_per_actor(config),
                incarnation=self._num_created,
                rules=build.ledger_rules(config),
                maker=self._parts.maker,
            ),
        )
        return maker

    def _maker_options(self, name: str) -> dict[str, Any]:
        return _actor_options(name, self._config.topology.gpus_per_maker, self._placement.options(name))

    def _places(self, names: list[str], num_gpus: float) -> list[_Place]:
        """Name, actor options and env_info of each rank of a group; rank 0 is where the group meets."""
        places = {name: self._placement.options(name) for name in names}
        if len(names) == 1:
            return [(name, _actor_options(name, num_gpus, options), None) for name, options in places.items()]
        call = self._host.find_meeting(names[0], places[names[0]] or {"num_gpus": num_gpus})
        seconds = self._deadlines.start_seconds
        node_id, address, port = answer(call, "a node where the trainers can meet", seconds=seconds, who=names[0])
        found: list[_Place] = []
        for rank, name in enumerate(names):
            near = {"scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=False)}
            options = places[name] or (near if rank == 0 else {})
            env_info = {
                "rank": str(rank),
                "local_rank": "0",  # each actor sees only its own GPU
                "world_size": str(len(names)),
                "master_addr": address,
                "master_port": str(port),
            }
            found.append((name, _actor_options(name, num_gpus, options), env_info))
        return found


def _actor_options(name: str, num_gpus: float, options: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "num_cpus": 1, "num_gpus": num_gpus, **options}
