"""How an actor spends its time: spans with a start and an end, and totals by activity.

It is the only source of times: for metrics (`lap`), performance summaries (`read`), and `coati report`, for which the
driver writes the spans to `spans.jsonl`. Times are seconds since the epoch: the wall clock is read once per timeline,
then a monotonic clock continues it. Actors on different hosts agree only as well as the hosts' clocks do.
"""

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from coati.monitor.metrics import Mean, Metric, Sum
from coati.monitor.records import RecordLog

ACTIVITIES: Final = (
    *("generate", "score", "evaluate", "send", "train", "publish", "commit", "save"),
    *("wait_data", "wait_weights", "wait_room", "wait_prompts", "wait_rewards", "wait_ranks", "wait_delivery"),
)
"""The activities that actors report, in the order of the report's table; see docs/report.md."""


def label_of(what: str) -> str:
    """Return the label of an activity in reports, such as "wait for data"."""
    return what.replace("wait_", "wait for ").replace("_", " ")


def is_idle(what: str) -> bool:
    """Return whether an activity is a wait."""
    return what.startswith("wait_")


class Span(NamedTuple):
    """An interval of an actor's time spent on one activity."""

    what: str
    start: float  # seconds since the epoch
    end: float
    version: int  # of the actor's weights when the span ended


@dataclass(frozen=True)
class TimeUse:
    """How a period was spent: seconds by activity. No moment counts twice."""

    elapsed: float = 0.0
    seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def after(self, earlier: "TimeUse") -> "TimeUse":
        """Return the part of this period after `earlier`, a period with the same start."""
        seconds = {what: total - earlier.seconds.get(what, 0.0) for what, total in self.seconds.items()}
        return TimeUse(self.elapsed - earlier.elapsed, seconds)

    def spent(self, *activities: str) -> float:
        """Return the total seconds of these activities."""
        return sum(self.seconds.get(what, 0.0) for what in activities)

    def share(self, *activities: str) -> float:
        """Return the fraction of the period spent on these activities, 0 to 1."""
        return min(1.0, self.spent(*activities) / self.elapsed) if self.elapsed > 0 else 0.0


class Timeline:
    """Records the activities of the thread that runs an actor's loop, in bounded memory.

    The thread is the last one that called `lap`, or else the one that created the timeline; other threads are ignored.
    Spans nest: an inner span interrupts the outer one, which is recorded in parts. If more than `capacity` spans are
    waiting to be fetched, the oldest are dropped.
    """

    def __init__(
        self,
        *,
        capacity: int = 20_000,
        clock: Callable[[], float] = time.perf_counter,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.version = 0  # of the weights, recorded with every span that ends from now on
        self._clock = clock
        self._began = clock()
        self._offset = wall_clock() - self._began
        self.spans: RecordLog[Span] = RecordLog(capacity)
        self._totals: dict[str, float] = {}
        self._taken = TimeUse()
        self._thread = threading.get_ident()
        self._open: list[str] = []  # activities in progress, the innermost last
        self._recorded_until = self._began

    @contextlib.contextmanager
    def span(self, what: str) -> Iterator[None]:
        """Time the body of a `with` statement, even if it raises."""
        if threading.get_ident() != self._thread:
            yield
            return
        self._record()
        self._open.append(what)
        try:
            yield
        finally:
            if threading.get_ident() == self._thread:  # otherwise another thread has taken over
                self._record()
                self._open.pop()

    def read(self) -> TimeUse:
        """Return how the time since the timeline was created was spent, including the span in progress."""
        return TimeUse(self._record() - self._began, dict(self._totals))

    def lap(self) -> TimeUse:
        """Return how the time since the last call was spent. From now on, the calling thread is the one recorded."""
        if self._thread != threading.get_ident():
            self._thread, self._open = threading.get_ident(), []
        now, earlier = self.read(), self._taken
        self._taken = now
        return now.after(earlier)

    def _record(self) -> float:
        """Record the time since the last call under the current activity; return the current time."""
        start, self._recorded_until = self._recorded_until, self._clock()
        if self._open and self._recorded_until > start:
            what = self._open[-1]
            self.spans.append(Span(what, start + self._offset, self._recorded_until + self._offset, self.version))
            self._totals[what] = self._totals.get(what, 0.0) + self._recorded_until - start
        return self._recorded_until


_MAKER_WORK: Final = ("generate", "score", "send")
_MAKER_WAITS: Final = ("weights", "room", "prompts", "rewards")


def maker_metrics(use: TimeUse) -> dict[str, Metric]:
    """Return a maker's time as metrics. Shares are weighted by time, so they merge correctly across makers."""
    return {
        **{f"wait/{what}_seconds": Sum(use.spent(f"wait_{what}")) for what in _MAKER_WAITS},
        **{f"wait/{what}_share": Mean(use.share(f"wait_{what}"), use.elapsed) for what in _MAKER_WAITS},
        **{f"maker/{what}_seconds": Sum(use.spent(what)) for what in _MAKER_WORK},
        "maker/busy_share": Mean(use.share(*_MAKER_WORK), use.elapsed),
    }


def trainer_metrics(use: TimeUse) -> dict[str, float]:
    """Return the time that a trainer spent on one version as metrics."""
    return {
        "trainer/train_seconds": use.spent("train"),
        "trainer/busy_share": use.share("train"),
        "wait/data_seconds": use.spent("wait_data"),
        "wait/data_share": use.share("wait_data"),
        "wait/ranks_seconds": use.spent("wait_ranks"),
        "wait/delivery_seconds": use.spent("wait_delivery"),
    }
