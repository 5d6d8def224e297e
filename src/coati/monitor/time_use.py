"""Where the time of each actor went, from its spans, and what limits the run."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from coati.monitor.timeline import ACTIVITIES, Span, is_idle

# A run begins when some actor does one of these for the first time; before that it starts up.
_FIRST_WORK: Final = frozenset({"generate", "train", "wait_data"})
TOTALS: Final = ("worked", "waited", "absent", "other")
_MAKER_WAITS: Final = {
    "wait_rewards": "waited for reward functions",
    "wait_weights": "waited for weights",
    "wait_room": "waited for room in the buffer",
    "absent": "had finished, or were not there",
}
_NOTABLE_SHARE: Final = 0.15
_MAX_COLUMNS: Final = 6


@dataclass(frozen=True)
class RunTimes:
    """The times of all actors, in one window: from the first work to the last span."""

    elapsed: float
    """Seconds of the window."""
    actors: Mapping[str, Mapping[str, float]]
    """The share of each activity, and of the `TOTALS`, by actor.

    "absent" is the time before its first span and after its last, "other" what no span covers in between.
    """

    def columns(self) -> dict[str, Mapping[str, float]]:
        """The shares of every actor, or the means of each kind of actors where there are many."""
        if len(self.actors) <= _MAX_COLUMNS:
            return dict(self.actors)
        kinds: dict[str, list[Mapping[str, float]]] = {}
        for actor, shares in self.actors.items():
            kinds.setdefault(actor.rstrip("0123456789").rstrip("-"), []).append(shares)
        every = (*ACTIVITIES, *TOTALS)
        return {
            f"{kind}, mean of {len(members)}": {what: _mean(members, what) for what in every}
            for kind, members in kinds.items()
        }

    def verdict(self) -> str:
        """Say in a sentence or two what limits the run; docs/fast.md says what helps."""
        trainers = [shares for shares in self.actors.values() if "train" in shares]
        makers = [shares for shares in self.actors.values() if "generate" in shares]
        name, shares = max(self.actors.items(), key=lambda actor: actor[1]["worked"])
        busiest = f"{name} worked {shares['worked']:.0%} of the time, more than any other."
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
    return RunTimes(end - start, {name: _shares(spans[name], start, end) for name in names})


def _shares(spans: Sequence[Span], start: float, end: float) -> dict[str, float]:
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
    return shares | dict(zip(TOTALS, totals, strict=True))


def _mean(actors: Sequence[Mapping[str, float]], what: str) -> float:
    return sum(shares.get(what, 0.0) for shares in actors) / len(actors)


def _in_natural_order(actor: str) -> tuple[list[str], list[int]]:
    """Sort maker-2 before maker-10."""
    return re.findall(r"\D+", actor), [int(number) for number in re.findall(r"\d+", actor)]
