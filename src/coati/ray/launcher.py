"""Runs a config on Ray: starts makers and trainers, restarts the trainers if one dies, saves the model.

        driver ── workingloop.remote() ──► makers ── items ──► trainers ◄── fit.remote() ── driver
                                              ▲                   │
                                              └───── weights ─────┘
        driver ── records_since, progress (every half second) ──► run log, live view

One loop does it all: at each turn `coati.ray.supervisor` reacts to what happened to actors, and then the driver follows
stop signals and requests for makers (`coati scale`). If a trainer dies, all trainers are started again from the newest
checkpoint while the makers wait for them; that is a resume without leaving the driver. What an actor raises ends the
run. A stop signal ends it with everything trained so far saved.
"""

import logging
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from coati import build
from coati.build import Parts
from coati.config import RunSettings
from coati.counting import listed
from coati.errors import DeadlineExceeded, PeerDied, RunStopped
from coati.monitor.progress import RunSnapshot
from coati.monitor.run_log import RunLog
from coati.ray.actor_factory import ActorFactory
from coati.ray.cluster import HeadWatch, connected
from coati.ray.run_actor import Restarts, TrainerDied
from coati.ray.supervisor import Supervisor
from coati.run_folder import asked_makers, choose_start, continue_files

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.5
_LAST_POLL_SECONDS = 5.0
_STOP_SECONDS = 60.0
_QUICK_STOP_SECONDS = 5.0


class DetachedRun:
    """A run of M makers and T trainers."""

    def __init__(
        self,
        config: RunSettings,
        log: RunLog,
        *,
        parts: Parts | None = None,
        checkpoint: Path | None = None,
        address: str | None = None,
        on_progress: Callable[[RunSnapshot], None] = lambda _: None,
        should_stop: Callable[[], bool] = lambda: False,
        log_to_driver: bool = False,
        make_factory: Callable[..., ActorFactory] = ActorFactory,
    ) -> None:
        self._config = config.with_absolute_paths()
        self._log = log
        self._checkpoint = checkpoint
        self._address = address
        self._on_progress = on_progress
        self._should_stop = should_stop
        self._log_to_driver = log_to_driver
        self._folder = self._config.output_folder.resolve()
        self._remedy = f"To continue from the newest checkpoint, if there is one: coati train --resume {self._folder}"
        self._restarts = Restarts(config.topology.max_restarts, remedy=self._remedy)
        log.restarts = self._restarts.counts
        self._factory = make_factory(self._config, parts=parts)
        self._supervisor = Supervisor(
            self._config, self._factory, log, self._restarts, shows_warnings=not log_to_driver
        )
        self._restart_at: float | None = None  # all trainers
        self._pending = ""  # what is waited for until makers have joined or left

    def run(self, model_path: str) -> None:
        """Train, and save the actor to `model_path`."""
        namespace = f"coati-{self._config.run.name}-{uuid.uuid4().hex[:8]}"
        self._show("starting Ray" if self._address is None else "joining the cluster")
        where = connected(self._config, address=self._address, namespace=namespace, log_to_driver=self._log_to_driver)
        with where as is_private:
            self._head = HeadWatch()
            try:
                self._factory.is_private = is_private
                self._show("loading models")
                self._supervisor.create_all(self._checkpoint)
                self._train()
                self._show("saving the model")
                self._save(model_path, seconds=self._config.deadlines.update_seconds)
            except Exception as error:
                self._save_after_failure(f"{model_path}-at-failure", error)
                raise
            finally:
                self._supervisor.kill_all()

    def _train(self) -> None:
        supervisor = self._supervisor
        while supervisor.trainer_states != {"trained"}:
            try:
                self._turn()
            except TrainerDied as death:
                self._plan_restart(death)
        supervisor.stop()
        patience = _QUICK_STOP_SECONDS if self._should_stop() else _STOP_SECONDS
        deadline = time.monotonic() + patience
        while (late := supervisor.working_makers) and time.monotonic() < deadline:
            supervisor.turn(_POLL_SECONDS)
        supervisor.fetch(_LAST_POLL_SECONDS)
        self._log.flush()
        self._show("")
        if late:  # training is complete, and what they would still make is not needed
            logger.warning("%s did not stop within %g s and will be killed", listed(late), patience)

    def _turn(self) -> None:
        supervisor = self._supervisor
        self._head.check()
        if self._restart_at is not None and time.monotonic() >= self._restart_at:
            self._restart_trainers()
        was_starting = supervisor.is_starting
        supervisor.turn(_POLL_SECONDS)
        if was_starting and not supervisor.is_starting:
            self._log.message = ""
        self._on_progress(self._log.snapshot())
        if self._should_stop() and not supervisor.is_stopping:
            self._stop()
        if supervisor.has_begun and not supervisor.is_stopping:
            self._follow_requests()

    def _stop(self) -> None:
        if not self._supervisor.has_begun:
            raise RunStopped("stopped before training began; there was nothing to save.")
        if self._supervisor.is_starting:
            raise RunStopped(
                f"stopped while the trainers were started again, so the model could not be saved. {self._remedy}"
            )
        self._supervisor.stop()

    def _plan_restart(self, death: TrainerDied) -> None:
        """End all trainers, to start them again after a while; makers keep what they have and wait."""
        if not self._supervisor.has_begun:
            raise death
        if self._supervisor.is_stopping:
            raise PeerDied(f"{death} It was stopping. {self._remedy}")
        seconds = self._restarts.take("trainers", death.name, death.reason)
        logger.error("all trainers are started again in %g s, because %s", seconds, death)
        self._show("a trainer died; starting the trainers again")
        self._supervisor.kill_trainers()
        self._restart_at = time.monotonic() + seconds

    def _restart_trainers(self) -> None:
        """Create the trainers, to continue from the newest checkpoint. The old ones have ended their writing by now."""
        self._restart_at = None
        start = choose_start(self._config, is_restart=True)
        continue_files(self._config, self._log, start, is_restart=True)
        self._show(f"a trainer died; the run continues from {start}")
        self._supervisor.create_trainers(start.checkpoint, incarnation=self._restarts.counts["trainers"])

    def _follow_requests(self) -> None:
        """Have as many makers as were asked for last, once those asked for before have joined or left."""
        supervisor = self._supervisor
        if not supervisor.pending and (makers := asked_makers(self._folder)) is not None:
            supervisor.scale_to(makers)
        before, self._pending = self._pending, supervisor.pending
        if self._pending != before:
            self._show(self._pending)

    def _save(self, path: str, *, seconds: float) -> None:
        self._supervisor.save(path)
        deadline = time.monotonic() + seconds
        while self._supervisor.trainer_states != {"saved"}:
            if time.monotonic() >= deadline:
                raise DeadlineExceeded(f"waited {seconds:g} s for the trainers to save the model to {path}.")
            self._supervisor.turn(_POLL_SECONDS)

    def _save_after_failure(self, path: str, error: Exception) -> None:
        """Save what a lone trainer has learned, if it still answers. A group can only save together."""
        self._supervisor.is_stopping = True
        version = self._log.trainer_version
        if not version or self._supervisor.is_starting:
            return
        if len(self._supervisor.trainers) == 1:
            build.save_after_failure(error, lambda place: self._save(place, seconds=_STOP_SECONDS), path, version)
        else:
            error.add_note(f"A group of trainers cannot save the model after a failure. {self._remedy}")

    def _show(self, message: str) -> None:
        self._log.message = message
        self._on_progress(self._log.snapshot())
