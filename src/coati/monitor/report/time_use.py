"""Where the time of each actor went, from its spans: no moment counts twice, and idle time has a cause."""

from __future__ import annotations

import functools
import heapq
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from coati.monitor.report.folder import ActorSpan, Processors
from coati.monitor.timeline import ACTIVITIES, LEAVE, WORK, Span, activity, is_idle

# A run begins when some actor does one of these for the first time; before that it starts up.
_FIRST_WORK: Final = frozenset({"generate", "train", "wait_data"})
_NOTABLE_SHARE: Final = 0.15
_SATURATED_SHARE: Final = 0.75
_SHOWN_SHARE: Final = 0.005
_MAX_COLUMNS: Final = 6
# An actor that was present for less of the run joined late or left early; the rest is start-up.
_PRESENT_SHARE: Final = 0.9


class Piece(NamedTuple):
    """A stretch of time with one activity."""

    what: str
    start: float
    end: float
    version: int


@dataclass(frozen=True, kw_only=True)
class ActorTime:
    """What one actor did with its time: the window of the run, or the part of it in which the actor was present."""

    actor: str
    pieces: list[Piece]
    """Of the lane of work, one after the other, inside the window."""
    other_lanes: Mapping[str, list[Piece]]
    """What its other threads did."""
    elapsed: float
    """Seconds in which it was present; shares are of these."""
    finished: float = 0.0
    """Seconds of those in which it had nothing left to do while the run continued."""

    @functools.cached_property
    def seconds(self) -> dict[str, float]:
        """Seconds of each activity, in the order of `ACTIVITIES`."""
        totals = dict.fromkeys(ACTIVITIES, 0.0)
        for piece in self.pieces:
            totals[piece.what] = totals.get(piece.what, 0.0) + piece.end - piece.start
        return {what: seconds for what, seconds in totals.items() if seconds > 0}

    def share(self, *activities: str) -> float:
        """Return the part of its time that went into these activities."""
        spent = sum(self.seconds.get(what, 0.0) for what in activities)
        return spent / self.elapsed if self.elapsed > 0 else 0.0

    @functools.cached_property
    def totals(self) -> dict[str, float]:
        """The shares of its time in which it worked, waited, had finished, and did something that no span covers."""
        worked = self.share(*(what for what in self.seconds if not is_idle(what)))
        waited = self.share(*(what for what in self.seconds if is_idle(what)))
        finished = self.finished / self.elapsed if self.elapsed > 0 else 0.0
        other = max(0.0, 1.0 - worked - waited - finished)
        return {"worked": worked, "waited": waited, "had finished": finished, "other": other}


