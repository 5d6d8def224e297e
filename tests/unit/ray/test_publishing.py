"""Training continues while makers verify published weights."""

import threading
from types import SimpleNamespace

import pytest
import torch
from ray_testing import PATIENCE, Background
from tiny import experience
from weight_testing import Noting, connect

from coati.errors import CoatiError, StalenessExceeded, WeightUpdateError


@pytest.fixture
def trainer(make_trainer):
    trainer = make_trainer()
    for index in range(3):
        trainer.buffer_append(experience(4 * index, 4))
    return trainer


@pytest.fixture
def maker():
    return Noting()


def hold_answer(trainer, maker):
    """Hold the answer to the manifest of the first update: a start, the actor, the critic, the manifest."""
    return connect(trainer, maker=maker).hold("maker", "update_experience_maker", "after", nth=4)


def watch_steps(trainer):
    """Return an event for each learner step, set when the step is done."""
    done = [threading.Event() for _ in range(3)]
    real_step = trainer._learner.step
    following = iter(done)

    def step(batch):
        metrics = real_step(batch)
        next(following).set()
        return metrics

    trainer._learner.step = step
    return done


def test_training_continues_during_verification_with_one_update_in_flight(trainer, maker):
    done, held = watch_steps(trainer), hold_answer(trainer, maker)
    fit = Background(trainer.fit, 3, 1)
    assert done[1].wait(PATIENCE)  # while version 1 is not verified yet
    assert maker.updates == [1]
    held.release()
    fit.result()
    assert maker.updates == [1, 2, 3]
    records = [record for record in trainer.report().records.records if "weights/bytes" in record["metrics"]]
    assert [(record["version"], record["batch"]) for record in records] == [(1, 1), (2, 2), (3, 3)]
    assert all(record["metrics"]["weights/bytes"] > 0 for record in records)
    assert records[2]["metrics"]["wait/delivery_seconds"] > 0  # version 2 waited for version 1


def test_fit_ends_when_its_last_version_has_been_verified(trainer, maker):
    held = hold_answer(trainer, maker)
    fit = Background(trainer.fit, 1, 1)
    held.reached()
    assert trainer.progress().state == "working"
    held.release()
    fit.result()
    assert trainer.progress().state == "finished"


@pytest.mark.parametrize("num_steps", [1, 3, 5])  # in the last case no data comes: makers wait for the rejected version
def test_a_rejected_update_fails_fit(trainer, maker, num_steps):
    connect(trainer, maker=maker)
    maker.error = WeightUpdateError("the head is wider here")
    with pytest.raises(WeightUpdateError, match="version 1 were rejected"):
        trainer.fit(num_steps, 1 if num_steps < 5 else 3)
    assert trainer.progress().state == "failed"
    assert maker.updates == [1]  # the next one was not started


def test_a_sync_waits_for_verification_and_raises_its_error(trainer, maker):
    held = hold_answer(trainer, maker)
    sync = Background(trainer.sync_models_to_remote_makers)
    held.reached()
    assert sync.is_running
    held.release()
    sync.result()
    maker.error = WeightUpdateError("the head is wider here")
    with pytest.raises(WeightUpdateError, match="the head is wider here"):
        trainer.sync_models_to_remote_makers()
    maker.error = None
    trainer.fit(1, 1)  # does not raise the failure of the sync


def test_training_continues_while_a_sync_waits_for_the_makers(trainer, maker):
    held = hold_answer(trainer, maker)
    sync = Background(trainer.sync_models_to_remote_makers)
    held.reached()
    trainer.training_step(experience(0, 4))
    assert sync.is_running
    held.release()
    sync.result()


def test_one_rank_of_a_group_does_not_save_alone_while_they_train(trainer, tmp_path):
    trainer.strategy, trainer._state = SimpleNamespace(world_size=2), "working"
    with pytest.raises(CoatiError, match="save_every"):
        trainer.strategy_save_actor(str(tmp_path / "model"))


def test_a_trainer_refuses_data_beyond_the_staleness_bound(make_trainer):
    trainer = make_trainer(max_staleness=1)
    batch = experience(0, 4)
    batch.policy_versions = torch.zeros_like(batch.action_log_probs, dtype=torch.long)
    trainer.training_step(batch)  # age 0
    trainer.version = 2
    with pytest.raises(StalenessExceeded, match="2 versions old, but max_staleness is 1"):
        trainer.training_step(batch)


def begin_episode(trainer):
    """Make it train on the first of two batches; return its `fit` and its maker."""
    maker, trained = Noting(), threading.Event()
    real_step = trainer._learner.step

    def step(batch):
        metrics = real_step(batch)
        trained.set()
        return metrics

    trainer._learner.step = step
    connect(trainer, maker=maker)
    fit = Background(trainer.fit, 2, 2)
    trainer.buffer_append(experience(0, 4))
    assert trained.wait(PATIENCE)
    return fit, maker


def test_a_sync_in_the_middle_of_an_episode_is_a_version_of_its_own(make_trainer):
    trainer = make_trainer()
    fit, maker = begin_episode(trainer)
    for _ in range(2):  # without training in between
        trainer.sync_models_to_remote_makers()
    assert maker.updates == [1, 1]
    trainer.buffer_append(experience(4, 4))
    fit.result()
    assert maker.updates == [1, 1, 2]


def test_a_trainer_with_leases_refuses_a_sync_in_the_middle_of_an_episode(make_trainer):
    trainer = make_trainer()
    fit, maker = begin_episode(trainer)
    trainer._leased = object()  # the sync only checks that it is not None
    with pytest.raises(CoatiError, match="middle of an episode"):
        trainer.sync_models_to_remote_makers()
    trainer.buffer_append(experience(4, 4))
    fit.result()
    assert maker.updates == [1]


def test_a_sync_after_steps_by_hand_is_a_version_of_its_own(make_trainer):
    trainer = make_trainer()
    trainer.sync_models_to_remote_makers()
    assert trainer.version == 0
    trainer.training_step(experience(0, 4))
    trainer.sync_models_to_remote_makers()
    trainer.sync_models_to_remote_makers()
    assert trainer.version == 1
