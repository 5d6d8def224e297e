"""Supervises the actors of a run: one table of actors and their states, and one function that reacts to changes.

    maker      loading ─► loaded ─► working ─► leaving
    trainer    loading ─► loaded ─► syncing ─► synced ─► training ─► trained

An actor is loaded when it answers its first call. Trainers hear of a maker only then, because an update would wait for
a maker that is still loading. A maker is working once it has its first weights. All trainers change state together.

Each turn creates missing makers, whether they died or the target number rose (`coati scale`), and stops surplus ones.
The leases of a maker that is gone or unresponsive are reassigned. If a trainer dies, all trainers restart from the
newest checkpoint. An exception raised in an actor ends the run, unless the actor is a maker that never started working.
"""

import functools
import logging
import time
from concurrent.futures import FIRST_COMPLETED, wait
from pathlib import Path

from coati import build
from coati.actors.host import Report
from coati.config import RunSettings
from coati.errors import (
    CoatiError,
    DeadlineExceeded,
    PeerDied,
    PeerUnavailable,
    RemoteError,
    StartFailed,
    counted,
    listed,
)
from coati.monitor.run_log import RunLog
from coati.ray.actor_factory import ActorFactory, maker_names, number_of
from coati.ray.run_actor import Restarts, RunActor
from coati.run_folder import StartingPoint, choose_start, continue_files

logger = logging.getLogger(__name__)

_LAST_FETCH_SECONDS = 5.0
NAME_SECONDS = 0.5  # time until Ray frees the name of a killed actor
# How long to wait, after a rank raised, for Ray to report the death of another rank, which may be the cause.
_DEATH_SECONDS = 20.0


