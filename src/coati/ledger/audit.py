"""The account of a run: the fate of every group that was leased, read from the journals of its ledgers.

It follows each number through the events without using `Ledger`, so it also finds bugs in the ledger.
"""

import dataclasses
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from coati.errors import DataError, counted
from coati.ledger.journal import JournalContent, read_journals
from coati.ledger.rules import LedgerRules

FATES = ("trained", "dropped", "quarantined", "open")  # "open": the lease has not ended

_MOST_DETAILS = 5  # maximum number of rows per fate; rarer reasons are summed up in one more
_DETAIL_CHARACTERS = 60

# For each kind of event: the states that a number may be in before, and its state afterwards.
_MOVES = {
    "grant": (("", "returned"), "open"),
    "return": (("open",), "returned"),
    "deliver": (("open",), "delivered"),
    "pick": (("delivered",), "picked"),
    "train": (("picked",), "trained"),
    "drop": (("open",), "dropped"),
    "quarantine": (("open",), "quarantined"),
}
# What happened to a group, by kind of event.
_TEXTS = {
    "grant": "leased to {maker}, which served version {version}",
    "return": "returned: {reason}",
    "resume": "returned: the run was resumed from version {resume}",
    "deliver": "delivered",
    "refuse": "another delivery was refused: it was too late, or the second one",
    "pick": "picked for training",
    "train": "trained on, which made version {train}",
    "drop": "dropped: {reason}",
    "quarantine": "quarantined: {reason}",
}

Row = tuple[str, str, int, int]  # fate, details, number of groups, number of samples


@dataclasses.dataclass(slots=True)
class Group:
    """The state of one lease number while events are applied."""

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
        """Versions between its grant and the version that it was trained at."""
        return self.trained_at - self.granted_at

    @property
    def details(self) -> str:
        """The reason why it was dropped, or where an open group is."""
        if self.fate != "open":
            return _kind(self.reason)
        return f"being made by {self.maker}" if self.state == "open" else self.state


