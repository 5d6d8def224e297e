"""Checkpoints are atomic, verified and rotated, and training resumes from one bit for bit."""

import dataclasses
import errno
import itertools
import json
import logging
import os
import random
import shutil
import threading
from concurrent.futures import Future
from pathlib import Path

import pytest
import tiny
import torch
from learner_settings import sections
from ledger_events import replayed
from thread_peers import PATIENCE

from coati.actors.options import TrainerOptions
from coati.background import run_in_background
from coati.errors import CheckpointError, DeadlineExceeded
from coati.experience_buffer.buffer import LeasedBuffer
from coati.ledger import LeaseRequest, LedgerRules
from coati.ledger.audit import audit_run
from coati.ledger.journal import Journal, read_journal
from coati.trainer import checkpoints as module
from coati.trainer.checkpoints import Checkpoints, clear_after, find_checkpoint
from coati.trainer.ppo import PPOLearner
from coati.trainer.strategies import DDPStrategy, files

RULES = LedgerRules(samples_per_version=2, total_samples=40, lead=3, max_staleness=3)


class Trainer:
    """A learner and its buffer."""

    def __init__(self, folder, *, seed=0, rules=RULES, journal=None, **settings):
        settings = {"warmup_steps": 8, "total_steps": 20, "actor_lr": 0.01, "save_every": 1, **settings}
        train, algorithm = sections(**settings)
        torch.manual_seed(seed)
        self.learner = PPOLearner(*tiny.actor_and_critic(seed), DDPStrategy(device="cpu"), train, algorithm)
        self.buffer = LeasedBuffer(rules, 2, open_journal=journal)
        self.checkpoints = Checkpoints(folder, self.learner, self.buffer, train=train)

    def weights(self):
        return {
            f"{label}.{name}": tensor.clone()
            for label, model in self.learner.models.items()
            for name, tensor in model.state_dict().items()
        }

    def save(self, version, **counters):
        self.checkpoints.save(version, counters)
        self.checkpoints.wait()


ASKS = itertools.count()


def deliver(buffer, version, wanted):
    """Lease and deliver samples as a maker; a sample's id is the number of its lease."""
    leases = buffer.lease(LeaseRequest("maker", next(ASKS), version, wanted))
    buffer.extend([dataclasses.replace(tiny.item(lease.number), lease=tuple(lease)) for lease in leases])
    return leases


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture
def saved(tmp_path):
    """A trainer that has saved version 1."""
    trainer = Trainer(tmp_path)
    trainer.learner.step(tiny.experience(0, 2))
    trainer.save(1, fresh=1)
    return trainer


def test_training_continues_from_a_checkpoint_to_the_bit(saved, tmp_path):
    path, state = find_checkpoint(tmp_path)
    assert (path.name, state["version"]) == ("version-1", 1)
    other = Trainer(tmp_path, seed=5)
    assert other.checkpoints.restore(path) == {"version": 1, "fresh": 1}
    assert equal(other.weights(), saved.weights())
    for first in (2, 4, 6):
        ours, theirs = (one.learner.step(tiny.experience(first, 2)) for one in (saved, other))
        assert ours == theirs  # including the learning rate, which increases
    assert equal(other.weights(), saved.weights())


def test_random_state_is_restored(tmp_path):
    trainer = Trainer(tmp_path)
    trainer.save(1)
    expected = torch.rand(4)
    torch.manual_seed(123)
    trainer.checkpoints.restore(tmp_path / "version-1")
    assert torch.equal(torch.rand(4), expected)


