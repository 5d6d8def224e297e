"""The PPO trainer: a learner, the replay buffer that feeds it, and the channel that sends weights to its makers."""

import contextlib
import dataclasses
import functools
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import nn

from coati.actors.callbacks import TrainerCallback, TrainerPerformanceEvaluator, num_parameters
from coati.actors.host import Host, apply_env_info, set_up_gpu
from coati.actors.options import TrainerOptions
from coati.actors.trainer import Trainer
from coati.devices import set_up_cpu
from coati.errors import CheckpointError, CoatiError, DeadlineExceeded, StalenessExceeded
from coati.evaluation.schedule import EvalJob
from coati.experience import Experience
from coati.experience_buffer.buffer import LeasedBuffer
from coati.models import as_critic
from coati.monitor.records import READ_KEPT
from coati.monitor.timeline import trainer_metrics
from coati.peers import wait_in_slices
from coati.trainer.checkpoints import Checkpoints
from coati.trainer.ppo import PPOLearner
from coati.trainer.steps import plain_metrics
from coati.trainer.strategies import Strategy
from coati.weights.message import SharedGpuMemory
from coati.weights.sender import Recipients, WeightSender

logger = logging.getLogger(__name__)


class PlainPPOTrainer(Trainer):
    """Trains actor and critic with PPO or a variant of it, and sends their weights to the makers after each episode.

    `model_fn()` returns (actor, critic); the critic is None for algorithms without one. An argument that contradicts a
    setting in `options` is an error. To change the loss, pass a subclass of `PPOLearner` as `options.learner`.
    """

    def __init__(
        self,
        experience_maker_holder_name_list: Sequence[str],
        strategy_fn: Callable[[], Strategy],
        model_fn: Callable[[], tuple[nn.Module, nn.Module | None]],
        env_info: Mapping[str, str] | None = None,
        train_batch_size: int = 8,
        buffer_limit: int = 0,
        eps_clip: float = 0.2,
        value_clip: float = 0.4,
        dataloader_pin_memory: bool = True,
        callbacks: Sequence[TrainerCallback] = (),
        eval_performance: bool = False,
        debug: bool = False,
        update_lora_weights: bool = False,
        *,
        options: TrainerOptions | None = None,
        host: Host | None = None,
    ) -> None:
        options = options or TrainerOptions()
        clips = {"eps_clip": ("eps_clip", eps_clip, 0.2), "value_clip": ("value_clip", value_clip, 0.4)}
        self.options = options = dataclasses.replace(
            options,
            train=options.train.with_arguments("options.train", train_batch_size=("batch_size", train_batch_size, 8)),
            algorithm=options.algorithm.with_arguments("options.algorithm", **clips),
        )
        apply_env_info(env_info)
        set_up_cpu(options.num_threads)
        self.has_reference = options.has_reference
        self._leased: LeasedBuffer | None = None
        if (rules := options.rules) is not None:
            self._leased = LeasedBuffer(
                rules, options.train.batch_size, open_journal=options.journal, incarnation=options.incarnation
            )
        super().__init__(  # before the models are built: it records their warnings
            experience_maker_holder_name_list,
            train_batch_size=options.train.batch_size,
            buffer_limit=buffer_limit,
            dataloader_pin_memory=dataloader_pin_memory,
            callbacks=callbacks,
            debug=debug,
            deadlines=options.deadlines,
            seed=options.seed,
            buffer=self._leased,
            host=host,
        )
        self.strategy = strategy_fn()
        set_up_gpu(self.strategy.device)
        with self.strategy.model_init_context():
            actor, critic = model_fn()
        critic = None if critic is None else as_critic(critic)
        if eval_performance:
            self.callbacks.append(TrainerPerformanceEvaluator(num_parameters(actor), num_parameters(critic)))
        self._learner = self.make_learner(actor, critic)
        self._max_staleness = options.topology.max_staleness  # negative: unbounded
        self._version_metrics: dict[str, float] = {}  # of the latest version
        self._num_steps_unpublished = 0
        self._sender = self._make_sender(only_trained=update_lora_weights)
        self._sync: Future[None] | None = None  # the last full update
        # Held while weights change and while they are read for publishing, so that no update mixes two versions.
        self._weights_lock = threading.RLock()  # reentrant: a sync publishes while it holds the lock
        self._checkpoints = self._make_checkpoints()
        self._evaluations = options.evaluations(record=self._records.append, stop=self.stop)
        self._resume()

    def make_learner(self, actor: nn.Module, critic: nn.Module | None) -> PPOLearner:
        """Create the learner. Override this, or pass `options.learner`, to change how it learns."""
        return self.options.learner(
            actor,
            critic,
            self.strategy,
            self.options.train,
            self.options.algorithm,
            max_staleness=self.options.topology.max_staleness,
            max_response_tokens=self.options.max_response_tokens,
            optimizer_class=self.strategy.optimizer_class,
        )

    def _make_checkpoints(self) -> Checkpoints:
        return Checkpoints(
            self.options.save_folder,
            self._learner,
            self._leased,
            train=self.options.train,
            tokenizer=self.options.tokenizer,
            write_seconds=self.deadlines.update_seconds,
        )

    def _resume(self) -> None:
        """Resume from the checkpoint, or restart the buffer if this trainer replaces one that had no checkpoint."""
        if self.options.resume is None:
            if self.options.incarnation and self._leased is not None:
                self._leased.start_over()
            return
        counters = self._checkpoints.restore(self.options.resume)
        self.version, self._num_done = counters["version"], counters["fresh"]
        self._num_batches, self._num_samples = counters["batches"], counters.get("samples", 0)
        self._evaluations.restore(counters.get("evaluations"))
        for record in counters.get("records", ()):
            self._records.append(record)

    def _make_sender(self, *, only_trained: bool) -> WeightSender:
        device = self.strategy.device
        return WeightSender(
            self._learner.models,
            self.strategy,
            Recipients(self.host.peers, self.maker_names, self.deadlines),
            self.options.topology,
            timeline=self._timeline,
            only_trained=only_trained,
            source=self.host.name or "trainer",
            shared=SharedGpuMemory(device) if device.type == "cuda" and self.host.can_share_gpu_memory else None,
            incarnation=self.options.incarnation,
            on_read=None if self._leased is None or device.type != "cpu" else self._note_weights,
        )

    def _note_weights(self, version: int, digests: Mapping[str, Mapping[str, str]], makers: Sequence[str]) -> None:
        """Record the digests of sent weights in the journal."""
        assert self._leased is not None
        self._leased.note_weights(version, digests, makers)

    def training_step(self, experience: Experience) -> dict[str, float]:
        """Run one optimizer step; the metrics include `actor_loss` and, with a critic, `critic_loss`."""
        ages = experience.age_metrics(self.version)
        oldest = ages["train/age_max"]
        if 0 <= self._max_staleness < oldest:
            raise StalenessExceeded(
                f"a batch holds samples {oldest:g} versions old, but max_staleness is {self._max_staleness}. "
                "Make makers lease their work (options.rules, with the same bound), or leave max_staleness out."
            )
        with self._hold_weights():
            metrics = plain_metrics(self._learner.step(experience))
            self._num_steps_unpublished += 1
        return {**metrics, "version": float(self.version), "train/samples": float(experience.num_samples), **ages}

    def sync_models_to_remote_makers(self, **kwargs: Any) -> None:
        """Send all weights to the makers and wait until they have verified them.

        Steps taken since the last version, by hand or by the current episode of `fit`, become a version of their own.
        """
        self._refuse_in_group_fit("sync its makers", "fit sends new weights after every episode")
        self._sender.wait_until_idle()  # before taking the lock: a training step may be waiting for it
        with self._hold_weights():
            if self._num_steps_unpublished > 0:
                if self._leased is not None and self._state == "working":
                    raise CoatiError(
                        "a trainer that leases work cannot sync its makers in the middle of an episode, because its "
                        "leases count versions. fit sends new weights after every episode; sync before or after fit."
                    )
                self.version += 1
            super().sync_models_to_remote_makers(**kwargs)
        if self._sync is not None:
            self._sender.end_update(self._sync)

    def change_makers(self, maker_names: Sequence[str]) -> None:
        """Send weights to these makers from now on; new ones get all weights with the next version."""
        with self._hold_weights():  # not in the middle of an update
            self._sender.change_makers(maker_names)

    def next_evaluation(self, maker: str, version: int, incarnation: int) -> EvalJob | None:
        """Return an evaluation that is due for this maker to run; None if there is none."""
        return self._evaluations.grant(maker, version, incarnation)

    def evaluated(self, job: EvalJob, found: Mapping[str, Any]) -> bool:
        """Accept a maker's evaluation results; False if the job was reassigned."""
        return self._evaluations.report(EvalJob(*job), found)

    def release_maker(self, maker: str, reason: str) -> None:
        """Reassign the leases and evaluations of a maker that is gone or unresponsive, and stop waiting for it."""
        self._sender.recipients.abandon(maker)
        self._evaluations.release(maker)
        super().release_maker(maker, reason)

    def _update_late_makers(self) -> None:
        """Send the current weights to makers that missed this version, without waiting for the next one.

        They include the steps of the current episode, so with `update_steps` above 1 one version number can stand for
        two sets of weights. Parameters that are sharded over ranks are gathered by all of them, in `_try_batch`.
        """
        self._sender.check()
        is_sharded = self.strategy.shards_parameters and self.strategy.world_size > 1
        if self._sender.recipients.need_all and not is_sharded:
            self._send_to_late_makers()

    def _send_to_late_makers(self) -> None:
        with self._hold_weights():
            update = self._sender.begin_update(self.version, fully_update=True, only_behind=True)
        self._sender.end_update(update)

    def _update_remote_makers(self, fully_update: bool = False, **config: Any) -> None:
        """Send the weights as version `self.version`; `config` may hold `shard_size` in MiB.

        Returns once the weights have been read. `fit` raises errors that occur later; for a full update, the sync does.
        """
        metrics = dict(self._version_metrics)
        record = {"batch": self._num_batches, "version": self.version, "metrics": metrics}

        def note(seconds: float, num_bytes: int) -> None:
            metrics.update({"weights/publish_seconds": seconds, "weights/bytes": float(num_bytes)})
            self._records.append(record)

        with self._hold_weights():
            if fully_update:
                self._sync = self._sender.begin_update(self.version, fully_update=True, on_arrival=note, **config)
            else:
                self._sender.publish(self.version, on_arrival=note, **config)
            self._num_steps_unpublished = 0

    def strategy_save_actor(self, path: str, only_rank0: bool = False) -> None:
        """Save the actor and `options.tokenizer` as a folder that transformers can load; all ranks must call this."""
        self._refuse_in_group_fit("save", "Use save_every and save_folder")
        try:
            self._checkpoints.wait()  # after a failure nothing else waits for it before the process ends
        except DeadlineExceeded as error:  # a stuck checkpoint must not prevent saving the model
            logger.error("%s", error)

        def add(folder: Path) -> None:
            if (load := self.options.tokenizer) is not None:
                load().save_pretrained(folder)
            (folder / "coati.json").write_text(json.dumps({"version": self.version}))  # shown by `coati eval`

        with self._hold_weights():
            self.strategy.save_model(self._learner.actor, path, only_rank0, add=add)

    def strategy_save_critic(self, path: str, only_rank0: bool = False) -> None:
        """Save the critic as a folder that `Critic.from_pretrained` can load."""
        self._refuse_in_group_fit("save", "Use save_every and save_folder")
        if self._learner.critic is None:
            raise CheckpointError(f"there is no critic to save to {path}: this trainer's algorithm does not use one.")
        with self._hold_weights():
            self.strategy.save_model(self._learner.critic, path, only_rank0)

    def publish(self) -> None:
        """Send the weights to the makers as the next version, through `_update_remote_makers` and the sender."""
        self._version_metrics = trainer_metrics(self._timeline.lap())
        with self._hold_weights():  # a concurrent sync may create a version too
            super().publish()

    def checkpoint(self, num_fresh: int, *, was_stopped: bool = False) -> None:
        """Save a checkpoint if `train.save_every` makes one due, or if the run was stopped."""
        was_stopped = was_stopped and self._leased is not None
        if self._checkpoints.is_due(self.version, num_fresh, was_stopped=was_stopped):
            with self._timeline.span("save"), self._hold_weights():
                # The driver may not have fetched the latest records when the run ends.
                records = self._records.since(0).records[-READ_KEPT:]
                counters = {
                    "fresh": num_fresh,
                    "batches": self._num_batches,
                    "samples": self._num_samples,
                    "records": [record for record in records if "warning" not in record],
                    "evaluations": self._evaluations.state(),
                }
                self._checkpoints.save(self.version, counters)

    def finish(self) -> None:
        """Wait until the makers have verified and evaluated the last update; raise its errors."""
        self._sender.wait_until_idle()
        self._sender.check()
        self._checkpoints.wait()
        self._evaluations.end(self.version)
        while (pending := len(self._evaluations.pending)) and not self.should_stop():  # each has its own deadline
            wait_in_slices(
                functools.partial(self._are_evaluated, pending),
                deadline_seconds=self.deadlines.batch_seconds,
                what=lambda: f"makers to finish the evaluation of {', '.join(self._evaluations.pending)}",
                last_progress=lambda: self._buffer.last_progress,
            )
        self._learner.health.check_progress()

    def _are_evaluated(self, pending: int, seconds: float) -> bool:
        """Wait up to `seconds`; True if fewer than `pending` evaluations remain or the trainer should stop."""
        if self.should_stop() or self._evaluations.wait(seconds) or len(self._evaluations.pending) < pending:
            return True
        self._update_late_makers()  # a restarted maker may have to run one
        return False

    def _refuse_in_group_fit(self, what: str, instead: str) -> None:
        """Raise if this group of ranks is in `fit`: a collective call outside the loop would deadlock them."""
        if self.strategy.world_size > 1 and self._state == "working":
            raise CoatiError(
                f"one of {self.strategy.world_size} trainers was asked to {what} while they train together, which "
                f"would block them all. {instead}, or {what} before or after fit."
            )

    @contextlib.contextmanager
    def _hold_weights(self) -> Iterator[None]:
        """Hold the lock on the weights; raises DeadlineExceeded if it is not free within `deadlines.update_seconds`."""
        seconds = self.deadlines.update_seconds
        if not self._weights_lock.acquire(timeout=seconds):
            raise DeadlineExceeded(f"waited {seconds:g} s for the lock on the trainer's weights, held by another call.")
        try:
            yield
        finally:
            self._weights_lock.release()

    def _try_batch(self, seconds: float) -> "tuple[Experience | None] | None":
        """Return an answer once every rank has one, so that all take the same steps. Ranks without data train on none.

        A stop of any rank ends the wait of all. Until then all ranks go on updating makers, whose samples others need.
        """
        if self.strategy.world_size == 1:
            return super()._try_batch(seconds)
        self._found = self._found or super()._try_batch(seconds)
        batch = None if self._found is None else self._found[0]
        with self._timeline.span("wait_ranks"):
            is_behind = self._sender.recipients.need_all
            mine = [self._found is None, batch is not None, self.should_stop(), is_behind]
            sums = self.strategy.all_reduce_sum(torch.tensor(mine, dtype=torch.int64, device=self.strategy.device))
            num_waiting, num_with_data, num_stopped, num_behind = sums.tolist()
        if num_waiting and not num_stopped:
            if num_behind and (self.strategy.shards_parameters or is_behind):
                self._send_to_late_makers()
            if self._found is not None or num_behind:  # it waits for other ranks, or for a maker that was updated now
                self._buffer.last_progress = time.monotonic()
            return None
        self._found = None
        if num_stopped:
            self.stop()
            if batch is not None:
                self._buffer.give_back(batch)
        return (None if num_stopped or not num_with_data else batch or Experience.blank(0),)
