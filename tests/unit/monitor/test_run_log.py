"""The log of a run, by hand: what is written and when, and the snapshot."""

import json

import pytest

from coati.monitor import Mean, RunLog, Sum, read_jsonl
from coati.monitor.timeline import Span


class FakeClock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def made(version, reward, *, samples=4, kl=1.0, texts=()):
    """A record that a maker reports for one batch."""
    return {
        "version": version,
        "metrics": {
            "reward/mean": Mean(reward, samples),
            "kl/per_sample": Mean(kl, samples),
            "maker/samples": Sum(samples),
        },
        "samples": list(texts),
    }


def sample(prompt="the film", response=" was good", reward=0.5):
    return {"prompt": prompt, "response": response, "reward": reward, "sample_id": 7}


def trained(batch, version, **metrics):
    return {"batch": batch, "version": version, "metrics": {"actor_loss": 1.0, **metrics}}


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def make_log(clock, tmp_path):
    def make(**kwargs):
        settings = {"total_steps": 10, "clock": clock} | kwargs
        return RunLog(tmp_path, **settings)

    return make


def written(tmp_path, name="samples"):
    path = tmp_path / f"{name}.jsonl"
    return read_jsonl(path) if path.exists() else []


def columns(tmp_path, *names):
    return [tuple(row.get(name) for name in names) for row in written(tmp_path, "metrics")]


def test_makers_metrics_of_a_version_are_in_the_row_of_its_last_step(make_log, tmp_path):
    log = make_log()
    # Version 0: 4 samples of mean 0.2 and 12 of mean 0.6: (4 · 0.2 + 12 · 0.6) / 16 = 0.5
    log.add_report("maker-0", [made(0, 0.2), made(0, 0.6, samples=12, kl=3.0)])
    log.add_report("trainer-0", [trained(1, 0, **{"policy/loss": 1.0}), trained(2, 0, **{"policy/loss": 2.0})])
    assert columns(tmp_path, "step") == [(1,)]  # step 2 may be the last of version 0
    log.add_report("trainer-0", [trained(2, 1, **{"weights/bytes": 64.0})])  # of the update to version 1
    log.add_report("trainer-0", [trained(3, 1, **{"policy/loss": 3.0})])
    assert columns(tmp_path, "step") == [(1,)]  # makers may still send samples of version 0
    log.add_report("maker-0", [made(1, 0.9)])
    assert columns(tmp_path, "step", "version", "policy/loss", "weights/bytes", "maker/samples") == [
        (1, 0, 1.0, None, None),
        (2, 0, 2.0, 64.0, 16.0),
    ]
    log.flush()
    last = written(tmp_path, "metrics")[-1]
    assert (last["step"], last["version"], last["reward/mean"]) == (3, 1, pytest.approx(0.9))
    assert written(tmp_path, "metrics")[1]["reward/mean"] == pytest.approx(0.5)
    assert written(tmp_path, "metrics")[1]["kl/per_sample"] == pytest.approx(2.5)  # (4 · 1 + 12 · 3) / 16


def test_a_late_record_of_an_older_version_counts_for_the_current_one(make_log, tmp_path):
    log = make_log()
    log.add_report("maker-0", [made(2, 0.5), made(1, 0.7)])
    log.add_report("trainer-0", [trained(batch, batch - 1) for batch in (1, 2, 3)])
    log.flush()
    assert columns(tmp_path, "version", "reward/mean") == [(0, None), (1, None), (2, pytest.approx(0.6))]


def test_every_sample_is_counted_once_though_makers_skip_versions(make_log, tmp_path):
    log = make_log()
    log.add_report("maker-0", [made(0, 0.5), made(3, 0.5), made(4, 0.5)])
    log.add_report("trainer-0", [trained(batch, batch - 1) for batch in range(1, 7)])
    log.flush()
    assert columns(tmp_path, "version", "maker/samples") == [(0, 4), (1, None), (2, None), (3, 4), (4, 4), (5, None)]


