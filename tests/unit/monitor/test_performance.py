"""FLOPs, phases and summaries, by hand."""

import pytest

from coati.errors import ConfigError
from coati.monitor.performance import (
    PerformanceSummary,
    PhaseTimer,
    WorkMeter,
    format_flops,
    format_seconds,
    generation_flops,
    transformer_flops,
)


class FakeClock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def pass_seconds(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock():
    return FakeClock()


def summary(**changes) -> PerformanceSummary:
    settings = {
        "title": "Maker",
        "samples": 100,
        "tokens": 3000,
        "response_tokens": 1000,
        "seconds": 4.0,
        "phase_seconds": {"make": 2.0, "send": 0.05, "other": 1.95},
        "flops": 6e9,
        "compute_phase": "make",
    }
    return PerformanceSummary(**(settings | changes))


def test_transformer_flops_by_hand():
    assert transformer_flops(100, 7, backward=False) == 2 * 100 * 7
    assert transformer_flops(100, 7, backward=True) == 6 * 100 * 7
    assert transformer_flops(100, 7, backward=True, recompute=True) == 8 * 100 * 7


def test_transformer_flops_refuses_nonsense():
    with pytest.raises(ConfigError, match="got -1 and 7"):
        transformer_flops(-1, 7, backward=False)
    with pytest.raises(ConfigError, match="needs backward=True"):
        transformer_flops(1, 7, backward=False, recompute=True)


def test_generation_flops_by_hand():
    # Two samples, 5 + 3 prompt tokens, 4 + 2 response tokens; the last of each response is never fed back.
    assert generation_flops(100, prompt_tokens=8, response_tokens=6, num_sequences=2) == 2 * 100 * (8 + 4)
    assert generation_flops(100, prompt_tokens=8, response_tokens=0, num_sequences=2) == 2 * 100 * 8


def test_phases_add_up_and_nest(clock):
    timer = PhaseTimer(clock)
    for _ in range(2):
        with timer.phase("make"):
            clock.pass_seconds(1.0)
            with timer.phase("generate"):
                clock.pass_seconds(3.0)
        clock.pass_seconds(10.0)
        with timer.phase("send"):
            clock.pass_seconds(0.5)
    assert timer.seconds == {"make/generate": 6.0, "make": 8.0, "send": 1.0}
    assert timer.counts == {"make/generate": 2, "make": 2, "send": 2}


def test_a_phase_that_raises_still_counts_and_closes_what_it_left_open(clock):
    timer = PhaseTimer(clock)

    def fail():
        with timer.phase("make"):
            timer.start("generate")
            clock.pass_seconds(2.0)
            raise RuntimeError("reward failed")

    with pytest.raises(RuntimeError, match="reward failed"):
        fail()
    with timer.phase("send"):
        clock.pass_seconds(1.0)
    assert timer.seconds == {"make/generate": 2.0, "make": 2.0, "send": 1.0}


def test_stop_finds_an_outer_phase_and_ignores_a_closed_one(clock):
    timer = PhaseTimer(clock)
    timer.stop("make")
    assert timer.seconds == {}
    timer.start("make")
    timer.start("generate")
    clock.pass_seconds(1.0)
    timer.stop("make")
    timer.stop("generate")
    assert timer.seconds == {"make/generate": 1.0, "make": 1.0}


def test_forgotten_phases_are_not_booked(clock):
    timer = PhaseTimer(clock)
    timer.start("make")
    clock.pass_seconds(5.0)
    timer.forget_open()
    with timer.phase("send"):
        clock.pass_seconds(1.0)
    assert timer.seconds == {"send": 1.0}


def test_rates_by_hand():
    s = summary()
    assert s.samples_per_second == 25.0  # 100 / 4
    assert s.tokens_per_second == 750.0  # 3000 / 4
    assert s.response_tokens_per_second == 250.0
    assert s.seconds_per_sample == pytest.approx({"make": 0.02, "send": 0.0005, "other": 0.0195})
    assert s.flops_per_second == 3e9  # over the 2 s of "make"
    assert s.overall_flops_per_second == 1.5e9  # over all 4 s


def test_the_summary_reads_well():
    assert summary().render().splitlines() == [
        "Maker: 100 samples, 3,000 tokens (1,000 in responses) in 4.00 s",
        "  throughput   25.0 samples/s, 750 tokens/s (250 in responses)",
        "  compute      3.00 GFLOP/s in make, 1.50 GFLOP/s overall",
        "  per sample   40.0 ms",
        "    make    20.0 ms   50%",
        "    send     500 us    1%",
        "    other   19.5 ms   49%",
    ]


def test_an_empty_run_has_no_rates_and_says_so():
    empty = summary(samples=0, tokens=0, response_tokens=0, seconds=0.0, phase_seconds={}, flops=0.0)
    assert empty.samples_per_second == empty.tokens_per_second == empty.flops_per_second == 0.0
    assert empty.seconds_per_sample == {}
    assert empty.render() == "Maker: no samples in 0 s, so nothing to measure"


def test_a_run_too_quick_to_time_renders():
    # A coarse clock can read the same twice.
    assert "0.00 samples/s" in summary(seconds=0.0, phase_seconds={"make": 0.0}).render()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0.00 FLOP/s"),
        (999.0, "999 FLOP/s"),
        (1.5e3, "1.50 kFLOP/s"),
        (2e6, "2.00 MFLOP/s"),
        (45.67e9, "45.7 GFLOP/s"),
        (312e12, "312 TFLOP/s"),
        (1.2e15, "1.20 PFLOP/s"),
    ],
)
def test_flops_are_scaled(value, text):
    assert format_flops(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0 s"),
        (2e-6, "2.00 us"),
        (0.25, "250 ms"),
        (1.0, "1.00 s"),
        (60.0, "1 min 00 s"),
        (7323.4, "122 min 03 s"),
    ],
)
def test_seconds_are_scaled(value, text):
    assert format_seconds(value) == text


def test_the_meter_books_the_rest(clock):
    meter = WorkMeter(clock)
    clock.pass_seconds(100.0)  # before the first call: not measured
    meter.mark()
    clock.pass_seconds(1.0)
    meter.start("make")
    clock.pass_seconds(2.0)
    meter.start("make")  # the first try was abandoned: its 2 s belong to the rest
    clock.pass_seconds(4.0)
    meter.stop("make")
    meter.add(samples=2, tokens=10, response_tokens=4, flops=8.0)
    s = meter.summary("Maker", phases=("make", "send"), compute_phase="make", rest="other")
    assert s.seconds == 7.0
    assert s.phase_seconds == {"make": 4.0, "send": 0.0, "other": 3.0}
    assert (s.samples, s.tokens, s.response_tokens, s.flops) == (2, 10, 4, 8.0)
