"""A truncated journal holds all whole records, and damage before the end is always detected."""

import errno
import logging
import os
import random
import resource
import time

import pytest
from lease_world import World
from ledger_events import replayed

from coati.errors import CheckpointError, DeadlineExceeded, StorageError
from coati.ledger.journal import Journal, read_journal
from coati.ledger.rules import LedgerRules

RULES = LedgerRules(samples_per_version=2, total_samples=8, max_staleness=1)
BATCHES = [
    [{"grant": [0], "maker": "maker-0", "version": 0}, {"grant": [1], "maker": "maker-0", "version": 0}],
    [{"deliver": [1]}],
    [{"drop": [0], "reason": "zu lang…\nand two lines"}],
    [{"pick": [1]}, {"train": 1}],
]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ledger" / "stream-0.jsonl"


def written(path, batches=BATCHES):
    journal = Journal(path, RULES, run="a-run")
    for batch in batches:
        journal.write(batch)
    journal.close()
    return path.read_bytes()


def joined(batches):
    return [event for batch in batches for event in batch]


def test_events_are_read_as_written(path):
    data = written(path)
    content = read_journal(path)
    assert (content.run, content.rules, content.events) == ("a-run", RULES, joined(BATCHES))
    assert (content.num_bytes, content.num_cut) == (len(data), 0)
    assert data.count(b"\n") == 1 + len(BATCHES)


def test_a_ledger_is_the_same_after_its_journal(path):
    world = World(seed=3, speeds=[1, 0.3], slots=[4, 4], versions=5, drop_rate=0.2, max_staleness=2)
    assert world.run()
    (ledger,) = world.ledgers
    journal = Journal(path, ledger.rules, run="")
    journal.write(ledger.events[:7])
    journal.write([])
    journal.write(ledger.events[7:])
    journal.sync()
    content = read_journal(path)
    assert replayed(content.rules, content.events).state() == ledger.state()
    journal.close()


def test_the_file_may_be_cut_at_any_byte_and_continued(path, caplog):
    data = written(path)
    ends = [index + 1 for index, byte in enumerate(data) if byte == ord("\n")]
    for size in range(len(data) + 1):
        path.unlink()  # ext4 writes a file that is truncated to the disk at once
        path.write_bytes(data[:size])
        num_whole = sum(end <= size for end in ends)
        kept = joined(BATCHES[: max(0, num_whole - 1)])
        if num_whole:
            content = read_journal(path)
            assert content.events == kept
            assert content.num_cut == size - ends[num_whole - 1]
        else:
            with pytest.raises(CheckpointError, match="no whole record"):
                read_journal(path)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            journal = Journal(path, RULES, run="a-run")
        assert bool(caplog.records) == (num_whole > 0 and size not in ends)
        journal.write([{"train": 9}])
        journal.close()
        after = read_journal(path)
        assert (after.events, after.num_cut) == ([*kept, {"train": 9}], 0)


def test_flipped_bytes_are_noticed(path):
    data = written(path)
    end_of_header, start_of_last = data.index(b"\n") + 1, data[:-1].rindex(b"\n") + 1
    rng = random.Random(0)
    for _ in range(1000):
        changed = bytearray(data)
        for at in rng.sample(range(len(data)), rng.randint(1, 3)):
            changed[at] ^= rng.randint(1, 255)
        first = next(at for at, (old, new) in enumerate(zip(data, changed, strict=True)) if old != new)
        path.unlink()  # ext4 writes a file that is truncated to the disk at once
        path.write_bytes(changed)
        try:
            content = read_journal(path)
        except CheckpointError as error:
            assert str(path) in str(error)  # noqa: PT017
            continue
        # Allowed only without a good record after the damage; no damaged event is returned.
        assert first >= end_of_header
        assert content.num_cut > 0
        assert content.num_bytes <= first
        assert content.events == joined(BATCHES)[: len(content.events)]
        if first < start_of_last - 1:  # before the record's own newline: the last record is damaged too
            assert changed[start_of_last - 1 :] != data[start_of_last - 1 :]


