"""A maker: turns prompts into experience for the trainers, and receives new weights while it works.

`workingloop` requests leases, makes experience and sends it (`coati.experience_maker.work_loop`). Concurrently, in
another thread, `update_experience_maker` stages and verifies weights and offers them to the models, which commit them
between two tokens (`rollout.in_flight`) or when nothing is being generated or scored.
"""

import logging
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from coati.actors.callbacks import ExperienceMakerPerformanceEvaluator, MakerCallback, num_parameters
from coati.actors.host import Host, Progress, Worker, apply_env_info, set_up_gpu
from coati.actors.options import MakerOptions
from coati.devices import set_up_cpu
from coati.errors import ConfigError
from coati.evaluation.work import EvaluationWork
from coati.experience_maker.base import ExperienceMaker, build_maker
from coati.experience_maker.delivery import ItemSender
from coati.experience_maker.pipeline import ExperiencePipeline
from coati.experience_maker.work_loop import WorkLoop
from coati.experience_maker.work_source import LeasedPrompts, LoaderPrompts, WorkSource
from coati.peers import wait_in_slices
from coati.rollout import GenerateOptions
from coati.trainer.strategies import Strategy
from coati.weights.message import Chunk, WeightMessage
from coati.weights.receiver import WeightReceiver
from coati.weights.served import ServedModels

logger = logging.getLogger(__name__)


