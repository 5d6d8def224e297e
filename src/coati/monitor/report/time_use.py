"""Where the time of each actor went, from its spans: no moment counts twice, and idle time has a cause."""

from __future__ import annotations

import functools
import heapq
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from coati.monitor.report.folder import ActorSpan
from coati.monitor.timeline import ACTIVITIES, LEAVE, WORK, Span

# A run begins when somebody does one of these for the first time; before that it starts up.
_FIRST_WORK: Final = frozenset({"generate", "train", "wait_data"})
_NOTABLE_SHARE: Final = 0.15


class Piece(NamedTuple):
    """A stretch of time with one activity."""

    what: str
    start: float
    end: float
    version: int


@dataclass(frozen=True, kw_only=True)
class ActorTime:
    """What one actor did with its time: the window of the run, or the part of it in which the actor was there."""

    actor: str
    pieces: list[Piece]
    """Of the lane of work, one after the other, inside the window."""
    other_lanes: Mapping[str, list[Piece]]
    """What it did beside that."""
    elapsed: float
    """Seconds in which it was there; shares are of these."""
    done: float = 0.0
    """Seconds of those in which it had nothing left to do but to take new weights, and the run went on."""

    @functools.cached_property
    def seconds(self) -> dict[str, float]:
        """Seconds of each activity, in the order of `ACTIVITIES`."""
        totals = dict.fromkeys(ACTIVITIES, 0.0)
        for piece in self.pieces:
            totals[piece.what] = totals.get(piece.what, 0.0) + piece.end - piece.start
        return {what: seconds for what, seconds in totals.items() if seconds > 0}

    def share(self, *activities: str) -> float:
        """The part of its time that went into these activities."""
        spent = self.seconds
        return sum(spent.get(what, 0.0) for what in activities) / self.elapsed if self.elapsed > 0 else 0.0

    @property
    def busy_share(self) -> float:
        """The part of its time in which it worked."""
        return self.share(*(what for what in self.seconds if not is_idle(what)))

    @property
    def idle_share(self) -> float:
        """The part of its time in which it waited for a reason that is known."""
        return self.share(*(what for what in self.seconds if is_idle(what)))

    @property
    def done_share(self) -> float:
        """The part of its time in which it was done already."""
        return self.done / self.elapsed if self.elapsed > 0 else 0.0

    @property
    def rest_share(self) -> float:
        """The part of its time of which nothing is recorded: it was between two things."""
        return max(0.0, 1.0 - self.busy_share - self.idle_share - self.done_share)


TOTALS: Final[Mapping[str, Callable[[ActorTime], float]]] = {
    "worked": lambda actor: actor.busy_share,
    "waited": lambda actor: actor.idle_share,
    "was done": lambda actor: actor.done_share,
    "none of these": lambda actor: actor.rest_share,
}
"""What an actor's time adds up to, as tables show it."""


@dataclass(frozen=True, kw_only=True)
class RunTimes:
    """The times of all actors, in one window: from the first work to the last span."""

    start: float
    end: float
    actors: list[ActorTime]

    @property
    def elapsed(self) -> float:
        """Seconds of the window."""
        return self.end - self.start

    @property
    def busiest(self) -> ActorTime:
        """Whoever worked most: the run cannot be quicker than that actor."""
        return max(self.actors, key=lambda actor: actor.busy_share * actor.elapsed)

    @property
    def busiest_share(self) -> float:
        """The part of the window, and not only of its own time, in which the busiest actor worked."""
        return self.busiest.busy_share * self.busiest.elapsed / self.elapsed if self.elapsed > 0 else 0.0

    def verdict(self) -> str:
        """One or two sentences on what limits the run, and what to do about it."""
        trainers = [actor for actor in self.actors if "train" in actor.seconds]
        makers = [actor for actor in self.actors if "generate" in actor.seconds]
        if not trainers or not makers or trainers == makers:
            return f"One process did everything in turn, for {self.busiest_share:.0%} of the time: nothing overlapped."
        lead = f"{self.busiest.actor} worked {self.busiest_share:.0%} of the time, more than any other."
        data = mean_share(trainers, lambda actor: actor.share("wait_data"))
        weights = mean_share(makers, lambda actor: actor.share("wait_weights"))
        room = mean_share(makers, lambda actor: actor.share("wait_room"))
        rewards = mean_share(makers, lambda actor: actor.share("wait_rewards"))
        if data >= _NOTABLE_SHARE and rewards >= max(weights, _NOTABLE_SHARE):
            return (
                f"{lead} Trainers waited for data ({data:.0%}) and makers for reward functions ({rewards:.0%}): those "
                "are the limit. Make them quicker, or use more makers (coati scale)."
            )
        if data >= _NOTABLE_SHARE and weights >= _NOTABLE_SHARE:
            return (
                f"{lead} Trainers waited for data ({data:.0%}) and makers for weights ({weights:.0%}) in turn. "
                "A greater topology.max_staleness would let them overlap."
            )
        if data >= _NOTABLE_SHARE:
            return (
                f"{lead} Trainers waited for data {data:.0%} of the time: generation is the limit. More makers "
                "(coati scale), or shorter responses, would help."
            )
        if max(weights, room) >= _NOTABLE_SHARE:
            cause = "weights" if weights >= room else "room in the buffer"
            fewer = "Fewer makers would do; more trainers" if len(makers) > 1 else "More trainers"
            return (
                f"{lead} Makers waited for {cause} {max(weights, room):.0%} of the time: training is the limit. "
                f"{fewer}, or a quicker training step, would help."
            )
        done = mean_share(makers, lambda actor: actor.done_share)
        if done >= _NOTABLE_SHARE:
            return (
                f"{lead} Makers had nothing left to do for {done:.0%} of it: training is the limit. More trainers, or "
                "a quicker training step, would help."
            )
        return f"{lead} Nobody waited long: makers and trainers are in balance."


