"""`coati train` with trainers that are killed: they restart from the newest checkpoint, and on-policy the result is
bit-identical to a run without faults. `coati audit` accounts for every sample.

The ledger lives in the trainer, so these tests also cover its death.
"""

import itertools
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from fault_schedule import Fault, Schedule

from coati.ledger.audit import audit_run
from coati.ledger.journal import read_journal
from coati.monitor import read_jsonl

SETTINGS = (
    "train.update_steps=1", "train.epochs=1", "train.total_steps=4", "train.save_every=1",
    "rollout.prompts_per_batch=12",
)  # fmt: skip


def changed(*settings):
    return [argument for setting in settings for argument in ("--set", setting)]


@pytest.fixture
def check(film_run, coati_here, forked_workers, tmp_path):
    """The account of the run closes, and its model has the bits of a run without faults."""

    def go(*settings):
        audit = coati_here("audit", tmp_path / "out")
        assert audit.returncode == 0, audit.stdout
        arguments = ("train", film_run, *changed(*SETTINGS, *settings, f"run.output={tmp_path / 'calm'}"))
        is_group = "topology.trainers=2" in settings
        calm = coati_here(*arguments, *([] if is_group else ["--sync"]))
        assert calm.returncode == 0, calm.stderr
        one, other = ((tmp_path / run / "model" / "model.safetensors").read_bytes() for run in ("out", "calm"))
        assert one == other
        assert [row["step"] for row in read_jsonl(tmp_path / "out" / "metrics.jsonl")] == [1, 2, 3, 4]

    return go


@pytest.fixture
def killed_run(film_run, coati_here, check, tmp_path):
    """Train with faults that kill trainers; returns what was printed."""

    def go(*faults, settings=()):
        schedule = Schedule(tmp_path / "faults", faults)
        arguments = ("train", film_run, *changed(*SETTINGS, *settings))
        finished = coati_here(*arguments, **schedule.environment)
        told = finished.stdout + finished.stderr
        assert finished.returncode == 0, told
        assert all(schedule.has_happened(number) for number in range(len(faults))), told
        assert f"restarted: {len(faults)} trainer" in told
        check(*settings)
        return told

    return go


def test_the_trainer_is_killed_between_chunks_and_in_a_step_and_no_bit_changes(killed_run):
    # The first sync has two chunks, so the fault comes before the second one of version 1, which is not saved yet.
    between_chunks = Fault("weights.before_chunk", "kill", actor="trainer-0", nth=4)
    told = killed_run(between_chunks, Fault("trainer.after_backward", "kill", actor="trainer-0", nth=3))
    assert "from its beginning" in told
    assert re.search("the run continues from version [12]", told)  # the second may have been in writing


POINTS = ("trainer.after_forward", "trainer.after_backward", "trainer.after_step", "trainer.after_ack")


@pytest.mark.long
@pytest.mark.parametrize(
    ("point", "trainers", "victim"),
    [*itertools.product(POINTS, [1], [0]), *itertools.product(POINTS, [2], [0, 1])],
)
def test_a_rank_is_killed_anywhere_and_no_bit_changes(killed_run, point, trainers, victim):
    fault = Fault(point, "kill", actor=f"trainer-{victim}", nth=3)
    killed_run(fault, settings=(f"topology.trainers={trainers}",))


@pytest.mark.long
def test_a_detached_run_whose_driver_is_killed_is_resumed_to_the_same_bits(film_run, coati_here, check, tmp_path):
    """The driver dies when the trainer is in its third step, which is held, and has saved the second."""
    schedule = Schedule(tmp_path / "faults", [Fault("trainer.after_backward", "block", actor="trainer-0", nth=3)])
    command = [sys.executable, "-m", "coati.cli.main", "train", film_run, *changed(*SETTINGS)]
    with subprocess.Popen(command, env={**os.environ, **schedule.environment}, stderr=subprocess.DEVNULL) as driver:
        deadline = time.monotonic() + 200
        saved = tmp_path / "out" / "checkpoints" / "version-2"
        while not (schedule.has_happened() and saved.exists()):
            assert time.monotonic() < deadline
            assert driver.poll() is None
            time.sleep(0.1)
        driver.send_signal(signal.SIGKILL)
    resumed = coati_here("train", "--resume", tmp_path / "out")
    assert resumed.returncode == 0, resumed.stderr
    events = read_journal(tmp_path / "out" / "ledger" / "stream-0.jsonl").events
    assert [event["train"] for event in events if "train" in event] == [1, 2, 3, 4]
    check()


@pytest.mark.long
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_a_run_is_resumed_with_another_number_of_trainers(film_run, coati_command, coati_here, tmp_path, before, after):
    def train(number, *arguments):
        return coati_here("train", "--sync", *arguments) if number == 1 else coati_command("train", *arguments)

    first = train(before, film_run, *changed(*SETTINGS, f"topology.trainers={before}", "train.total_steps=2"))
    assert first.returncode == 0, first.stderr
    more = changed(f"topology.trainers={after}", "train.total_steps=4")
    resumed = train(after, "--resume", tmp_path / "out", *more)
    assert resumed.returncode == 0, resumed.stderr
    audit = coati_here("audit", tmp_path / "out")
    assert audit.returncode == 0, audit.stdout
    assert [row["step"] for row in read_jsonl(tmp_path / "out" / "metrics.jsonl")] == [1, 2, 3, 4]
    groups = [group for trainer in audit_run(tmp_path / "out").trainers for group in trainer.groups.values()]
    assert sum(group.fate == "trained" for group in groups) == 24 * 2 * (before + after)