class Supervisor:
    """Supervises the makers and trainers of a run. Every wait is bounded."""

    def __init__(self, config: RunSettings, factory: ActorFactory, log: RunLog) -> None:
        self._config = config
        self._factory = factory
        self._log = log
        self.restarts = Restarts(config.topology.max_restarts)
        self.makers: dict[str, RunActor] = {}
        self.trainers: dict[str, RunActor] = {}
        self.target_makers = config.topology.makers  # target number of makers; may be changed at any time
        self.has_begun = False  # whether training has begun; before that, any death ends the run
        self.is_stopping = False  # from then on, failures of makers are ignored
        self._makers_to_replace = {*maker_names(self.target_makers)}  # the first ones, and any that worked
        self._maker_restart_times: dict[str, float] = {}  # the earliest time at which a maker's name may be used again
        self._trainer_restart_time = 0.0
        self._start = StartingPoint()  # where the restarted trainers continue
        self._symptom: tuple[Exception, float] | None = None  # a trainer's exception, and when to raise it

    @property
    def actors(self) -> list[RunActor]:
        """All makers and trainers."""
        return [*self.makers.values(), *self.trainers.values()]

    @property
    def trainer_states(self) -> set[str]:
        """The distinct states of all trainers: one state, except while some have finished a job before others."""
        return {trainer.state for trainer in self.trainers.values()}

    @property
    def is_starting(self) -> bool:
        """Whether the trainers are missing, loading, or sending their first weights."""
        return not self.trainers or not self.trainer_states.isdisjoint({"loading", "loaded", "syncing", "synced"})

    @property
    def makers_in_loop(self) -> list[str]:
        """Names of the makers whose loops are running."""
        return [name for name, maker in self.makers.items() if maker.job is not None]

    @property
    def message(self) -> str:
        """The progress message: what the run waits for; empty while all makers and trainers are working."""
        if self.is_stopping:
            return ""
        if self.is_starting and self.has_begun:
            what = f"the run continues from {self._start}" if self.trainers else "restarting all trainers"
            return f"a trainer died; {what}"
        if self.is_starting:
            return "loading models"
        num_working = sum(maker.state == "working" for maker in self.makers.values())
        if num_working == len(self.makers) == self.target_makers:
            return ""
        return f"{num_working} of {counted(self.target_makers, 'maker')} working"

    # Called by the launcher

    def create_all(self, resume: Path | None) -> None:
        """Create the initial actors of the run."""
        self._create_trainers(resume)
        self._reconcile_makers()

    def _create_trainers(self, resume: Path | None) -> None:
        incarnation = self.restarts.counts["trainers"]
        makers = self._loaded_maker_names() if self.has_begun else maker_names(self.target_makers)
        peers = self._factory.create_trainers(resume, makers=makers, incarnation=incarnation)
        self.trainers = {peer.name: RunActor(peer.name, peer) for peer in peers}
        for maker in self.makers.values():
            maker.is_stalled = False  # detected again if it still is, so that the new trainers learn of it

    def save(self, path: str) -> None:
        """Make the trainers save the model; their state becomes "saved"."""
        self._symptom = None  # after a failure it has been raised already
        for trainer in self.trainers.values():
            trainer.start_job("saving", "strategy_save_actor", path, True)

    def stop(self) -> None:
        """Tell all actors to end their loops."""
        if not self.is_stopping:
            self.is_stopping = True
            for actor in self.actors:
                actor.send_command("stop")

    def kill_all(self) -> None:
        """Kill all actors."""
        for actor in self.actors:
            self._factory.kill(actor.peer)

    # The state machine

    def turn(self, timeout: float) -> None:
        """Wait up to `timeout` seconds for a job to end, and again for reports; react, or raise what ends the run."""
        if not self.actors:
            time.sleep(timeout)
        for actor in self.actors:
            actor.retry_lost_commands()
        jobs = {actor.job: actor for actor in self.actors if actor.job is not None}
        ended = [jobs[job] for job in wait(jobs, timeout, FIRST_COMPLETED).done]
        self.fetch(timeout)
        for actor in self.actors:
            if actor not in self.actors:
                continue  # removed while another actor was handled
            if actor in ended:
                self._handle_job_end(actor)
            elif actor.failure is not None:
                self._handle_failure(actor, actor.failure)
        self._check_deadlines()
        if not self.is_stopping:
            if self.has_begun:
                self._reconcile_makers()
            self._advance_makers()
        self._advance_trainers()

    def fetch(self, timeout: float, only: RunActor | None = None) -> None:
        """Request reports from all actors concurrently, and log those that arrive within `timeout` seconds.

        The others stay in flight and are read in a later call. `only` waits for one actor, and logs its report only.
        """
        for actor in self.actors:
            if actor.report_call is None:
                actor.report_call = actor.peer.call("report", *actor.cursors)
                actor.report_called_at = time.monotonic()
        awaited = self.actors if only is None else [only]
        done = wait([actor.report_call for actor in awaited if actor.report_call is not None], timeout).done
        for actor in self.actors:
            if actor.report_call in done:
                call, actor.report_call = actor.report_call, None
                if call.exception() is None:
                    self._read(actor, call.result())
                elif not isinstance(call.exception(), PeerUnavailable):  # otherwise the next `fetch` retries
                    actor.failure = call.exception()
        for maker in self.makers.values():
            if maker.failure is None:
                self._update_stall(maker)

    def _read(self, actor: RunActor, report: Report) -> None:
        if actor.state == "loading":
            actor.state = "loaded"
        actor.has_weights, actor.num_made = report.progress.has_weights, report.progress.num_made
        if self.trainers:
            self._log.state.num_made = sum(trainer.num_made for trainer in self.trainers.values())
        if not self.has_begun:  # log nothing yet: the folder may still hold an earlier run
            return
        records = report.records.records
        actor.cursors = report.records.cursor, report.spans.cursor
        if actor.name in self.trainers and number_of(actor.name) > 0:  # the ranks of a group report the same steps
            records = [record for record in records if "warning" in record]
        elif actor.name in self.trainers:
            self._log.state.buffer_batches = report.progress.num_waiting
        self._log.add_report(actor.name, records, report.spans.records)

    def _update_stall(self, maker: RunActor) -> None:
        """Release the leases of a maker that stops answering; the trainers refuse its late deliveries."""
        seconds, was_stalled = self._config.deadlines.stall_seconds, maker.is_stalled
        call, waited = maker.report_call, time.monotonic() - maker.report_called_at
        maker.is_stalled = call is not None and not call.done() and waited >= seconds and maker.state != "loading"
        if maker.is_stalled and not was_stalled:
            logger.warning("%s has not answered for %g s; its leases are reassigned", maker.name, seconds)
            self._release_leases(maker.name, "does not respond")
        elif was_stalled and not maker.is_stalled:
            logger.warning("%s is answering again", maker.name)

    def _handle_job_end(self, actor: RunActor) -> None:
        job, actor.job = actor.job, None
        assert job is not None
        error, is_single = job.exception(), len(self.trainers) == 1  # a rank of a group cannot repeat a job alone
        if isinstance(error, PeerUnavailable) and actor.state in ("syncing", "saving") and is_single:
            actor.restart_job()
        elif error is not None:
            self._handle_failure(actor, error)
        elif actor.name in self.trainers:
            actor.state = {"syncing": "synced", "training": "trained", "saving": "saved"}[actor.state]
        elif not self.is_stopping:
            self.fetch(_LAST_FETCH_SECONDS, actor)
            self._remove(actor, "left")

    def _handle_failure(self, actor: RunActor, error: BaseException) -> None:
        """Handle an actor that raised or died: remove or replace it, or raise the error that ends the run."""
        actor.job = actor.failure = None
        is_maker, has_raised = actor.name in self.makers, isinstance(error, RemoteError)
        if is_maker and self.is_stopping:
            return
        cause = error.cause if isinstance(error, RemoteError) else PeerDied(f"{actor.name} died: {error}")
        if has_raised:
            cause.add_note(f"raised in {actor.name}")
        is_symptom = isinstance(cause, RuntimeError) and not isinstance(cause, CoatiError)
        if is_maker and self.has_begun and not (has_raised and actor.name in self._makers_to_replace):
            # Tell the trainers now, so that they treat its successor as a new maker, which needs all weights.
            self._remove(actor, f"died: {error}")
            if actor.state != "leaving":
                self._handle_maker_loss(actor.name, error)
        elif not is_maker and (is_symptom or isinstance(error, StartFailed)):
            self._defer_error(actor, cause)
        elif is_maker or has_raised or not self.has_begun:
            raise cause from None
        else:
            self._schedule_trainer_restart(actor, error)

    def _handle_maker_loss(self, maker: str, error: BaseException) -> None:
        """Schedule the restart of a maker that died or could not be created; give up on one that never worked."""
        if maker in self._makers_to_replace:
            seconds = self.restarts.count_death("makers", maker, error)
            logger.error("%s died; restarting it in %g s: %s", maker, seconds, error)
            self._maker_restart_times[maker] = time.monotonic() + seconds
        else:
            self.target_makers = min(self.target_makers, number_of(maker))
            left, reason = counted(self.target_makers, "maker"), str(error) or type(error).__name__
            logger.warning("%s could not join; training continues with %s: %s", maker, left, reason)

    def _schedule_trainer_restart(self, dead: RunActor, error: BaseException) -> None:
        """Kill all trainers because one died, and schedule their restart; makers keep running."""
        if self.is_stopping:
            raise PeerDied(f"{dead.name} died while the run was stopping: {error}")
        seconds = self.restarts.count_death("trainers", dead.name, error)
        logger.error("%s died; restarting all trainers in %g s: %s", dead.name, seconds, error)
        for trainer in self.trainers.values():
            self._factory.kill(trainer.peer)
        self.trainers, self._symptom = {}, None
        self._trainer_restart_time = time.monotonic() + seconds

    def _defer_error(self, trainer: RunActor, error: Exception) -> None:
        """Keep a rank's error, which may only be a symptom of another rank's death.

        It is raised if no death is reported within `_DEATH_SECONDS`, or if all ranks have failed.
        """
        trainer.state = "failed"
        if self._symptom is None:
            self._symptom = error, time.monotonic() + _DEATH_SECONDS
        if all(one.state == "failed" for one in self.trainers.values()):
            raise self._symptom[0] from None

    def _check_deadlines(self) -> None:
        now, limit = time.monotonic(), self._config.deadlines.start_seconds
        if self._symptom is not None and now >= self._symptom[1]:
            raise self._symptom[0] from None
        late = [one for one in self.actors if one.state in ("loading", "syncing") and now - one.since > limit]
        if needed := [one.name for one in late if one.name in self.trainers or not self.has_begun]:
            raise DeadlineExceeded(
                f"waited {limit:g} s (deadlines.start_seconds) for {listed(needed)} to load models and complete the "
                "first weight update. Raise the deadline for large models or slow disks."
            )
        for maker in late:
            if maker.name not in self.makers:
                continue  # removed while another maker was handled
            reason = (
                f"it did not load within {limit:g} s (deadlines.start_seconds). Check that a CPU or GPU is free for it."
            )
            self._handle_failure(maker, PeerDied(reason))

    def _reconcile_makers(self) -> None:
        """Create missing makers and stop surplus ones: those with the lowest numbers stay."""
        names = maker_names(self.target_makers)
        self._makers_to_replace.intersection_update(names)
        for name in names:
            if name not in self.makers and time.monotonic() >= self._maker_restart_times.get(name, 0.0):
                self._create_maker(name)
        for maker in [maker for name, maker in self.makers.items() if name not in names and maker.state != "leaving"]:
            if maker.job is None:  # it is still loading
                self._remove(maker, "left")
            else:
                maker.state = "leaving"
                maker.send_command("stop")

    def _create_maker(self, name: str) -> None:
        try:
            self.makers[name] = RunActor(name, self._factory.create_maker(name))
        except Exception as error:
            if not self.has_begun:
                raise
            self._handle_maker_loss(name, error)

    def _advance_makers(self) -> None:
        loaded = [maker for maker in self.makers.values() if maker.state == "loaded"]
        for maker in loaded:
            if maker.has_weights and maker.job is not None:
                maker.state = "working"
                self._makers_to_replace.add(maker.name)
        idle = [maker for maker in loaded if maker.job is None]
        if idle and self.has_begun:
            self._send_maker_lists()
            for maker in idle:
                maker.start_job("loaded", "workingloop", functools.partial(build.make_prompts, self._config))

    def _advance_trainers(self) -> None:
        if not self.trainers and time.monotonic() >= self._trainer_restart_time:
            # By now the old trainers have stopped writing.
            self._start = choose_start(self._config, is_restart=True)
            continue_files(self._config, self._log, self._start, is_restart=True)
            self._create_trainers(self._start.checkpoint)
        states = self.trainer_states
        if states == {"loaded"} and (self.has_begun or len(self._loaded_maker_names()) == len(self.makers)):
            self._send_maker_lists()  # makers may have joined or left while the trainers were loading
            for trainer in self.trainers.values():
                trainer.start_job("syncing", "sync_models_to_remote_makers")
        elif states == {"synced"}:
            if not self.has_begun:
                self._log.begin()
                self.has_begun = True
                self._advance_makers()
            train = self._config.train
            for trainer in self.trainers.values():
                trainer.start_job("training", "fit", train.total_steps, train.update_steps, train.epochs)

    def _remove(self, maker: RunActor, reason: str) -> None:
        del self.makers[maker.name]
        self._maker_restart_times[maker.name] = time.monotonic() + NAME_SECONDS
        self._factory.kill(maker.peer)
        self._release_leases(maker.name, reason)
        self._send_maker_lists()

    def _release_leases(self, name: str, reason: str) -> None:
        """Tell the trainers to release a maker's leases and not to wait for it."""
        for trainer in self.trainers.values():
            trainer.send_command("release_maker", name, reason, about=name)

    def _send_maker_lists(self) -> None:
        for rank, trainer in enumerate(self.trainers.values()):
            trainer.send_command("change_makers", self._factory.updated_by(rank, self._loaded_maker_names()))

    def _loaded_maker_names(self) -> list[str]:
        return [name for name, maker in self.makers.items() if maker.state != "loading"]
