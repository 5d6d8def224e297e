"""A run that continues with another number of trainers: what is unfinished is divided among their ledgers."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from coati.ledger.journal import Journal, resume_event
from coati.ledger.leases import Ledger, Work
from coati.ledger.rules import LedgerRules


def redistribute(rules: LedgerRules, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The state of one of `rules.num_streams` ledgers that take over from others, however many these were.

    A version that a stop ended early counts as a whole one. Groups that were not trained on, delivered or not, are made
    again, by whichever ledger their numbers belong to now.
    """
    num_before, version = len(states), int(states[0]["version"])
    next_numbers = [state["num_numbers"] * num_before + stream for stream, state in enumerate(states)]
    end = max(next_numbers)  # no ledger has granted this number or one above it
    unfinished = {work["number"] for state in states for work in state["works"]}
    for number in next_numbers:
        unfinished.update(range(number, end, num_before))  # one that had dropped less is behind
    own = sorted(number for number in unfinished if number % rules.num_streams == rules.stream)
    num_numbers = -(-(end - rules.stream) // rules.num_streams)
    num_samples = -(-int(states[0]["num_trained"]) // rules.samples_per_version) * rules.samples_per_version
    return {
        "version": version,
        "num_picked": num_samples,
        "num_numbers": num_numbers,
        # What was granted, less these, is what was trained on and what is unfinished. More ledgers than before have
        # trained on more together than was ever granted, so it may be below 0.
        "num_dropped": num_numbers - len(own) - num_samples // rules.group_size,
        "num_trained": num_samples,
        "picked": [],
        "works": [dataclasses.asdict(Work(number)) for number in own],
    }


def retire_journals(folder: Path, rules: LedgerRules, *, run: str, version: int, events: Sequence[int] | None) -> None:
    """Write into the journals of trainers that are gone that the others have their unfinished groups from `version` on.

    `rules` are those of any trainer of the run in `folder`. `events`, of each trainer that the checkpoint knows, led to
    it; None if the run starts over, and all they hold is void.
    """
    for path in sorted((folder / "ledger").glob("stream-*.jsonl")):
        stream = int(path.stem.removeprefix("stream-"))
        if stream < rules.num_streams:
            continue
        own = dataclasses.replace(rules, stream=stream)
        num_valid = 0 if events is None else events[stream] if stream < len(events) else None
        journal = Journal(path, own, run=run, is_resumed=True)
        journal.write([resume_event(version, num_valid, own, state=Ledger(own).state())])
        journal.close()