class Maker(Worker):
    """Holds four models, makes experience with them, and sends it to trainers.

    `model_fn()` returns (actor, critic, reward_model, initial_model); the critic is None for algorithms without one,
    and the reward model may be a `RewardScorer` over text. With `options.rules`, the maker works only on leases that
    its trainers grant. Pass generate options as keywords or in `options.rollout`.
    """

    def __init__(
        self,
        detached_trainer_name_list: Sequence[str],
        strategy_fn: Callable[[], Strategy],
        model_fn: Callable[[], tuple[nn.Module, nn.Module | None, Any, nn.Module | None]],
        env_info: Mapping[str, str] | None = None,
        sync_models_from_trainers: bool = False,
        buffer_cpu_offload: bool = True,
        kl_coef: float = 0.1,
        callbacks: Sequence[MakerCallback] = (),
        eval_performance: bool = False,
        debug: bool = False,
        update_lora_weights: bool = False,
        *,
        options: MakerOptions | None = None,
        host: Host | None = None,
        **generate_kwargs: Any,
    ) -> None:
        if not detached_trainer_name_list:
            raise ConfigError("detached_trainer_name_list must name at least one trainer, got an empty list.")
        self._options = options = options or MakerOptions()
        generate_kwargs = options.generate_options(generate_kwargs)
        GenerateOptions.parse(**generate_kwargs)  # raise for an unknown option now, not in the first batch
        apply_env_info(env_info)
        set_up_cpu(options.num_threads)
        self._sync_models_from_trainers = sync_models_from_trainers
        self._buffer_cpu_offload = buffer_cpu_offload
        super().__init__(host, callbacks, debug=debug)
        self._name = self.host.name or f"maker-{os.getpid()}"
        strategy = strategy_fn()
        set_up_gpu(strategy.device)
        # Not in `model_init_context`: a model inside a reward would never get its weights.
        models = [strategy.prepare(model) if isinstance(model, nn.Module) else model for model in model_fn()]
        maker = build_maker(
            options.maker,
            models,
            algorithm=options.algorithm.with_arguments("options.algorithm", kl_coef=("kl_coef", kl_coef, 0.1)),
            engine=options.rollout or "reference",
            seed=options.seed,
        )
        self._served = ServedModels(maker.trained_models, name=f"maker {self._name}")
        self._receiver = WeightReceiver(self._served, allow_partial_plain=update_lora_weights)
        self.pipeline = self._make_pipeline(maker, generate_kwargs)
        self._trainer_names = tuple(detached_trainer_name_list)
        self._sender = ItemSender(
            self._trainer_names,
            peers=self.host.peers,
            maker_name=self._name,
            deadlines=options.deadlines,
            should_stop=self.host.stop.is_set,
            timeline=self._timeline,
        )
        self._evaluations = self._make_evaluations(strategy)
        if eval_performance:
            models = [maker.actor, maker.critic, maker.initial_model, maker.reward_model]
            self.callbacks.append(ExperienceMakerPerformanceEvaluator(*map(num_parameters, models)))

    def workingloop(self, dataloader_fn: Callable[[], Any], num_epochs: int = 1, num_steps: int = 0) -> None:
        """Make and deliver experience from `num_steps` batches of `dataloader_fn()`, or from `num_epochs` passes."""
        self._state = "working"
        self._timeline.lap()  # the timeline measures this thread from here on
        try:
            with self._timeline.span("wait_weights"):
                self._await_first_weights()
            self._timeline.lap()  # the metrics of this loop exclude earlier time
            self.notify("on_loop_start")
            self.make_loop(dataloader_fn, num_epochs, num_steps).run()
            self._sender.flush()
            self.notify("on_loop_end")
        except BaseException:
            self._state = "failed"
            raise
        self._state = "finished"

    def make_loop(self, dataloader_fn: Callable[[], Any], num_epochs: int = 1, num_steps: int = 0) -> WorkLoop:
        """Create the loop that `workingloop` runs, over leased prompts in a run, else over the loader's batches."""
        return WorkLoop(
            self.pipeline,
            self._make_source(dataloader_fn, num_epochs, num_steps),
            self._sender,
            deadlines=self._options.deadlines,
            stop=self.host.stop,
            notify=self.notify,
            record=self._records.append,
            samples_kept=self._options.logging.samples_kept,
            offload_to_cpu=self._buffer_cpu_offload,
        )

    def update_experience_maker(
        self,
        new_actor_state_dict: Mapping[str, Any] | None = None,
        new_actor_lora_config_dict: Mapping[str, Any] | None = None,
        new_critic_state_dict: Mapping[str, Any] | None = None,
        new_critic_lora_config_dict: Mapping[str, Any] | None = None,
        fully_update: bool = False,
        chunk_start: bool | None = None,
        chunk_end: bool | None = None,
        *,
        message: WeightMessage | None = None,
    ) -> None:
        """Receive part of a weight update: a message, or state dicts from `chunk_start=True` to `chunk_end=True`.

        An update is verified as a whole and committed at once; if it is invalid, the maker keeps its current weights.
        """
        if message is not None:
            self._receiver.receive(message)
        else:
            self._receiver.receive_plain(
                {"actor": new_actor_state_dict, "critic": new_critic_state_dict},
                {"actor": new_actor_lora_config_dict, "critic": new_critic_lora_config_dict},
                fully_update=fully_update,
                chunk_start=chunk_start,
                chunk_end=chunk_end,
            )

    def sharing_fault(self, probe: Chunk) -> str | None:
        """Return why this maker cannot read weights from a trainer's memory; None if it can."""
        return self._receiver.sharing_fault(probe)

    def progress(self) -> Progress:
        """Return this maker's progress."""
        served = self._served
        return Progress(self._state, served.version, self._sender.num_delivered, has_weights=served.is_synced)

    def _make_pipeline(self, maker: ExperienceMaker, generate_kwargs: dict[str, Any]) -> ExperiencePipeline:
        rollout = self._options.rollout
        return ExperiencePipeline(
            maker,
            self._served,
            generate_kwargs=generate_kwargs,
            # Prompts without ids get numbers that start at a different value in each maker.
            first_sample_id=(zlib.crc32(self._name.encode()) & 0x7FFFFF) << 40,
            commit_between_tokens=rollout is not None and rollout.in_flight,
            timeline=self._timeline,
        )

    def _make_evaluations(self, strategy: Strategy) -> EvaluationWork | None:
        make = self._options.evaluations
        return make and make(
            strategy,
            self._served,
            peers=self.host.peers,
            trainer=self._trainer_names[0],
            maker=self._name,
            should_stop=self.host.stop.is_set,
        )

    def _make_source(self, dataloader_fn: Callable[[], Any], num_epochs: int, num_steps: int) -> WorkSource:
        rules = self._options.rules
        if rules is None:
            return LoaderPrompts(dataloader_fn, num_epochs, num_steps, maker_name=self._name)
        return LeasedPrompts(
            dataloader_fn(),  # a `PromptStream`, which looks up leased prompts by number
            self._trainer_names,
            rules,
            self._served,
            peers=self.host.peers,
            maker_name=self._name,
            incarnation=self._options.incarnation,
            deadlines=self._options.deadlines,
            should_stop=self.host.stop.is_set,
            other_work=(lambda: None) if self._evaluations is None else self._evaluations.poll,
        )

    def _await_first_weights(self) -> None:
        if self._sync_models_from_trainers:
            logger.info("maker %s is waiting for a full weight update from its trainers", self._name)
            # In a run only a maker that joins late waits here: until the trainer publishes, or waits for samples.
            deadlines, is_in_run = self._options.deadlines, self._options.rules is not None
            wait_in_slices(
                lambda seconds: self.host.stop.is_set() or self._served.wait_for_full_update(seconds),
                deadline_seconds=deadlines.batch_seconds if is_in_run else deadlines.start_seconds,
                what=lambda: (
                    f"a full weight update of maker {self._name} (call sync_models_to_remote_makers on its trainer)"
                ),
            )
