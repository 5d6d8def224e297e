"""Runs a config on Ray: creates makers and trainers, watches them, saves the model.

        driver ── workingloop.remote() ──► makers ── items ──► trainers ◄── fit.remote() ── driver
                                              ▲                   │
                                              └───── weights ─────┘
        driver ── records_since, progress (every half second) ──► run log, live view

The driver waits for the trainers' `fit`. Any actor that fails ends the run with its error; a stop signal
ends it with everything trained so far saved.
"""

import functools
import logging
import time
import uuid
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from coati import assembly
from coati.config import RunConfig
from coati.errors import CoatiError, DeadlineExceeded, PeerDied, RunStopped
from coati.monitor.progress import RunSnapshot
from coati.monitor.run_log import RunLog
from coati.ray.cluster import actor_options, connected, rendezvous
from coati.ray.detached_trainer_ppo import DetachedPPOTrainer
from coati.ray.experience_maker_holder import ExperienceMakerHolder
from coati.ray.maker_follower import MakerFollower
from coati.ray.peers import death_reason, original_error
from coati.ray.topology import makers_updated_by

logger = logging.getLogger(__name__)

# ray.remote makes actor classes of these, which mypy cannot see.
_MAKER: Any = ExperienceMakerHolder
_TRAINER: Any = DetachedPPOTrainer
_FOLLOWER: Any = MakerFollower

# Name, actor options and env_info of one actor.
_Place = tuple[str, dict[str, Any], dict[str, str] | None]

_POLL_SECONDS = 0.5
_STOP_SECONDS = 60.0


