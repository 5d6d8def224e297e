"""Supervises the actors of a run: one table of actors and their states, and one function that reacts to changes.

    maker      loading ─► loaded ─► working ─► leaving
    trainer    loading ─► loaded ─► syncing ─► synced ─► training ─► trained

An actor is loaded when it answers its first call. Trainers hear of a maker only then, because an update would wait for
a maker that is still loading. A maker is working once it has its first weights. All trainers of a group change state
together.

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
from coati.counting import counted, listed
from coati.errors import (
    CoatiError,
    DeadlineExceeded,
    PeerDied,
    PeerUnavailable,
    RemoteError,
    StartFailed,
)
from coati.monitor.run_log import RunLog
from coati.ray.actor_factory import ActorFactory, maker_names, number_of
from coati.ray.run_actor import Restarts, RunActor
from coati.run_folder import StartingPoint, choose_start, continue_files

logger = logging.getLogger(__name__)

_LAST_FETCH_SECONDS = 5.0
NAME_SECONDS = 0.5
"""Time until Ray frees the name of a killed actor."""
# How long to wait, after a rank raised, for Ray to report the death of another rank, which may be the cause.
_DEATH_SECONDS = 20.0


class Supervisor:
    """Supervises the makers and trainers of a run. Not thread-safe; every wait is bounded."""

    def __init__(self, config: RunSettings, factory: ActorFactory, log: RunLog, *, remedy: str = "") -> None:
        """`remedy` ends the error message of a death that ends the run."""
        self._config = config
        self._factory = factory
        self._log = log
        self._remedy = remedy
        self.restarts = Restarts(config.topology.max_restarts, remedy=remedy)
        self.makers: dict[str, RunActor] = {}
        self.trainers: dict[str, RunActor] = {}
        self.wanted = config.topology.makers  # target number of makers; may be changed at any time
        self.has_begun = False  # whether training has begun; before that, any death ends the run
        self.is_stopping = False  # from then on, failures of makers are ignored
        self._members = {*maker_names(self.wanted)}  # initial makers and those that have worked; these are replaced
        self._makers_due: dict[str, float] = {}  # the earliest time at which a maker's name may be used again
        self._trainers_due = 0.0
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
    def working_makers(self) -> list[str]:
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
        if num_working == len(self.makers) == self.wanted:
            return ""
        return f"{num_working} of {counted(self.wanted, 'maker')} working"

    # Called by the launcher

    def create_all(self, resume: Path | None) -> None:
        """Create the initial actors of the run."""
        self._create_trainers(resume)
        self._match_wanted()

    def _create_trainers(self, resume: Path | None) -> None:
        incarnation = self.restarts.counts["trainers"]
        makers = self._loaded_makers() if self.has_begun else maker_names(self.wanted)
        peers = self._factory.create_trainers(resume, makers=makers, incarnation=incarnation)
        self.trainers = {peer.name: RunActor(peer.name, peer) for peer in peers}
        for maker in self.makers.values():
            maker.is_stalled = False  # detected again if it still is, so that the new trainers learn of it

    def save(self, path: str) -> None:
        """Make the trainers save the model; their state becomes "saved"."""
        self._symptom = None  # after a failure it has been raised already
        for trainer in self.trainers.values():
            trainer.begin("saving", "strategy_save_actor", path, True)

    def stop(self) -> None:
        """Tell all actors to end their loops."""
        if not self.is_stopping:
            self.is_stopping = True
            for actor in self.actors:
                actor.order("stop")

    def kill_all(self) -> None:
        """Kill all actors."""
        for actor in self.actors:
            self._factory.kill(actor.peer)

    # The state machine

    def turn(self, timeout: float) -> None:
        """Wait up to `timeout` seconds for a job to end, and as long for reports; then react to all changes.

        Raises the error if one of them ends the run.
        """
        if not self.actors:
            time.sleep(timeout)
        for actor in self.actors:
            actor.repeat_lost_orders()
        jobs = {actor.job: actor for actor in self.actors if actor.job is not None}
        ended = [jobs[job] for job in wait(jobs, timeout, FIRST_COMPLETED).done]
        self.fetch(timeout)
        for actor in self.actors:
            if actor not in self.actors:
                continue  # removed while another actor was handled
            if actor in ended:
                self._end_job(actor)
            elif actor.failure is not None:
                self._note_end(actor, actor.failure)
        self._check_deadlines()
        if not self.is_stopping:
            if self.has_begun:
                self._match_wanted()
            self._advance_makers()
        self._advance_trainers()

    def fetch(self, timeout: float) -> None:
        """Request reports from all actors concurrently, and log those that arrive within `timeout` seconds.

        The others stay in flight and are read in a later call.
        """
        for actor in self.actors:
            if actor.question is None:
                actor.question = actor.peer.call("report", *actor.cursors)
                actor.asked_at = time.monotonic()
        done = wait([actor.question for actor in self.actors if actor.question is not None], timeout).done
        for actor in self.actors:
            if actor.question in done:
                call, actor.question = actor.question, None
                if call.exception() is None:
                    self._read(actor, call.result())
                elif not isinstance(call.exception(), PeerUnavailable):  # otherwise the next `fetch` retries
                    actor.failure = call.exception()
        for maker in self.makers.values():
            if maker.failure is None:
                self._note_stall(maker)

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
        self._log.take(actor.name, records, report.spans.records)

    def _note_stall(self, maker: RunActor) -> None:
        """Release the leases of a maker that stops answering; the trainers refuse its late deliveries."""
        seconds, was_stalled = self._config.deadlines.stall_seconds, maker.is_stalled
        is_late = maker.question is not None and time.monotonic() - maker.asked_at >= seconds
        maker.is_stalled = is_late and maker.state != "loading"
        if maker.is_stalled and not was_stalled:
            logger.warning("%s has not answered for %g s; its leases are reassigned", maker.name, seconds)
            self._release(maker.name, "does not respond")
        elif was_stalled and not maker.is_stalled:
            logger.warning("%s is answering again", maker.name)

    def _end_job(self, actor: RunActor) -> None:
        job, actor.job = actor.job, None
        assert job is not None
        error, is_lone = job.exception(), len(self.trainers) == 1  # a rank of a group cannot repeat a job alone
        if isinstance(error, PeerUnavailable) and actor.state in ("syncing", "saving") and is_lone:
            actor.repeat_job()
        elif error is not None:
            self._note_end(actor, error)
        elif actor.name in self.trainers:
            actor.state = {"syncing": "synced", "training": "trained", "saving": "saved"}[actor.state]
        elif not self.is_stopping:
            self.fetch(_LAST_FETCH_SECONDS)
            self._remove(actor, "left")

    def _note_end(self, actor: RunActor, error: BaseException) -> None:
        """Handle an actor that raised or died: remove or replace it, or raise the error that ends the run."""
        actor.job = actor.failure = None
        is_maker, has_raised = actor.name in self.makers, isinstance(error, RemoteError)
        if is_maker and self.is_stopping:
            return
        if isinstance(error, RemoteError):
            cause = error.cause
            cause.add_note(f"raised in {actor.name}")
        else:
            cause = PeerDied(f"{actor.name} died: {error}")
        is_symptom = isinstance(cause, RuntimeError) and not isinstance(cause, CoatiError)
        if is_maker and self.has_begun and not (has_raised and actor.name in self._members):
            # Tell the trainers now, so that they treat its successor as a new maker, which needs all weights.
            self._remove(actor, f"died: {error}")
            if actor.state != "leaving":
                self._note_loss(actor.name, error)
        elif not is_maker and (is_symptom or isinstance(error, StartFailed)):
            self._suspect_death(actor, cause)
        elif is_maker or has_raised or not self.has_begun:
            raise cause from None
        else:
            self._plan_trainers(actor, error)

    def _note_loss(self, maker: str, error: BaseException) -> None:
        """Schedule the restart of a maker that died or could not be created; give up on one that never worked."""
        if maker in self._members:
            seconds = self.restarts.take("makers", maker, error)
            logger.error("%s died; restarting it in %g s: %s", maker, seconds, error)
            self._makers_due[maker] = time.monotonic() + seconds
        else:
            self.wanted = min(self.wanted, number_of(maker))
            left, reason = counted(self.wanted, "maker"), str(error) or type(error).__name__
            logger.warning("%s could not join; training continues with %s: %s", maker, left, reason)

    def _plan_trainers(self, dead: RunActor, error: BaseException) -> None:
        """Kill all trainers because one died, and schedule their restart; makers keep running."""
        if self.is_stopping:
            raise PeerDied(f"{dead.name} died while the run was stopping: {error} {self._remedy}")
        seconds = self.restarts.take("trainers", dead.name, error)
        logger.error("%s died; restarting all trainers in %g s: %s", dead.name, seconds, error)
        for trainer in self.trainers.values():
            self._factory.kill(trainer.peer)
        self.trainers, self._symptom = {}, None
        self._trainers_due = time.monotonic() + seconds

    def _suspect_death(self, trainer: RunActor, error: Exception) -> None:
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
            self._note_end(maker, PeerDied(reason))

    def _match_wanted(self) -> None:
        """Create missing makers and stop surplus ones: those with the lowest numbers stay."""
        names = maker_names(self.wanted)
        self._members.intersection_update(names)
        for name in names:
            if name not in self.makers and time.monotonic() >= self._makers_due.get(name, 0.0):
                self._create_maker(name)
        for maker in [maker for name, maker in self.makers.items() if name not in names and maker.state != "leaving"]:
            if maker.job is None:  # it is still loading
                self._remove(maker, "left")
            else:
                maker.state = "leaving"
                maker.order("stop")

    def _create_maker(self, name: str) -> None:
        try:
            self.makers[name] = RunActor(name, self._factory.create_maker(name))
        except Exception as error:
            if not self.has_begun:
                raise
            self._note_loss(name, error)

    def _advance_makers(self) -> None:
        loaded = [maker for maker in self.makers.values() if maker.state == "loaded"]
        for maker in loaded:
            if maker.has_weights and maker.job is not None:
                maker.state = "working"
                self._members.add(maker.name)
        idle = [maker for maker in loaded if maker.job is None]
        if idle and self.has_begun:
            self._tell_trainers()
            for maker in idle:
                maker.begin("loaded", "workingloop", functools.partial(build.make_prompts, self._config))

    def _advance_trainers(self) -> None:
        if not self.trainers and time.monotonic() >= self._trainers_due:
            # By now the old trainers have stopped writing.
            self._start = choose_start(self._config, is_restart=True)
            continue_files(self._config, self._log, self._start, is_restart=True)
            self._create_trainers(self._start.checkpoint)
        states = self.trainer_states
        if states == {"loaded"} and (self.has_begun or len(self._loaded_makers()) == len(self.makers)):
            self._tell_trainers()  # makers may have joined or left while the trainers were loading
            for trainer in self.trainers.values():
                trainer.begin("syncing", "sync_models_to_remote_makers")
        elif states == {"synced"}:
            if not self.has_begun:
                self._log.begin()
                self.has_begun = True
                self._advance_makers()
            train = self._config.train
            for trainer in self.trainers.values():
                trainer.begin("training", "fit", train.total_steps, train.update_steps, train.epochs)

    def _remove(self, maker: RunActor, reason: str) -> None:
        del self.makers[maker.name]
        self._makers_due[maker.name] = time.monotonic() + NAME_SECONDS
        self._factory.kill(maker.peer)
        self._release(maker.name, reason)
        self._tell_trainers()

    def _release(self, name: str, reason: str) -> None:
        """Tell the trainers to release a maker's leases and not to wait for it."""
        for trainer in self.trainers.values():
            trainer.order("release_maker", name, reason, about=name)

    def _tell_trainers(self) -> None:
        """Send each trainer the list of makers that it updates."""
        for rank, trainer in enumerate(self.trainers.values()):
            trainer.order("change_makers", self._factory.updated_by(rank, self._loaded_makers()))

    def _loaded_makers(self) -> list[str]:
        return [name for name, maker in self.makers.items() if maker.state != "loading"]
