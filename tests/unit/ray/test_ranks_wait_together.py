"""Ranks of a group wait for their batches together, and meanwhile update makers that missed a version."""

import functools
import logging
import threading
from types import SimpleNamespace

import pytest
import torch
from ray_testing import Background
from tiny import experience
from weight_testing import Noting, connect

SECONDS = 20.0  # for ranks to meet; a rank that is alone after this time would have hung


class Ranks:
    """Adds up tensors of threads that stand for the ranks of a group."""

    def __init__(self, count):
        self._parts = [None] * count
        self._barrier = threading.Barrier(count)

    def strategy(self, rank, *, shards):
        return SimpleNamespace(
            world_size=len(self._parts),
            shards_parameters=shards,
            device=torch.device("cpu"),
            all_reduce_sum=functools.partial(self._sum, rank),
        )

    def _sum(self, rank, tensor):
        self._parts[rank] = tensor
        self._barrier.wait(SECONDS)
        total = torch.stack(self._parts).sum(dim=0)
        self._barrier.wait(SECONDS)
        return total


class Successor(Noting):
    """A maker that delivers to a trainer once it has all weights."""

    def __init__(self, trainer):
        super().__init__()
        self._trainer = trainer

    def update_experience_maker(self, *, message):
        super().update_experience_maker(message=message)
        if message.manifest is not None and message.manifest.is_full and len(self.updates) == 1:
            self._trainer.buffer_append(experience(0, 4))


def let_join(trainer, maker):
    """Connect a maker that has no weights yet, as the successor of one that died."""
    connect(trainer, maker=maker)
    trainer.change_makers([])
    trainer.change_makers(["maker"])


@pytest.fixture
def make_group(make_trainer):
    def make(*, shards=False):
        ranks = Ranks(2)
        trainers = [make_trainer(), make_trainer()]
        for rank, trainer in enumerate(trainers):
            trainer.strategy, trainer.sizes, trainer.late = ranks.strategy(rank, shards=shards), [], 0
            trainer.training_step = functools.partial(_note_size, trainer)
            trainer._sender.begin_update = functools.partial(_count, trainer, trainer._sender.begin_update)
        return trainers

    return make


def _note_size(trainer, batch):
    trainer.sizes.append(batch.num_samples)
    return {}


def _count(trainer, begin_update, *args, only_behind=False, **options):
    trainer.late += only_behind
    return begin_update(*args, only_behind=only_behind, **options)


def fit_all(trainers, *args):
    for fit in [Background(trainer.fit, *args) for trainer in trainers]:
        fit.result()


def test_a_single_rank_with_a_sharded_model_updates_the_only_maker_while_it_waits(make_trainer):
    trainer = make_trainer()
    trainer.strategy.shards_parameters = True
    let_join(trainer, maker := Successor(trainer))
    trainer.deadlines = trainer.deadlines.model_copy(update={"batch_seconds": SECONDS})
    trainer.fit(1, 1)
    assert maker.updates == [0, 1]


@pytest.mark.parametrize("shards", [False, True])
def test_a_rank_with_its_batch_updates_the_maker_that_another_rank_waits_for(make_group, shards):
    first, second = make_group(shards=shards)
    first.buffer_append(experience(4, 4))
    let_join(first, maker := Successor(second))
    fit_all((first, second), 1, 1)
    assert (first.sizes, second.sizes) == ([4], [4])
    assert maker.updates == [0, 1]
    assert (first.late, second.late) == (1, int(shards)), "sharded weights are gathered by all ranks together"


def _then(call, action):
    def both(*args):
        found = call(*args)
        action()
        return found

    return both


def test_a_stop_of_a_rank_ends_the_wait_of_all(make_group, caplog):
    first, second = make_group()
    first.buffer_append(experience(4, 4))
    first._buffer.give_back, given_back = (lambda batch: given_back.append(batch.num_samples)), []
    first._buffer.try_sample = _then(first._buffer.try_sample, second.stop)
    with caplog.at_level(logging.INFO):
        fit_all((first, second), 2, 1)
    assert first.sizes == second.sizes == []
    assert given_back == [4]
    assert caplog.text.count("training ends after 0 of 2 batches: it was stopped") == 2


def test_a_rank_without_data_ends_when_another_is_stopped(make_group):
    first, second = make_group()
    first._buffer.try_sample = _then(first._buffer.try_sample, second.stop)
    fit_all((first, second), 2, 1)
    assert first.sizes == second.sizes == []


def test_a_rank_whose_makers_have_finished_takes_the_steps_of_the_others(make_group):
    first, second = make_group()
    for index in range(3):
        first.buffer_append(experience(4 * index, 4))
    second._buffer.last_batch, asked = (lambda: (None,)), []
    second._buffer.try_sample = asked.append
    fit_all((first, second), 3, 2, 2)
    assert len(asked) == 1, "it waited again"
    assert (first.sizes, second.sizes) == ([4] * 6, [0] * 6), "in later epochs too"


def test_a_rank_with_its_batch_has_no_deadline_while_others_update_makers(make_group):
    first, second = make_group()
    first.deadlines = first.deadlines.model_copy(update={"batch_seconds": 0.05})
    first.buffer_append(experience(4, 4))
    let_join(second, Successor(second))
    send, waited = second._send_to_late_makers, threading.Event()
    second._send_to_late_makers = lambda: (waited.wait(0.2), send())
    fit_all((first, second), 1, 1)
    assert (first.sizes, second.sizes) == ([4], [4])


def test_training_ends_when_no_rank_has_data(make_group, caplog):
    trainers = make_group()
    for trainer in trainers:
        trainer.buffer_append(experience(0, 4))
        trainer._buffer.last_batch = lambda: (None,)
    with caplog.at_level(logging.WARNING):
        fit_all(trainers, 2, 2)
    assert [trainer.sizes for trainer in trainers] == [[4], [4]]
    assert caplog.text.count("training ends after 1 of 2 batches: no more data came") == 2
