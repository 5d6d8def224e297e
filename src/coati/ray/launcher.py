"""Runs a config on Ray: starts makers and trainers, supervises them until training ends, and saves the model.

        driver ── workingloop.remote() ──► makers ── items ──► trainers ◄── fit.remote() ── driver
                                              ▲                   │
                                              └───── weights ─────┘
        driver ── report (every half second) ──► run log, live view

The driver has one loop. In each turn, `coati.ray.supervisor` reacts to changes of the actors; then the driver handles
stop signals and requests for more or fewer makers (`coati scale`). A stop signal ends the run and saves the model.
"""

import dataclasses
import logging
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from coati import build
from coati.build import Parts
from coati.config import RunSettings
from coati.errors import DeadlineExceeded, RunStopped, listed
from coati.monitor.run_log import RunLog, RunSnapshot
from coati.ray.actor_factory import ActorFactory
from coati.ray.cluster import HeadWatch, connected
from coati.ray.supervisor import Supervisor
from coati.run_folder import asked_makers, save_makers

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.5
_LAST_POLL_SECONDS = 5.0
_STOP_SECONDS = 60.0
_QUICK_STOP_SECONDS = 5.0


@dataclasses.dataclass(eq=False)
class DetachedRun:
    """A run of M makers and T trainers, each in its own actor."""

    config: RunSettings
    log: RunLog
    _: dataclasses.KW_ONLY
    parts: Parts | None = None
    checkpoint: Path | None = None
    address: str | None = None
    on_progress: Callable[[RunSnapshot], None] = lambda _: None
    should_stop: Callable[[], bool] = lambda: False
    log_to_driver: bool = False
    make_factory: Callable[..., ActorFactory] = ActorFactory

    def __post_init__(self) -> None:
        config = self.config = self.config.with_absolute_paths()
        self._folder = config.output_folder.resolve()
        self._factory = self.make_factory(config, parts=self.parts)
        self._supervisor = Supervisor(config, self._factory, self.log)
        self.log.state.restarts = self._supervisor.restarts.counts

    def run(self, model_path: str) -> None:
        """Train, and save the actor model to `model_path`."""
        namespace = f"coati-{self.config.run.name}-{uuid.uuid4().hex[:8]}"
        self._show("starting Ray" if self.address is None else "joining the cluster")
        where = connected(self.config, address=self.address, namespace=namespace, log_to_driver=self.log_to_driver)
        with where as is_private:
            self._head = HeadWatch()
            try:
                self._factory.is_private = is_private
                self._show("loading models")
                self._supervisor.create_all(self.checkpoint)
                self._train()
                self._show("saving the model")
                self._save(model_path, seconds=self.config.deadlines.update_seconds)
            except Exception as error:
                self._save_after_failure(f"{model_path}-at-failure", error)
                raise
            finally:
                self._supervisor.kill_all()

    def _train(self) -> None:
        supervisor = self._supervisor
        while supervisor.trainer_states != {"trained"}:
            self._turn()
        supervisor.stop()
        patience = _QUICK_STOP_SECONDS if self.should_stop() else _STOP_SECONDS
        deadline = time.monotonic() + patience
        while (late := supervisor.makers_in_loop) and time.monotonic() < deadline:
            supervisor.turn(_POLL_SECONDS)
        supervisor.fetch(_LAST_POLL_SECONDS)
        self.log.close()
        self._show("")
        if late:  # harmless: training is complete
            logger.warning("%s did not stop within %g s and will be killed", listed(late), patience)

    def _turn(self) -> None:
        supervisor = self._supervisor
        self._head.check()
        supervisor.turn(_POLL_SECONDS)
        self._show(supervisor.message)
        if supervisor.is_stopping:
            return
        if self.should_stop():
            self._stop()
        elif supervisor.has_begun and (makers := asked_makers(self._folder)) is not None:
            supervisor.target_makers = makers
            save_makers(self.config, makers)

    def _stop(self) -> None:
        if not self._supervisor.has_begun:
            raise RunStopped("stopped before training began; there was nothing to save.")
        if self._supervisor.is_starting:
            raise RunStopped("stopped while the trainers were restarting, so the model was not saved.")
        self._supervisor.stop()

    def _save(self, path: str, *, seconds: float) -> None:
        self._supervisor.save(path)
        deadline = time.monotonic() + seconds
        while self._supervisor.trainer_states != {"saved"}:
            if time.monotonic() >= deadline:
                raise DeadlineExceeded(f"waited {seconds:g} s for the trainers to save the model to {path}.")
            self._supervisor.turn(_POLL_SECONDS)

    def _save_after_failure(self, path: str, error: Exception) -> None:
        """Save the model of a single trainer, if it still answers; a group could only save together."""
        self._supervisor.is_stopping = True
        version = self.log.state.version
        if not version or self._supervisor.is_starting:
            return
        if len(self._supervisor.trainers) == 1:
            build.save_after_failure(error, lambda place: self._save(place, seconds=_STOP_SECONDS), path, version)
        else:
            error.add_note("A group of trainers cannot save the model after a failure.")

    def _show(self, message: str) -> None:
        self.log.state.message = message
        self.on_progress(self.log.snapshot())
