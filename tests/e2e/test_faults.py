"""`coati train` with makers that are killed or stopped in the middle of their work: the run completes, and `coati
audit` accounts for every sample."""

import pytest

from coati.ledger.journal import read_journal

# Rewards that send their own process signals while its next batch is generated; each once in a run.
FAULTS = """
import os
import signal
import subprocess
import time
from pathlib import Path

from coati.demo.reward import film_sentiment

HERE = Path(__file__).parent


def is_first(fault):
    try:
        (HERE / fault).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def dies(prompts, completions, calls=[]):
    calls.append(1)
    if len(calls) >= 3 and is_first("killed"):
        os.kill(os.getpid(), signal.SIGKILL)
    return film_sentiment(completions, prompts)


def dies_and_stalls(prompts, completions, calls=[], calls_of_others=[]):
    calls.append(1)
    if len(calls) >= 6 and (HERE / "killed").exists() and is_first("stalled"):
        subprocess.Popen(["sh", "-c", f"sleep 5; kill -CONT {os.getpid()}; touch {HERE / 'continued'}"])
        os.kill(os.getpid(), signal.SIGSTOP)
    elif (HERE / "stalled").exists():
        calls_of_others.append(1)
        while len(calls_of_others) > 3 and not (HERE / "continued").exists():
            time.sleep(0.1)  # so that the run does not end before
    return dies(prompts, completions)
"""


def changed(*settings):
    return [argument for setting in settings for argument in ("--set", setting)]


SHORT = ("train.update_steps=1", "train.epochs=1", "rollout.prompts_per_batch=12")


@pytest.fixture
def faulty_run(film_run, coati_command, tmp_path):
    """Train with faults; the run completes, its account closes, and leases that were returned are trained on.

    Returns why leases were returned.
    """
    (tmp_path / "faults.py").write_text(FAULTS)

    def go(function, *settings, steps):
        changes = (f"reward.function=faults:{function}", f"train.total_steps={steps}", *SHORT, *settings)
        finished = coati_command("train", film_run, *changed(*changes))
        told = finished.stdout + finished.stderr
        assert finished.returncode == 0, told
        audit = coati_command("audit", tmp_path / "out")
        assert audit.returncode == 0, audit.stdout + told
        events = read_journal(tmp_path / "out" / "ledger" / "stream-0.jsonl").events
        picked = [number for event in events for number in event.get("pick", ())]
        assert len(picked) == steps * 24, told
        returned = [event for event in events if "return" in event]
        assert set(picked).issuperset(number for event in returned for number in event["return"])
        return [event["reason"] for event in returned]

    return go


def test_the_only_maker_is_killed_and_replaced_and_no_bit_changes(faulty_run, film_run, coati_here, tmp_path):
    reasons = faulty_run("dies", "topology.max_staleness=0", steps=6)
    assert any("died" in reason for reason in reasons)
    settings = (*SHORT, "train.total_steps=6", f"run.output={tmp_path / 'calm'}")
    calm = coati_here("train", film_run, "--sync", *changed(*settings))
    assert calm.returncode == 0, calm.stderr
    one, other = ((tmp_path / run / "model" / "model.safetensors").read_bytes() for run in ("out", "calm"))
    assert one == other


@pytest.mark.long
def test_one_of_two_makers_is_killed_and_then_one_stalls(faulty_run):
    settings = ("topology.makers=2", "topology.max_staleness=2", "deadlines.stall_seconds=2")
    reasons = faulty_run("dies_and_stalls", *settings, steps=30)
    assert any("died" in reason for reason in reasons)
    assert any("respond" in reason for reason in reasons)
