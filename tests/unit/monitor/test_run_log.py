"""The log of a run, by hand: what is written when, and what the person in front of it sees."""

import json

import pytest

from coati.monitor.metrics import Mean, Sum
from coati.monitor.run_log import RunLog
from coati.monitor.timeline import Span


class FakeTracker:
    def __init__(self):
        self.logged = []
        self.texts = []
        self.num_closed = 0

    def log(self, step, metrics):
        self.logged.append((step, dict(metrics)))

    def text(self, step, tag, text):
        self.texts.append((step, tag, text))

    def close(self):
        self.num_closed += 1


class FakeClock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def made(version, reward, *, samples=4, kl=1.0, texts=()):
    """What a maker reports of one batch."""
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
def tracker():
    return FakeTracker()


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def make_log(tracker, clock, tmp_path):
    def make(**kwargs):
        return RunLog(tracker, samples_path=tmp_path / "samples.jsonl", total_steps=10, clock=clock, **kwargs)

    return make


def written(tmp_path):
    path = tmp_path / "samples.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_makers_are_gathered_by_version(make_log, tracker):
    log = make_log()
    # Version 0: 4 samples of mean 0.2 and 12 of mean 0.6: (4 · 0.2 + 12 · 0.6) / 16 = 0.5
    log.maker_records([made(0, 0.2), made(0, 0.6, samples=12, kl=3.0)])
    assert tracker.logged == []
    log.maker_records([made(1, 0.9)])
    step, values = tracker.logged[0]
    assert step == 0
    assert values["reward/mean"] == pytest.approx(0.5)
    assert values["kl/per_sample"] == pytest.approx(2.5)  # (4 · 1 + 12 · 3) / 16
    assert (values["maker/samples"], values["maker/version"]) == (16.0, 0.0)
    log.close()
    assert tracker.logged[1][1]["reward/mean"] == pytest.approx(0.9)
    assert tracker.num_closed == 1
    assert log.rewards == [(0.0, pytest.approx(0.5)), (1.0, pytest.approx(0.9))]
    assert log.kls == [(0.0, pytest.approx(2.5)), (1.0, 1.0)]


def test_a_late_record_of_an_older_version_is_counted_with_the_current_one(make_log, tracker):
    log = make_log()
    log.maker_records([made(2, 0.5), made(1, 0.7)])
    log.close()
    assert [values["maker/version"] for _, values in tracker.logged] == [2.0]
    assert tracker.logged[0][1]["reward/mean"] == pytest.approx(0.6)


def test_closing_without_records_logs_nothing(make_log, tracker):
    make_log().close()
    assert tracker.logged == []
    assert tracker.num_closed == 1


def test_trainer_records_are_logged_one_by_one_under_their_batch(make_log, tracker):
    log = make_log()
    log.trainer_records([trained(1, 0, **{"policy/loss": 0.25}), trained(2, 1, **{"policy/loss": 0.5})])
    assert tracker.logged == [(1, {"policy/loss": 0.25}), (2, {"policy/loss": 0.5})]  # area/name only
    log.trainer_records([trained(1, 0, **{"policy/loss": 0.125})])  # of another rank, late
    snapshot = log.snapshot()
    assert (snapshot.step, snapshot.version, snapshot.total_steps) == (2, 1, 10)


def test_makers_are_logged_at_the_step_where_their_version_began(make_log, tracker):
    log = make_log(steps_per_version=4)
    log.trainer_records([trained(9, 2, **{"policy/loss": 0.25})])  # training may be anywhere
    log.maker_records([made(0, 0.5), made(1, 0.5), made(3, 0.5)])
    log.close()
    assert [step for step, values in tracker.logged if "reward/mean" in values] == [0, 4, 12]


def test_snapshot_by_hand(make_log, clock):
    log = make_log()
    empty = log.snapshot()
    assert (empty.step, empty.version, empty.reward, empty.kl) == (0, 0, None, None)
    assert (empty.elapsed, empty.samples_per_second) == (0.0, None)
    log.message = "loading models"
    log.buffer_batches = 3
    log.maker_records([made(0, 0.25), made(1, 0.75, kl=2.0), made(2, 0.9)])
    clock.now += 6.0
    snapshot = log.snapshot()
    assert (snapshot.reward, snapshot.kl) == (0.75, 2.0)  # of the newest version that is complete
    assert snapshot.reward_history == (0.25, 0.75)
    assert snapshot.samples_per_second == 2.0  # 12 samples in 6 s
    assert (snapshot.elapsed, snapshot.buffer_batches, snapshot.message) == (6.0, 3, "loading models")
    assert log.num_samples == 12


def test_time_and_rate_count_from_begin(make_log, clock):
    log = make_log()
    log.maker_records([made(0, 0.5, samples=4)])
    clock.now += 100.0  # loading libraries and models
    log.begin()
    assert log.snapshot().elapsed == 0.0
    assert log.snapshot().startup == 100.0  # the clock that is shown goes on
    log.maker_records([made(0, 0.5, samples=6)])
    clock.now += 3.0
    snapshot = log.snapshot()
    assert (snapshot.elapsed, snapshot.samples_per_second) == (3.0, 2.0)  # 6 samples in 3 s
    assert log.num_samples == 10


