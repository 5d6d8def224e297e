"""`coati train` with faults at named points: the run completes, and `coati audit` accounts for every sample."""

import json

import pytest
from fault_schedule import Fault, Schedule

from coati.ledger.audit import audit_run
from coati.ledger.journal import read_journal

SHORT = ("train.update_steps=1", "train.epochs=1", "rollout.prompts_per_batch=12")
STEPS, BATCH = 6, 24


def changed(*settings):
    return [argument for setting in settings for argument in ("--set", setting)]


@pytest.fixture
def faulty_run(film_run, coati_here, forked_workers, tmp_path):
    """Train with faults; all of them happen, the run completes, its account closes, and leases that were returned are
    trained on.

    Returns why leases were returned.
    """

    def go(faults, *settings, steps=STEPS, command=coati_here, **variables):
        schedule = Schedule(tmp_path / "faults", faults)
        changes = (f"train.total_steps={steps}", *SHORT, *settings)
        variables |= schedule.environment
        finished = command("train", film_run, *changed(*changes), **variables)
        told = finished.stdout + finished.stderr
        assert finished.returncode == 0, told
        assert [str(fault) for n, fault in enumerate(faults) if not schedule.has_happened(n)] == []
        assert audit_run(tmp_path / "out").problems == [], told
        events = read_journal(tmp_path / "out" / "ledger" / "stream-0.jsonl").events
        picked = [number for event in events for number in event.get("pick", ())]
        assert len(picked) == steps * BATCH, told
        returned = [event for event in events if "return" in event]
        assert set(picked).issuperset(number for event in returned for number in event["return"])
        return [event["reason"] for event in returned]

    return go


def test_no_bit_changes_if_the_only_maker_is_killed_and_clocks_are_set(faulty_run, film_run, coati_here, tmp_path):
    faults = [
        Fault("maker.before_deliver", "clock", seconds=3600),
        Fault("trainer.after_step", "clock", nth=2, seconds=-3600),
        Fault("maker.generating", "kill", nth=40),
    ]
    reasons = faulty_run(faults, "topology.max_staleness=0")
    assert any("died" in reason for reason in reasons)
    settings = (*SHORT, f"train.total_steps={STEPS}", f"run.output={tmp_path / 'calm'}")
    calm = coati_here("train", film_run, "--sync", *changed(*settings))
    assert calm.returncode == 0, calm.stderr
    one, other = ((tmp_path / run / "model" / "model.safetensors").read_bytes() for run in ("out", "calm"))
    assert one == other


@pytest.mark.long
def test_one_of_two_makers_is_killed_and_then_one_stalls(faulty_run):
    faults = [
        Fault("maker.generating", "kill", actor="maker-0", nth=40),
        Fault("maker.before_deliver", "stop", actor="maker-1", nth=3, seconds=12),
        Fault("trainer.after_step", "sleep", nth=0, seconds=0.25),  # so that the run does not end before
    ]
    settings = ("topology.makers=2", "topology.max_staleness=2", "deadlines.stall_seconds=2")
    reasons = faulty_run(faults, *settings, steps=40)
    assert any("died" in reason for reason in reasons)
    # Its leases are taken back when it does not respond, or before if the other one has nothing to do.
    assert any("respond" in reason or "slow" in reason for reason in reasons)


@pytest.mark.long
def test_a_maker_is_killed_at_every_chunk_of_an_update(faulty_run):
    # Its first update is the one that a run begins with; the next one and those of its successors are cut short.
    faults = [Fault("receiver.before_chunk", "kill", nth=2, index=index) for index in range(4)]
    faulty_run(faults, "topology.max_staleness=0", "topology.chunk_mib=0.2", steps=8)


@pytest.mark.long
def test_trainers_with_a_sharded_model_go_on_when_their_only_maker_is_killed(faulty_run):
    settings = ("topology.trainers=2", "train.strategy=gemini", "deadlines.batch_seconds=60")
    reasons = faulty_run([Fault("maker.generating", "kill", nth=40)], *settings)
    assert any("died" in reason for reason in reasons)


@pytest.mark.long
def test_lost_calls_and_replies_lose_and_double_nothing(faulty_run, coati_command):
    lost = {"num_failures": 6, "req_failure_prob": 3, "resp_failure_prob": 3}  # in each process; of a hundred calls
    failures = json.dumps({"CoreWorkerService.grpc_client.PushTask": lost})
    settings = ("topology.makers=2", "topology.max_staleness=2", "topology.max_restarts=50", "train.save_every=1")
    faulty_run([], *settings, steps=20, command=coati_command, timeout=500, RAY_testing_rpc_failure=failures)