def test_metrics_of_an_update_after_its_row_are_in_the_next_row(make_log, tmp_path):
    log = make_log()
    log.add_report("trainer-0", [trained(1, 0), trained(2, 1)])
    log.add_report("maker-0", [made(1, 0.5)])
    log.add_report("trainer-0", [trained(1, 1, **{"weights/bytes": 64.0})])
    log.flush()
    assert columns(tmp_path, "step", "weights/bytes") == [(1, None), (2, 64.0)]


def test_rows_do_not_wait_for_makers_forever(make_log, tmp_path):
    log = make_log()
    log.add_report("trainer-0", [trained(batch, batch - 1) for batch in range(1, 101)])  # as if makers had ended
    assert 30 < len(written(tmp_path, "metrics")) < 100
    log.flush()
    assert columns(tmp_path, "step") == [(step,) for step in range(1, 101)]


def test_metrics_load_in_pandas_as_one_numeric_row_per_step(make_log, tmp_path):
    pandas = pytest.importorskip("pandas")
    log = make_log()
    log.state.buffer_batches = 2
    log.add_report("trainer-0", [trained(0, 0, **{"weights/bytes": 1.0})])  # the first weights, before any step
    for version in range(3):
        log.add_report("maker-0", [made(version, 0.5, texts=[sample()]), {"warning": "slow", "kind": "here"}])
        for epoch in range(2):
            step = 2 * version + epoch + 1
            numbers = {"policy/loss": float("nan"), "policy/entropy": 1.5, "a/text": "no number"}
            log.add_report("trainer-0", [trained(step, version, **numbers), {"warning": "slow", "kind": "here"}])
        log.add_report("trainer-0", [trained(2 * version + 2, version + 1, **{"weights/bytes": 1.0})])
    log.flush()
    table = pandas.read_json(tmp_path / "metrics.jsonl", lines=True)
    assert list(table["step"]) == [1, 2, 3, 4, 5, 6]
    assert list(table["version"]) == [0, 0, 1, 1, 2, 2]
    assert all(pandas.api.types.is_numeric_dtype(table[name]) for name in table.columns)
    assert table["time"].is_monotonic_increasing
    by_version = table.groupby("version").first()  # the first value that is not NaN
    assert by_version[["reward/mean", "weights/bytes", "buffer/batches"]].notna().all(axis=None)
    assert "a/text" not in table.columns


def test_without_records_nothing_is_written(make_log, tmp_path):
    make_log().flush()
    assert list(tmp_path.iterdir()) == []


def test_warnings_of_an_actor_are_logged_with_its_name_and_their_kind(make_log, caplog):
    make_log().add_report("maker-0", [{"warning": "waited 10 s", "kind": "here"}, made(0, 0.5)])
    assert [(record.message, record.kind) for record in caplog.records] == [("maker-0: waited 10 s", "here")]


def test_a_snapshot_by_hand(make_log, clock):
    log = make_log()
    empty = log.snapshot()
    assert (empty.step, empty.version, empty.reward, empty.kl) == (0, 0, None, None)
    assert (empty.elapsed, empty.samples_per_second) == (0.0, None)
    log.state.message = "loading models"
    log.state.buffer_batches = 3
    log.add_report("trainer-0", [trained(1, 0, **{"reward/mean": 0.25, "kl/per_sample": 1.0})])
    log.add_report("trainer-0", [trained(2, 1, **{"reward/mean": 0.75, "kl/per_sample": 2.0}), trained(2, 2)])
    log.state.num_made = 12
    clock.now += 6.0
    snapshot = log.snapshot()
    assert (snapshot.reward, snapshot.kl) == (0.75, 2.0)  # of the last step, not of the update after it
    assert snapshot.samples_per_second == 2.0  # 12 samples in 6 s
    assert (snapshot.elapsed, snapshot.buffer_batches, snapshot.message) == (6.0, 3, "loading models")


