"""The whole system in one process: make a batch, train on it, update the maker, repeat.

It runs the same trainer and maker classes as the Ray actors, one after the other and on-policy. Use it as the reference
for asynchronous runs, and with a debugger.
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
    """A trainer that runs its maker while it waits."""

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
        """`rules` are those of a run to replay, without writing a journal; None for on-policy training."""
        if rules is None:  # one maker and one trainer, whatever the topology says
            alone = {"makers": 1, "trainers": 1, "lead": 0, "max_staleness": 0}
            config = config.model_copy(update={"topology": config.topology.model_copy(update=alone)})
        self._config, self._log, self._on_progress = config, log, on_progress
        self._cursors = dict.fromkeys((_MAKER, _TRAINER), (0, 0))  # records and spans logged so far
        parts, peers, stop = parts or Parts(), LocalPeers(), _PolledStop(should_stop)
        options = TrainerOptions.from_run(config, parts, resume=checkpoint)
        super().__init__(
            [_MAKER],
            functools.partial(build.make_strategy, config, "trainer"),
            functools.partial(build.trainer_models, config),
            update_lora_weights=config.lora.rank > 0,
            options=options if rules is None else dataclasses.replace(options, rules=rules, journal=None),
            host=Host(_TRAINER, peers, stop),
        )
        gpus = [self.strategy.device] if self.strategy.device.type == "cuda" else []
        with torch.random.fork_rng(gpus):  # building the maker must not advance the trainer's random state
            self.maker = Maker(
                [_TRAINER],
                functools.partial(build.make_strategy, config, "maker"),
                functools.partial(build.maker_models, config, parts.reward),
                options=MakerOptions.from_run(config, parts),
                host=Host(_MAKER, peers, stop),
            )
        peers.targets |= {_TRAINER: self, _MAKER: self.maker}
        self._maker_loop = self.maker.make_loop(functools.partial(build.make_prompts, config))

    def run(self, model_path: str) -> None:
        """Train as configured, and save the actor to the folder `model_path`, loadable with transformers."""
        self._log.state.message, self._log.state.num_made = "", self._buffer.num_made
        self._log.begin()
        try:
            self.train()
        except Exception as error:
            if self._num_batches > 0:
                build.save_after_failure(error, self.strategy_save_actor, f"{model_path}-at-failure", self._num_batches)
            raise
        finally:
            self._buffer.close()  # so that this process can resume the run
        self._log.close()
        self._on_progress(self._log.snapshot())
        self.strategy_save_actor(model_path)

    def train(self) -> None:
        """Train as configured, from the current version."""
        train = self._config.train
        self.sync_models_to_remote_makers()
        try:
            with self.maker.pipeline.timeline.span("wait_weights"):  # the state of the maker while the trainer works
                self.fit(train.total_steps, train.update_steps, train.epochs)
        finally:
            self._report()

    def train_on(self, batch: Experience) -> None:
        """Take a training step and log it."""
        super().train_on(batch)
        self._report()
        self._on_progress(self._log.snapshot())

    def publish(self) -> None:
        """Update the maker to the next version of the weights."""
        super().publish()
        self._sender.wait_until_idle()

    def checkpoint(self, num_fresh: int, *, was_stopped: bool = False) -> None:
        """Save a checkpoint if one is due, after writing all steps so far to the log."""
        self._report()
        self._log.flush()
        super().checkpoint(num_fresh, was_stopped=was_stopped)

    def _try_batch(self, seconds: float) -> "tuple[Experience | None] | None":
        found = super()._try_batch(0.0)
        if found is None:
            self._run_maker(seconds)
        return found

    def _are_evaluated(self, pending: int, seconds: float) -> bool:
        self._run_maker(seconds)
        return super()._are_evaluated(pending, 0.0)

    def _run_maker(self, seconds: float) -> None:
        """Run the maker for one turn, or sleep if it has no work. The buffer's deadline restarts after each turn."""
        if self._maker_loop.take_turn():
            self._buffer.last_progress = time.monotonic()
        else:
            self.host.stop.wait(min(seconds, _IDLE_SECONDS))

    def _report(self) -> None:
        """Log the new records of both actors, the maker's first because they are older."""
        self._log.state.num_made = self._buffer.num_made
        for name, one in ((_MAKER, self.maker), (_TRAINER, self)):
            report = one.report(*self._cursors[name])
            self._cursors[name] = report.records.cursor, report.spans.cursor
            self._log.add_report(name, report.records.records, report.spans.records)


class _PolledStop(threading.Event):
    """An event that is also set once `should_stop` returns True."""

    def __init__(self, should_stop: Callable[[], bool]) -> None:
        super().__init__()
        self._should_stop = should_stop

    def is_set(self) -> bool:
        return super().is_set() or self._should_stop()
