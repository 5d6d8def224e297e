"""The account of a run: what became of every group that was leased, from the journals of its ledgers.

It follows each number through the events without the `Ledger` that wrote them, so that a fault of the ledger shows.
"""

import dataclasses
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from coati.counting import counted
from coati.ledger.journal import JournalContent, read_journals
from coati.ledger.rules import LedgerRules

FATES = ("trained", "dropped", "quarantined", "open")  # how a lease can end, and that it has not ended

_MOST_DETAILS = 5  # of one fate; rarer ones are counted together
_DETAIL_CHARACTERS = 60

# For each kind of event: the state that a number must be in, and the one it is in afterwards.
_MOVES = {
    "grant": (("", "returned"), "open"),
    "return": (("open",), "returned"),
    "deliver": (("open",), "delivered"),
    "pick": (("delivered",), "picked"),
    "train": (("picked",), "trained"),
    "drop": (("open",), "dropped"),
    "quarantine": (("open",), "quarantined"),
}


Row = tuple[str, str, int, int]  # of the account: fate, details, groups and samples


@dataclasses.dataclass(slots=True)
class Group:
    """One number's way through the events."""

    state: str = ""
    maker: str = ""
    granted_at: int = 0
    trained_at: int = 0
    reason: str = ""

    @property
    def fate(self) -> str:
        """One of FATES."""
        return self.state if self.state in FATES else "open"

    @property
    def age(self) -> int:
        """When it was trained on, in versions."""
        return self.trained_at - self.granted_at

    @property
    def details(self) -> str:
        """Why it was dropped, or where it is."""
        if self.fate != "open":
            return _kind(self.reason)
        return f"being made by {self.maker}" if self.state == "open" else self.state


