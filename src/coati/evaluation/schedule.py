"""Which evaluations a run owes, which maker makes each, and what came of them: the trainer's side.

A set has one job at a time, for the first maker that asks while it serves the version that is due, or a later one. The
job of a maker that is gone goes to the next that asks.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from coati.config import EvalSettings


class EvalJob(NamedTuple):
    """The right to evaluate one set, from one incarnation of the trainer; a report under an older one is refused."""

    name: str
    maker: str
    number: int
    incarnation: int


class EvalSchedule:
    """The evaluations of a run. Any thread may call it.

    `record` takes what was found; `stop` is called when a metric has not improved for long enough.
    """

    def __init__(
        self,
        sets: Sequence[EvalSettings] = (),
        *,
        incarnation: int = 0,
        record: Callable[[dict[str, Any]], None] = lambda _: None,
        stop: Callable[[], None] = lambda: None,
    ) -> None:
        self._sets = {one.name: one for one in sets}
        self._incarnation = incarnation
        self._record, self._stop = record, stop
        self._changed = threading.Condition()
        self._last: dict[str, int] = {}  # the version evaluated last, by set
        self._num_worse = 0  # evaluations in a row
        self._jobs: dict[str, EvalJob] = {}  # by set
        self._num_jobs = 0
        self._final: int | None = None
        self._has_stopped = False

    def grant(self, maker: str, version: int, incarnation: int) -> EvalJob | None:
        """Give a maker that serves a version an evaluation that is due; if it has one already, the answer was lost."""
        with self._changed:
            if self._has_stopped or incarnation != self._incarnation:
                return None
            for name, one in self._sets.items():
                is_free = name not in self._jobs or self._jobs[name].maker == maker
                if is_free and self._last.get(name, -1) < self._due(one, version):
                    self._num_jobs += 1
                    self._jobs[name] = EvalJob(name, maker, self._num_jobs, incarnation)
                    return self._jobs[name]
        return None

    def report(self, job: EvalJob, found: Mapping[str, Any]) -> bool:
        """Take what a maker found; False if it is not, or no longer, the job of this maker."""
        with self._changed:
            if self._jobs.get(job.name) != job:
                return False
            del self._jobs[job.name]
            self._last[job.name] = found["version"]
            one, found = self._sets[job.name], dict(found)
            if one.patience and one.best_by in found:  # it has scores
                self._num_worse = 0 if found.get("is_best", True) else self._num_worse + 1
                if self._num_worse >= one.patience:
                    found["stop"] = f"{job.name} {one.best_by} was not better in {one.patience} evaluations in a row"
                    self._has_stopped = True
                    self._stop()
            self._record({"evaluation": found})
            self._changed.notify_all()
            return True

    def release(self, maker: str) -> None:
        """A maker is gone: others may have its jobs."""
        with self._changed:
            self._jobs = {name: job for name, job in self._jobs.items() if job.maker != maker}

    def end(self, version: int) -> None:
        """Training has ended with this version, which is the last to be evaluated."""
        with self._changed:
            self._final = version

    def wait(self, seconds: float) -> bool:
        """Whether all evaluations of a run that has ended are done; waits for so long."""
        with self._changed:
            return self._changed.wait_for(lambda: not self.pending, timeout=seconds)

    @property
    def pending(self) -> list[str]:
        """The sets that are being evaluated, or still have to be when training has ended."""
        final = -1 if self._final is None else self._final
        late = [name for name, one in self._sets.items() if self._last.get(name, -1) < self._due(one, final)]
        return sorted({*late, *self._jobs})

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds: done evaluations are not made again."""
        with self._changed:
            return {"last": dict(self._last), "num_worse": self._num_worse}

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Continue from a `state`; None is that of a run without evaluations."""
        if state is not None:
            self._last, self._num_worse = dict(state["last"]), state["num_worse"]

    def _due(self, one: EvalSettings, version: int) -> int:
        """The last version, up to this one, at which the set is due; -1 before the first."""
        if version == self._final and one.at_end:
            return version
        due = version // one.every * one.every if one.every else min(version, 0)
        return due if due or one.before else -1
