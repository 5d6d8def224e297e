"""Where the time of each actor went, from its spans, and what limits the run."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from coati.monitor.report.folder import Processors
from coati.monitor.timeline import ACTIVITIES, LEAVE, WORK, Span, TimeUse, activity, is_idle

# A run begins when some actor does one of these for the first time; before that it starts up.
_FIRST_WORK: Final = frozenset({"generate", "train", "wait_data"})
_TOTALS: Final = ("worked", "waited", "had finished", "other")
_NOTABLE_SHARE: Final = 0.15
_SATURATED_SHARE: Final = 0.75
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
                rows.append(TimeRow(activity(what).label, "idle" if is_idle(what) else "work", shares))
        if any(actor.elapsed < _PRESENT_SHARE * self.elapsed for actor in self.actors):
            means = [sum(actor.elapsed for actor in actors) / len(actors) for actors in columns.values()]
            rows.append(TimeRow("present", "total", [mean / self.elapsed for mean in means]))
        return list(columns), rows

    def verdict(self, processors: Processors | None = None, *, lead_setting: str = "topology.lead") -> str:
        """Say in a few sentences what limits the run, and what would help.

        `processors` are those that all actors share, if they do; `lead_setting` is what keeps makers from being further
        ahead.
        """
        trainers = [actor for actor in self.actors if "train" in actor.seconds]
        makers = [actor for actor in self.actors if "generate" in actor.seconds]
        worked = self.worked_share(self.busiest)
        if not trainers or not makers or trainers == makers:
            return f"One process did everything in turn, for {worked:.0%} of the time: nothing overlapped."
        return f"{self.busiest.actor} worked {worked:.0%} of the time, more than any other. " + _limit(
            trainers, makers, self._saturated(processors), lead_setting
        )

    def _saturated(self, processors: Processors | None) -> str | None:
        """Say that the processors are the limit; None if they are not."""
        if processors is None or not self.elapsed:
            return None
        busy_actors = sum(map(self.worked_share, self.actors))
        share = min(1.0, busy_actors * processors.threads_per_actor / processors.cores)
        if share < _SATURATED_SHARE:
            return None
        cores = "the only core" if processors.cores == 1 else f"the {processors.cores} cores"
        return (
            f"The actors keep {cores} of the machine busy ({share:.0%}), so more of them would not help: more cores, a "
            "GPU, shorter responses or a smaller model would."
        )


def _limit(trainers: Sequence[ActorTime], makers: Sequence[ActorTime], saturated: str | None, lead_setting: str) -> str:
    """Say what limits a run of makers and trainers, and what would help."""
    data, rewards = _mean(trainers, "wait_data"), _mean(makers, "wait_rewards")
    causes = {
        "wait_weights": "waited for weights",
        "wait_room": "waited for room in the buffer",
        "had finished": "had finished",
    }
    waits = {cause: _mean(makers, cause) for cause in causes}
    weights, longest = waits["wait_weights"], max(waits, key=waits.__getitem__)
    if data >= _NOTABLE_SHARE and rewards >= max(weights, _NOTABLE_SHARE):
        return (
            f"Trainers waited for data ({data:.0%}) and makers for reward functions ({rewards:.0%}): reward functions "
            "are the limit. Make them faster, or use more makers (coati scale)."
        )
    if data >= _NOTABLE_SHARE and weights >= _NOTABLE_SHARE:
        return (
            f"Trainers waited for data ({data:.0%}) and makers for weights ({weights:.0%}) in turn. A greater "
            f"{lead_setting} would let them overlap."
        )
    if data >= _NOTABLE_SHARE:
        remedy = saturated or "More makers (coati scale), or shorter responses, would help."
        return f"Trainers waited for data {data:.0%} of the time: generation is the limit. {remedy}"
    if waits[longest] >= _NOTABLE_SHARE:
        fewer = "Fewer makers would do; more trainers" if len(makers) > 1 else "More trainers"
        remedy = saturated or f"{fewer}, or a faster training step, would help."
        return f"Makers {causes[longest]} {waits[longest]:.0%} of the time: training is the limit. {remedy}"
    return f"No actor waited long: makers and trainers are in balance. {saturated or ''}".rstrip()


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
