"""The journal of a ledger: its events on disk, in a file that may be cut at any byte.

Each record is one line: a checksum, a space, a JSON list of events. The first record describes the ledger.

    1f0c3a9e [{"format":1,"run":"…","rules":{…}}]
    77ab01c2 [{"grant":[0],"maker":"maker-0","version":0},{"grant":[1],"maker":"maker-0","version":0}]

Part of a record at the end, of a process that died while it wrote, is ignored. A bad record with good ones after it is
an error.

A resumed run appends {"resume": version, "events": n, "first_epoch": e, "rules": {…}}: the first n events led to its
checkpoint, what comes between them and this one is void, open leases are returned, and epochs go on from e. If n is
null, the checkpoint knows no such trainer: those up to the first resume from that version or a later one led to it.
With another number of trainers, "state" says which numbers the ledger has now.
"""

import dataclasses
import errno
import fcntl
import io
import json
import logging
import os
import time
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from coati import faults
from coati.counting import counted
from coati.errors import CheckpointError, DeadlineExceeded, StorageError
from coati.ledger.leases import Ledger, Work
from coati.ledger.rules import Event, LedgerRules

logger = logging.getLogger(__name__)

_FORMAT = 1


class JournalContent(NamedTuple):
    """What a journal holds."""

    run: str
    rules: LedgerRules  # the last ones; a run that is resumed may change them
    first_rules: LedgerRules
    events: list[Event]  # without those that a resumed run has made again
    num_events: int  # of the file, with those
    num_bytes: int  # of whole records
    num_cut: int  # bytes at the end that are not a whole record, and were ignored


def read_journal(path: Path) -> JournalContent:
    """Read the ledger's rules and events, without part of a record at the end; CheckpointError if it is damaged."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"The journal {str(path)!r} cannot be read: {error.strerror}.") from None
    records, num_bytes = _scan(path, data)
    if not records:
        raise CheckpointError(
            f"{str(path)!r} has no whole record of a journal in its {counted(len(data), 'byte')}: the run stopped "
            "before it recorded anything, or this is another file."
        )
    header, events = records[0][0], [event for record in records[1:] for event in record]
    if header.get("format") != _FORMAT:
        raise CheckpointError(
            f"{str(path)!r} is a journal of format {header.get('format')}, and this version of coati reads format "
            f"{_FORMAT}. Use the version that wrote it."
        )
    rules, valid = header["rules"], dict[int, Event]()
    for number, event in enumerate(events):
        if "resume" in event:
            later = (index for index in valid if valid[index].get("resume", -1) >= event["resume"])
            end = next(later, number) if event["events"] is None else event["events"]
            rules, valid = event["rules"], {index: valid[index] for index in valid if index < end}
        valid[number] = event
    cut = len(data) - num_bytes
    both = LedgerRules(**rules), LedgerRules(**header["rules"])
    return JournalContent(header["run"], *both, [*valid.values()], len(events), num_bytes, cut)


def read_journals(folder: Path) -> list[JournalContent]:
    """Read the journals of all trainers of a run; CheckpointError if there are none, or one is missing or damaged."""
    contents = [read_journal(path) for path in sorted((folder / "ledger").glob("stream-*.jsonl"))]
    if not contents:
        raise CheckpointError(
            f"{str(folder)!r} has no journals (ledger/stream-*.jsonl). Give the output folder of a run."
        )
    contents.sort(key=lambda content: content.rules.stream)
    expected, found = contents[0].rules.num_streams, [content.rules.stream for content in contents]
    if found[:expected] != list(range(expected)):  # there may be more, of trainers that are gone
        raise CheckpointError(
            f"{str(folder)!r} must have one journal for each of the run's {expected} trainers, got those of {found}. "
            "Restore the missing files from a copy."
        )
    return contents


class Journal:
    """Append the events of one ledger to a file, which no other process can do then.

    Raises:
        CheckpointError: when the file is there and damaged, or belongs to another run or to other rules.
        StorageError: when it cannot be written.
        DeadlineExceeded: when another process still writes to it after `lock_seconds`.
    """

    def __init__(
        self, path: Path, rules: LedgerRules, *, run: str, is_resumed: bool = False, lock_seconds: float = 60.0
    ) -> None:
        self.path = path
        self.num_events = 0  # events in the file
        self._end = 0  # of the last whole record
        header = _record([{"format": _FORMAT, "run": run, "rules": dataclasses.asdict(rules)}])
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise self._failure(error) from error
        try:
            self._lock(lock_seconds)
            if header.startswith(path.read_bytes()):  # new, or its writer died before it had recorded anything
                self._append(header)
            else:
                self._continue(read_journal(path), None if is_resumed else rules, run)
        except BaseException:
            os.close(self._file)
            raise

    def write(self, events: Sequence[Event]) -> None:
        """Append events as one record, which is found whole or not at all; after a StorageError none is recorded.

        They survive the end of this process, and the end of the machine after `sync`.
        """
        if events:
            faults.reach("journal.before_write")
            self._append(_record(events))
            self.num_events += len(events)

    def sync(self) -> None:
        """Wait until everything written is on the disk."""
        try:
            os.fsync(self._file)
        except OSError as error:
            raise self._failure(error) from error

    def close(self) -> None:
        """Close the file, without `sync`."""
        with suppress(OSError):
            fcntl.flock(self._file, fcntl.LOCK_UN)  # which a process that was forked from this one would hold on to
        os.close(self._file)

    def _lock(self, seconds: float) -> None:
        """Wait for the end of a writer before this one: a trainer that is killed may take a while to be gone."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise DeadlineExceeded(
                        f"waited {seconds:g} s for the journal {str(self.path)!r}, which another process has open to "
                        "write, probably a trainer of this run that should have ended. `fuser` names it: end it."
                    ) from None
                time.sleep(0.05)
            except OSError as error:  # some network file systems have no locks
                logger.warning("%s cannot be locked (%s); make sure that nothing else writes it.", self.path, error)
                return
            else:
                return

    def _continue(self, there: JournalContent, rules: LedgerRules | None, run: str) -> None:
        if (there.run, there.rules) != (run, rules or there.rules):
            raise CheckpointError(
                f"The journal {str(self.path)!r} cannot be continued, because it was written by run {there.run!r} with "
                f"{there.rules}, and this is {run!r} with {rules}. Use the same settings, or another run.output."
            )
        self._end, self.num_events = there.num_bytes, there.num_events
        if there.num_cut:
            os.ftruncate(self._file, self._end)
            logger.warning(
                "%s ended in part of a record (%s), which was removed: its writer was stopped while it wrote.",
                self.path, counted(there.num_cut, "byte"),
            )  # fmt: skip

    def _append(self, record: bytes) -> None:
        try:
            done = 0
            while done < len(record):  # a disk that is nearly full takes a part
                done += os.pwrite(self._file, record[done:], self._end + done)
        except OSError as error:
            with suppress(OSError):  # then a part stays until the next write, and readers ignore it
                os.ftruncate(self._file, self._end)
            raise self._failure(error) from error
        self._end += len(record)

    def _failure(self, error: OSError) -> StorageError:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        return StorageError(
            f"The journal {str(self.path)!r} cannot be written: {error.strerror}. What it holds so far is intact. "
            + ("Free space on that disk." if is_full else "Check the disk and the folder's permissions.")
        )