class TimeRow(NamedTuple):
    """A line of the table: a share of the time for each column."""

    label: str
    kind: Literal["work", "idle", "total"]
    shares: list[float]


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
        return actor.totals["worked"] * actor.elapsed / self.elapsed if self.elapsed > 0 else 0.0

    def table(self) -> tuple[list[str], list[TimeRow]]:
        """Return the shares of all activities that took some time, and their totals: names of columns, and rows.

        A column is an actor, or the mean of a kind of actors where there are many.
        """
        columns = _columns(self.actors)
        rows = []
        for what in sorted(ACTIVITIES, key=is_idle):
            shares = [_mean(actors, lambda actor, what=what: actor.share(what)) for actors in columns.values()]  # type: ignore[misc]
            if max(shares) >= _SHOWN_SHARE:
                rows.append(TimeRow(activity(what).label, "idle" if is_idle(what) else "work", shares))
        for total in self.actors[0].totals:
            shares = [_mean(actors, lambda actor, total=total: actor.totals[total]) for actors in columns.values()]  # type: ignore[misc]
            rows.append(TimeRow(total, "total", shares))
        if any(actor.elapsed < _PRESENT_SHARE * self.elapsed for actor in self.actors):
            means = [sum(actor.elapsed for actor in actors) / len(actors) for actors in columns.values()]
            rows.append(TimeRow("present", "total", [mean / self.elapsed for mean in means]))
        return list(columns), rows

    def verdict(self, processors: Processors | None = None) -> str:
        """Say in one or two sentences what limits the run, and what would help.

        `processors` are those that all actors share, if they do.
        """
        trainers = [actor for actor in self.actors if "train" in actor.seconds]
        makers = [actor for actor in self.actors if "generate" in actor.seconds]
        worked = self.worked_share(self.busiest)
        if not trainers or not makers or trainers == makers:
            return f"One process did everything in turn, for {worked:.0%} of the time: nothing overlapped."
        lead = f"{self.busiest.actor} worked {worked:.0%} of the time, more than any other."
        saturated = self._saturated(processors)
        data = _mean(trainers, lambda actor: actor.share("wait_data"))
        weights = _mean(makers, lambda actor: actor.share("wait_weights"))
        room = _mean(makers, lambda actor: actor.share("wait_room"))
        rewards = _mean(makers, lambda actor: actor.share("wait_rewards"))
        finished = _mean(makers, lambda actor: actor.totals["had finished"])
        if data >= _NOTABLE_SHARE and rewards >= max(weights, _NOTABLE_SHARE):
            return (
                f"{lead} Trainers waited for data ({data:.0%}) and makers for reward functions ({rewards:.0%}): reward "
                "functions are the limit. Make them faster, or use more makers (coati scale)."
            )
        if data >= _NOTABLE_SHARE and weights >= _NOTABLE_SHARE:
            return (
                f"{lead} Trainers waited for data ({data:.0%}) and makers for weights ({weights:.0%}) in turn. "
                "A greater topology.max_staleness would let them overlap."
            )
        if data >= _NOTABLE_SHARE:
            remedy = saturated or "More makers (coati scale), or shorter responses, would help."
            return f"{lead} Trainers waited for data {data:.0%} of the time: generation is the limit. {remedy}"
        if max(weights, room, finished) >= _NOTABLE_SHARE:
            cause = "had finished" if finished >= max(weights, room) else "waited for weights"
            cause = "waited for room in the buffer" if room > max(weights, finished) else cause
            fewer = "Fewer makers would do; more trainers" if len(makers) > 1 else "More trainers"
            remedy = saturated or f"{fewer}, or a faster training step, would help."
            share = max(weights, room, finished)
            return f"{lead} Makers {cause} {share:.0%} of the time: training is the limit. {remedy}"
        return f"{lead} No actor waited long: makers and trainers are in balance. {saturated}".rstrip()

    def _saturated(self, processors: Processors | None) -> str:
        """Say that the processors are the limit, if they are; else an empty string."""
        if processors is None or not self.elapsed:
            return ""
        busy_actors = sum(map(self.worked_share, self.actors))
        share = min(1.0, busy_actors * processors.threads_per_actor / processors.cores)
        if share < _SATURATED_SHARE:
            return ""
        cores = "the only core" if processors.cores == 1 else f"the {processors.cores} cores"
        return (
            f"The actors keep {cores} of the machine busy ({share:.0%}), so more of them would not help: more cores, a "
            "GPU, shorter responses or a smaller model would."
        )


def _mean(actors: Sequence[ActorTime], share: Callable[[ActorTime], float]) -> float:
    """Return the mean of their shares, weighted by the time that each was present."""
    elapsed = sum(actor.elapsed for actor in actors)
    return sum(share(actor) * actor.elapsed for actor in actors) / elapsed if elapsed > 0 else 0.0


def run_times(spans: Sequence[ActorSpan]) -> RunTimes | None:
    """Cut all spans to the window of the run; None if no span tells of work.

    An actor is present from its first span until the run ends, or until the span that says that it left.
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
        # An actor that has finished still puts new weights into use.
        last = max((span.end for span in own if span.lane == WORK and span.what != "commit"), default=came)
        lanes = {lane: pieces_of(found, start, end) for lane, found in by_actor[actor].items()}
        work = lanes.pop(WORK, [])
        later = sum(piece.end - piece.start for piece in work if piece.start >= last)
        finished = max(0.0, left - max(last, came) - later)
        actors.append(
            ActorTime(actor=actor, pieces=work, other_lanes=lanes, elapsed=max(0.0, left - came), finished=finished)
        )
    return RunTimes(start=start, end=end, actors=actors)


def pieces_of(spans: Iterable[Span], start: float, end: float) -> list[Piece]:
    """Cut spans that lie inside or across each other into pieces: at each moment the latest begun counts.

    So a span inside another takes its time away from that one.
    """
    ordered = sorted(
        (span for span in spans if span.end > start and span.start < end and span.end > span.start),
        key=lambda span: (span.start, -span.end),
    )
    pieces: list[Piece] = []
    open_spans: list[tuple[float, int, Span]] = []  # the latest begun first

    def emit(until: float, since: float) -> float:
        """Give the time up to `until` to the spans that are open; return how far we are."""
        while open_spans and since < until:
            span = open_spans[0][2]
            if span.end <= since:
                heapq.heappop(open_spans)
                continue
            stop = min(span.end, until)
            piece = Piece(span.what, max(since, start), min(stop, end), span.version)
            if piece.end > piece.start:
                pieces.append(piece)
            since = stop
        return until

    now = start
    for index, span in enumerate(ordered):
        now = emit(max(span.start, start), now)
        heapq.heappush(open_spans, (-span.start, -index, span))
    emit(end, now)
    return pieces


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
