"""Runs a config on Ray: creates makers and trainers, watches them, saves the model.

        driver ── workingloop.remote() ──► makers ── items ──► trainers ◄── fit.remote() ── driver
                                              ▲                   │
                                              └───── weights ─────┘
        driver ── records_since, progress (every half second) ──► run log, live view

The driver waits for the trainers' `fit`. Makers that die are started again (`coati.ray.maker_pool`), and makers may
join and leave (`coati scale`). If a trainer dies, all trainers are started again from the newest checkpoint while the
makers wait for them; that is a resume without leaving the driver. What an actor raises ends the run. A stop signal ends
it with everything trained so far saved.
"""

import functools
import logging
import math
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from coati import build
from coati.build import Parts
from coati.config import RunSettings
from coati.counting import listed
from coati.errors import (
    CoatiError,
    PeerDied,
    PeerUnavailable,
    RemoteError,
    RunStopped,
    ScalingRefused,
    StartFailed,
)
from coati.monitor.control import RunControl
from coati.monitor.progress import RunSnapshot
from coati.monitor.records import RecordPage
from coati.monitor.run_log import RunLog
from coati.monitor.timeline import Span
from coati.peers import Peer, PendingCall, wait_all, wait_any, wait_in_slices
from coati.ray.cluster import HeadWatch, connected
from coati.ray.maker_pool import MakerPool
from coati.ray.restarts import Restarts, TrainerDied
from coati.ray.run_actors import Followed, RunActors
from coati.resume import choose_restart, continue_files
from coati.trainer.checkpoints import saved_versions

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.5
_LAST_POLL_SECONDS = 5.0
_STOP_SECONDS = 60.0
_QUICK_STOP_SECONDS = 5.0
# After a rank of a group raised: until Ray says that another one died, which breaks what they compute together.
_DEATH_SECONDS = 20.0


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
        make_actors: Callable[..., RunActors] = RunActors,
    ) -> None:
        self._config = config.with_absolute_paths()
        self._log = log
        self._address = address
        self._on_progress = on_progress
        self._should_stop = should_stop
        self._log_to_driver = log_to_driver
        self._deadlines = config.deadlines
        self._folder = self._config.output_folder.resolve()
        self._checkpoints = self._folder / "checkpoints"
        self._checkpoint = checkpoint
        self._actors = make_actors(self._config, checkpoints=self._checkpoints, parts=parts)
        self._restarts = Restarts(
            config.topology.max_restarts,
            remedy=f"To continue from the newest checkpoint, if there is one: coati train --resume {self._folder}",
        )
        log.restarts = self._restarts.counts
        self._followed: dict[str, Followed] = {}
        self._is_stopping = False
        self._is_scaling = False

    def run(self, model_path: str) -> None:
        """Train, and save the actor to `model_path`."""
        namespace = f"coati-{self._config.run.name}-{uuid.uuid4().hex[:8]}"
        self._show("starting Ray" if self._address is None else "joining the cluster")
        where = connected(self._config, address=self._address, namespace=namespace, log_to_driver=self._log_to_driver)
        with where as is_private:
            self._head = HeadWatch()
            self._control = RunControl(self._folder, makers=self._config.topology.makers)
            self._pool = MakerPool(
                self._actors,
                functools.partial(build.make_prompts, self._config),
                restarts=self._restarts,
                before_end=self._take_leave,
                after_death=self._forget,
            )
            ending = "failed"
            try:
                self._actors.create(self._checkpoint, should_stop=self._should_stop, is_private=is_private)
                self._show("loading models")
                self._load(self._actors.running, self._check_start)
                self._show("")
                self._log.begin()
                self._train()
                self._show("saving the model")
                self._save(model_path, seconds=self._deadlines.update_seconds)
                ending = "stopped" if self._should_stop() else "completed"
            except Exception as error:
                self._save_after_failure(f"{model_path}-at-failure", error)
                raise
            finally:
                self._actors.kill_all()
                self._control.report(status="ended", message=ending)

    def _load(self, actors: Mapping[str, Peer], on_turn: Callable[[], None]) -> None:
        """Wait until actors have loaded their models. Makers begin with the trainers' weights, whatever they loaded."""
        seconds = self._deadlines.start_seconds
        what = "all actors to start and load their models"
        self._await_all(actors, "progress", what=what, seconds=seconds, on_turn=on_turn)
        self._actors.tell_trainers()  # makers may have left or joined meanwhile
        sync = "sync_models_to_remote_makers"
        self._await_all(self._actors.trainers, sync, what="the first weights", seconds=seconds, on_turn=on_turn)

    def _check_start(self) -> None:
        self._head.check()
        if self._should_stop():
            raise RunStopped("stopped before training began; there was nothing to save.")

    def _train(self) -> None:
        for name in self._actors.makers:
            self._pool.start(name)
        self._control.report(status="running")
        death: TrainerDied | None = None
        while True:
            try:
                if death is not None:
                    self._restart_trainers(death)
                self._fit()
                break
            except TrainerDied as error:
                death = error
        self._stop_all()
        patience = _QUICK_STOP_SECONDS if self._should_stop() else _STOP_SECONDS
        deadline = time.monotonic() + patience
        while self._pool.working and time.monotonic() < deadline:
            self._actors.repeat_lost_orders()
            self._pool.wind_up(_POLL_SECONDS)
        self.poll_actors(timeout=_LAST_POLL_SECONDS)
        self._log.flush()
        self._show("")
        if late := self._pool.working:  # training is complete, and what they would still make is not needed
            logger.warning("%s did not stop within %g s and will be killed", listed(late), patience)

    def _fit(self) -> None:
        """Have all trainers train to the end, or to a stop."""
        train = self._config.train
        fits = {
            trainer.call("fit", train.total_steps, train.update_steps, train.epochs): name
            for name, trainer in self._actors.trainers.items()
        }
        while fits:
            self._finish_some(fits, timeout=_POLL_SECONDS)
            self._tend()

    def _tend(self) -> None:
        """Do what is due at each turn of the driver's loop."""
        self._head.check()
        self._actors.repeat_lost_orders()
        self.poll_actors(timeout=_POLL_SECONDS)
        if self._should_stop() and not self._is_stopping:
            self._stop_all()
        if not self._is_stopping:
            self._follow_makers()

    def _restart_trainers(self, death: TrainerDied) -> None:
        """Start all trainers again from the newest checkpoint, while makers keep what they have and wait."""
        if self._is_stopping:
            raise PeerDied(f"{death} It was stopping; to continue it: coati train --resume {self._folder}")
        seconds = self._restarts.take("trainers", death.name, death.reason)
        logger.error("all trainers are started again in %g s, because %s", seconds, death)
        self._show("a trainer died; starting the trainers again")
        for name in self._actors.trainers:
            self._forget(name)
        self._actors.dismiss_trainers()
        due = time.monotonic() + seconds
        while (left := due - time.monotonic()) > 0:
            self._tend_restart()
            time.sleep(min(left, _POLL_SECONDS))
        # Not before: what the old trainers still wrote, they have written.
        start = choose_restart(self._config)
        continue_files(self._config, self._log, start, is_restart=True)
        self._show(f"a trainer died; the run continues from {start}")
        number = self._restarts.counts["trainers"]
        self._actors.create_trainers(start.checkpoint, incarnation=number)
        for followed in self._followed.values():
            followed.is_stalled = False  # if it still is, the new trainers are told too
        self._load(self._actors.trainers, self._tend_restart)
        self._show("")

    def _tend_restart(self) -> None:
        self._tend()
        if self._is_stopping:
            raise RunStopped(
                "stopped while the trainers were started again, so the model could not be saved. To continue from the "
                f"newest checkpoint: coati train --resume {self._folder}"
            )

    def _follow_makers(self) -> None:
        """Replace makers that died, and have as many as were asked for last; report it."""
        request = None if self._is_scaling else self._control.new_request()
        try:
            if request is not None:
                self._control.begin(request)
                self._is_scaling = True
                self._pool.scale_to(request.makers)
            message = self._pool.advance()
        except ScalingRefused as error:
            logger.warning("%s", error)
            self._end_scaling("refused", str(error))
            return
        if self._is_scaling and not message:
            self._end_scaling("done", "")
            return
        self._control.report(makers=self._pool.size, **({"message": message} if self._is_scaling else {}))
        if message:
            self._show(message)

    def _end_scaling(self, answer: str, message: str) -> None:
        self._is_scaling = False
        self._control.report(answer=answer, message=message, makers=self._pool.size)
        self._show(message)

    def _finish_some(
        self,
        waiting: dict[PendingCall, str],
        *,
        timeout: float,
        repeat: Callable[[str], PendingCall] | None = None,
    ) -> None:
        """Remove calls that have returned; raise the error of one that failed. `repeat` makes one again that was lost,
        by the actor's name."""
        for call in wait_any(waiting, timeout):
            name = waiting.pop(call)
            try:
                call.result(0)
            except RemoteError as error:
                if isinstance(error.cause, RuntimeError) and not isinstance(error.cause, CoatiError):
                    self._look_for_death(waiting)
                error.cause.add_note(f"raised in {name}")
                raise error.cause from None
            except (PeerDied, PeerUnavailable) as error:
                if repeat is not None and isinstance(error, PeerUnavailable):
                    waiting[repeat(name)] = name
                    continue
                is_fault = name not in self._actors.trainers or isinstance(error, StartFailed)
                if is_fault and len(self._actors.trainers) > 1:
                    self._look_for_death(waiting)
                raise (PeerDied(f"{name} died: {error}") if is_fault else TrainerDied(name, error)) from None

    def _look_for_death(self, waiting: dict[PendingCall, str]) -> None:
        """Raise the death of a trainer, if there is one: others fail because of it, and may be the first to say so."""
        deadline = time.monotonic() + _DEATH_SECONDS
        while waiting and (left := deadline - time.monotonic()) > 0:
            self._finish_some(waiting, timeout=left)

    def poll_actors(self, *, timeout: float) -> None:
        """Fetch what the actors have recorded and show it. All are asked at once; a busy one is read later."""
        for name, actor in self._actors.running.items():
            followed = self._followed.setdefault(name, Followed())
            if not followed.calls:
                followed.calls = [
                    actor.call("records_since", followed.record_cursor),
                    actor.call("spans_since", followed.span_cursor),
                    *([actor.call("buffer_get_length")] if self._is_first_trainer(name) else []),
                ]
                followed.asked_at = time.monotonic()
        done = set(wait_all([call for followed in self._followed.values() for call in followed.calls], timeout))
        for name, followed in self._followed.items():
            if done.issuperset(followed.calls):
                calls, followed.calls = followed.calls, []
                try:
                    self._read(name, followed, *(call.result(0) for call in calls))
                except (RemoteError, PeerDied, PeerUnavailable) as error:
                    logger.debug("%s could not be asked: %s", name, error)  # its loop fails too, and says why
            if name in self._actors.makers:
                self._note_stall(name, followed)
        self._on_progress(self._log.snapshot())

    def _note_stall(self, name: str, followed: Followed) -> None:
        """Have the leases of a maker that does not answer granted to others: what it delivers later is refused."""
        seconds = self._deadlines.stall_seconds
        was_stalled = followed.is_stalled
        if name in self._actors.loading:
            followed.asked_at = time.monotonic()
        followed.is_stalled = bool(followed.calls) and time.monotonic() - followed.asked_at >= seconds
        if followed.is_stalled and not was_stalled:
            logger.warning("%s has not answered for %g s; its work is given to others", name, seconds)
            self._actors.release(name, "does not respond")
        elif was_stalled and not followed.is_stalled:
            logger.warning("%s answers again", name)

    def _read(
        self, name: str, followed: Followed, page: RecordPage[Any], spans: RecordPage[Span], buffer_batches: int = 0
    ) -> None:
        followed.record_cursor, followed.span_cursor = page.cursor, spans.cursor
        self._log.spans(name, spans.records)
        if not self._log_to_driver:  # else Ray shows them with the rest of the actor's log
            self._log.warnings(name, page.records)
        if name not in self._actors.trainers:
            self._log.maker_records(page.records)
        elif self._is_first_trainer(name):  # the ranks of a group report the same steps
            self._log.trainer_records(page.records)
            self._log.buffer_batches = buffer_batches

    def _is_first_trainer(self, name: str) -> bool:
        return name == next(iter(self._actors.trainers), None)

    def _take_leave(self, names: Sequence[str]) -> None:
        """Fetch what makers that have finished recorded, and note when they left."""
        self.poll_actors(timeout=_LAST_POLL_SECONDS)
        for name in names:
            self._forget(name)

    def _forget(self, name: str) -> None:
        """A maker is gone; another may take its name."""
        self._followed.pop(name, None)
        self._log.left(name)

    def _save(self, path: str, *, seconds: float) -> None:
        what = f"the model to be saved to {path}"
        self._await_all(self._actors.trainers, "strategy_save_actor", path, True, what=what, seconds=seconds)

    def _save_after_failure(self, path: str, error: Exception) -> None:
        """Save what a lone trainer has learned, if it still answers. A group can only save together."""
        version = self._log.trainer_version
        if version and len(self._actors.trainers) == 1:
            build.save_after_failure(error, lambda place: self._save(place, seconds=_STOP_SECONDS), path, version)
        elif version and self._actors.trainers:
            saved, every = saved_versions(self._checkpoints), self._config.train.save_every
            where = (
                f"its newest checkpoint is {saved[0]}"
                if saved
                else f"it had no checkpoint (train.save_every is {every})"
            )
            error.add_note(f"a group of trainers cannot save alone; {where}.")

    def _stop_all(self) -> None:
        if not self._is_stopping:
            self._is_stopping = True
            for actor in self._actors.running.values():
                self._actors.order(actor, "stop")

    def _await_all(
        self,
        actors: Mapping[str, Peer],
        method: str,
        *args: Any,
        what: str,
        seconds: float,
        on_turn: Callable[[], None] = lambda: None,
    ) -> None:
        """Call a method of several actors at once and wait for all; the first error is raised at once, because others
        may wait for the one that failed. A call that was lost is repeated; not in a group, which works together."""
        calls = {actor.call(method, *args): name for name, actor in actors.items()}
        repeat = None if len(self._actors.trainers) > 1 else lambda name: actors[name].call(method, *args)

        def have_ended(timeout: float) -> bool:
            on_turn()
            self._finish_some(calls, timeout=timeout, repeat=repeat)
            return not calls

        wait_in_slices(
            have_ended,
            deadline_seconds=seconds,
            what=lambda: f"{what} ({listed(sorted(calls.values()))} did not answer)",
            slice_seconds=_POLL_SECONDS,
            message_every=math.inf,
        )

    def _show(self, message: str) -> None:
        self._log.message = message
        self._on_progress(self._log.snapshot())