def test_time_and_rate_start_at_begin(make_log, clock):
    log = make_log()
    log.state.num_made = 4
    clock.now += 100.0  # loading libraries and models
    log.begin()
    assert log.snapshot().elapsed == 0.0
    assert log.snapshot().startup == 100.0  # the elapsed time that is shown includes it
    log.state.num_made += 6
    clock.now += 3.0
    snapshot = log.snapshot()
    assert (snapshot.elapsed, snapshot.samples_per_second) == (3.0, 2.0)  # 6 samples in 3 s


def test_rate_and_time_left_are_those_of_the_last_steps(make_log, clock):
    log = make_log(total_steps=50)
    log.begin()

    def go_on(batch, *, seconds, samples):
        clock.now += seconds
        log.add_report("trainer-0", [trained(batch, batch)])
        log.state.num_made += samples
        return log.snapshot()

    compiling = go_on(1, seconds=100.0, samples=4)
    assert (compiling.samples_per_second, compiling.seconds_per_step) == (0.04, 100.0)
    for batch in range(2, 32):
        latest = go_on(batch, seconds=15.0, samples=30)
    assert (latest.samples_per_second, latest.seconds_per_step) == (2.0, 15.0)
    assert latest.seconds_left == 15.0 * (50 - 31)
    assert latest.elapsed == 100.0 + 30 * 15.0
    clock.now += 300.0  # no progress
    assert (log.snapshot().samples_per_second, log.snapshot().seconds_per_step) == (1.0, 15.0)
    log.state.num_made = 100  # of the checkpoint from which trainers restarted
    assert log.snapshot().samples_per_second is None
    clock.now += 10.0
    log.state.num_made = 120
    assert log.snapshot().samples_per_second == 2.0


def test_the_first_samples_of_each_version_are_written(make_log, tmp_path):
    log = make_log()
    log.add_report("maker-0", [made(version, 0.5, texts=[sample()]) for version in [0, 0, 1, 3, 2]])
    assert [line["version"] for line in written(tmp_path)] == [0, 1, 3]


def test_samples_are_written_as_text(make_log, tmp_path):
    log = make_log()
    log.add_report("trainer-0", [trained(5, 0)])
    log.add_report("maker-0", [made(0, 0.5, texts=[sample(response=" très bien \ud83c"), sample(reward=0.25)])])
    first, second = written(tmp_path)
    assert first == {
        "version": 0,
        "prompt": "the film",
        "response": " très bien \ud83c",  # a lone surrogate, cut inside a pair
        "reward": 0.5,
        "sample_id": 7,
    }
    assert second["reward"] == 0.25


def test_if_a_batch_has_no_samples_those_of_the_next_are_written(make_log, tmp_path):
    log = make_log()
    log.add_report("maker-0", [made(0, 0.5), made(0, 0.5, texts=[sample()])])
    assert [line["version"] for line in written(tmp_path)] == [0]


def test_spans_are_written_up_to_the_limit(make_log, tmp_path, caplog):
    path = tmp_path / "spans.jsonl"
    log = make_log(max_spans=3)
    log.add_report("maker-0", [], [])
    assert not path.exists()
    log.add_report("maker-0", [], [Span("generate", 1.0, 2.5, 4), Span("score", 2.5, 2.75, 4)])
    log.add_report("trainer-0", [], [Span("train", 2.0, 3.0, 4), Span("publish", 3.0, 4.0, 5)])
    log.add_report("trainer-0", [], [Span("train", 4.0, 5.0, 5)])
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert rows[0] == {"actor": "maker-0", "what": "generate", "start": 1.0, "end": 2.5, "version": 4}
    assert [(row["actor"], row["what"]) for row in rows[1:]] == [("maker-0", "score"), ("trainer-0", "train")]
    assert len(caplog.messages) == 1
    assert "logging.spans_kept" in caplog.text