def test_rate_and_time_left_are_those_of_the_last_minute(make_log, clock):
    log = make_log()
    log.begin()

    def go_on(batch, *, seconds, samples):
        clock.now += seconds
        log.trainer_records([trained(batch, batch)])
        log.maker_records([made(batch, 0.5, samples=samples)])
        return log.snapshot()

    compiling = go_on(1, seconds=100.0, samples=4)
    assert (compiling.samples_per_second, compiling.seconds_per_step) == (0.04, 100.0)
    for batch in range(2, 7):
        latest = go_on(batch, seconds=15.0, samples=30)
    assert (latest.samples_per_second, latest.seconds_per_step) == (2.0, 15.0)
    assert latest.seconds_left == 15.0 * (latest.total_steps - 6)
    assert latest.elapsed == 175.0
    clock.now += 200.0  # nothing of late: the pace is that of the whole run
    stuck = log.snapshot()
    assert (stuck.samples_per_second, stuck.seconds_per_step) == (0.0, None)
    assert stuck.seconds_left == 375.0 / 6 * (stuck.total_steps - 6)


@pytest.mark.parametrize(
    ("every", "seen", "expected"),
    [
        (1, [0, 0, 1, 2], [0, 1, 2]),  # the first batch of each version
        (3, [0, 1, 2, 3, 4, 5, 6], [0, 3, 6]),
        (3, [0, 2, 4, 5, 6], [0, 4, 6]),  # version 3 was never seen, so 4 stands in; 6 is due again
        (0, [0, 1], []),
    ],
)
def test_samples_are_written_every_so_many_versions(every, seen, expected, make_log, tmp_path):
    log = make_log(samples_every_versions=every)
    log.maker_records([made(version, 0.5, texts=[sample()]) for version in seen])
    assert [line["version"] for line in written(tmp_path)] == expected


def test_samples_are_written_as_text_and_the_first_is_shown(make_log, tracker, tmp_path):
    log = make_log()
    log.trainer_records([trained(5, 0)])
    log.maker_records([made(0, 0.5, texts=[sample(response=" très bien \ud83c"), sample(reward=0.25)])])
    first, second = written(tmp_path)
    assert first == {
        "version": 0,
        "prompt": "the film",
        "response": " très bien \ud83c",  # a lone surrogate, cut inside a pair
        "reward": 0.5,
        "sample_id": 7,
    }
    assert second["reward"] == 0.25
    assert tracker.texts == [(5, "samples/first", "the film ** très bien \ud83c** (reward 0.500)")]


def test_a_batch_without_samples_leaves_the_turn_to_the_next(make_log, tmp_path):
    log = make_log()
    log.maker_records([made(0, 0.5), made(0, 0.5, texts=[sample()])])
    assert [line["version"] for line in written(tmp_path)] == [0]


def test_spans_are_written_as_long_as_there_is_room(make_log, tmp_path, caplog):
    path = tmp_path / "spans.jsonl"
    log = make_log(spans_path=path, max_spans=3)
    log.spans("maker-0", [])
    assert not path.exists()
    log.spans("maker-0", [Span("work", "generate", 1.0, 2.5, 4), Span("work", "score", 2.5, 2.75, 4)])
    log.spans("trainer-0", [Span("work", "train", 2.0, 3.0, 4), Span("work", "publish", 3.0, 4.0, 5)])
    log.spans("trainer-0", [Span("work", "train", 4.0, 5.0, 5)])
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert rows[0] == {"actor": "maker-0", "lane": "work", "what": "generate", "start": 1.0, "end": 2.5, "version": 4}
    assert [(row["actor"], row["what"]) for row in rows[1:]] == [("maker-0", "score"), ("trainer-0", "train")]
    assert [record.getMessage() for record in caplog.records] == [
        "spans.jsonl is full; the run goes on without. Raise logging.spans_kept."
    ]


def test_that_a_maker_left_is_a_span_without_length(make_log, tmp_path):
    log = make_log(spans_path=tmp_path / "spans.jsonl", max_spans=3)
    log.left("maker-1")
    row = json.loads((tmp_path / "spans.jsonl").read_text())
    assert (row["actor"], row["what"], row["end"] - row["start"]) == ("maker-1", "leave", 0.0)


def test_a_log_without_a_place_for_spans_writes_none(make_log, tmp_path):
    make_log().spans("maker-0", [Span("work", "generate", 1.0, 2.5, 4)])
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written_is_said_once_and_the_run_goes_on(make_log, tracker, tmp_path, caplog):
    log = make_log(spans_path=tmp_path / "spans.jsonl", max_spans=100)
    log.maker_records([made(0, 0.5, texts=[sample()])])
    (tmp_path / "samples.jsonl").unlink()
    (tmp_path / "samples.jsonl").mkdir()  # as good as a full disk
    (tmp_path / "spans.jsonl").mkdir()
    for version in (1, 2):
        log.maker_records([made(version, 0.5, texts=[sample()])])
        log.spans("maker-0", [Span("work", "generate", 1.0, 2.0, version)])
    assert [record.getMessage().split(",")[0].rsplit("/", 1)[1] for record in caplog.records] == [
        "samples.jsonl cannot be written",
        "spans.jsonl cannot be written",
    ]
    log.close()
    assert len(tracker.logged) == 3  # the metrics of all versions


def test_who_wants_to_know_is_told_when_training_begins(make_log):
    told = []
    log = make_log(on_begin=lambda: told.append("begun"))
    assert told == []
    log.begin()
    assert told == ["begun"]
