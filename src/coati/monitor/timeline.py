"""The one account of an actor's time: spans with a start and an end, and sums for its metrics.

Each actor keeps one `Timeline` and puts `span` around whatever it does or waits for. Everything that speaks of time
reads from it: metrics (`take`), performance summaries (`read`), and `coati report`, for which the driver fetches the
spans while the run continues and writes them to `spans.jsonl`. So pictures and numbers agree.

Times are seconds since the epoch, read once per process and continued by a monotonic clock: actors of one host share
that clock, and actors of several hosts agree as well as the hosts' clocks do.
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

WORK: Final = "work"
"""The lane of an actor's loop. Other lanes hold what its other threads do."""
WEIGHTS: Final = "weights"
BUFFER: Final = "buffer"


ACTIVITIES: Final = (
    *("generate", "score", "send", "train", "publish", "deliver", "commit", "save", "receive", "take_in"),
    *("wait_data", "wait_weights", "wait_room", "wait_prompts", "wait_rewards", "wait_ranks", "wait_delivery"),
)
"""Every activity that actors of this project report, in the order in which reports list them; see docs/report.md."""


def label_of(what: str) -> str:
    """Return what reports call an activity.

    >>> label_of("wait_data")
    'wait for data'
    """
    return what.replace("wait_", "wait for ").replace("_", " ")


def is_idle(what: str) -> bool:
    """Return whether an activity is a wait."""
    return what.startswith("wait_")


LEAVE: Final = "leave"
"""The last span of a maker that left before the run ended; it takes no time."""


class Span(NamedTuple):
    """One piece of an actor's time."""

    lane: str
    what: str
    start: float  # seconds since the epoch
    end: float
    version: int  # of the actor's weights when the span ended


@dataclass(frozen=True)
class TimeUse:
    """How a period was spent: seconds of each activity in the lane of work, without counting a moment twice."""

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


@dataclass
class _OpenSpan:
    what: str
    lane: str
    since: float  # of the part that is not yet recorded
    version: int | None


class _ThreadSpans(threading.local):
    """The spans that the calling thread is in, the innermost last."""

    def __init__(self) -> None:
        self.open: list[_OpenSpan] = []


class Timeline:
    """Records spans, from any thread, in bounded memory: the oldest go if the driver does not fetch them.

    A thread does one thing at a time: a span inside another one interrupts it, and is in the same lane.

    >>> timeline = Timeline()
    >>> with timeline.span("send"):
    ...     with timeline.span("wait_room"):
    ...         pass
    >>> [span.what for span in timeline.since(0).records]
    ['send', 'wait_room', 'send']
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
        self._lock = threading.Lock()
        self._totals: dict[str, float] = {}
        self._taken = TimeUse()
        self._mine = _ThreadSpans()

    @contextlib.contextmanager
    def span(self, what: str, lane: str = WORK, *, version: int | None = None) -> Iterator[None]:
        """Time the body of a `with` statement, also if it raises. Pass `version` if it is not the newest."""
        now, open_spans = self._record_open(), self._mine.open
        open_spans.append(_OpenSpan(what, open_spans[-1].lane if open_spans else lane, now, version))
        try:
            yield
        finally:
            now = self._record_open()
            open_spans.pop()
            if open_spans:
                open_spans[-1].since = now

    def since(self, cursor: int) -> RecordPage[Span]:
        """Return the spans that ended after `cursor`, as far as they are still kept."""
        return self._log.since(cursor)

    def read(self) -> TimeUse:
        """Return how the time since the beginning was spent, with the span that the calling thread is in."""
        now = self._record_open()
        with self._lock:
            return TimeUse(now - self._began, dict(self._totals))

    def take(self) -> TimeUse:
        """Return how the time since the last call was spent. Call it from one thread, that of the loop."""
        now, earlier = self.read(), self._taken
        self._taken = now
        return now.after(earlier)

    def _record_open(self) -> float:
        """Record what the calling thread is doing, up to now; return the time."""
        now = self._clock()
        for span in self._mine.open[-1:]:
            start, span.since = span.since, now
            if now > start:
                version = self.version if span.version is None else span.version
                self._log.append(Span(span.lane, span.what, start + self._offset, now + self._offset, version))
            if span.lane == WORK:
                with self._lock:
                    self._totals[span.what] = self._totals.get(span.what, 0.0) + now - start
        return now


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