class StreamAccount:
    """What became of the groups of one trainer."""

    def __init__(self, rules: LedgerRules) -> None:
        self.rules = rules
        self.groups: dict[int, Group] = {}
        self.problems: list[str] = []  # what must not be, with the numbers of the groups
        self.repeats: Counter[tuple[str, str]] = Counter()
        """How often groups were returned, and refused when they were delivered, with the reasons."""
        self._picked: list[int] = []
        self._num_trained = 0
        self._num_numbers = 0  # granted so far
        self._num_before = 0  # groups that others had trained on when this one took over

    def apply(self, event: Mapping[str, Any]) -> None:
        """Follow an event."""
        kind = next(iter(event))
        if kind == "resume":
            self.rules = LedgerRules(**event["rules"])
            if "state" in event:
                self._take_over(event["state"])
            for group in self.groups.values():
                if group.state == "open":
                    group.state = "returned"
                    self.repeats["returned", "the run was resumed"] += 1
        elif kind == "refuse":
            self.repeats["refused", "delivered too late, or twice"] += len(event[kind])
        elif kind == "train":
            samples = event.get("samples", event["train"] * self.rules.samples_per_version)
            end = -(-samples // self.rules.group_size)  # a stop may leave a group trained on in part
            for number in self._picked[self._num_trained - self._num_before : end - self._num_before]:
                self._move(number, kind, event)
        elif kind != "publish":
            for number in event[kind]:
                self._move(number, kind, event)

    def _take_over(self, state: Mapping[str, Any]) -> None:
        """The run has another number of trainers: groups without a fate were divided among them again."""
        self.groups = {number: group for number, group in self.groups.items() if group.fate != "open"}
        self.groups |= {work["number"]: Group("returned") for work in state["works"]}
        self._picked, self._num_numbers = [], state["num_numbers"]
        self._num_trained = self._num_before = state["num_trained"] // self.rules.group_size

    def _move(self, number: int, kind: str, event: Mapping[str, Any]) -> None:
        if kind == "grant" and number not in self.groups:
            expected = self._num_numbers * self.rules.num_streams + self.rules.stream
            self._num_numbers += 1
            if number != expected:
                self.problems.append(f"group {number}: granted when {expected} was the next")
        group = self.groups.setdefault(number, Group())
        before, after = _MOVES[kind]
        if group.state not in before:
            self.problems.append(f"group {number}: {kind} after it was {group.state or 'never granted'}")
        if kind == "grant":
            group.maker, group.granted_at = event["maker"], event["version"]
        elif kind == "return":
            self.repeats["returned", _kind(event["reason"])] += 1
        elif kind == "pick":
            self._picked.append(number)
        elif kind == "train":
            group.trained_at = self._num_trained * self.rules.group_size // self.rules.samples_per_version
            self._num_trained += 1
            bound = self.rules.max_staleness
            if group.age < 0 or (bound is not None and group.age > bound):
                versions = f"trained at version {group.trained_at}, granted at {group.granted_at}"
                self.problems.append(f"group {number}: {versions}, max_staleness {bound}")
        group.state, group.reason = after, event.get("reason", "")


@dataclasses.dataclass(frozen=True)
class RunAccount:
    """The accounts of all trainers of a run."""

    streams: list[StreamAccount]
    notes: list[str]  # what a reader should know, such as a journal that ends in part of a record

    @property
    def problems(self) -> list[str]:
        """Why the account does not close; empty if it does."""
        found = [problem for stream in self.streams for problem in stream.problems]
        trained_by: dict[int, list[int]] = {}  # a number may move to another trainer, as long as it has no fate
        for stream in self.streams:
            for number, group in stream.groups.items():
                if group.state == "trained":
                    trained_by.setdefault(number, []).append(stream.rules.stream)
        twice = [number for number in sorted(trained_by) if len(trained_by[number]) > 1]
        return found + [f"group {number}: trained by each of trainers {trained_by[number]}" for number in twice]

    @property
    def oldest(self) -> int:
        """The greatest age of a group that was trained on, in versions."""
        return max((group.age for group in self._groups if group.state == "trained"), default=0)

    @property
    def num_trained(self) -> int:
        """Samples that were trained on."""
        return sum(group.state == "trained" for group in self._groups) * self._group_size

    @property
    def num_made(self) -> int:
        """Samples that were delivered, and not refused."""
        return sum(group.state in ("delivered", "picked", "trained") for group in self._groups) * self._group_size

    def table(self) -> list[Row]:
        """What became of the groups; the last row is the sum, what was leased."""
        groups = self._groups
        rows = self._rows(Counter((group.fate, group.details) for group in groups))
        return [*rows, ("leased", "", len(groups), len(groups) * self._group_size)]

    def repeated(self) -> list[Row]:
        """What was done more than once, which is no fate: groups that were returned, and refused deliveries."""
        return self._rows(sum((stream.repeats for stream in self.streams), Counter()))

    @property
    def _groups(self) -> list[Group]:
        return [group for stream in self.streams for group in stream.groups.values()]

    @property
    def _group_size(self) -> int:
        return self.streams[0].rules.group_size if self.streams else 1

    def _rows(self, counts: Counter[tuple[str, str]]) -> list[Row]:
        rows: list[Row] = []
        for fate in (*FATES, "returned", "refused"):
            own = sorted((-count, details) for (one, details), count in counts.items() if one == fate)
            if rare := own[_MOST_DETAILS:]:
                own[_MOST_DETAILS:] = [(sum(count for count, _ in rare), counted(len(rare), "other reason"))]
            rows += [(fate, details, -count, -count * self._group_size) for count, details in own]
        return rows


def _kind(reason: str) -> str:
    """What groups with such a reason are counted under: without what tells one from the other."""
    return re.split(r": | \(|\n", reason, maxsplit=1)[0][:_DETAIL_CHARACTERS]


def audit_run(folder: Path) -> RunAccount:
    """Read the journals in a run's folder. CheckpointError as `read_journals`."""
    return account_of(read_journals(folder))


def account_of(journals: Sequence[JournalContent]) -> RunAccount:
    """Follow the events of all trainers' journals."""
    streams, notes = [], []
    for content in journals:
        streams.append(StreamAccount(content.first_rules))
        for event in content.events:
            streams[-1].apply(event)
        if content.num_cut:
            notes.append(
                f"stream-{content.rules.stream}.jsonl ends in part of a record ({content.num_cut} bytes), which was "
                "ignored: the run was stopped while it wrote, or is writing now."
            )
    return RunAccount(streams, notes)
