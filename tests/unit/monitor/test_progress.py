"""What a person sees of a run."""

import math

from hypothesis import given
from hypothesis import strategies as st

from coati.monitor.progress import RunSnapshot, plain_line, sparkline


def halfway(**changes) -> RunSnapshot:
    fields = {
        "step": 30,
        "total_steps": 60,
        "version": 29,
        "reward": 0.5,
        "kl": 2.125,
        "buffer_batches": 3,
        "samples_per_second": 213.7,
        "elapsed": 12.0,
        "reward_history": (0.1, 0.2, 0.3, 0.5),
    }
    return RunSnapshot(**(fields | changes))


def test_time_left_follows_the_pace_so_far():
    assert halfway(step=20, elapsed=10.0).seconds_left == 20.0  # 0.5 s a step, 40 to go
    started = halfway(step=20, elapsed=10.0, startup=30.0)
    assert started.seconds_left == 20.0  # getting ready is no part of the pace, but of the clock
    assert "0:00:40 elapsed, 0:00:20 left" in plain_line(started)
    assert halfway(step=0).seconds_left is None
    assert halfway(step=60).seconds_left is None
    assert halfway(total_steps=0).seconds_left is None


def test_a_plain_line():
    assert plain_line(halfway(message="updating\n1 maker")) == (
        "step 30/60 (50%), reward 0.500, KL 2.12, version 29, buffer 3, 214 samples/s, "
        "0:00:12 elapsed, 0:00:12 left - updating 1 maker"
    )


def test_a_plain_line_before_anything_is_known():
    assert plain_line(RunSnapshot(step=0, total_steps=0, version=0)) == "step 0, version 0, 0:00:00 elapsed"
    starting = RunSnapshot(step=0, total_steps=9, version=0, samples_per_second=0.0, message="loading models")
    assert plain_line(starting) == "loading models, 0:00:00 elapsed"


def test_a_run_is_not_done_until_it_is():
    assert "(99%)" in plain_line(halfway(step=9_999, total_steps=10_000))
    assert "(100%)" in plain_line(halfway(step=60))


def test_sparkline_by_hand():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([7, 0], 8) == "█▁"
    assert sparkline([5.0, 5.0], 8) == "▁▁"
    assert sparkline([0.0, math.nan, 1.0], 8) == "▁█"
    assert sparkline([0, 2, 6, 8], 2) == "▁█"  # averages 1 and 7
    assert sparkline([], 8) == sparkline([math.nan], 8) == sparkline([1.0], 0) == ""


@given(st.lists(st.floats(-1e9, 1e9) | st.sampled_from([math.nan, math.inf]), max_size=60), st.integers(0, 30))
def test_sparkline_always_fits(values, width):
    num_finite = sum(math.isfinite(value) for value in values)
    assert len(sparkline(values, width)) == min(width, num_finite)
