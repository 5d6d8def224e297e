"""The journal of a ledger: its events in an append-only file that stays readable if it is truncated at any byte.

Each record is one line: a checksum, a space, a JSON list of events. The first record describes the ledger. A partial
record at the end, left by a process that died while writing, is ignored. A bad record with good ones after it is an
error. docs/leases.md describes the events, and which of them a `resume` makes void.
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
from coati.errors import CheckpointError, DeadlineExceeded, StorageError, counted
from coati.ledger.leases import LeaseRecord, Ledger
from coati.ledger.rules import Event, LedgerRules

logger = logging.getLogger(__name__)

_FORMAT = 1


class JournalContent(NamedTuple):
    """The content of a journal."""

    run: str
    rules: LedgerRules  # the latest rules; a resumed run may change them
    first_rules: LedgerRules
    events: list[Event]  # without void events, from before a resume
    num_events: int  # number of events in the file, including void ones
    num_bytes: int  # number of bytes of whole records
    num_cut: int  # number of bytes of a partial record at the end, which are ignored


def read_journal(path: Path) -> JournalContent:
    """Read a journal, ignoring a partial record at the end. Raises CheckpointError if it is unreadable or damaged."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"The journal {str(path)!r} cannot be read: {error.strerror}.") from None
    records, num_bytes = _scan(path, data)
    if not records:
        raise CheckpointError(
            f"{str(path)!r} ({counted(len(data), 'byte')}) contains no whole record: the run stopped before it "
            "recorded anything, or this is not a journal."
        )
    header, events = records[0][0], [event for record in records[1:] for event in record]
    if header.get("format") != _FORMAT:
        raise CheckpointError(
            f"{str(path)!r} is a journal of format {header.get('format')}, but this version of coati reads format "
            f"{_FORMAT}. Use the version of coati that wrote it."
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
    """Read the journals of all trainers of a run. Raises CheckpointError if there are none or any is bad or missing."""
    contents = [read_journal(path) for path in sorted((folder / "ledger").glob("stream-*.jsonl"))]
    if not contents:
        raise CheckpointError(
            f"{str(folder)!r} has no journals (ledger/stream-*.jsonl). Pass the output folder of a run."
        )
    contents.sort(key=lambda content: content.rules.stream)
    expected, found = contents[0].rules.num_streams, [content.rules.stream for content in contents]
    if found[:expected] != list(range(expected)):  # there may be more, of trainers of earlier topologies
        raise CheckpointError(
            f"{str(folder)!r} must have one journal for each of the run's {expected} trainers, got those of {found}. "
            "Restore the missing files from a backup."
        )
    return contents


class Journal:
    """Appends the events of one ledger to a file, and locks it against other writers.

    Raises:
        CheckpointError: if the file exists and is damaged, or belongs to another run or to other rules.
        StorageError: if it cannot be written.
        DeadlineExceeded: if another process still holds the lock after `lock_seconds`.
    """

    def __init__(
        self, path: Path, rules: LedgerRules, *, run: str, is_resumed: bool = False, lock_seconds: float = 60.0
    ) -> None:
        self.path = path
        self.num_events = 0  # number of events in the file
        self._end = 0  # offset of the end of the last whole record
        header = _record([{"format": _FORMAT, "run": run, "rules": dataclasses.asdict(rules)}])
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise self._failure(error) from error
        try:
            self._lock(lock_seconds)
            if header.startswith(path.read_bytes()):  # new, or its writer died while it wrote the header
                self._append(header)
            else:
                self._continue(read_journal(path), None if is_resumed else rules, run)
        except BaseException:
            os.close(self._file)
            raise

    def write(self, events: Sequence[Event]) -> None:
        """Append events as one atomic record. If this raises StorageError, none of them is recorded.

        Written events survive a crash of this process; after `sync`, also a crash of the machine.
        """
        if events:
            faults.reach("journal.before_write")
            self._append(_record(events))
            self.num_events += len(events)

    def sync(self) -> None:
        """Flush everything written to disk."""
        try:
            os.fsync(self._file)
        except OSError as error:
            raise self._failure(error) from error

    def close(self) -> None:
        """Close the file, without `sync`."""
        with suppress(OSError):
            fcntl.flock(self._file, fcntl.LOCK_UN)  # forked processes may keep the file, and with it the lock, open
        os.close(self._file)

    def _lock(self, seconds: float) -> None:
        """Lock the file. Wait for the previous writer, because a killed trainer may take a while to exit."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise DeadlineExceeded(
                        f"waited {seconds:g} s for the journal {str(self.path)!r}, which another process is writing, "
                        "probably a trainer of this run that has not exited. Find it with `fuser`, and end it."
                    ) from None
                time.sleep(0.05)
            except OSError as error:  # some network file systems have no locks
                logger.warning("cannot lock %s (%s); make sure that no other process writes to it", self.path, error)
                return
            else:
                return

    def _continue(self, there: JournalContent, rules: LedgerRules | None, run: str) -> None:
        if (there.run, there.rules) != (run, rules or there.rules):
            raise CheckpointError(
                f"The journal {str(self.path)!r} cannot be continued: it was written by run {there.run!r} with "
                f"{there.rules}, but this is run {run!r} with {rules}. Use the same settings or another run.output."
            )
        self._end, self.num_events = there.num_bytes, there.num_events
        if there.num_cut:
            os.ftruncate(self._file, self._end)
            logger.warning(
                "%s ended in a partial record (%s), which was removed: its writer was stopped while writing",
                self.path, counted(there.num_cut, "byte"),
            )  # fmt: skip

    def _append(self, record: bytes) -> None:
        try:
            done = 0
            while done < len(record):  # a nearly full disk may write only a part
                done += os.pwrite(self._file, record[done:], self._end + done)
        except OSError as error:
            with suppress(OSError):  # if this fails, readers ignore the partial record and the next write replaces it
                os.ftruncate(self._file, self._end)
            raise self._failure(error) from error
        self._end += len(record)

    def _failure(self, error: OSError) -> StorageError:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        return StorageError(
            f"The journal {str(self.path)!r} cannot be written: {error.strerror}. The records in it are intact. "
            + ("Free space on that disk." if is_full else "Check the disk and the folder's permissions.")
        )


def redistribute(rules: LedgerRules, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the state of one of `rules.num_streams` ledgers that take over from `len(states)` ledgers.

    A version that a stop ended early counts as whole. Groups that were not trained on are made again.
    """
    num_before, version = len(states), int(states[0]["version"])
    next_numbers = [state["num_numbers"] * num_before + stream for stream, state in enumerate(states)]
    end = max(next_numbers)  # all numbers granted so far are below this
    unfinished = {work["number"] for state in states for work in state["works"]}
    for number in next_numbers:
        unfinished.update(range(number, end, num_before))  # a ledger that dropped fewer groups has granted fewer
    own = sorted(number for number in unfinished if number % rules.num_streams == rules.stream)
    num_numbers = -(-(end - rules.stream) // rules.num_streams)
    num_samples = -(-int(states[0]["num_trained"]) // rules.samples_per_version) * rules.samples_per_version
    return {
        "version": version,
        "num_picked": num_samples,
        "num_numbers": num_numbers,
        # Numbers granted minus dropped must be those trained on plus those unfinished. With more ledgers than before,
        # `num_trained` adds up to more than was ever granted, so this may be negative.
        "num_dropped": num_numbers - len(own) - num_samples // rules.group_size,
        "num_trained": num_samples,
        "picked": [],
        "works": [dataclasses.asdict(LeaseRecord(number)) for number in own],
    }


def retire_journals(folder: Path, rules: LedgerRules, *, run: str, version: int, events: Sequence[int] | None) -> None:
    """Record in the journals of former trainers that other trainers own their groups from `version` on.

    `events` is the number of events, per trainer, that led to the checkpoint; None if the run starts over.
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
    """Return the whole records, and the offset of the end of the last one."""
    records: list[list[Event]] = []
    start = good = 0
    for line in io.BytesIO(data):
        is_whole = line.endswith(b"\n") and line[:9] == b"%08x " % zlib.crc32(line[9:-1])
        if is_whole and start != good:
            raise CheckpointError(
                f"The journal {str(path)!r} is damaged at byte {good}: the record there does not match its checksum, "
                f"and there are good records after it, from byte {start}. Restore the file from a backup. Without one, "
                f"`truncate -s {good}` keeps the records before the damage."
            )
        start += len(line)
        if is_whole:
            records.append(json.loads(line[9:]))
            good = start
    return records, good