def mean_share(actors: Sequence[ActorTime], share: Callable[[ActorTime], float]) -> float:
    """The mean of their shares, by the time that each of them was there."""
    elapsed = sum(actor.elapsed for actor in actors)
    return sum(share(actor) * actor.elapsed for actor in actors) / elapsed if elapsed > 0 else 0.0


def run_times(spans: Sequence[ActorSpan]) -> RunTimes | None:
    """Cut all spans to the window of the run; None if no span tells of work.

    An actor is there from its first span on, and until the run ends unless it says that it left.
    """
    starts = [span.start for _, span in spans if span.what in _FIRST_WORK]
    if not starts:
        return None
    start, end = min(starts), max(span.end for _, span in spans)
    by_actor: dict[str, dict[str, list[Span]]] = {}
    for actor, span in spans:
        by_actor.setdefault(actor, {}).setdefault(span.lane, []).append(span)
    actors = []
    for actor in sorted(by_actor, key=_in_natural_order):
        own = [span for found in by_actor[actor].values() for span in found]
        came = max(start, min(span.start for span in own))
        left = max(span.end for span in own) if any(span.what == LEAVE for span in own) else end
        # Whoever is done still takes new weights into use.
        last = max((span.end for span in own if span.lane == WORK and span.what != "commit"), default=came)
        lanes = {lane: pieces_of(found, start, end) for lane, found in by_actor[actor].items()}
        work = lanes.pop(WORK, [])
        elapsed = max(0.0, left - came)
        done = max(0.0, left - max(last, came) - sum(piece.end - piece.start for piece in work if piece.start >= last))
        actors.append(ActorTime(actor=actor, pieces=work, other_lanes=lanes, elapsed=elapsed, done=done))
    return RunTimes(start=start, end=end, actors=actors)


def pieces_of(spans: Iterable[Span], start: float, end: float) -> list[Piece]:
    """Cut spans that lie inside or across each other into pieces: of those at one moment, the latest begun counts.

    So a span inside another takes its time away from that one.
    """
    ordered = sorted(
        (span for span in spans if span.end > start and span.start < end and span.end > span.start),
        key=lambda span: (span.start, -span.end),
    )
    pieces: list[Piece] = []
    open_spans: list[tuple[float, int, Span]] = []  # the latest begun first

    def emit(until: float, since: float) -> float:
        """Give the time up to `until` to whoever has it; returns how far we are."""
        while open_spans and since < until:
            span = open_spans[0][2]
            if span.end <= since:
                heapq.heappop(open_spans)
                continue
            stop = min(span.end, until)
            _append(pieces, Piece(span.what, max(since, start), min(stop, end), span.version))
            since = stop
        return until

    now = start
    for index, span in enumerate(ordered):
        now = emit(max(span.start, start), now)
        heapq.heappush(open_spans, (-span.start, -index, span))
    emit(end, now)
    return pieces


def is_idle(what: str) -> bool:
    """Whether this is a wait and no work."""
    return what in ACTIVITIES and ACTIVITIES[what].kind == "idle"


def label_of(what: str) -> str:
    """What people call an activity."""
    return ACTIVITIES[what].label if what in ACTIVITIES else what


def _append(pieces: list[Piece], piece: Piece) -> None:
    if piece.end > piece.start:
        pieces.append(piece)


def _in_natural_order(actor: str) -> tuple[list[str], list[int]]:
    """maker-2 before maker-10."""
    return re.findall(r"\D+", actor), [int(number) for number in re.findall(r"\d+", actor)]
