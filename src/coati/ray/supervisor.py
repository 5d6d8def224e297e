"""Which actors a run has, and what becomes of them: one table, and one function that reacts to what happened.

    maker      loading ─► loaded ─► working ─► leaving
    trainer    loading ─► loaded ─► syncing ─► synced ─► training ─► trained

An actor has loaded when it answers for the first time. Then the trainers are told of a maker, and not before: an update
would wait for it. A maker works once it has its first weights. The trainers of a group change their states together.

At every turn makers are created that are missing, because they died or because more are wanted (`coati scale`), and
those that are too many leave. The leases of one that is gone, or only does not answer, are granted to others. If a
trainer dies, all are started again, from the newest checkpoint. What an actor raises ends the run, unless it
is a maker that has yet to begin its work.
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
"""Until Ray can give the name of an actor that was ended to another."""
# After a rank of a group raised: until Ray says that another one died, which breaks what they compute together.
_DEATH_SECONDS = 20.0


class Supervisor:
    """Follows the makers and trainers of a run. Nothing here waits longer than the `turn` that it is called in."""

    def __init__(self, config: RunSettings, factory: ActorFactory, log: RunLog, *, remedy: str = "") -> None:
        """`remedy` ends the message of a death that ends the run."""
        self._config = config
        self._factory = factory
        self._log = log
        self._remedy = remedy
        self.restarts = Restarts(config.topology.max_restarts, remedy=remedy)
        self.makers: dict[str, RunActor] = {}
        self.trainers: dict[str, RunActor] = {}
        self.wanted = config.topology.makers  # those with the lowest numbers; may be changed at any time
        self.has_begun = False  # whether training has begun; before that, a death ends the run
        self.is_stopping = False  # then what becomes of makers does not matter any more
        self._members = {*maker_names(self.wanted)}  # makers that the run counts on: they worked, or it began with them
        self._makers_due: dict[str, float] = {}  # when those that are gone may be started again
        self._trainers_due = 0.0
        self._start = StartingPoint()  # of the trainers that were started again
        self._symptom: tuple[Exception, float] | None = None  # what a trainer raised, and when that is an error

    @property
    def actors(self) -> list[RunActor]:
        """All makers and trainers."""
        return [*self.makers.values(), *self.trainers.values()]

    @property
    def trainer_states(self) -> set[str]:
        """The states of all trainers: one, while none of them ends a job."""
        return {trainer.state for trainer in self.trainers.values()}

    @property
    def is_starting(self) -> bool:
        """Whether there are no trainers yet that train: they load, or send their first weights."""
        return not self.trainers or not self.trainer_states.isdisjoint({"loading", "loaded", "syncing", "synced"})

    @property
    def working_makers(self) -> list[str]:
        """Makers whose loops have not ended."""
        return [name for name, maker in self.makers.items() if maker.job is not None]

    @property
    def message(self) -> str:
        """What the run waits for; "" while all that it is to have is at work."""
        if self.is_stopping:
            return ""
        if self.is_starting and self.has_begun:
            what = f"the run continues from {self._start}" if self.trainers else "starting the trainers again"
            return f"a trainer died; {what}"
        if self.is_starting:
            return "loading models"
        num_working = sum(maker.state == "working" for maker in self.makers.values())
        if num_working == len(self.makers) == self.wanted:
            return ""
        return f"{num_working} of {counted(self.wanted, 'maker')} at work"

    # What the run does

    def create_all(self, resume: Path | None) -> None:
        """Create the actors that the run begins with."""
        self._create_trainers(resume)
        self._match_wanted()

    def _create_trainers(self, resume: Path | None) -> None:
        incarnation = self.restarts.counts["trainers"]
        makers = self._loaded_makers() if self.has_begun else maker_names(self.wanted)
        peers = self._factory.create_trainers(resume, makers=makers, incarnation=incarnation)
        self.trainers = {peer.name: RunActor(peer.name, peer) for peer in peers}
        for maker in self.makers.values():
            maker.is_stalled = False  # if it still is, the new trainers are told too

    def save(self, path: str) -> None:
        """Have the trainers save the model; they have when their state is "saved"."""
        self._symptom = None  # known by now, if this is after a failure
        for trainer in self.trainers.values():
            trainer.begin("saving", "strategy_save_actor", path, True)

    def stop(self) -> None:
        """Have all actors end their loops."""
        if not self.is_stopping:
            self.is_stopping = True
            for actor in self.actors:
                actor.order("stop")

    def kill_all(self) -> None:
        """End all actors."""
        for actor in self.actors:
            self._factory.kill(actor.peer)

    # What happens

    def turn(self, timeout: float) -> None:
        """Wait a moment for jobs to end, read what actors have recorded, and react to what happened, or raise it."""
        if not self.actors:
            time.sleep(timeout)
        for actor in self.actors:
            actor.repeat_lost_orders()
        jobs = {actor.job: actor for actor in self.actors if actor.job is not None}
        ended = [jobs[job] for job in wait(jobs, timeout, FIRST_COMPLETED).done]
        self.fetch(timeout)
        for actor in self.actors:
            if actor not in self.actors:
                continue  # it was removed with another one
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
        """Ask all actors at once for what they have recorded, and log it; a busy one is read later."""
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
                elif not isinstance(call.exception(), PeerUnavailable):  # else it is asked again
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
        if not self.has_begun:  # nothing is logged: the folder may still hold an earlier run
            return
        records = report.records.records
        actor.cursors = report.records.cursor, report.spans.cursor
        if actor.name in self.trainers and number_of(actor.name) > 0:  # the ranks of a group report the same steps
            records = [record for record in records if "warning" in record]
        elif actor.name in self.trainers:
            self._log.state.buffer_batches = report.progress.num_waiting
        self._log.take(actor.name, records, report.spans.records)

    def _note_stall(self, maker: RunActor) -> None:
        """Have the leases of a maker that does not answer granted to others: what it delivers later is refused."""
        seconds, was_stalled = self._config.deadlines.stall_seconds, maker.is_stalled
        is_late = maker.question is not None and time.monotonic() - maker.asked_at >= seconds
        maker.is_stalled = is_late and maker.state != "loading"
        if maker.is_stalled and not was_stalled:
            logger.warning("%s has not answered for %g s; its work is given to others", maker.name, seconds)
            self._release(maker.name, "does not respond")
        elif was_stalled and not maker.is_stalled:
            logger.warning("%s answers again", maker.name)

    def _end_job(self, actor: RunActor) -> None:
        job, actor.job = actor.job, None
        assert job is not None
        error, is_lone = job.exception(), len(self.trainers) == 1  # a group works together
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
        """An actor raised, or is gone."""
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
            # Trainers hear of it now, so that its successor is a new maker to them.
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
        """A maker died, or could not be created. One that has yet to begin its work in this run is done without."""
        if maker in self._members:
            seconds = self.restarts.take("makers", maker, error)
            logger.error("%s died and is started again in %g s: %s", maker, seconds, error)
            self._makers_due[maker] = time.monotonic() + seconds
        else:
            self.wanted = min(self.wanted, number_of(maker))
            left, reason = counted(self.wanted, "maker"), str(error) or type(error).__name__
            logger.warning("%s could not join; training continues with %s: %s", maker, left, reason)

    def _plan_trainers(self, dead: RunActor, error: BaseException) -> None:
        """End all trainers, because one died, to start them again after a while; makers keep what they have."""
        if self.is_stopping:
            raise PeerDied(f"{dead.name} died: {error} It was stopping. {self._remedy}")
        seconds = self.restarts.take("trainers", dead.name, error)
        logger.error("all trainers are started again in %g s, because %s died: %s", seconds, dead.name, error)
        for trainer in self.trainers.values():
            self._factory.kill(trainer.peer)
        self.trainers, self._symptom = {}, None
        self._trainers_due = time.monotonic() + seconds

    def _suspect_death(self, trainer: RunActor, error: Exception) -> None:
        """A rank fails when another one dies, and may be the first to say so: its error counts if none has died."""
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
                f"waited {limit:g} s (deadlines.start_seconds) for all actors to load their models and for the first "
                f"weights ({listed(needed)} did not answer)."
            )
        for maker in late:
            if maker.name not in self.makers:
                continue  # it was removed with another one
            reason = f"it did not load within {limit:g} s (deadlines.start_seconds). Is there a free CPU or GPU for it?"
            self._note_end(maker, PeerDied(reason))

    def _match_wanted(self) -> None:
        """Create makers that are missing, and have those leave that are too many."""
        names = maker_names(self.wanted)
        self._members.intersection_update(names)
        for name in names:
            if name not in self.makers and time.monotonic() >= self._makers_due.get(name, 0.0):
                self._create_maker(name)
        for maker in [maker for name, maker in self.makers.items() if name not in names and maker.state != "leaving"]:
            if maker.job is None:  # it still loads
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
            # The old ones have ended their writing by now.
            self._start = choose_start(self._config, is_restart=True)
            continue_files(self._config, self._log, self._start, is_restart=True)
            self._create_trainers(self._start.checkpoint)
        states = self.trainer_states
        if states == {"loaded"} and (self.has_begun or len(self._loaded_makers()) == len(self.makers)):
            self._tell_trainers()  # makers may have joined or left meanwhile
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
        """Have the trainers grant a maker's leases to others, and not wait for it."""
        for trainer in self.trainers.values():
            trainer.order("release_maker", name, reason, about=name)

    def _tell_trainers(self) -> None:
        """Send each trainer the names of the makers that it updates now."""
        for rank, trainer in enumerate(self.trainers.values()):
            trainer.order("change_makers", self._factory.updated_by(rank, self._loaded_makers()))

    def _loaded_makers(self) -> list[str]:
        return [name for name, maker in self.makers.items() if maker.state != "loading"]
