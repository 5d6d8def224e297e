"""How the scaling benchmark reads times off spans and calibrates the simulation, by hand."""

from pathlib import Path

import pytest

from coati.monitor.timeline import Span

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import scaling

    return scaling


def spans(*rows):
    return [Span(lane, what, start, end, 0) for lane, what, start, end in rows]


def test_the_steady_part_lies_between_the_ends_of_steps(benchmark):
    from detached_runs import measure

    # Steps end at 2, 4, 6 and 8; the first is warm-up. Between 2 and 8 the maker generates 3 × 1 and waits 3 × 1.
    trainer = [("work", "train", end - 1.0, end) for end in (2.0, 4.0, 6.0, 8.0)]
    maker = [("work", "generate", end - 1.0, end) for end in (1.0, 3.0, 5.0, 7.0)]
    maker += [("work", "wait_weights", end, end + 1.0) for end in (1.0, 3.0, 5.0, 7.0)]
    maker += [("weights", "receive", 4.0, 4.5)]
    measured = measure({"maker-0": spans(*maker), "trainer-0": spans(*trainer)}, batch=10, warmup=1)
    assert (measured.seconds, measured.steps, measured.samples, measured.makers) == (6.0, 3, 30, 1)
    assert measured.spent["maker-0"] == {"generate": 3.0, "wait_weights": 3.0}
    assert measured.work_per_step("maker-0") == 1.0
    assert measured.per_step("maker-0", "generate", "score") == 1.0  # nothing was scored
    assert measured.per_step("trainer-0", "train") == 1.0
    assert measured.samples_per_second == 5.0
    assert measured.cost == pytest.approx(400.0)  # two actors, 6 s, 30 samples
    assert measured.medians["receive"] == 0.5


def test_costs_are_straight_lines_through_two_runs(benchmark):
    # 3 s at 8 samples and 2 s at 4: 1 s and 0.25 for each
    assert benchmark.line(3.0, 2.0, 8, 4) == (1.0, 0.25)
    assert benchmark.line(2.0, 3.0, 8, 4) == (2.0, 0.0)  # noise: more samples in less time
    assert benchmark.line(4.0, 1.0, 8, 4) == (0.0, 0.75)  # and nothing costs less than nothing


def test_a_model_for_more_makers_keeps_their_batches_and_shares_nothing(benchmark):
    from pipeline_simulation import PipelineModel

    model = PipelineModel(rollout_batch=4, train_batch=4, versions=9, train_per_sample=0.5, train_base=1.0, cores=2)
    large = benchmark.for_cluster(model, makers=8, speedup=2)
    assert (large.train_batch, large.train, large.cores) == (32, 0.5 + 32 * 0.25, None)
    real = benchmark.for_run(model, batch=8, makers=2, cores=2)
    assert (real.rollout_batch, real.train_batch, real.cores) == (4, 8, 2)


def test_a_batch_that_is_scored_in_pieces_costs_their_sum(benchmark):
    from detached_runs import Measured

    def alone(scale, makers=1):
        once = {"train": 4.0 * scale, "publish": 1.0 * makers, "deliver": 2.0, "send": 0.5, "take_in": 0.25}
        return Measured(
            seconds=100.0,
            steps=10,
            samples=80,
            makers=makers,
            spent={"maker-0": {"generate": 20.0 * scale, "score": 30.0 * scale}},
            medians={"generate": 2.0 * scale, "score": 0.1, **once},  # most pieces of scoring are short
        )

    model = benchmark.calibrated(alone(1.0), alone(0.5), alone(1.0, makers=2), batch=8)
    assert (model.generate(8), model.generate(4), model.train) == (5.0, 2.5, 4.0)
    assert (model.publish_base, model.publish_per_maker, model.deliver, model.send) == (0.0, 1.0, 2.0, 0.5)