class TrainerAccount:
    """The account of the groups of one trainer."""

    def __init__(self, rules: LedgerRules) -> None:
        self.rules = rules
        self.groups: dict[int, Group] = {}
        self.problems: list[str] = []  # violations, with the numbers of the groups
        self.repeats: Counter[tuple[str, str]] = Counter()
        """Number of returned groups and of refused deliveries, by ("returned" or "refused", reason)."""
        self._picked: list[int] = []
        self._num_trained = 0
        self._num_numbers = 0  # numbers granted so far
        self._num_before = 0  # groups trained on before the run changed its number of trainers

    def apply(self, event: Mapping[str, Any]) -> None:
        """Apply an event to the account."""
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
            end = -(-samples // self.rules.group_size)  # after a stop, the last group may be partial
            for number in self._picked[self._num_trained - self._num_before : end - self._num_before]:
                self._move(number, kind, event)
        elif kind != "publish":
            for number in event[kind]:
                self._move(number, kind, event)

    def _take_over(self, state: Mapping[str, Any]) -> None:
        """Take over the groups without a fate that a changed number of trainers assigns to this one."""
        self.groups = {number: group for number, group in self.groups.items() if group.fate != "open"}
        self.groups |= {work["number"]: Group("returned") for work in state["works"]}
        self._picked, self._num_numbers = [], state["num_numbers"]
        self._num_trained = self._num_before = state["num_trained"] // self.rules.group_size

    def _move(self, number: int, kind: str, event: Mapping[str, Any]) -> None:
        if kind == "grant" and number not in self.groups:
            expected = self._num_numbers * self.rules.num_streams + self.rules.stream
            self._num_numbers += 1
            if number != expected:
                self.problems.append(f"group {number}: granted, but {expected} was next")
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

    trainers: list[TrainerAccount]
    notes: list[str]  # remarks for the reader, such as a journal that ends in a partial record

    @property
    def problems(self) -> list[str]:
        """Violations because of which the account does not balance; empty if it does."""
        found = [problem for trainer in self.trainers for problem in trainer.problems]
        trained_by: dict[int, list[int]] = {}  # a number may move to another trainer only before it is trained on
        for trainer in self.trainers:
            for number, group in trainer.groups.items():
                if group.state == "trained":
                    trained_by.setdefault(number, []).append(trainer.rules.stream)
        twice = [number for number in sorted(trained_by) if len(trained_by[number]) > 1]
        return found + [f"group {number}: trained on by each of trainers {trained_by[number]}" for number in twice]

    @property
    def oldest(self) -> int:
        """Maximum age of the groups trained on, in versions."""
        return max((group.age for group in self._groups if group.state == "trained"), default=0)

    @property
    def num_trained(self) -> int:
        """Number of samples trained on."""
        return sum(group.state == "trained" for group in self._groups) * self._group_size

    @property
    def num_made(self) -> int:
        """Number of samples delivered and accepted."""
        return sum(group.state in ("delivered", "picked", "trained") for group in self._groups) * self._group_size

    def table(self) -> list[Row]:
        """Return the groups by fate and details. The last row is their sum, all groups leased."""
        groups = self._groups
        rows = self._rows(Counter((group.fate, group.details) for group in groups))
        return [*rows, ("all leased", "", len(groups), len(groups) * self._group_size)]

    def repeated(self) -> list[Row]:
        """Return the number of returned groups and refused deliveries, which are not fates and not part of the sum."""
        return self._rows(sum((trainer.repeats for trainer in self.trainers), Counter()))

    @property
    def _groups(self) -> list[Group]:
        return [group for trainer in self.trainers for group in trainer.groups.values()]

    @property
    def _group_size(self) -> int:
        return self.trainers[0].rules.group_size if self.trainers else 1

    def _rows(self, counts: Counter[tuple[str, str]]) -> list[Row]:
        rows: list[Row] = []
        for fate in (*FATES, "returned", "refused"):
            own = sorted((-count, details) for (one, details), count in counts.items() if one == fate)
            if rare := own[_MOST_DETAILS:]:
                own[_MOST_DETAILS:] = [(sum(count for count, _ in rare), counted(len(rare), "other reason"))]
            rows += [(fate, details, -count, -count * self._group_size) for count, details in own]
        return rows


def _kind(reason: str) -> str:
    """Return the general part of a reason, without the details of a single group."""
    return re.split(r": | \(|\n", reason, maxsplit=1)[0][:_DETAIL_CHARACTERS]


def audit_run(folder: Path) -> RunAccount:
    """Read the journals in a run's folder and return their account. Raises CheckpointError as `read_journals` does."""
    return account_of(read_journals(folder))


def account_of(journals: Sequence[JournalContent]) -> RunAccount:
    """Return the account of the journals of all trainers."""
    trainers, notes = [], []
    for content in journals:
        trainers.append(TrainerAccount(content.first_rules))
        for event in content.events:
            trainers[-1].apply(event)
        if content.num_cut:
            notes.append(
                f"stream-{content.rules.stream}.jsonl ends in a partial record ({content.num_cut} bytes), which was "
                "ignored: the run was stopped while it wrote, or is writing now."
            )
    return RunAccount(trainers, notes)


def history_of(folder: Path, sample: int) -> list[str]:
    """Return the history of a sample's group, as lines of text. Raises DataError for an unknown sample.

    Every line begins with the version that the trainer had reached.
    """
    lines: list[tuple[tuple[int, bool], str]] = []
    last, group, journals = -1, Group(), read_journals(folder)
    for content in journals:
        size = content.rules.group_size
        number, index = divmod(sample, size)
        account, when = TrainerAccount(content.first_rules), (0, False)  # version, and whether it was just resumed
        for event in content.events:
            kind, before = next(iter(event)), account.groups.get(number, Group()).state
            account.apply(event)
            when = (event["resume"], True) if kind == "resume" else when
            after = account.groups.get(number, Group()).state
            if after not in ("", before) or number in event.get("refuse", ()):
                text = _TEXTS[kind].format(**event)
                if "written_by" in event:
                    versions = event["written_by"][event["deliver"].index(number) * size + index][::2]
                    text += f", written by version {', then '.join(map(str, versions))}"
                trainer = f"trainer {content.rules.stream}, " if len(journals) > 1 else ""
                lines.append((when, f"{trainer}version {when[0]}: {text}"))
            when = (event["train"], False) if kind == "train" else when
        last, group = max([last, *account.groups]), account.groups.get(number, group)
    if not lines:
        raise DataError(
            f"--sample must be the id of a leased sample, in this run below {(last + 1) * size}, got {sample}. "
            "samples.jsonl and quarantine.jsonl have the ids, as sample_id."
        )
    first, fate = number * size, f"{group.fate} ({group.details})" if group.details else group.fate
    heading = f"Sample {sample}" + f" is in group {number} (samples {first} to {first + size - 1})" * (size > 1)
    return [f"{heading}. Fate: {fate}.", *(text for _, text in sorted(lines, key=lambda line: line[0]))]
