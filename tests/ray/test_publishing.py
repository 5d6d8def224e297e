"""The trainer learns on while makers verify what it published."""

import threading

import pytest
from ray_testing import PATIENCE, Background, experience, make_ppo_trainer

from coati.errors import WeightUpdateError


class Makers:
    """Stands in for the channel: takes everything at once, and verifies it when told to."""

    def __init__(self):
        self.sent = []
        self.has_started = threading.Event()
        self.may_answer = threading.Event()
        self.error = None
        self._num_open = 0

    def start(self, header, messages, *, fully_update, snapshots=None):
        assert self._num_open == 0, "an update began while another was on its way"
        self._num_open += 1
        self.sent.append(header.version)
        list(messages)
        self.has_started.set()

        def finish():
            assert self.may_answer.wait(PATIENCE)
            self._num_open -= 1
            if self.error is not None:
                raise self.error
            return 7

        return finish


@pytest.fixture
def trainer(keep):
    trainer = make_ppo_trainer([])
    keep(trainer._buffer)
    for index in range(3):
        trainer.buffer_append(experience(4 * index, 4))
    return trainer


@pytest.fixture
def makers(trainer):
    makers = Makers()
    trainer._publisher.channel.start = makers.start
    return makers


def watch_steps(trainer):
    """An event for each step of the learner, set when it is done."""
    done = [threading.Event() for _ in range(3)]
    real_step = trainer._learner.step
    following = iter(done)

    def step(batch):
        metrics = real_step(batch)
        next(following).set()
        return metrics

    trainer._learner.step = step
    return done


def test_a_step_is_learnt_while_the_makers_verify_the_one_before_and_never_two_are_on_their_way(trainer, makers):
    done = watch_steps(trainer)
    fit = Background(trainer.fit, 3, 1)
    assert done[1].wait(PATIENCE)  # with version 1 not yet verified
    assert makers.sent == [1]
    makers.may_answer.set()
    fit.result()
    assert makers.sent == [1, 2, 3]
    records = [record for record in trainer.records_since(0).records if "weights/bytes" in record["metrics"]]
    assert [(record["version"], record["batch"]) for record in records] == [(1, 1), (2, 2), (3, 3)]
    assert all(record["metrics"]["weights/bytes"] == 7 for record in records)
    assert records[2]["metrics"]["wait/delivery_seconds"] > 0  # until version 2 could go out


def test_fit_ends_when_its_last_version_has_been_verified(trainer, makers):
    fit = Background(trainer.fit, 1, 1)
    assert makers.has_started.wait(PATIENCE)
    assert trainer.progress().state == "fitting"
    makers.may_answer.set()
    fit.result()
    assert trainer.progress().state == "finished"


@pytest.mark.parametrize("num_steps", [1, 3])
def test_a_rejected_update_fails_fit(trainer, makers, num_steps):
    makers.error = WeightUpdateError("weights of version 1 were rejected.")
    makers.may_answer.set()
    with pytest.raises(WeightUpdateError, match="version 1 were rejected"):
        trainer.fit(num_steps, 1)
    assert trainer.progress().state == "failed"
    assert makers.sent == [1]  # the next one was not begun


def test_a_rejected_update_fails_fit_though_no_data_comes(keep):
    """On policy nothing would come: the makers wait for the version that they rejected."""
    trainer = make_ppo_trainer([])
    keep(trainer._buffer)
    makers = Makers()
    makers.error = WeightUpdateError("weights of version 1 were rejected.")
    trainer._publisher.channel.start = makers.start
    trainer.buffer_append(experience(0, 4))
    fit = Background(trainer.fit, 2, 1)
    assert makers.has_started.wait(PATIENCE)
    makers.may_answer.set()
    with pytest.raises(WeightUpdateError, match="version 1 were rejected"):
        fit.result()


@pytest.mark.parametrize("interrupt", ["change_makers", "sync_models_to_remote_makers"])
def test_what_went_wrong_reaches_fit_whoever_waited_for_it(keep, interrupt):
    trainer = make_ppo_trainer([])
    keep(trainer._buffer)
    makers = Makers()
    makers.error = WeightUpdateError("weights of version 1 were rejected.")
    trainer._publisher.channel.start = makers.start
    may_learn_on = threading.Event()
    steps = []
    real_step = trainer._learner.step

    def step(batch):
        steps.append(batch)
        if len(steps) == 2:
            assert may_learn_on.wait(PATIENCE)
        return real_step(batch)

    trainer._learner.step = step
    for index in range(2):
        trainer.buffer_append(experience(4 * index, 4))
    fit = Background(trainer.fit, 2, 1)
    assert makers.has_started.wait(PATIENCE)
    arguments = ([],) if interrupt == "change_makers" else ()
    other = Background(getattr(trainer, interrupt), *arguments)
    makers.may_answer.set()
    may_learn_on.set()
    with pytest.raises(WeightUpdateError, match="version 1 were rejected"):
        fit.result()
    if interrupt == "change_makers":
        other.result()  # it has no part in that
    else:
        with pytest.raises(WeightUpdateError):  # of its own update, which is sent when fit has ended
            other.result()


def test_a_sync_returns_when_the_makers_have_verified_it(trainer, makers):
    sync = Background(trainer.sync_models_to_remote_makers)
    assert makers.has_started.wait(PATIENCE)
    assert sync.is_running
    makers.may_answer.set()
    sync.result()