@pytest.mark.parametrize("folder", [True, False])
def test_with_a_limit_of_0_or_without_a_folder_no_spans_are_written(folder, tmp_path):
    log = RunLog(tmp_path if folder else None, total_steps=1, max_spans=0 if folder else 10)
    log.add_report("maker-0", [], [Span("generate", 1.0, 2.5, 4)])
    log.flush()
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written_is_reported_once_and_the_run_continues(make_log, tmp_path, caplog):
    log = make_log(max_spans=100)
    for name in ("samples", "spans", "metrics"):
        (tmp_path / f"{name}.jsonl").mkdir()  # cannot be opened, as on a full disk
    for version in range(3):
        log.add_report("maker-0", [made(version, 0.5, texts=[sample()])])
        log.add_report("trainer-0", [trained(version + 1, version)])
        log.add_report("maker-0", [], [Span("generate", 1.0, 2.0, version)])
    log.flush()
    assert sorted(message.split(" ")[0].rsplit("/", 1)[1] for message in caplog.messages) == [
        "metrics.jsonl",
        "samples.jsonl",
        "spans.jsonl",
    ]


def test_on_begin_is_called_when_training_begins(make_log):
    calls = []
    log = make_log(on_begin=lambda: calls.append("begun"))
    assert calls == []
    log.begin()
    assert calls == ["begun"]


def test_only_the_first_1000_quarantined_samples_are_written(tmp_path):
    log = RunLog(tmp_path, total_steps=1)
    log.add_report("maker-0", [{"quarantined": {"sample_id": number}, "version": 0} for number in range(1200)])
    assert [row["sample_id"] for row in read_jsonl(tmp_path / "quarantine.jsonl")] == list(range(1000))


def test_a_quarantined_sample_is_written_once(tmp_path):
    log = RunLog(tmp_path, total_steps=1)
    failed = [{"quarantined": {"sample_id": number}, "version": number} for number in range(3)]
    log.add_report("maker-0", [*failed, failed[0]])  # its group was leased again
    log = RunLog(tmp_path, total_steps=1)
    log.continue_from(2, 2)
    assert [row["sample_id"] for row in read_jsonl(tmp_path / "quarantine.jsonl")] == [0, 1]
    log.add_report("maker-0", failed)
    assert [row["sample_id"] for row in read_jsonl(tmp_path / "quarantine.jsonl")] == [0, 1, 2]


