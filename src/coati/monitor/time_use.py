"""Where the time of each actor went, from its spans, and what limits the run."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from coati.monitor.timeline import ACTIVITIES, Span, is_idle, label_of

# A run begins when some actor does one of these for the first time; before that it starts up.
_FIRST_WORK: Final = frozenset({"generate", "train", "wait_data"})
_TOTALS: Final = ("worked", "waited", "absent", "other")
_MAKER_WAITS: Final = {
    "wait_rewards": "waited for reward functions",
    "wait_weights": "waited for weights",
    "wait_room": "waited for room in the buffer",
    "absent": "had finished, or were not there",
}
_NOTABLE_SHARE: Final = 0.15
_SHOWN_SHARE: Final = 0.005
_MAX_COLUMNS: Final = 6


class ActorTime(NamedTuple):
    """How one actor spent the time of the run."""

    actor: str
    shares: Mapping[str, float]
    """The share of each activity, and of the totals.

    "absent" is the time before its first span and after its last, "other" what no span covers in between.
    """


@dataclass(frozen=True)
class RunTimes:
    """The times of all actors, in one window: from the first work to the last span."""

    elapsed: float
    """Seconds of the window."""
    actors: list[ActorTime]

    @property
    def busiest(self) -> ActorTime:
        """The actor that worked most: the run cannot be faster than that."""
        return max(self.actors, key=lambda actor: actor.shares["worked"])

    def table(self) -> list[tuple[str, list[str]]]:
        """Return rows of texts, each with its kind: the "head", activities ("work", "idle"), and each "total".

        A column is an actor, or the mean of a kind of actors where there are many. Activities that took next to no time
        are left out.
        """
        columns = _columns(self.actors)
        rows = [("head", ["", *columns])]
        for what in (*sorted(ACTIVITIES, key=is_idle), *_TOTALS):
            shares = [_mean(actors, what) for actors in columns.values()]
            if what in _TOTALS:
                rows.append(("total", [what, *(f"{share:.0%}" for share in shares)]))
            elif max(shares) >= _SHOWN_SHARE:
                cells = [f"{share:.0%}" if share > 0 else "" for share in shares]
                rows.append(("idle" if is_idle(what) else "work", [label_of(what), *cells]))
        return rows

    def verdict(self) -> str:
        """Say in a sentence or two what limits the run; docs/fast.md says what helps."""
        trainers = [actor for actor in self.actors if "train" in actor.shares]
        makers = [actor for actor in self.actors if "generate" in actor.shares]
        busiest = f"{self.busiest.actor} worked {self.busiest.shares['worked']:.0%} of the time, more than any other."
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


def run_times(spans: Mapping[str, Sequence[Span]]) -> RunTimes | None:
    """Add up the spans of all actors within the window of the run; None if no span tells of work."""
    every = [span for own in spans.values() for span in own]
    start = min((span.start for span in every if span.what in _FIRST_WORK), default=None)
    if start is None:
        return None
    end = max(span.end for span in every)
    names = sorted(spans, key=_in_natural_order)
    return RunTimes(end - start, [_actor_time(name, spans[name], start, end) for name in names])


def _actor_time(actor: str, spans: Sequence[Span], start: float, end: float) -> ActorTime:
    """Add up one actor's spans."""
    elapsed = max(end - start, 1e-9)
    shares: dict[str, float] = {}
    for span in spans:
        if span.end > start:
            shares[span.what] = shares.get(span.what, 0.0) + (span.end - max(span.start, start)) / elapsed
    worked = sum(share for what, share in shares.items() if not is_idle(what))
    waited = sum(share for what, share in shares.items() if is_idle(what))
    first, last = max(start, min(span.start for span in spans)), max(start, max(span.end for span in spans))
    absent = 1.0 - max(0.0, last - first) / elapsed
    totals = (worked, waited, absent, max(0.0, 1.0 - worked - waited - absent))
    return ActorTime(actor, shares | dict(zip(_TOTALS, totals, strict=True)))


def _mean(actors: Sequence[ActorTime], what: str) -> float:
    return sum(actor.shares.get(what, 0.0) for actor in actors) / len(actors)


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
