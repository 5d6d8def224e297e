"""The progress line of a run."""

from coati.monitor.live import plain_line
from coati.monitor.run_log import RunSnapshot


def halfway(**changes) -> RunSnapshot:
    fields = {
        "step": 30,
        "total_steps": 60,
        "version": 29,
        "reward": 0.5,
        "kl": 2.125,
        "buffer_batches": 3,
        "num_made": 2000,
        "num_trained": 1900,
        "samples_per_second": 213.7,
        "seconds_per_step": 0.4,
        "elapsed": 12.0,
    }
    return RunSnapshot(**(fields | changes))


def test_time_left_follows_the_pace_so_far():
    started = halfway(step=20, elapsed=10.0, startup=30.0, seconds_per_step=0.5)
    assert "0:00:40 elapsed, 0:00:20 left" in plain_line(started)  # 40 steps to go
    assert halfway(seconds_per_step=None).seconds_left is None
    assert halfway(step=60).seconds_left is None
    assert halfway(total_steps=0).seconds_left is None


def test_a_plain_line():
    assert plain_line(halfway(message="updating\n1 maker")) == (
        "step 30/60 (50%), reward 0.500, KL 2.12, version 29, buffer 3, 1,900 samples trained, 2,000 made (214/s), "
        "0:00:12 elapsed, 0:00:12 left - updating 1 maker"
    )


def test_restarts_are_shown_only_if_there_are_any():
    assert "restart" not in plain_line(halfway())
    assert "2 restarts, 0:00:12 elapsed" in plain_line(halfway(restarts={"makers": 2}))


def test_a_plain_line_without_data():
    assert plain_line(RunSnapshot(step=0, total_steps=0, version=0)) == "step 0, version 0, 0:00:00 elapsed"
    starting = RunSnapshot(step=0, total_steps=9, version=0, samples_per_second=0.0, message="loading models")
    assert plain_line(starting) == "loading models, 0:00:00 elapsed"


def test_100_percent_means_that_the_run_is_done():
    assert "(99%)" in plain_line(halfway(step=9_999, total_steps=10_000))
    assert "(100%)" in plain_line(halfway(step=60))
