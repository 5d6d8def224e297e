"""Where the time of each actor went, from its spans, and what limits the run."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from coati.monitor.timeline import ACTIVITIES, LEAVE, WORK, Span, TimeUse, is_idle, label_of

# A run begins when some actor does one of these for the first time; before that it starts up.
_FIRST_WORK: Final = frozenset({"generate", "train", "wait_data"})
_TOTALS: Final = ("worked", "waited", "had finished", "other")
_MAKER_WAITS: Final = {
    "wait_rewards": "waited for reward functions",
    "wait_weights": "waited for weights",
    "wait_room": "waited for room in the buffer",
    "had finished": "had finished",
}
_NOTABLE_SHARE: Final = 0.15
_SHOWN_SHARE: Final = 0.005
_MAX_COLUMNS: Final = 6
# An actor that was present for less of the run joined late or left early; the rest is start-up.
_PRESENT_SHARE: Final = 0.9


@dataclass(frozen=True, kw_only=True)
class ActorTime(TimeUse):
    """How one actor spent the time in which it was present."""

    actor: str
    lanes: Mapping[str, list[Span]]
    """Spans by lane, cut to the window of the run."""
    finished: float
    """Seconds in which it had nothing left to do while the run continued."""

    @functools.cached_property
    def shares(self) -> dict[str, float]:
        """The share of its time of each activity, and of the totals; "other" is what no span covers."""
        worked = self.share(*(what for what in self.seconds if not is_idle(what)))
        waited = self.share(*(what for what in self.seconds if is_idle(what)))
        finished = self.finished / self.elapsed if self.elapsed > 0 else 0.0
        totals = (worked, waited, finished, max(0.0, 1.0 - worked - waited - finished))
        return {what: self.share(what) for what in self.seconds} | dict(zip(_TOTALS, totals, strict=True))


class TimeRow(NamedTuple):
    """A line of the table: a share of the time for each column."""

    label: str
    kind: Literal["work", "idle", "total"]
    shares: list[float]

    @property
    def cells(self) -> list[str]:
        """The shares as text; an activity that a column does not have is left empty."""
        return [f"{share:.0%}" if share > 0 or self.kind == "total" else "" for share in self.shares]


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
        """The actor that worked most: the run cannot be faster than that."""
        return max(self.actors, key=self.worked_share)

    def worked_share(self, actor: ActorTime) -> float:
        """Return the part of the window, not only of its own time, in which an actor worked."""
        return actor.shares["worked"] * actor.elapsed / self.elapsed if self.elapsed > 0 else 0.0

    def table(self) -> tuple[list[str], list[TimeRow]]:
        """Return the shares of all activities that took some time, and their totals: names of columns, and rows.

        A column is an actor, or the mean of a kind of actors where there are many.
        """
        columns = _columns(self.actors)
        rows = []
        for what in (*sorted(ACTIVITIES, key=is_idle), *_TOTALS):
            shares = [_mean(actors, what) for actors in columns.values()]
            if what in _TOTALS:
                rows.append(TimeRow(what, "total", shares))
            elif max(shares) >= _SHOWN_SHARE:
                rows.append(TimeRow(label_of(what), "idle" if is_idle(what) else "work", shares))
        if any(actor.elapsed < _PRESENT_SHARE * self.elapsed for actor in self.actors):
            means = [sum(actor.elapsed for actor in actors) / len(actors) for actors in columns.values()]
            rows.append(TimeRow("present", "total", [mean / self.elapsed for mean in means]))
        return list(columns), rows

    def verdict(self) -> str:
        """Say in a sentence or two what limits the run; docs/fast.md says what helps."""
        trainers = [actor for actor in self.actors if "train" in actor.seconds]
        makers = [actor for actor in self.actors if "generate" in actor.seconds]
        busiest = f"{self.busiest.actor} worked {self.worked_share(self.busiest):.0%} of the time, more than any other."
        if not trainers or not makers or trainers == makers:
            return "One process did everything in turn: nothing overlapped."
        data = _mean(trainers, "wait_data")
        waits = {what: _mean(makers, cause) for cause, what in _MAKER_WAITS.items()}
        longest = max(waits, key=waits.__getitem__)
        maker_waits = f"makers {longest} ({waits[longest]:.0%})"
        if max(data, waits[longest]) < _NOTABLE_SHARE:
            limit = "No actor waited long: makers and trainers are in balance."
        elif data < _NOTABLE_SHARE:
            limit = f"Training is the limit: {maker_waits}."
        elif waits[longest] < _NOTABLE_SHARE:
            limit = f"Generation is the limit: trainers waited for data ({data:.0%})."
        else:
            limit = f"They took turns: trainers waited for data ({data:.0%}), and {maker_waits}."
        return f"{busiest} {limit}"


def _mean(actors: Sequence[ActorTime], what: str) -> float:
    """Return the mean of one of their shares, weighted by the time that each was present."""
    elapsed = sum(actor.elapsed for actor in actors)
    return sum(actor.shares.get(what, 0.0) * actor.elapsed for actor in actors) / elapsed if elapsed > 0 else 0.0


def run_times(spans: Mapping[str, Sequence[Span]]) -> RunTimes | None:
    """Cut the spans of all actors to the window of the run; None if no span tells of work.

    An actor is present from its first span until the run ends, or until the span that says that it left.
    """
    every = [span for own in spans.values() for span in own]
    start = min((span.start for span in every if span.what in _FIRST_WORK), default=None)
    if start is None:
        return None
    end = max(span.end for span in every)
    actors = []
    for actor, own in sorted(spans.items(), key=lambda item: _in_natural_order(item[0])):
        came = max(start, min(span.start for span in own))
        left = max(span.end for span in own) if any(span.what == LEAVE for span in own) else end
        lanes: dict[str, list[Span]] = {WORK: []}
        for span in within(own, start, end):
            lanes.setdefault(span.lane, []).append(span)
        seconds: dict[str, float] = {}
        for span in lanes[WORK]:
            seconds[span.what] = seconds.get(span.what, 0.0) + span.end - span.start
        last = max((span.end for span in own if span.lane == WORK), default=came)
        times = {"elapsed": max(0.0, left - came), "finished": max(0.0, left - max(last, came))}
        actors.append(ActorTime(actor=actor, lanes=lanes, seconds=seconds, **times))
    return RunTimes(start=start, end=end, actors=actors)


def within(spans: Iterable[Span], start: float, end: float) -> list[Span]:
    """Return the spans of a period, cut at its ends."""
    cut = (span._replace(start=max(span.start, start), end=min(span.end, end)) for span in spans)
    return [span for span in cut if span.end > span.start]


def _columns(actors: Sequence[ActorTime]) -> dict[str, list[ActorTime]]:
    if len(actors) <= _MAX_COLUMNS:
        return {actor.actor: [actor] for actor in actors}
    kinds: dict[str, list[ActorTime]] = {}
    for actor in actors:
        kinds.setdefault(actor.actor.rstrip("0123456789").rstrip("-"), []).append(actor)
    return {f"{kind}, mean of {len(members)}": members for kind, members in kinds.items()}


def _in_natural_order(actor: str) -> tuple[list[str], list[int]]:
    """Sort maker-2 before maker-10."""
    return re.findall(r"\D+", actor), [int(number) for number in re.findall(r"\d+", actor)]
