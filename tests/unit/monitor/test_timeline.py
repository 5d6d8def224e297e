"""Spans and totals under a fake clock, computed by hand."""

import threading

import pytest
from metric_table import DOCUMENTED

from coati.monitor import Mean, Sum
from coati.monitor.timeline import (
    ACTIVITIES,
    Span,
    Timeline,
    TimeUse,
    is_idle,
    label_of,
    maker_metrics,
    trainer_metrics,
)


class FakeClock:
    def __init__(self):
        self.now = 50.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def timeline(clock):
    return Timeline(clock=clock, wall_clock=lambda: clock.now + 1000.0)


def test_spans_have_wall_times_and_the_version_at_their_end(timeline, clock):
    with timeline.span("wait_weights"):
        clock.now += 2.0
        timeline.version = 3
    clock.now += 1.0
    with timeline.span("generate"):
        clock.now += 0.5
    assert timeline.spans.since(0).records == [
        Span("wait_weights", 1050.0, 1052.0, 3),
        Span("generate", 1053.0, 1053.5, 3),
    ]
    assert timeline.spans.since(1).records == [Span("generate", 1053.0, 1053.5, 3)]


def test_an_inner_span_interrupts_the_outer_one(timeline, clock):
    # send 1, wait 3.5, commit 0.5, send 2: each moment counts once.
    with timeline.span("send"):
        clock.now += 1.0
        with timeline.span("wait_room"):
            clock.now += 3.5
            with timeline.span("commit"):
                clock.now += 0.5
        clock.now += 2.0
    clock.now += 3.0
    use = timeline.lap()
    assert use.elapsed == 10.0
    assert use.seconds == {"commit": 0.5, "wait_room": 3.5, "send": 3.0}
    assert (use.share("send", "commit"), use.share("train")) == (0.35, 0.0)
    assert timeline.read().seconds["send"] == 3.0
    assert [(span.what, span.end - span.start) for span in timeline.spans.since(0).records] == [
        ("send", 1.0),
        ("wait_room", 3.5),
        ("commit", 0.5),
        ("send", 2.0),
    ]


def test_two_successive_spans_inside_a_third(timeline, clock):
    with timeline.span("publish"):
        for seconds in (1.0, 2.0):
            with timeline.span("save"):
                clock.now += seconds
        clock.now += 4.0
    assert timeline.lap().seconds == {"save": 3.0, "publish": 4.0}


def test_take_resets_its_period_and_read_does_not(timeline, clock):
    for seconds in (1.0, 4.0):
        with timeline.span("train"):
            clock.now += seconds
        assert timeline.lap().seconds["train"] == seconds
    assert timeline.read().seconds["train"] == 5.0
    assert timeline.lap() == TimeUse(0.0, {"train": 0.0})
    assert timeline.lap().share("train") == 0.0


def test_a_span_in_progress_is_split_by_take(timeline, clock):
    with timeline.span("generate"):
        clock.now += 2.0
        with timeline.span("send"):
            clock.now += 0.5
            assert timeline.lap() == TimeUse(2.5, {"generate": 2.0, "send": 0.5})
            clock.now += 0.25
        clock.now += 1.0
        assert timeline.lap() == TimeUse(1.25, {"generate": 1.0, "send": 0.25})
        clock.now += 3.0
    assert timeline.lap() == TimeUse(3.0, {"generate": 3.0, "send": 0.0})
    assert timeline.read().seconds["generate"] == 6.0


def test_other_threads_are_ignored_until_one_calls_take(timeline, clock):
    def work(takes_over):
        if takes_over:
            timeline.lap()
        with timeline.span("generate"):
            clock.now += 1.0

    with timeline.span("wait_weights"):
        for takes_over in (False, True):
            thread = threading.Thread(target=work, args=[takes_over])
            thread.start()
            thread.join()
    assert timeline.read().seconds == {"generate": 1.0}
    assert [span.what for span in timeline.spans.since(0).records] == ["generate"]


def test_a_span_counts_even_if_its_body_raises(timeline, clock):
    def fail():
        with timeline.span("score"):
            clock.now += 1.5
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert timeline.read().seconds["score"] == 1.5
    with timeline.span("score"):
        clock.now += 1.0
    assert timeline.read().seconds["score"] == 2.5


def test_memory_is_bounded(clock):
    timeline = Timeline(capacity=2, clock=clock, wall_clock=clock)
    for what in ("generate", "score", "send"):
        with timeline.span(what):
            clock.now += 1.0
    page = timeline.spans.since(0)
    assert [span.what for span in page.records] == ["score", "send"]
    assert page.cursor == 3


def test_metrics_of_two_makers_add_up():
    # One maker waits 1 of 4 s for weights, the other 3 of 6 s: 4 of 10 s.
    one = maker_metrics(TimeUse(4.0, {"generate": 2.0, "score": 0.5, "wait_weights": 1.0}))
    other = maker_metrics(TimeUse(6.0, {"generate": 2.0, "send": 0.5, "wait_weights": 3.0}))
    merged = {name: metric.merge(other[name]) for name, metric in one.items()}
    assert merged["wait/weights_seconds"] == Sum(4.0)
    assert merged["wait/weights_share"].value == pytest.approx(0.4)
    assert merged["maker/busy_share"] == Mean(0.5, 10.0)  # 2.5 + 2.5 of 10
    assert merged["maker/generate_seconds"] == Sum(4.0)
    assert merged["wait/prompts_seconds"] == Sum(0.0)


def test_metrics_of_a_trainer():
    metrics = trainer_metrics(TimeUse(8.0, {"train": 6.0, "wait_data": 1.0, "wait_ranks": 0.5, "wait_delivery": 0.25}))
    assert metrics == {
        "trainer/train_seconds": 6.0,
        "trainer/busy_share": 0.75,
        "wait/data_seconds": 1.0,
        "wait/data_share": 0.125,
        "wait/ranks_seconds": 0.5,
        "wait/delivery_seconds": 0.25,
    }


def test_every_metric_is_in_the_table_and_every_wait_is_idle():
    use = TimeUse(1.0, {})
    assert {*maker_metrics(use), *trainer_metrics(use)} <= DOCUMENTED
    assert all(label_of(what).startswith("wait for") == is_idle(what) for what in ACTIVITIES)
