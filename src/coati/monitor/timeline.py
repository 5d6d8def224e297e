"""What an actor does and what it waits for, as spans with a start and an end, and as sums for its metrics.

Each actor keeps one `Timeline`. Whatever it does is put around with `span`; the driver fetches the spans while the run
goes on and writes them to `spans.jsonl`, which `coati report` draws. The same clock readings make the seconds and
shares in the metrics, so picture and numbers agree.

Times are seconds since the epoch, read once per process and carried on by a monotonic clock: actors of one host share
that clock, and those of several hosts agree as well as the hosts' clocks do.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from coati.monitor.metrics import Mean, Metric, Sum
from coati.monitor.records import RecordLog, RecordPage

Kind = Literal["work", "idle"]

WORK: Final = "work"
"""The lane of an actor's loop. The others hold what it does beside that, in other threads."""
WEIGHTS: Final = "weights"
BUFFER: Final = "buffer"


@dataclass(frozen=True)
class Activity:
    """Something an actor does, or waits for."""

    label: str
    kind: Kind


ACTIVITIES: Final[Mapping[str, Activity]] = {
    "generate": Activity("generate", "work"),
    "score": Activity("score", "work"),
    "send": Activity("send", "work"),
    "train": Activity("train", "work"),
    "publish": Activity("publish weights", "work"),
    "deliver": Activity("deliver weights", "work"),
    "commit": Activity("commit weights", "work"),
    "save": Activity("save", "work"),
    "receive": Activity("receive weights", "work"),
    "take_in": Activity("take items in", "work"),
    "wait_data": Activity("wait for data", "idle"),
    "wait_weights": Activity("wait for weights", "idle"),
    "wait_room": Activity("wait for room", "idle"),
    "wait_prompts": Activity("wait for prompts", "idle"),
    "wait_rewards": Activity("wait for rewards", "idle"),
    "wait_ranks": Activity("wait for other ranks", "idle"),
    "wait_delivery": Activity("wait for delivery", "idle"),
}
"""Every activity that actors of this project report, in the order in which reports list them."""


LEAVE: Final = "leave"
"""The last span of a maker that left before the run ended; it takes no time."""


class Span(NamedTuple):
    """One piece of an actor's time."""

    lane: str
    what: str
    start: float  # seconds since the epoch
    end: float
    version: int  # of the weights that the actor had when it ended


@dataclass(frozen=True)
class TimeUse:
    """What became of a stretch of time: seconds of each activity in the lane of work, none of them counted twice."""

    elapsed: float
    seconds: Mapping[str, float]

    def share(self, *activities: str) -> float:
        """The part of the time that went into these activities, 0 to 1."""
        spent = sum(self.seconds.get(what, 0.0) for what in activities)
        return min(1.0, spent / self.elapsed) if self.elapsed > 0 else 0.0


@dataclass
class _OpenSpan:
    what: str
    lane: str
    started: float
    inner: float = 0.0
    """Seconds of the spans inside of it that have ended."""
    counted: float = 0.0
    """Of its own seconds, those that `take` has counted already."""


class Timeline:
    """Records spans, from any thread, in bounded memory: the oldest go when nobody fetches them.

    A span inside another (of the same thread) counts for itself: the outer one's sum leaves it out.

    >>> timeline = Timeline()
    >>> with timeline.span("send"):
    ...     with timeline.span("wait_room"):
    ...         pass
    >>> [span.what for span in timeline.since(0).records]
    ['wait_room', 'send']
    """

    def __init__(
        self,
        *,
        capacity: int = 20_000,
        clock: Callable[[], float] = time.perf_counter,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.version = 0
        """What spans that end from now on say of the weights."""
        self._clock = clock
        self._offset = wall_clock() - clock()
        self._log: RecordLog[Span] = RecordLog(capacity)
        self._lock = threading.Lock()
        self._totals: dict[str, float] = {}
        self._taken: dict[str, float] = {}
        self._taken_at = clock()
        self._thread = threading.local()

    @contextlib.contextmanager
    def span(self, what: str, lane: str = WORK, *, version: int | None = None) -> Iterator[None]:
        """Time the body of a `with` statement; it counts even if the body raises. `version` if it is not the newest."""
        open_spans = self._open_spans()
        this = _OpenSpan(what, lane, self._clock())
        open_spans.append(this)
        try:
            yield
        finally:
            ended = self._clock()
            open_spans.pop()
            elapsed = ended - this.started
            if open_spans:
                open_spans[-1].inner += elapsed
            newest = self.version if version is None else version
            span = Span(lane, what, this.started + self._offset, ended + self._offset, newest)
            self._note(span, elapsed - this.inner - this.counted)

    def add(self, what: str, started: float, ended: float, lane: str = WORK) -> None:
        """Note a span that somebody else has timed, with this timeline's clock, in the thread that calls."""
        if open_spans := self._open_spans():
            open_spans[-1].inner += ended - started
        self._note(Span(lane, what, started + self._offset, ended + self._offset, self.version), ended - started)

    def since(self, cursor: int) -> RecordPage[Span]:
        """The spans that ended after `cursor`, as far as they are still there."""
        return self._log.since(cursor)

    def total(self, what: str) -> float:
        """Seconds of one activity so far."""
        with self._lock:
            return self._totals.get(what, 0.0)

    def take(self) -> TimeUse:
        """What became of the time since the last call, with what this thread is in the middle of."""
        with self._lock:
            now = self._clock()
            inside = 0.0
            for span in reversed(self._open_spans()):
                elapsed = now - span.started
                own = elapsed - span.inner - inside
                if span.lane == WORK:
                    self._totals[span.what] = self._totals.get(span.what, 0.0) + own - span.counted
                span.counted, inside = own, elapsed
            use = TimeUse(
                now - self._taken_at,
                {what: total - self._taken.get(what, 0.0) for what, total in self._totals.items()},
            )
            self._taken, self._taken_at = dict(self._totals), now
            return use

    def _open_spans(self) -> list[_OpenSpan]:
        """Of this thread, the innermost last."""
        if not hasattr(self._thread, "open_spans"):
            self._thread.open_spans = []
        found: list[_OpenSpan] = self._thread.open_spans
        return found

    def _note(self, span: Span, own_seconds: float) -> None:
        self._log.append(span)
        if span.lane == WORK:
            with self._lock:
                self._totals[span.what] = self._totals.get(span.what, 0.0) + own_seconds


_MAKER_WORK: Final = ("generate", "score", "send")
_MAKER_WAITS: Final = ("weights", "room", "prompts", "rewards")


def maker_metrics(use: TimeUse) -> dict[str, Metric]:
    """A maker's time as metrics; shares are weighted by time, so that those of several makers add up."""
    return {
        **{f"wait/{what}_seconds": Sum(use.seconds.get(f"wait_{what}", 0.0)) for what in _MAKER_WAITS},
        **{f"wait/{what}_share": Mean(use.share(f"wait_{what}"), use.elapsed) for what in _MAKER_WAITS},
        **{f"maker/{what}_seconds": Sum(use.seconds.get(what, 0.0)) for what in _MAKER_WORK},
        "maker/busy_share": Mean(use.share(*_MAKER_WORK), use.elapsed),
    }


def trainer_metrics(use: TimeUse) -> dict[str, float]:
    """A trainer's time of one version as metrics."""
    return {
        "trainer/train_seconds": use.seconds.get("train", 0.0),
        "trainer/busy_share": use.share("train"),
        "wait/ranks_seconds": use.seconds.get("wait_ranks", 0.0),
        "wait/delivery_seconds": use.seconds.get("wait_delivery", 0.0),
    }