def test_damage_before_good_records_is_an_error_with_its_place_and_the_remedy(path):
    data = bytearray(written(path))
    at = data.index(b"deliver")
    record = data[:at].rindex(b"\n") + 1
    data[at] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=rf"stream-0.*damaged at byte {record}.*truncate -s {record}"):
        read_journal(path)
    with pytest.raises(CheckpointError, match="damaged"):
        Journal(path, RULES, run="a-run")
    assert path.read_bytes() == data
    os.truncate(path, record)
    assert read_journal(path).events == BATCHES[0]


@pytest.mark.parametrize("num_later", [0, 1, 2])
def test_a_full_disk_leaves_the_journal_as_it_was(path, monkeypatch, num_later):
    data = written(path)
    journal = Journal(path, RULES, run="a-run")
    room = [30]

    def pwrite(file, what, offset, real=os.pwrite):
        taken = what[: room[0]]
        room[0] -= len(taken)
        if not taken:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(file, taken, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    batch = [{"drop": [2], "reason": "x" * 40}]
    with pytest.raises(StorageError, match=r"No space left.*intact.*Free space"):
        journal.write(batch)
    assert path.read_bytes() == data
    room[0] = 1000
    for _ in range(num_later):
        journal.write(batch)
    assert read_journal(path).events == joined(BATCHES) + batch * num_later
    journal.close()


def test_a_file_that_may_not_grow_stays_readable(path):
    data = written(path)
    journal = Journal(path, RULES, run="a-run")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(data) + 10, hard))
        with pytest.raises(StorageError, match="intact"):
            journal.write([{"deliver": [2]}])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == data
    journal.close()


def test_a_partial_record_that_cannot_be_removed_is_overwritten(path, monkeypatch):
    written(path, BATCHES[:1])
    journal = Journal(path, RULES, run="a-run")
    with monkeypatch.context() as patch:

        def pwrite(file, what, offset, real=os.pwrite):
            if len(what) < 60:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return real(file, what[:30], offset)

        def ftruncate(file, size):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        patch.setattr(os, "pwrite", pwrite)
        patch.setattr(os, "ftruncate", ftruncate)
        with pytest.raises(StorageError, match="Check the disk"):
            journal.write([{"drop": [0], "reason": "x" * 40}])
    assert read_journal(path).events == BATCHES[0]
    journal.write(BATCHES[1])
    assert read_journal(path).events == joined(BATCHES[:2])
    journal.close()


def test_another_run_or_other_rules_are_refused(path):
    data = written(path)
    with pytest.raises(CheckpointError, match="run 'a-run'"):
        Journal(path, RULES, run="b")
    with pytest.raises(CheckpointError, match="samples_per_version=2"):
        Journal(path, LedgerRules(samples_per_version=4, total_samples=8, max_staleness=1), run="a-run")
    assert path.read_bytes() == data


def test_a_file_that_is_not_a_journal_is_refused_and_left_unchanged(path):
    path.parent.mkdir()
    with pytest.raises(CheckpointError, match="cannot be read: No such file"):
        read_journal(path)
    path.write_text("something else")
    with pytest.raises(CheckpointError, match="no whole record"):
        Journal(path, RULES, run="a-run")
    assert path.read_text() == "something else"
    path.unlink()
    path.parent.rmdir()
    path.parent.write_text("")
    with pytest.raises(StorageError, match="permissions"):
        Journal(path, RULES, run="a-run")


def test_a_later_format_is_named(path, monkeypatch):
    monkeypatch.setattr("coati.ledger.journal._FORMAT", 2)
    written(path)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match=r"format 2.*reads format 1"):
        read_journal(path)


def test_a_journal_has_one_writer_and_the_next_waits_for_its_end(path, monkeypatch):
    first = Journal(path, RULES, run="a-run")
    first.write(BATCHES[0])
    with pytest.raises(DeadlineExceeded, match=path.name):
        Journal(path, RULES, run="a-run", lock_seconds=0.0)

    def last_words(_):
        first.write(BATCHES[1])
        first.close()

    monkeypatch.setattr(time, "sleep", last_words)
    second = Journal(path, RULES, run="a-run")
    second.write(BATCHES[2])
    second.close()
    assert read_journal(path).events == joined(BATCHES[:3])