def test_a_checkpoint_holds_the_state_at_the_time_of_saving(saved, tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(module, "run_in_background", lambda call, name: calls.append(call) or Future())
    before = saved.weights()
    saved.checkpoints.save(2, {})
    saved.learner.step(tiny.experience(2, 2))  # training continues
    calls[0]()
    other = Trainer(tmp_path)
    other.checkpoints.restore(tmp_path / "version-2")
    assert equal(other.weights(), before)
    assert not equal(saved.weights(), before)


def test_the_writer_does_not_read_models_in_training(saved, tmp_path, monkeypatch):
    # With FSDP2, that would reshard them in the middle of a pass.
    calls, asked = [], []
    monkeypatch.setattr(module, "run_in_background", lambda call, name: calls.append(call) or Future())
    saved.checkpoints.save(2, {})
    with monkeypatch.context() as spied:
        spied.setattr(torch.nn.Module, "state_dict", lambda self, **_: asked.append(self) or {})
        calls[0]()
    assert asked == []
    assert find_checkpoint(tmp_path)[0].name == "version-2"


def test_the_next_checkpoint_is_copied_only_after_the_previous_one_is_written(tmp_path, monkeypatch):
    trainer = Trainer(tmp_path, warmup_steps=0)
    at_wait_or_copied, may_write = threading.Event(), threading.Event()
    wait, replace_folder = trainer.checkpoints.wait, module.replace_folder

    def noted_wait():
        at_wait_or_copied.set()
        wait()

    def held(path, *args, **kwargs):
        assert path.name != "version-1" or may_write.wait(PATIENCE)
        replace_folder(path, *args, **kwargs)

    monkeypatch.setattr(module, "replace_folder", held)
    before = trainer.weights()
    trainer.checkpoints.save(1, {})
    trainer.learner.step(tiny.experience(0, 2))
    after = trainer.weights()
    monkeypatch.setattr(trainer.checkpoints, "wait", noted_wait)

    def save_next():
        trainer.checkpoints.save(2, {})
        at_wait_or_copied.set()

    second = run_in_background(save_next, name="second")
    assert at_wait_or_copied.wait(PATIENCE)
    may_write.set()
    second.result(PATIENCE)
    wait()
    for version, expected in ((1, before), (2, after)):
        other = Trainer(tmp_path, seed=5)
        other.checkpoints.restore(tmp_path / f"version-{version}")
        assert equal(other.weights(), expected), version
    assert not equal(before, after)


def test_waiting_for_a_stuck_write_has_a_deadline(saved, monkeypatch):
    monkeypatch.setattr(module, "run_in_background", lambda call, name: Future())
    saved.checkpoints.save(2, {})
    saved.checkpoints.write_seconds = 0.01
    with pytest.raises(DeadlineExceeded, match="update_seconds"):
        saved.checkpoints.wait()


def test_samples_that_were_delivered_and_not_trained_on_are_trained_on_after_it(tmp_path):
    first, second = Trainer(tmp_path), Trainer(tmp_path)
    deliver(first.buffer, 0, 7)
    trained = first.buffer.try_sample(0.0)
    first.buffer.mark_trained(1)
    first.buffer.try_sample(0.0)  # not trained on
    open_lease = first.buffer.lease(LeaseRequest("maker", 10**7, 1, 1))
    first.save(1)
    second.checkpoints.restore(tmp_path / "version-1")
    again = second.buffer.lease(LeaseRequest("another", 0, 1, 1))
    assert [lease.number for lease in again] == [lease.number for lease in open_lease]
    assert again[0].epoch > open_lease[0].epoch  # so deliveries of its first maker are refused
    second.buffer.extend([dataclasses.replace(tiny.item(again[0].number), lease=tuple(again[0]))])
    batches = [second.buffer.try_sample(0.0) for _ in range(3)]
    ids = [batch.sample_ids.tolist() for batch in (trained, *batches)]
    assert ids == [[0, 1], [2, 3], [4, 5], [6, 7]]
    expected = LeasedBuffer(RULES, 2)
    deliver(expected, 0, 4)
    expected.try_sample(0.0)
    for (name, tensor), (_, other) in zip(batches[0].tensors(), expected.try_sample(0.0).tensors(), strict=True):
        assert torch.equal(tensor, other), name
        assert tensor.dtype == other.dtype


def test_samples_for_leases_granted_after_the_checkpoint_are_refused(tmp_path):
    trainer = Trainer(tmp_path)
    trainer.save(1)
    late = trainer.buffer.lease(LeaseRequest("maker", 0, 0, 2))  # by a maker that survives
    for _ in range(2):
        trainer = Trainer(tmp_path)
        trainer.checkpoints.restore(tmp_path / "version-1")
        again = trainer.buffer.lease(LeaseRequest("another", 0, 0, 2))
        assert [lease.number for lease in again] == [lease.number for lease in late]
        trainer.buffer.extend([dataclasses.replace(tiny.item(lease.number), lease=tuple(lease)) for lease in late])
        assert trainer.buffer.num_items_waiting == 0
        late = again


def test_a_journal_omits_events_that_a_resumed_run_repeats(tmp_path):
    journal = tmp_path / "ledger" / "stream-0.jsonl"
    first = Trainer(tmp_path, journal=lambda: Journal(journal, RULES, run="r"))
    deliver(first.buffer, 0, 6)
    first.buffer.try_sample(0.0)
    first.buffer.mark_trained(1)
    first.save(1)
    first.buffer.try_sample(0.0)
    first.buffer.mark_trained(2)  # lost in the resume
    deliver(first.buffer, 1, 2)
    first.buffer.close()
    longer = dataclasses.replace(RULES, total_samples=60, lead=2)
    for _ in range(2):  # twice from the same checkpoint
        open_journal = lambda: Journal(journal, longer, run="r", is_resumed=True)  # noqa: E731
        again = Trainer(tmp_path, rules=longer, journal=open_journal)
        again.checkpoints.restore(tmp_path / "version-1")
        again.buffer.lease(LeaseRequest("maker", 0, 1, 2))
        again.buffer.try_sample(0.0)
        again.buffer.mark_trained(2)
        again.buffer.close()
    content = read_journal(journal)
    assert content.rules == longer
    assert [event for event in content.events if "train" in event] == [
        {"train": 1, "samples": 2},
        {"train": 2, "samples": 4},
    ]
    account = audit_run(tmp_path)
    assert account.problems == []
    assert account.table()[0][2] == 4  # trained
    assert replayed(RULES, content.events).state() == again.buffer._ledger.state()


def test_a_restarted_run_voids_its_journal_and_refuses_old_leases(tmp_path):
    journal = tmp_path / "ledger" / "stream-0.jsonl"
    open_journal = lambda: Journal(journal, RULES, run="r")  # noqa: E731
    first = LeasedBuffer(RULES, 2, open_journal=open_journal)
    deliver(first, 0, 3)
    first.try_sample(0.0)
    first.mark_trained(1)
    (held,) = first.lease(LeaseRequest("maker", 10**7, 1, 1))
    first.close()
    second = LeasedBuffer(RULES, 2, open_journal=open_journal, incarnation=1)
    second.start_over()
    old = LeaseRequest("maker", 10**7 + 1, 1, 8)
    assert second.lease(old) == [], "its weights come from the trainer that died"
    again = second.lease(old._replace(number=10**7 + 2, version=0, trainer_incarnation=1))
    assert [lease.number for lease in again] == [*range(8)]
    assert held.number in range(8)
    second.extend([dataclasses.replace(tiny.item(lease.number), lease=tuple(lease)) for lease in (held, again[0])])
    assert second.num_items_waiting == 1
    second.extend([dataclasses.replace(tiny.item(1), lease=tuple(again[1]))])
    second.try_sample(0.0)
    second.mark_trained(1)
    second.close()
    account = audit_run(tmp_path)
    assert account.problems == []
    assert account.table()[0] == ("trained", "", 2, 2)
    assert account.table()[-1][2] == 8  # leased


def test_the_newest_few_are_kept(tmp_path):
    trainer = Trainer(tmp_path, checkpoints_kept=3)
    for version in (8, 9, 10, 11):
        trainer.save(version)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["version-10", "version-11", "version-9"]


def test_foreign_folders_and_the_newest_checkpoint_are_kept(tmp_path):
    for version in (5, 250, 300):
        (tmp_path / f"version-{version}").mkdir()
        (tmp_path / f"version-{version}" / "mine.txt").write_text("mine")
    trainer = Trainer(tmp_path, checkpoints_kept=1)
    for version in (9, 10):
        trainer.save(version)
    assert {path.name for path in tmp_path.iterdir()} == {"version-5", "version-10", "version-250", "version-300"}


def test_without_a_folder_nothing_is_saved():
    assert TrainerOptions().save_folder is None
    assert not Trainer(None, save_every=1).checkpoints.is_due(1, 1, was_stopped=True)


def test_without_host_memory_a_checkpoint_fails_and_training_continues(tmp_path, monkeypatch, caplog):
    trainer = Trainer(tmp_path)

    def fail(*_):
        raise torch.OutOfMemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr("coati.trainer.strategies.base._host_copy", fail)
        trainer.save(1)
    assert "host memory ran out of memory" in caplog.text
    assert "train.save_every" in caplog.text
    assert list(tmp_path.iterdir()) == []
    trainer.save(2)
    assert [path.name for path in tmp_path.iterdir()] == ["version-2"]


def test_which_versions_are_due(tmp_path):
    every = Trainer(tmp_path, save_every=2).checkpoints
    assert [every.is_due(version, version, was_stopped=False) for version in (1, 2, 3, 4)] == [False, True, False, True]
    assert every.is_due(3, 3, was_stopped=True)
    never = Trainer(tmp_path, save_every=0, update_steps=2)
    assert not never.checkpoints.is_due(2, 4, was_stopped=False)
    assert never.checkpoints.is_due(1, 1, was_stopped=True)  # cut short, and there is no other
    never.save(2)
    assert not never.checkpoints.is_due(2, 4, was_stopped=True)  # saved already
    assert not never.checkpoints.is_due(3, 5, was_stopped=True)  # cut short, and the one before it is saved
    assert never.checkpoints.is_due(4, 7, was_stopped=True)


class Killed(BaseException):
    """The process ends here."""


def test_a_kill_at_any_write_sync_or_rename_leaves_the_old_or_the_new(saved, tmp_path, monkeypatch):
    seen = set()
    saved.learner.step(tiny.experience(2, 2))
    for moment in range(10_000):
        left = [moment]

        def passed(call, left=left):
            def counted(*args, **kwargs):
                if left[0] == 0:
                    raise Killed
                left[0] -= 1
                return call(*args, **kwargs)

            return counted

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", lambda _: None)  # slow, and what a killed process wrote is there without it
            for owner, name in ((os, "fsync"), (os, "replace"), (Path, "write_text"), (Path, "write_bytes")):
                patch.setattr(owner, name, passed(getattr(owner, name)))
            patch.setattr(files.shutil, "rmtree", lambda *_, **__: None)  # a killed process does not clean up
            try:
                saved.save(2)
            except Killed:
                pass
            else:
                break
        found, _ = find_checkpoint(tmp_path)
        if found.name == "version-2" or not seen:
            Trainer(tmp_path).checkpoints.restore(found)
        seen.add(found.name)
        clear_after(tmp_path, 1)
        saved.checkpoints._writing = None
        shutil.rmtree(tmp_path / "version-2.damaged", ignore_errors=True)
        assert {path.name for path in tmp_path.iterdir()} == {"version-1"}
    assert moment > 20
    assert seen == {"version-1", "version-2"}


def test_every_flipped_byte_and_every_cut_is_found(saved, tmp_path, caplog):
    saved.save(2)
    files = sorted(file for file in (tmp_path / "version-2").rglob("*") if file.is_file())
    assert {"model.safetensors", "state.json", "manifest.json", "rank-0.safetensors", "optimizer.safetensors"} <= {
        file.name for file in files
    }
    draw = random.Random(0)
    for file in files:
        data = file.read_bytes()
        places = [draw.randrange(len(data)) for _ in range(300 if file.name == "manifest.json" else 8)]
        damaged = [data[:at] + bytes([data[at] ^ draw.randrange(1, 256)]) + data[at + 1 :] for at in places]
        for content in (*damaged, data[:-1], data[: len(data) // 2], b"", None):
            file.unlink(missing_ok=True)  # ext4 writes a file that is truncated to the disk at once
            if content is not None:
                file.write_bytes(content)
            caplog.clear()
            if file.parent.name == "version-2" or file.name != "manifest.json" or content is None:
                assert find_checkpoint(tmp_path)[0].name == "version-1", (file, content)
                assert "version-2 cannot be used" in caplog.text
        file.write_bytes(data)
    assert find_checkpoint(tmp_path)[0].name == "version-2"


def test_a_missing_checkpoint_is_an_error_and_not_a_fresh_start(saved, tmp_path):
    with pytest.raises(CheckpointError, match="got none"):
        find_checkpoint(tmp_path / "elsewhere")
    (tmp_path / "version-1" / "state.json").write_text("{}")
    with pytest.raises(CheckpointError, match="only damaged ones \\(version-1\\)"):
        find_checkpoint(tmp_path)


def test_a_full_disk_costs_the_checkpoint_and_nothing_else(saved, tmp_path, monkeypatch, caplog):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        saved.save(2)
    assert "No space left" in caplog.text
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert [path.name for path in tmp_path.iterdir()] == ["version-1"]
    saved.save(3)
    assert find_checkpoint(tmp_path)[0].name == "version-3"


@pytest.mark.parametrize("call", ["pwrite", "fsync"])
def test_a_journal_that_is_behind_costs_the_checkpoint_of_all_ranks(tmp_path, monkeypatch, caplog, call):
    """Otherwise the run could resume from events that the journal does not have."""

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    sent = []
    monkeypatch.setattr(module.dist, "gather_object", lambda mine, into: sent.append((mine, into)))
    journal = tmp_path / "ledger" / "stream-1.jsonl"
    trainer = Trainer(tmp_path / "saved", journal=lambda: Journal(journal, RULES, run="r"))
    deliver(trainer.buffer, 0, 2)
    strategy = trainer.learner.strategy
    with monkeypatch.context() as patch:
        patch.setattr(strategy, "world_size", 2)
        patch.setattr(strategy, "rank", 1)
        patch.setattr(os, call, full)
        deliver(trainer.buffer, 0, 2)
        trainer.save(1)
    ((of_other, _),) = sent
    monkeypatch.setattr(strategy, "world_size", 2)
    monkeypatch.setattr(module.dist, "gather_object", lambda mine, into: into.__setitem__(1, of_other))
    trainer.save(1)
    assert "checkpoint of version 1 failed" in caplog.text
    assert not list((tmp_path / "saved").glob("version-*"))
    of_other = trainer.checkpoints._rank_state()
    trainer.save(2)
    events = read_journal(journal).num_events
    assert [rank["events"] for rank in find_checkpoint(tmp_path / "saved")[1]["ranks"]] == [events] * 2
    trainer.buffer.close()


def test_one_trainer_resumes_from_two_and_repeats_their_unfinished_samples(tmp_path):
    rules = [dataclasses.replace(RULES, stream=stream, num_streams=2) for stream in range(2)]
    first, second = (Trainer(tmp_path, rules=rules[stream]) for stream in range(2))
    for trainer, wanted in ((first, 5), (second, 3)):
        deliver(trainer.buffer, 0, wanted)
        trainer.buffer.try_sample(0.0)
        trainer.buffer.mark_trained(1)
    first.learner.step(tiny.experience(0, 2))
    first.save(1, fresh=1)
    file = tmp_path / "version-1" / "state.json"
    state = json.loads(file.read_text())
    state["ranks"].append(second.buffer.state()[0])
    file.write_text(json.dumps(state))
    alone = Trainer(tmp_path, seed=5)
    assert alone.checkpoints.restore(tmp_path / "version-1")["version"] == 1
    assert equal(alone.weights(), first.weights())
    # Trained on: 0, 2 and 1, 3. Delivered but not trained on: 4, 6, 8 and 5. Next lease of the second trainer: 7.
    again = alone.buffer.lease(LeaseRequest("maker", 1, 1, 8))
    assert [lease.number for lease in again] == [4, 5, 6, 7, 8, 9, 10, 11]
    assert alone.buffer.num_items_waiting == 0


def test_later_versions_are_set_aside_and_unfinished_ones_deleted(saved, tmp_path):
    saved.save(2)
    (tmp_path / ".version-3.abc.tmp").mkdir()
    clear_after(tmp_path, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["version-1", "version-2.damaged"]
    assert find_checkpoint(tmp_path)[0].name == "version-1"