def test_a_resumed_run_starts_at_the_step_of_its_checkpoint(tmp_path, clock):
    log = RunLog(tmp_path, total_steps=60, total_samples=600, clock=clock)
    log.set_position(40, 20)
    clock.now += 30.0
    assert (log.snapshot().step, log.snapshot().version, log.snapshot().seconds_left) == (40, 20, None)
    log.continue_from(40, 20)  # the run was killed before it wrote any row
    log.begin()
    clock.now += 9.0
    snapshot = log.snapshot()
    assert (snapshot.step, snapshot.version, snapshot.num_trained) == (40, 20, 400)
    assert snapshot.seconds_left is None, "the pace is unknown before the first step"
    log.add_report("trainer-0", [trained(40, 19), trained(41, 20)])  # step 40 is in the checkpoint, but has no row yet
    assert log.snapshot().seconds_left == 9.0 * 19
    log.flush()
    assert [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == [40, 41]


def test_after_a_restart_of_the_trainers_later_records_are_dropped_and_replaced(tmp_path):
    log = RunLog(tmp_path, total_steps=6)
    log.state.restarts = {"makers": 1, "trainers": 0}
    for version in range(4):
        log.add_report("maker-0", [made(version, reward=float(version), texts=[sample()])])
        log.add_report("trainer-0", [{"batch": version + 1, "version": version, "metrics": {"policy/loss": 1.0}}])
    log.state.restarts = {"makers": 1, "trainers": 1}
    log.continue_from(2, 2, is_restart=True)
    assert (log.snapshot().step, log.snapshot().version, sum(log.snapshot().restarts.values())) == (2, 2, 2)
    assert log.snapshot().reward == 1.0
    log.add_report("maker-0", [made(3, reward=99.0)])  # from a maker that does not know of the restart yet
    for version in (2, 3):
        log.add_report("maker-0", [{**made(version, reward=10.0 + version, texts=[sample()]), "incarnation": 1}])
        log.add_report(
            "trainer-0", [trained(version + 1, version, **{"policy/loss": 2.0, "reward/mean": 10.0 + version})]
        )
    log.flush()
    rows = read_jsonl(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert [row["policy/loss"] for row in rows] == [1.0, 1.0, 2.0, 2.0]
    assert [row["reward/mean"] for row in rows] == [0.0, 1.0, 12.0, 13.0]
    assert [row["restarts/trainers"] for row in rows] == [0.0, 0.0, 1.0, 1.0]
    assert log.snapshot().reward == 13.0
    assert [row["version"] for row in read_jsonl(tmp_path / "samples.jsonl")] == [0, 1, 2, 3]


def test_reports_that_restarted_trainers_repeat_do_not_replace_those_of_later_steps(tmp_path):
    log = RunLog(tmp_path, total_steps=6)
    reports = [trained(step, step - 1) for step in (1, 2, 3)]
    updates = [trained(step, step, **{"weights/publish_seconds": float(step)}) for step in (1, 2, 3)]
    log.add_report("trainer-0", [reports[0], updates[0], reports[1], updates[1], reports[2], updates[2]])
    log.add_report("maker-0", [made(2, reward=1.0)])  # so the rows of steps 1 and 2 are written
    log.continue_from(3, 3, is_restart=True)
    log.add_report("trainer-0", [reports[1], updates[1], reports[2]])
    log.flush()
    assert [row["weights/publish_seconds"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == [1.0, 2.0, 3.0]


def evaluated(version):
    return {"evaluation": {"name": "held-out", "version": version, "avg@1": float(version)}}


def test_an_evaluation_is_in_a_row_of_its_version_or_later_and_the_final_one_in_its_own(make_log, tmp_path):
    log = make_log()
    log.add_report("trainer-0", [evaluated(0), trained(1, 0), trained(2, 1), evaluated(1), trained(3, 2), evaluated(3)])
    log.flush()  # as for a checkpoint; the run continues
    assert columns(tmp_path, "step", "version", "eval/held-out/avg@1") == [(1, 0, 0.0), (2, 1, 1.0), (3, 2, None)]
    log.close()
    assert columns(tmp_path, "step", "version", "eval/held-out/avg@1")[3:] == [(3, 3, 3.0)]


@pytest.mark.parametrize("is_restart", [True, False])
def test_an_evaluation_whose_row_is_dropped_is_in_the_next_row_and_a_later_one_is_dropped(
    make_log, tmp_path, is_restart
):
    log = make_log()
    log.add_report("trainer-0", [evaluated(0), trained(1, 0), trained(2, 1), trained(3, 2), trained(4, 3)])
    log.flush()
    log.add_report(
        "trainer-0", [evaluated(1), evaluated(9), trained(5, 4)]
    )  # version 1 is in the row of step 5, version 9 in none
    log.flush()
    log = log if is_restart else make_log()
    log.continue_from(2, 2, is_restart=is_restart)
    log.add_report("trainer-0", [trained(3, 2), trained(4, 3)])
    log.close()
    named = columns(tmp_path, "step", "eval/held-out/version", "eval/held-out/avg@1", "eval/held-out/step")
    assert named == [(1, 0, 0.0, None), (2, None, None, None), (3, 1, 1.0, None), (4, None, None, None)]


@pytest.mark.parametrize(("spreads", "num_warnings"), [([0.0] * 12, 1), ([0.0] * 4 + [0.1] + [0.0] * 4, 0)])
def test_rewards_that_never_differ_are_warned_of_once(make_log, caplog, spreads, num_warnings):
    log = make_log()
    for step, spread in enumerate(spreads, start=1):
        log.add_report("trainer-0", [trained(step, step - 1, **{"reward/mean": 0.25, "reward/std": spread})])
    assert caplog.text.count("had the same reward (0.25)") == num_warnings
