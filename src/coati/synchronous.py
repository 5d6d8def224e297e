"""The whole system in one process: make a batch, learn from it, update the maker, repeat.

It runs the same objects as the Ray actors (leases, pipeline, learner, weight sender and receiver), one after the other,
on-policy. So it is what an asynchronous run is held against, and where a debugger works.
"""

import dataclasses
import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from coati import build
from coati.build import Parts
from coati.config import RunSettings
from coati.cpu import set_up_cpu
from coati.errors import DeadlineExceeded
from coati.evaluation.schedule import EvalSchedule
from coati.evaluation.work import EvaluationWork
from coati.experience import Experience
from coati.experience_buffer.leased import LeasedBuffer
from coati.experience_maker.base import PromptBatch, build_maker
from coati.experience_maker.delivery import ItemSender
from coati.experience_maker.leased_prompts import LeasedPrompts
from coati.experience_maker.pipeline import ExperiencePipeline
from coati.experience_maker.work_loop import WorkLoop
from coati.ledger import age_metrics
from coati.ledger.journal import Journal
from coati.monitor.progress import RunSnapshot
from coati.monitor.run_log import RunLog
from coati.monitor.timeline import Timeline
from coati.peers import LocalPeers
from coati.trainer.checkpoints import Checkpoints
from coati.trainer.fit_loop import FitLoop, FitSteps
from coati.trainer.ppo import PPOLearner
from coati.trainer.step_numbers import plain_metrics
from coati.weights.receiver import WeightReceiver
from coati.weights.recipients import Recipients
from coati.weights.sender import WeightSender
from coati.weights.served import ServedModels


