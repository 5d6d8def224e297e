"""The one account of an actor's time: spans with a start and an end, and sums for its metrics.

Everything that speaks of time reads from it: metrics (`take`), performance summaries (`read`), and `coati report`, for
which the driver writes the spans to `spans.jsonl`. Times are seconds since the epoch, read once per process and
continued by a monotonic clock: actors of several hosts agree as well as the hosts' clocks do.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from coati.monitor.metrics import Mean, Metric, Sum
from coati.monitor.records import RecordLog, RecordPage

ACTIVITIES: Final = (
    *("generate", "score", "evaluate", "send", "train", "publish", "commit", "save"),
    *("wait_data", "wait_weights", "wait_room", "wait_prompts", "wait_rewards", "wait_ranks", "wait_delivery"),
)
"""Every activity that actors of this project report, in the order in which reports list them; see docs/report.md."""


def label_of(what: str) -> str:
    """Return what reports call an activity, such as "wait for data"."""
    return what.replace("wait_", "wait for ").replace("_", " ")


def is_idle(what: str) -> bool:
    """Return whether an activity is a wait."""
    return what.startswith("wait_")


class Span(NamedTuple):
    """One piece of an actor's time."""

    what: str
    start: float  # seconds since the epoch
    end: float
    version: int  # of the actor's weights when the span ended


@dataclass(frozen=True)
class TimeUse:
    """How a period was spent: seconds of each activity, without counting a moment twice."""

    elapsed: float = 0.0
    seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def after(self, earlier: TimeUse) -> TimeUse:
        """Return the part of this period that came after `earlier`, which began at the same moment."""
        seconds = {what: total - earlier.seconds.get(what, 0.0) for what, total in self.seconds.items()}
        return TimeUse(self.elapsed - earlier.elapsed, seconds)

    def spent(self, *activities: str) -> float:
        """Return the seconds that went into these activities."""
        return sum(self.seconds.get(what, 0.0) for what in activities)

    def share(self, *activities: str) -> float:
        """Return the part of the period that went into these activities, 0 to 1."""
        return min(1.0, self.spent(*activities) / self.elapsed) if self.elapsed > 0 else 0.0


class Timeline:
    """Records what the thread of an actor's loop does, in bounded memory: the oldest spans go if they are not fetched.

    The thread is the one that called `take` last, or made the timeline; what other threads do is left out. It does one
    thing at a time: a span inside another one interrupts it, so that the outer one is recorded in parts.
    """

    def __init__(
        self,
        *,
        capacity: int = 20_000,
        clock: Callable[[], float] = time.perf_counter,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.version = 0
        """The version of the weights that spans carry from now on."""
        self._clock = clock
        self._began = clock()
        self._offset = wall_clock() - self._began
        self._log: RecordLog[Span] = RecordLog(capacity)
        self._totals: dict[str, float] = {}
        self._taken = TimeUse()
        self._thread = threading.get_ident()
        self._open: list[str] = []  # what the thread is in, the innermost last
        self._noted = self._began

    @contextlib.contextmanager
    def span(self, what: str) -> Iterator[None]:
        """Time the body of a `with` statement, also if it raises."""
        if threading.get_ident() != self._thread:
            yield
            return
        self._note()
        self._open.append(what)
        try:
            yield
        finally:
            if threading.get_ident() == self._thread:  # else another one has taken over
                self._note()
                self._open.pop()

    def since(self, cursor: int) -> RecordPage[Span]:
        """Return the spans that ended after `cursor`, as far as they are still kept."""
        return self._log.since(cursor)

    def read(self) -> TimeUse:
        """Return how the time since the beginning was spent, with the span that the thread is in."""
        return TimeUse(self._note() - self._began, dict(self._totals))

    def take(self) -> TimeUse:
        """Return how the time since the last call was spent."""
        if self._thread != threading.get_ident():
            self._thread, self._open = threading.get_ident(), []
        now, earlier = self.read(), self._taken
        self._taken = now
        return now.after(earlier)

    def _note(self) -> float:
        """Record what the thread has done since the last time; return the time."""
        start, self._noted = self._noted, self._clock()
        if self._open and self._noted > start:
            what = self._open[-1]
            self._log.append(Span(what, start + self._offset, self._noted + self._offset, self.version))
            self._totals[what] = self._totals.get(what, 0.0) + self._noted - start
        return self._noted


_MAKER_WORK: Final = ("generate", "score", "send")
_MAKER_WAITS: Final = ("weights", "room", "prompts", "rewards")


def maker_metrics(use: TimeUse) -> dict[str, Metric]:
    """Return a maker's time as metrics; shares are weighted by time, so that those of several makers add up."""
    return {
        **{f"wait/{what}_seconds": Sum(use.spent(f"wait_{what}")) for what in _MAKER_WAITS},
        **{f"wait/{what}_share": Mean(use.share(f"wait_{what}"), use.elapsed) for what in _MAKER_WAITS},
        **{f"maker/{what}_seconds": Sum(use.spent(what)) for what in _MAKER_WORK},
        "maker/busy_share": Mean(use.share(*_MAKER_WORK), use.elapsed),
    }


def trainer_metrics(use: TimeUse) -> dict[str, float]:
    """Return a trainer's time of one version as metrics."""
    return {
        "trainer/train_seconds": use.spent("train"),
        "trainer/busy_share": use.share("train"),
        "wait/data_seconds": use.spent("wait_data"),
        "wait/data_share": use.share("wait_data"),
        "wait/ranks_seconds": use.spent("wait_ranks"),
        "wait/delivery_seconds": use.spent("wait_delivery"),
    }