class DetachedRun:
    """A run of M makers and T trainers."""

    def __init__(
        self,
        config: RunConfig,
        log: RunLog,
        *,
        address: str | None = None,
        on_progress: Callable[[RunSnapshot], None] = lambda _: None,
        should_stop: Callable[[], bool] = lambda: False,
        log_to_driver: bool = False,
    ) -> None:
        self._config = assembly.with_absolute_paths(config)
        self._log = log
        self._address = address
        self._on_progress = on_progress
        self._should_stop = should_stop
        self._log_to_driver = log_to_driver
        self._deadlines = assembly.deadlines_of(config)
        self._makers: dict[str, Any] = {}
        self._trainers: dict[str, Any] = {}
        self._followers: dict[str, Any] = {}
        self._following: dict[Any, str] = {}  # loops that end only when something is wrong
        self._cursors: dict[str, int] = {}
        self._is_stopping = False
        self._checkpoints = self._config.output_folder.resolve() / "checkpoints"

    def run(self, model_path: str) -> None:
        """Train, and save the actor to `model_path`."""
        namespace = f"coati-{self._config.run.name}-{uuid.uuid4().hex[:8]}"
        self._say("starting Ray")
        with connected(self._config, address=self._address, namespace=namespace, log_to_driver=self._log_to_driver):
            try:
                self._create_actors()
                self._say("loading models")
                self._await_actors()
                self._sync_first_weights()
                self._say("")
                self._log.begin()
                self._train()
                self._say("saving the model")
                self._save(model_path)
            except Exception as error:
                self._rescue(f"{model_path}-at-failure", error)
                raise
            finally:
                self._kill_actors()

    def _create_actors(self) -> None:
        config, topology = self._config, self._config.topology
        maker_names = [f"maker-{index}" for index in range(topology.makers)]
        trainer_names = [f"trainer-{index}" for index in range(topology.trainers)]
        for rank, (name, options, env_info) in enumerate(self._places(trainer_names, topology.gpus_per_trainer)):
            self._trainers[name] = _TRAINER.options(**options).remote(
                experience_maker_holder_name_list=maker_names,
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
                updated_makers=makers_updated_by(rank, maker_names, topology.trainers),
                save_every=config.train.save_every,
                save_folder=self._checkpoints,
                verify_updates=topology.verify_updates,
                chunk_mib=topology.chunk_mib,
            )
        for index, name in enumerate(maker_names):
            (_, options, env_info), *others = self._maker_places(name)
            self._create_followers(others)
            self._makers[name] = _MAKER.options(**options).remote(
                detached_trainer_name_list=trainer_names,
                strategy_fn=functools.partial(assembly.make_strategy, config, "maker"),
                model_fn=functools.partial(assembly.maker_models, config),
                sync_models_from_trainers=True,
                update_lora_weights=topology.update_lora_weights,
                **assembly.maker_settings(config),
                seed=config.run.seed,
                share=assembly.work_share(config, maker_index=index),
                deadlines=self._deadlines,
                num_threads=assembly.threads_per_actor(config),
                samples_kept=config.logging.samples_kept,
                in_flight=config.rollout.in_flight,
                env_info=env_info,
                tensor_parallel=topology.tensor_parallel > 1,
                **assembly.generate_options(config),
            )

    def _create_followers(self, places: list[_Place]) -> None:
        """The other ranks of a tensor-parallel maker. They follow from the start: the first weights need them."""
        config = self._config
        for name, options, env_info in places:
            self._followers[name] = _FOLLOWER.options(**options).remote(
                strategy_fn=functools.partial(assembly.make_strategy, config, "maker"),
                model_fn=functools.partial(assembly.maker_models, config, with_reward=False),
                env_info=env_info,
                algorithm=config.algorithm.resolved,
                seed=config.run.seed,
                deadlines=self._deadlines,
                num_threads=assembly.threads_per_actor(config),
            )
            self._following[self._followers[name].follow.remote()] = name

    def _maker_places(self, name: str) -> list[_Place]:
        """The places of a maker's ranks: one, or the leader and its followers, together if there is room."""
        topology = self._config.topology
        names = [name, *(f"{name}-rank-{rank}" for rank in range(1, topology.tensor_parallel))]
        return self._places(names, topology.gpus_per_maker / len(names), together=True)

    def _places(self, names: list[str], num_gpus: float, *, together: bool = False) -> list[_Place]:
        """Name, actor options and env_info of each rank of a group; rank 0 is pinned to where the group meets."""
        if len(names) == 1:
            return [(names[0], actor_options(names[0], num_gpus), None)]
        task = rendezvous.options(num_gpus=num_gpus * (len(names) if together else 1))  # where there is room for them
        node_id, address, port = self._get(task.remote(), f"a node for {names[0]} and its group to meet at")
        places: list[_Place] = []
        for rank, name in enumerate(names):
            is_near = rank == 0 or together
            more = {"scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=rank > 0)} if is_near else {}
            env_info = {
                "rank": str(rank),
                "local_rank": "0",  # each actor sees only its own GPU
                "world_size": str(len(names)),
                "master_addr": address,
                "master_port": str(port),
            }
            places.append((name, actor_options(name, num_gpus, **more), env_info))
        return places

    def _await_actors(self) -> None:
        """Wait until every actor is made; one whose constructor raises ends the run with what it raised."""
        actors = self._makers | self._trainers | self._followers
        waiting = {actor.progress.remote(): name for name, actor in actors.items()}
        deadline = time.monotonic() + self._deadlines.start
        while waiting:
            if self._should_stop():
                raise RunStopped("stopped before training began; there was nothing to save.")
            if time.monotonic() >= deadline:
                late = ", ".join(sorted(waiting.values()))
                raise DeadlineExceeded(f"waited {self._deadlines.start:g} s for {late} to start and load their models.")
            self._finish_some(waiting, timeout=_POLL_SECONDS)

    def _sync_first_weights(self) -> None:
        """Makers start from the trainers' weights, whatever each of them loaded."""
        syncs = [trainer.sync_models_to_remote_makers.remote() for trainer in self._trainers.values()]
        self._get(syncs, "trainers and makers to load their models")

    def _train(self) -> None:
        config, train = self._config, self._config.train
        waiting: dict[Any, str] = {}
        for index, (name, maker) in enumerate(self._makers.items()):
            prompts = functools.partial(assembly.make_prompts, config, shard=index, num_shards=config.topology.makers)
            waiting[maker.workingloop.remote(prompts)] = name
        for name, trainer in self._trainers.items():
            waiting[trainer.fit.remote(train.total_steps, train.update_steps, train.epochs)] = name
        while any(name in self._trainers for name in waiting.values()):
            self._finish_some(waiting, timeout=_POLL_SECONDS)
            self._look()
            if self._should_stop() and not self._is_stopping:
                self._stop_all()
        self._stop_all()
        deadline = time.monotonic() + _STOP_SECONDS
        while waiting and time.monotonic() < deadline:
            self._finish_some(waiting, timeout=_POLL_SECONDS)
        self._look()
        self._log.flush()
        self._say("")
        if waiting:  # training is done and complete; a generation that nobody needs must not spoil it
            logger.warning("%s did not stop within %g s and will be ended", ", ".join(waiting.values()), _STOP_SECONDS)

    def _finish_some(self, waiting: dict[Any, str], *, timeout: float) -> None:
        """Take note of loops that have ended; a failed one raises its error here."""
        done, _ = ray.wait([*waiting, *self._following], num_returns=1, timeout=timeout)
        for ref in done:
            name = waiting.pop(ref) if ref in waiting else self._following.pop(ref)
            try:
                ray.get(ref)
            except RayTaskError as error:
                cause = original_error(error)
                if not isinstance(cause, CoatiError):
                    self._blame_dead_follower()
                cause.add_note(f"raised in {name}")
                raise cause from None
            except RayActorError as error:
                raise PeerDied(f"{name} died: {death_reason(error)}") from None

    def _blame_dead_follower(self) -> None:
        """A leader that loses a follower fails in the middle of a sum, with an error that names nobody."""
        done, _ = ray.wait(list(self._following), timeout=4 * _POLL_SECONDS) if self._following else ([], [])
        for ref in done:
            try:
                ray.get(ref)
            except RayActorError as error:
                raise PeerDied(f"{self._following[ref]} died: {death_reason(error)}") from None
            except RayTaskError as error:
                logger.debug("%s failed too: %s", self._following[ref], original_error(error))

    def _look(self) -> None:
        """Fetch what the actors have recorded and show it. A busy actor is asked again next time."""
        for name, actor in (*self._makers.items(), *self._trainers.items()):
            try:
                page = ray.get(actor.records_since.remote(self._cursors.get(name, 0)), timeout=_POLL_SECONDS * 10)
                self._cursors[name] = page.cursor
                if name in self._makers:
                    self._log.maker_records(page.records)
                elif name == next(iter(self._trainers)):
                    self._log.trainer_records(page.records)  # the ranks of a group report the same steps
                    length = actor.buffer_get_length.remote()
                    self._log.buffer_batches = ray.get(length, timeout=_POLL_SECONDS * 10)
            except (GetTimeoutError, RayActorError):
                continue  # the loops' own references tell whether it died, and why
        self._complete_checkpoints()
        self._on_progress(self._log.snapshot())

    def _complete_checkpoints(self) -> None:
        """Put the tokenizer beside weights that the trainers have saved, for transformers to find."""
        for folder in self._checkpoints.glob("version-*"):
            if not (folder / "tokenizer_config.json").exists():
                assembly.load_tokenizer(self._config).save_pretrained(folder)

    def _save(self, path: str) -> None:
        saves = [trainer.strategy_save_actor.remote(path, only_rank0=True) for trainer in self._trainers.values()]
        self._get(saves, f"the model to be saved to {path}", seconds=self._deadlines.update)
        assembly.load_tokenizer(self._config).save_pretrained(path)

    def _rescue(self, path: str, error: Exception) -> None:
        """A run failed: save what a lone trainer has learned, if it still answers. A group can only save together."""
        if self._log.trainer_version == 0 or len(self._trainers) != 1:
            return
        (trainer,) = self._trainers.values()
        try:
            ray.get(trainer.strategy_save_actor.remote(path, only_rank0=True), timeout=_STOP_SECONDS)
            assembly.load_tokenizer(self._config).save_pretrained(path)
        except (RayError, GetTimeoutError, OSError) as failure:
            logger.debug("nothing could be saved: %s", failure)
        else:
            error.add_note(f"the model as of version {self._log.trainer_version} was saved to {path}")

    def _stop_all(self) -> None:
        if not self._is_stopping:
            self._is_stopping = True
            for actor in (*self._trainers.values(), *self._makers.values()):
                actor.stop.remote()

    def _kill_actors(self) -> None:
        for actor in (*self._trainers.values(), *self._makers.values(), *self._followers.values()):
            try:
                ray.kill(actor)
            except RayError as error:
                logger.debug("could not kill an actor: %s", error)

    def _get(self, refs: Any, what: str, *, seconds: float | None = None) -> Any:
        """`ray.get` with a deadline (that for the start, by default), and errors that a person can read."""
        seconds = self._deadlines.start if seconds is None else seconds
        try:
            return ray.get(refs, timeout=seconds)
        except GetTimeoutError:
            raise DeadlineExceeded(f"waited {seconds:g} s for {what}.") from None
        except RayTaskError as error:
            raise original_error(error) from None
        except RayActorError as error:
            raise PeerDied(f"an actor died while waiting for {what}: {death_reason(error)}") from None

    def _say(self, message: str) -> None:
        self._log.message = message
        self._on_progress(self._log.snapshot())
