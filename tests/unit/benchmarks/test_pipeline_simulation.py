"""The pipeline's event simulation, on cases worked by hand."""

import dataclasses
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


@pytest.fixture
def simulation(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import pipeline_simulation

    return pipeline_simulation


@pytest.fixture
def simulate(simulation):
    def run(**changes):
        settings = {"rollout_batch": 4, "train_batch": 4, "versions": 3, **changes}
        return simulation.simulate(simulation.PipelineModel(**settings))

    return run


def test_on_policy_they_take_turns(simulate):
    # generate 0-1, train 1-1.5, generate 1.5-2.5, …: 3 × 1.5
    outcome = simulate(generate_base=1.0, train_base=0.5, max_staleness=0)
    assert outcome.seconds == pytest.approx(4.5)
    assert outcome.samples == 12
    assert outcome.utilization["makers"] == pytest.approx(3 / 4.5)
    assert outcome.utilization["training"] == pytest.approx(1.5 / 4.5)
    assert outcome.waits["data"] == pytest.approx(3 / 4.5)
    assert outcome.waits["weights"] == pytest.approx(1.0 / 4.5)  # 1-1.5 and 2.5-3; after the last batch nobody waits
    assert outcome.limit == "turns"


def test_one_version_behind_they_overlap_and_generation_is_the_limit(simulate):
    # generate 0-1, 1-2, 2-3; train 1-1.5, 2-2.5, 3-3.5
    outcome = simulate(generate_base=1.0, train_base=0.5, max_staleness=1)
    assert outcome.seconds == pytest.approx(3.5)
    assert outcome.limit == "makers"


def test_training_is_the_limit(simulate):
    # generate until 0.1, then train without pause: 0.1 + 3 × 1
    outcome = simulate(generate_per_sample=0.025, train_per_sample=0.25, max_staleness=1)
    assert outcome.seconds == pytest.approx(3.1)
    assert outcome.limit == "trainer"
    assert outcome.waits["data"] == pytest.approx(0.1 / 3.1)


def test_weights_are_the_limit_when_many_makers_are_updated(simulate):
    # 4 makers of 1 sample each: generate until 0.1; then train 0.1 and publish 4 × 0.5, three times, without the last
    # publishing, because all is trained by then.
    outcome = simulate(
        makers=4, rollout_batch=1, generate_base=0.1, train_base=0.1, publish_per_maker=0.5, max_staleness=1
    )
    assert outcome.seconds == pytest.approx(0.1 + 3 * 0.1 + 2 * 2.0)
    assert outcome.limit == "weights"


def test_a_version_is_delivered_while_the_next_is_trained(simulate):
    # generate until 0.1; train 0.1-1.1; deliver 1.1-1.6 beside training 1.1-2.1; …: nobody waits for it.
    outcome = simulate(generate_base=0.1, train_base=1.0, deliver_base=0.5, max_staleness=1)
    assert outcome.seconds == pytest.approx(3.1)
    # On policy the makers need it: generate, train and deliver in turn, without the last delivery.
    outcome = simulate(generate_base=0.1, train_base=1.0, deliver_base=0.5, max_staleness=0)
    assert outcome.seconds == pytest.approx(3 * 1.1 + 2 * 0.5)


def test_a_delivery_that_takes_longer_than_a_step_holds_the_trainer_up(simulate):
    # train 0-1, 1-2; version 1 arrives at 4, so version 2 is published then, and step 3 is 4-5.
    outcome = simulate(train_base=1.0, deliver_base=3.0, max_staleness=-1)
    assert outcome.seconds == pytest.approx(5.0)
    assert outcome.utilization["weights"] == pytest.approx(2 / 5)


def test_the_intake_serves_one_batch_after_the_other(simulate):
    # 4 makers deliver a sample each at 0.1; taking one in lasts 1, so versions are complete at 4.1, 8.1 and 12.1.
    outcome = simulate(makers=4, rollout_batch=1, generate_base=0.1, intake=1.0, max_staleness=-1)
    assert outcome.seconds == pytest.approx(12.1)
    assert outcome.limit == "intake"
    # Each maker has made its 3 samples by 0.3; the third waits until one of the two in flight is taken in.
    assert outcome.waits["room"] > 0


def test_two_makers_share_the_work_of_a_version(simulate):
    # 2 samples each at 0.25 s a sample: a version every 0.5
    outcome = simulate(makers=2, rollout_batch=2, generate_per_sample=0.25, max_staleness=-1)
    assert outcome.seconds == pytest.approx(1.5)


def test_more_makers_than_samples_of_a_version_still_make_each_once(simulate):
    outcome = simulate(makers=9, rollout_batch=4, generate_base=1.0, max_staleness=0, versions=5)
    assert outcome.samples == 20
    assert outcome.seconds == pytest.approx(5.0)


def test_a_commit_delays_the_next_rollout(simulate):
    # generate 1, (publish nothing), commit 0.5 + generate 1, commit 0.5 + generate 1
    assert simulate(generate_base=1.0, commit=0.5, max_staleness=0).seconds == pytest.approx(4.0)


def test_on_one_core_both_slow_down(simulate):
    # generate 0-1 alone; generate and train (1 each) share 1-3; train 3-4
    outcome = simulate(generate_base=1.0, train_base=1.0, max_staleness=1, versions=2, cores=1)
    assert outcome.seconds == pytest.approx(4.0)
    # Two cores are enough for two.
    assert simulate(generate_base=1.0, train_base=1.0, versions=2, cores=2).seconds == pytest.approx(3.0)


def test_a_full_buffer_holds_makers_back(simulate):
    outcome = simulate(generate_base=0.1, train_base=10.0, max_staleness=-1, versions=8, buffer_limit=1)
    # In the buffer: one batch that may wait, and one whose delivery is not acknowledged.
    assert outcome.most_buffered == 8
    assert outcome.waits["room"] > 0.3
    assert outcome.seconds == pytest.approx(80.1)
    assert simulate(generate_base=0.1, train_base=10.0, max_staleness=-1, versions=8).most_buffered == 7 * 4


def test_spread_depends_on_the_seed_alone(simulate):
    one, same, other = (
        simulate(generate_base=1.0, train_base=0.5, versions=20, spread=0.2, seed=seed).seconds for seed in (1, 1, 2)
    )
    assert one == same
    assert one != other
    assert one == pytest.approx(20.5, rel=0.2)


def test_saturation_is_where_doubling_no_longer_pays(simulation):
    # A maker makes 4 samples/s, the trainer takes 16: 4 makers are as many as it can feed on.
    model = simulation.PipelineModel(
        rollout_batch=4, train_batch=16, versions=40, generate_base=1.0, train_base=1.0, max_staleness=-1
    )
    outcomes = simulation.sweep(model, [1, 2, 4, 8])
    assert [outcome.samples_per_second for _, outcome in outcomes] == pytest.approx([4, 8, 16, 16], rel=0.05)
    assert simulation.saturation(outcomes) == (4, "trainer")
    assert simulation.saturation(outcomes[:3]) is None
    channel = dataclasses.replace(model, train_base=0.01, publish_per_maker=1.0)
    assert simulation.saturation(simulation.sweep(channel, [1, 2, 4, 8]))[1] == "weights"


def test_a_thousand_makers_are_simulated(simulation):
    model = simulation.PipelineModel(
        makers=1024,
        rollout_batch=2,
        train_batch=2048,
        versions=3,
        generate_base=1.0,
        train_base=0.5,
        max_staleness=1,
    )
    outcome = simulation.simulate(model)
    assert outcome.samples == 3 * 2048
    assert outcome.seconds == pytest.approx(3.5)
