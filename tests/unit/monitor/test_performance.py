"""Rates and summaries, by hand."""

from types import SimpleNamespace

import pytest
import torch

from coati.monitor.performance import WorkMeter, format_seconds
from coati.monitor.timeline import Timeline


class FakeClock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def batch(num_samples=100, num_tokens=30, num_actions=10) -> SimpleNamespace:
    return SimpleNamespace(
        sequences=torch.zeros(num_samples, num_tokens, dtype=torch.long),
        attention_mask=None,
        action_mask=None,
        action_log_probs=torch.zeros(num_samples, num_actions),
    )


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def timeline(clock):
    return Timeline(clock=clock)


def spend(timeline, clock, **seconds):
    for what, length in seconds.items():
        with timeline.span(what):
            clock.now += length


PHASES = {"make": ("generate", "score"), "send": ("send", "wait_room")}


def test_rates_by_hand(timeline, clock):
    spend(timeline, clock, generate=100.0)  # before the meter begins
    meter = WorkMeter("Maker", timeline, PHASES)
    spend(timeline, clock, generate=1.5, score=0.5, send=0.03, wait_room=0.02, wait_weights=1.0)
    clock.now += 0.95  # in no span
    meter.add(batch(), flops_per_token=2.1e6, flops_per_sample=-3e6)
    clock.now += 50.0  # after the last mark
    assert (meter.samples, meter.tokens, meter.response_tokens) == (100, 3000, 1000)
    assert meter.flops == 6e9  # 2.1e6 · 3000 − 3e6 · 100
    assert meter.seconds == pytest.approx(4.0)
    assert meter.phase_seconds == pytest.approx({"make": 2.0, "send": 0.05, "other": 1.95})
    assert meter.render().splitlines() == [
        "Maker: 100 samples (25.00/s), 3,000 tokens (750/s, 1,000 in responses) in 4 s",
        "  3.00 GFLOP/s in make, 1.50 GFLOP/s overall",
        "  per sample 40 ms: make 20 ms (50%), send 500 us (1%), other 19.5 ms (49%)",
    ]


def test_an_empty_run_has_no_rates_and_says_so(timeline):
    assert WorkMeter("Maker", timeline, PHASES).render() == "Maker: 0 samples in 0 s, so nothing to measure"


def test_a_run_too_quick_to_time_renders(timeline):
    # A coarse clock can read the same twice.
    meter = WorkMeter("Maker", timeline, PHASES)
    meter.add(batch(), flops_per_token=1.0)
    assert "nothing to measure" in meter.render()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0 s"),
        (2e-6, "2 us"),
        (0.9997, "1000 ms"),
        (0.25, "250 ms"),
        (1.0, "1 s"),
        (60.0, "1 min 00 s"),
        (7323.4, "122 min 03 s"),
    ],
)
def test_seconds_are_scaled(value, text):
    assert format_seconds(value) == text
