"""The trainer's side of evaluations: which are due, which maker does each, and their results.

A set has at most one job at a time. It goes to the first maker that asks while it serves the version that is due, or a
later one. If that maker is gone, the job goes to the next maker that asks.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from coati.config import EvalSettings


class EvalJob(NamedTuple):
    """Permission to evaluate one set. Only the incarnation of the trainer that granted it accepts the report."""

    name: str
    maker: str
    number: int
    incarnation: int


class EvalSchedule:
    """The evaluations of a run. Thread-safe."""

    def __init__(
        self,
        sets: Sequence[EvalSettings] = (),
        *,
        incarnation: int = 0,
        record: Callable[[dict[str, Any]], None] = lambda _: None,  # called with each result
        stop: Callable[[], None] = lambda: None,  # called when `best_by` has not improved for `patience` evaluations
    ) -> None:
        self._sets = {settings.name: settings for settings in sets}
        self._incarnation = incarnation
        self._record, self._stop = record, stop
        self._changed = threading.Condition()
        self._last: dict[str, int] = {}  # the version evaluated last, by set
        self._num_worse = 0  # evaluations in a row without a new best value
        self._jobs: dict[str, EvalJob] = {}  # by set
        self._num_jobs = 0
        self._final = -1  # the last version of training, once it is known
        self._has_stopped = False

    def grant(self, maker: str, version: int, incarnation: int) -> EvalJob | None:
        """Return a job for a maker that serves a version, if an evaluation is due.

        A maker that has a job and asks again has lost the reply; it gets the same set again.
        """
        with self._changed:
            if self._has_stopped or incarnation != self._incarnation:
                return None
            for name, settings in self._sets.items():
                is_free = name not in self._jobs or self._jobs[name].maker == maker
                if is_free and self._last.get(name, -1) < self._due(settings, version):
                    self._num_jobs += 1
                    self._jobs[name] = EvalJob(name, maker, self._num_jobs, incarnation)
                    return self._jobs[name]
        return None

    def report(self, job: EvalJob, found: Mapping[str, Any]) -> bool:
        """Record a maker's result; return False if the job is not, or no longer, this maker's."""
        with self._changed:
            if self._jobs.get(job.name) != job:
                return False
            del self._jobs[job.name]
            self._last[job.name] = found["version"]
            settings, found = self._sets[job.name], dict(found)
            metric, patience = settings.best_by, settings.patience
            if patience and metric in found:  # it has scores
                self._num_worse = 0 if found.get("is_best", True) else self._num_worse + 1
                if self._num_worse >= patience:
                    found["stop"] = f"{job.name} {metric} did not improve in {patience} evaluations in a row"
                    self._has_stopped = True
                    self._stop()
            self._record({"evaluation": found})
            self._changed.notify_all()
            return True

    def release(self, maker: str) -> None:
        """Give up the jobs of a maker that is gone, so that others can take them."""
        with self._changed:
            self._jobs = {name: job for name, job in self._jobs.items() if job.maker != maker}

    def end(self, version: int) -> None:
        """Set the final version of training, the last to be evaluated."""
        with self._changed:
            self._final = version

    def wait(self, seconds: float) -> bool:
        """Wait until no evaluation is pending, at most `seconds`; return whether that is so."""
        with self._changed:
            return self._changed.wait_for(lambda: not self.pending, timeout=seconds)

    @property
    def pending(self) -> list[str]:
        """The sets that are being evaluated or, when training has ended, still have to be."""
        due = {name for name, one in self._sets.items() if self._last.get(name, -1) < self._due(one, self._final)}
        return sorted(due | self._jobs.keys())

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, so that finished evaluations are not repeated."""
        with self._changed:
            return {"last": dict(self._last), "num_worse": self._num_worse}

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Restore a `state`; None if the checkpoint has none, because its run had no evaluations."""
        if state is not None:
            self._last, self._num_worse = dict(state["last"]), state["num_worse"]

    def _due(self, settings: EvalSettings, version: int) -> int:
        """Return the last version, up to this one, at which the set is due; -1 if there is none."""
        if version == self._final and settings.at_end:
            return version
        due = version // settings.every * settings.every if settings.every else min(version, 0)
        return due if due or settings.before else -1