class SynchronousRun(FitSteps):
    """One maker and one trainer taking turns."""

    def __init__(
        self,
        config: RunSettings,
        log: RunLog,
        *,
        parts: Parts | None = None,
        checkpoint: Path | None = None,
        buffer: LeasedBuffer | None = None,
        on_progress: Callable[[RunSnapshot], None] = lambda _: None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """`buffer` decides what is made and trained on; None for one that keeps the run on-policy."""
        set_up_cpu(build.threads_per_actor(config))
        self._config = config
        self._parts = parts or Parts()
        self._log = log
        self._on_progress = on_progress
        self._should_stop = should_stop
        self._version = 0
        self._timeline = Timeline()
        self._num_spans = 0
        self._num_batches = 0
        self._buffer = buffer or self._make_buffer(is_resumed=checkpoint is not None)
        self._rules = self._buffer.rules
        self._learner = self._make_learner()
        with torch.random.fork_rng([]):  # what a maker draws when it is built would not be the trainer's elsewhere
            self._pipeline = self._make_pipeline()
        self._sender = self._make_sender()
        self._checkpoints = Checkpoints(
            config.output_folder / "checkpoints",
            self._learner,
            self._buffer,
            train=config.train,
            tokenizer=functools.partial(build.load_tokenizer, config),
            write_seconds=config.deadlines.update_seconds,
        )
        self._early_stop = threading.Event()
        self._evaluations = EvalSchedule(
            config.eval,
            record=lambda record: log.trainer_records([record]),
            stop=self._early_stop.set,
        )
        peers = LocalPeers(
            trainer=SimpleNamespace(
                lease=self._buffer.lease,
                buffer_extend=self._buffer.extend,
                next_evaluation=self._evaluations.grant,
                evaluated=self._evaluations.report,
            )
        )
        self._prompts = self._make_source(peers)
        self._delivery = ItemSender(["trainer"], peers=peers, sender="this process", deadlines=config.deadlines)
        self._work = WorkLoop(
            self._pipeline,
            self._prompts,
            self._delivery,
            record=lambda record: log.maker_records([record]),
            samples_kept=config.logging.samples_kept,
        )
        self._num_done = 0  # fresh batches, of a run that is resumed
        if checkpoint is not None:
            counters = self._checkpoints.restore(checkpoint)
            self._version, self._num_done = counters["version"], counters["fresh"]
            self._num_batches = counters["batches"]
            self._evaluations.restore(counters.get("evaluations"))

    def run(self, model_path: str) -> None:
        """Train as the config says, and save the actor to `model_path`, a folder that transformers loads."""
        log = self._log
        log.message = ""
        log.begin()
        try:
            self.fit()
            self._log_spans()
        except Exception as error:
            try:
                self._checkpoints.wait()
            except DeadlineExceeded as late:  # the run's own error is the one to report
                error.add_note(str(late))
            if self._num_batches > 0:
                build.save_after_failure(error, self.save, f"{model_path}-at-failure", self._num_batches)
            raise
        finally:
            self._buffer.close()  # this process may resume the run
        log.flush()
        self._on_progress(log.snapshot())
        self.save(model_path)

    def fit(self) -> None:
        """Train as the config says, from the version that the run has."""
        train = self._config.train
        self.send(fully_update=True)
        FitLoop(self, seed=self._config.run.seed).run(
            train.total_steps, train.update_steps, train.epochs, num_done=self._num_done
        )

    def save(self, path: str) -> None:
        """Write the actor and the tokenizer to a folder."""
        tokenizer = build.load_tokenizer(self._config)
        self._learner.strategy.save_model(self._learner.actor, path, add=tokenizer.save_pretrained)

    def _make_buffer(self, *, is_resumed: bool) -> LeasedBuffer:
        config = self._config
        # Whatever the topology says: here one maker does all the work, for one trainer.
        rules = dataclasses.replace(build.ledger_rules(config), lead=0, max_staleness=0, num_streams=1)
        path = build.journal_path(config)
        open_journal = functools.partial(Journal, path, rules, run=config.run.name, is_resumed=is_resumed)
        return LeasedBuffer(rules, config.train.batch_size, open_journal=open_journal)

    def _make_learner(self) -> PPOLearner:
        config = self._config
        strategy = build.make_strategy(config, "trainer")
        with strategy.model_init_context():
            models = build.trainer_models(config)
        return self._parts.learner(
            *models,
            strategy,
            config.train,
            config.algorithm,
            max_staleness=-1 if self._rules.max_staleness is None else self._rules.max_staleness,
            max_response_tokens=config.rollout.max_new_tokens,
            optimizer_class=strategy.optimizer_class,
        )

    def _make_pipeline(self) -> ExperiencePipeline:
        config = self._config
        models = build.maker_models(config, self._parts.reward)
        strategy = self._learner.strategy
        maker = build_maker(
            self._parts.maker,
            [strategy.prepare(model) if isinstance(model, nn.Module) else model for model in models],
            algorithm=config.algorithm,
            engine=config.rollout,
            seed=config.run.seed,
        )
        return ExperiencePipeline(
            maker,
            ServedModels(maker.trained_models),
            generate_kwargs=config.rollout.generate_options,
            in_flight=config.rollout.in_flight,
            timeline=self._timeline,
        )

    def _make_source(self, peers: LocalPeers) -> LeasedPrompts:
        served, stream, maker = self._pipeline.served, build.make_prompts(self._config), "this process"
        models = (self._learner.strategy, served)
        options: dict[str, Any] = {"peers": peers, "maker": maker, "should_stop": self._should_stop}
        evaluations = EvaluationWork(self._config, self._parts.reward, *models, trainer="trainer", **options)
        prompts = LeasedPrompts(stream, ["trainer"], self._rules, served, other_work=evaluations.poll, **options)
        return prompts

    def next_batch(self) -> Experience | None:
        """Make experience until it fills a batch; None after a stop."""
        while (batch := self._buffer.try_sample(0.0)) is None and not self.should_stop():
            work = self._prompts.poll()
            if isinstance(work, PromptBatch):
                self._work.make(work)
                self._delivery.flush()
            elif work is not None:
                work.run(self._pipeline)
        return batch

    def train_on(self, batch: Experience) -> dict[str, float]:
        """Take a training step and log it."""
        with self._timeline.span("train"):
            metrics = plain_metrics(self._learner.step(batch))
        self._num_batches += 1
        metrics |= {
            "version": float(self._version),
            "train/samples": float(batch.num_samples),
            **age_metrics(batch, self._version),
        }
        self._log.trainer_records([{"batch": self._num_batches, "version": self._version, "metrics": metrics}])
        self._log_spans()
        self._on_progress(self._log.snapshot())
        return metrics

    def _log_spans(self) -> None:
        page = self._timeline.since(self._num_spans)
        self._num_spans = page.cursor
        self._log.spans("this process", page.records)

    def _make_sender(self) -> WeightSender:
        """What a trainer sends its makers with, and a receiver in this process."""
        receiver = WeightReceiver(self._pipeline.served)
        peers = LocalPeers(maker=SimpleNamespace(update_experience_maker=receiver.receive))
        return WeightSender(
            self._learner.models,
            self._learner.strategy,
            Recipients(peers, ["maker"], self._config.deadlines),
            self._config.topology,
            timeline=self._timeline,
            on_read=self.note_weights if self._learner.device.type == "cpu" else None,
        )

    def send(self, *, fully_update: bool = False) -> None:
        """Send the maker the weights of this version."""
        self._sender.send(self._version, fully_update=fully_update)

    def note_weights(self, version: int, digests: Mapping[str, Mapping[str, str]], makers: Sequence[str] = ()) -> None:
        """Have the journal hold the digests of weights that are sent."""
        self._buffer.note_weights(version, digests, makers)

    def publish(self) -> None:
        """Give the maker the weights as the next version."""
        self._version += 1
        self._buffer.mark_trained(self._version)
        with self._timeline.span("publish"):
            self.send()
        self._log.trainer_version = self._version

    def checkpoint(self, num_fresh: int, *, was_stopped: bool = False) -> None:
        """Save a checkpoint if `train.save_every` says so, or the run is stopped; all steps so far are in the log."""
        if self._checkpoints.is_due(self._version, num_fresh, was_stopped=was_stopped):
            with self._timeline.span("save"):
                self._log.flush()
                counters = {"fresh": num_fresh, "batches": self._num_batches, "evaluations": self._evaluations.state()}
                self._checkpoints.save(self._version, counters)

    def finish(self) -> None:
        """Wait for the last checkpoint, and evaluate the final model; raise if training made no progress."""
        self._checkpoints.wait()
        self._evaluations.end(self._version)
        while self._evaluations.pending and not self.should_stop():
            work = self._prompts.poll()
            assert work is not None
            assert not isinstance(work, PromptBatch)  # all samples are made
            work.run(self._pipeline)
        self._learner.check_progress()

    def should_stop(self) -> bool:
        """Whether the run was told to stop, or does not improve any more."""
        return self._early_stop.is_set() or self._should_stop()