def redistribute(rules: LedgerRules, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The state of one of `rules.num_streams` ledgers that take over from another number of them.

    A version that a stop ended early counts as a whole one. Groups that were not trained on are made again.
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
    """Write into the journals of trainers that are gone that others have their groups from `version` on.

    `events`, of each trainer that the checkpoint knows, led to it; None if the run starts over.
    """
    for path in sorted((folder / "ledger").glob("stream-*.jsonl")):
        stream = int(path.stem.removeprefix("stream-"))
        if stream < rules.num_streams:
            continue
        own = dataclasses.replace(rules, stream=stream)
        num_valid = 0 if events is None else events[stream] if stream < len(events) else None
        journal = Journal(path, own, run=run, is_resumed=True)
        resume = {"resume": version, "events": num_valid, "first_epoch": 0, "rules": dataclasses.asdict(own)}
        journal.write([resume | {"state": Ledger(own).state()}])
        journal.close()


def _record(events: Sequence[Any]) -> bytes:
    body = json.dumps(events, separators=(",", ":")).encode("ascii")
    return b"%08x %b\n" % (zlib.crc32(body), body)


def _scan(path: Path, data: bytes) -> tuple[list[list[Event]], int]:
    """The whole records from the start, and where the last one ends."""
    records: list[list[Event]] = []
    start = good = 0
    for line in io.BytesIO(data):
        if (is_whole := _is_whole(line)) and start != good:
            raise CheckpointError(
                f"The journal {str(path)!r} is damaged at byte {good}: the record there does not match its checksum, "
                f"and there are good ones after it, from byte {start}. Restore the file from a copy. Without one, "
                f"`truncate -s {good}` keeps what was recorded before the damage."
            )
        start += len(line)
        if is_whole:
            records.append(json.loads(line[9:]))
            good = start
    return records, good


def _is_whole(line: bytes) -> bool:
    return line.endswith(b"\n") and line[:9] == b"%08x " % zlib.crc32(line[9:-1])
