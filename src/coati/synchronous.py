"""The whole system in one process: make a batch, learn from it, update the maker, repeat.

It has the trainer and the maker that Ray actors are made of, one after the other, on-policy. So it is what an
asynchronous run is held against, and where a debugger works.
"""

import dataclasses
import functools
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from coati import build
from coati.actors.host import Host
from coati.actors.maker import Maker
from coati.actors.options import MakerOptions, TrainerOptions
from coati.actors.ppo import PlainPPOTrainer
from coati.build import Parts
from coati.config import RunSettings
from coati.experience import Experience
from coati.ledger import LedgerRules
from coati.monitor.run_log import RunLog, RunSnapshot
from coati.peers import LocalPeers

_TRAINER, _MAKER = "trainer-0", "maker-0"
_IDLE_SECONDS = 0.05


class SynchronousRun(PlainPPOTrainer):
    """A trainer that has its maker work while it waits."""

    def __init__(
        self,
        config: RunSettings,
        log: RunLog,
        *,
        parts: Parts | None = None,
        checkpoint: Path | None = None,
        rules: LedgerRules | None = None,
        on_progress: Callable[[RunSnapshot], None] = lambda _: None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """`rules` are those of a run that is followed without a journal of its own; None for on-policy training."""
        if rules is None:  # whatever the topology says: here one maker does all the work, for one trainer
            alone = {"makers": 1, "trainers": 1, "lead": 0, "max_staleness": 0}
            config = config.model_copy(update={"topology": config.topology.model_copy(update=alone)})
        self._config, self._log, self._on_progress = config, log, on_progress
        self._cursors = dict.fromkeys((_MAKER, _TRAINER), (0, 0))  # of records and spans that are logged
        parts, peers, stop = parts or Parts(), LocalPeers(), _AskedStop(should_stop)
        options = TrainerOptions.of_run(config, parts, resume=checkpoint)
        super().__init__(
            [_MAKER],
            functools.partial(build.make_strategy, config, "trainer"),
            functools.partial(build.trainer_models, config),
            options=options if rules is None else dataclasses.replace(options, rules=rules, journal=None),
            host=Host(_TRAINER, peers, stop),
        )
        cards = [self.strategy.device] if self.strategy.device.type == "cuda" else []
        with torch.random.fork_rng(cards):  # what a maker draws when it is built would not be the trainer's elsewhere
            self.maker = Maker(
                [_TRAINER],
                functools.partial(build.make_strategy, config, "maker"),
                functools.partial(build.maker_models, config, parts.reward),
                update_lora_weights=config.topology.update_lora_weights,
                options=MakerOptions.of_run(config, parts),
                host=Host(_MAKER, peers, stop),
            )
        peers.add(**{_TRAINER: self, _MAKER: self.maker})
        self._making = self.maker.make_loop(functools.partial(build.make_prompts, config))

    def run(self, model_path: str) -> None:
        """Train as the config says, and save the actor to `model_path`, a folder that transformers loads."""
        self._log.state.message, self._log.state.num_made = "", self._buffer.num_made
        self._log.begin()
        try:
            self.train()
        except Exception as error:
            if self._num_batches > 0:
                build.save_after_failure(error, self.strategy_save_actor, f"{model_path}-at-failure", self._num_batches)
            raise
        finally:
            self._buffer.close()  # this process may resume the run
        self._log.close()
        self._on_progress(self._log.snapshot())
        self.strategy_save_actor(model_path)

    def train(self) -> None:
        """Train as the config says, from the version that the run has."""
        train = self._config.train
        self.sync_models_to_remote_makers()
        try:
            with self.maker.pipeline.timeline.span("wait_weights"):  # which is what it does while the trainer works
                self.fit(train.total_steps, train.update_steps, train.epochs)
        finally:
            self._report()

    def train_on(self, batch: Experience) -> None:
        """Take a training step and log it."""
        super().train_on(batch)
        self._report()
        self._on_progress(self._log.snapshot())

    def publish(self) -> None:
        """Give the maker the weights as the next version."""
        super().publish()
        self._sender.settle()

    def checkpoint(self, num_fresh: int, *, was_stopped: bool = False) -> None:
        """Save a checkpoint if one is due; all steps so far are in the log."""
        self._report()
        self._log.flush()
        super().checkpoint(num_fresh, was_stopped=was_stopped)

    def _try_batch(self, seconds: float) -> "tuple[Experience | None] | None":
        found = super()._try_batch(0.0)
        if found is None:
            self._have_work_done(seconds)
        return found

    def _are_evaluated(self, pending: int, seconds: float) -> bool:
        self._have_work_done(seconds)
        return super()._are_evaluated(pending, 0.0)

    def _have_work_done(self, seconds: float) -> None:
        """Let the maker do what there is to do. The deadline of a wait counts from the end of its work."""
        if self._making.take_turn():
            self._buffer.last_progress = time.monotonic()
        else:
            self.host.stop.wait(min(seconds, _IDLE_SECONDS))

    def _report(self) -> None:
        """Log what both have recorded, the maker's first: it is older."""
        self._log.state.num_made = self._buffer.num_made
        for name, one in ((_MAKER, self.maker), (_TRAINER, self)):
            report = one.report(*self._cursors[name])
            self._cursors[name] = report.records.cursor, report.spans.cursor
            self._log.take(name, report.records.records, report.spans.records)


class _AskedStop(threading.Event):
    """Is set when a program says so."""

    def __init__(self, should_stop: Callable[[], bool]) -> None:
        super().__init__()
        self._should_stop = should_stop

    def is_set(self) -> bool:
        return super().is_set() or self._should_stop()
