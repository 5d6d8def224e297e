"""The trainer's loop and buffer in this process, with makers on threads."""

import threading
from types import SimpleNamespace

import pytest
from ray_testing import Background, RecordingTrainer
from thread_peers import PATIENCE, ThreadPeers
from tiny import experience, items

from coati.actors import trainer
from coati.config import Deadlines
from coati.errors import ConfigError, DataError, DeadlineExceeded, PeerDied
from coati.experience_buffer.buffer import LeasedBuffer
from coati.ledger import Lease, LeaseRequest, LedgerRules
from coati.ray import detached_replay_buffer, environment
from coati.ray.callbacks import TrainerCallback

QUICK = Deadlines(start_seconds=0.05, batch_seconds=PATIENCE, update_seconds=PATIENCE, grace_seconds=0.05)


class FakeMaker:
    def __init__(self):
        self.state = "working"

    def progress(self):
        return SimpleNamespace(state=self.state)


@pytest.fixture
def makers():
    return ThreadPeers(maker=FakeMaker())


@pytest.fixture
def make_trainer(makers, local_queue, monkeypatch):
    monkeypatch.setattr(trainer, "_SLICE_SECONDS", 0.01)
    monkeypatch.setattr(detached_replay_buffer, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(environment, "RayPeers", lambda: makers)
    options = {"train_batch_size": 2, "deadlines": QUICK}
    return lambda names=(), **kwargs: RecordingTrainer(list(names), **{**options, **kwargs})


class Storyteller(TrainerCallback):
    def __init__(self):
        self.story = []


for hook in [name for name in vars(TrainerCallback) if name.startswith("on_")]:

    def _note(self, *args, _hook=hook):
        numbers = [arg for arg in args if isinstance(arg, int)]
        self.story.append(" ".join([_hook.removeprefix("on_"), *map(str, numbers)]))

    setattr(Storyteller, hook, _note)


def test_hooks_episodes_epochs_and_remainder_come_in_the_order_of_the_contract(make_trainer):
    teller = Storyteller()
    trainer = make_trainer(callbacks=[teller])
    trainer.story = teller.story
    trainer.buffer_extend(items(0, 6))
    trainer.fit(total_steps=3, update_steps=2, train_epochs=2)
    batch = ["batch_start", "train", "batch_end"]
    # 3 = one episode of 2 batches and a remainder of 1; each batch is trained on twice.
    assert teller.story == [
        "fit_start",
        *["episode_start 0", "epoch_start 0", *batch, *batch, "epoch_end 0"],
        *["epoch_start 1", *batch, *batch, "epoch_end 1"],
        *["update_start", "update 1", "update_end", "episode_end 0"],
        *["episode_start 1", "epoch_start 0", *batch, "epoch_end 0", "epoch_start 1", *batch, "epoch_end 1"],
        *["update_start", "update 2", "update_end", "episode_end 1"],
        "fit_end",
    ]
    assert trainer.trained[:2] == [[0, 1], [2, 3]]
    assert sorted(trainer.trained[2:4]) == [[0, 1], [2, 3]]
    assert trainer.trained[4:] == [[4, 5], [4, 5]]


def test_the_buffer_is_usable_while_fit_computes(make_trainer):
    trainer = make_trainer()
    in_step, may_go_on = threading.Event(), threading.Event()

    def hold():
        in_step.set()
        assert may_go_on.wait(PATIENCE)

    trainer.in_step = hold
    trainer.buffer_extend(items(0, 2))
    fit = Background(trainer.fit, 3, 1)
    assert in_step.wait(PATIENCE)
    trainer.buffer_append(experience(2, 2))
    trainer.buffer_extend(items(4, 2))
    assert trainer.buffer_get_length() == 2
    assert trainer.progress().state == "working"
    may_go_on.set()
    fit.result()
    assert trainer.trained == [[0, 1], [2, 3], [4, 5]]
    progress = trainer.progress()
    assert (progress.state, progress.num_batches, progress.num_samples, progress.version) == (
        "finished",
        3,
        6,
        3,
    )


def test_when_makers_are_finished_the_last_partial_batch_is_trained_on(make_trainer, makers):
    makers["maker"].target.state = "finished"
    trainer = make_trainer(["maker"])
    trainer.buffer_extend(items(0, 5))
    trainer.fit(total_steps=100, update_steps=2)
    assert trainer.trained == [[0, 1], [2, 3], [4]]
    assert trainer.version == 2  # version 1 after batches 0 and 1, version 2 after the partial batch


def test_makers_that_die_while_fit_waits_are_an_error(make_trainer, makers):

    class Killer(TrainerCallback):
        def on_episode_start(self, episode):  # fit has found the maker and is about to wait
            makers.kill("maker")

    trainer = make_trainer(["maker"], callbacks=[Killer()])
    with pytest.raises(PeerDied, match="maker is gone"):
        trainer.fit(1, 1)
    assert trainer.progress().state == "failed"


def test_makers_that_die_while_fit_computes_are_an_error(make_trainer, makers):
    trainer = make_trainer(["maker"])
    trainer.in_step = lambda: makers.kill("maker")
    trainer.buffer_extend(items(0, 2))
    with pytest.raises(PeerDied, match="maker is gone"):
        trainer.fit(2, 1)


def test_a_nonexistent_maker_is_named(make_trainer):
    trainer = make_trainer(["no-such-maker"], deadlines=QUICK.model_copy(update={"batch_seconds": 0.1}))
    with pytest.raises(DeadlineExceeded, match="no-such-maker is missing"):
        trainer.fit(1, 1)


def test_a_trainer_fed_by_hand_needs_no_makers(make_trainer):
    trainer = make_trainer(["no-such-maker"])
    trainer.buffer_append(experience(0, 4))
    trainer.fit(2, 2)
    assert trainer.trained == [[0, 1], [2, 3]]


def test_a_batch_deadline_reports_the_buffers_contents(make_trainer, makers):
    trainer = make_trainer(["maker"], deadlines=QUICK.model_copy(update={"batch_seconds": 0.1}))
    trainer.buffer_extend(items(0, 1))
    with pytest.raises(DeadlineExceeded, match=r"1 are there.*maker is working"):
        trainer.fit(1, 1)


def test_the_same_delivery_twice_is_trained_on_once(make_trainer):
    trainer = make_trainer()
    sent = items(0, 4)
    for number, one in enumerate(sent):
        one.delivery_id = f"delivery-{number // 2}"
    for delivery in (sent[:2], sent[:2], sent[2:], sent[:2]):
        trainer.buffer_extend(delivery)
    trainer.fit(2, 1)
    assert trainer.trained == [[0, 1], [2, 3]]
    assert trainer.buffer_get_length() == 0


def test_items_without_a_delivery_id_are_never_treated_as_retries(make_trainer):
    trainer = make_trainer()
    trainer.buffer_extend(items(0, 2))
    trainer.buffer_extend(items(0, 2))
    trainer.fit(2, 1)
    assert trainer.trained == [[0, 1], [0, 1]]


def test_a_refused_delivery_does_not_count_as_delivered(make_trainer):
    trainer = make_trainer()
    sent = items(0, 2)
    for one in sent:
        one.delivery_id = "delivery"
    good, sent[1].kl = sent[1].kl, sent[1].kl[:1]
    with pytest.raises(DataError, match=r"kl must be \[3\], got \[1\]"):
        trainer.buffer_extend(sent)
    sent[1].kl = good
    trainer.buffer_extend(sent)
    trainer.fit(1, 1)
    assert trainer.trained == [[0, 1]]


# With leases.


@pytest.fixture
def leasing(make_trainer):
    """A trainer that trains on two samples per version, with makers one version ahead."""
    rules = LedgerRules(samples_per_version=2, total_samples=8, lead=1, max_staleness=1)
    buffer = LeasedBuffer(rules, 2, clock=lambda: 0.0)  # with a constant clock, no maker is slow
    return make_trainer(["maker"], buffer=buffer)


def ask(trainer, number, *, maker="maker", version=None, endings=()):
    """Request as many leases as a maker may have, in the form in which a call arrives: a plain tuple."""
    request = LeaseRequest(maker, number, trainer.version if version is None else version, 8, endings)
    return trainer.lease(tuple(request))


def leased_items(leases):
    found = []
    for lease in leases:
        (item,) = items(lease.number, 1)
        item.lease = tuple(lease)
        found.append(item)
    return found


def test_leases_are_granted_version_by_version_while_fit_trains(leasing):
    granted = []

    def ask_for_more():
        granted.append([lease.number for lease in ask(leasing, len(granted) + 2)])

    first = ask(leasing, 1)
    assert [lease.number for lease in first] == [0, 1, 2, 3]
    leasing.in_step = ask_for_more  # called in the step before version 1, 2, …, when its samples are not trained on yet
    leasing.buffer_extend(leased_items(first))
    leasing.fit(total_steps=2, update_steps=1)
    assert leasing.trained == [[0, 1], [2, 3]]
    assert granted == [[], [4, 5]]
    leasing.in_step = None
    second = ask(leasing, 4)
    assert [lease.number for lease in second] == [6, 7]
    leasing.buffer_extend(leased_items([Lease(4, 0), Lease(5, 0), *second]))
    leasing.fit(total_steps=2, update_steps=1)
    assert leasing.trained[2:] == [[4, 5], [6, 7]]
    assert ask(leasing, 5) == [], "all samples of the run have been leased"


def test_a_batch_that_is_given_back_does_not_count_as_trained_on(leasing):
    leasing.buffer_extend(leased_items(ask(leasing, 1)))
    next_batch = leasing.next_batch

    def first_batch():  # the second arrives, but another rank was stopped
        batch = next_batch()
        return batch if not leasing.trained else leasing._buffer.give_back(batch)

    leasing.next_batch = first_batch
    leasing.fit(total_steps=2, update_steps=2)
    assert leasing.trained == [[0, 1]]
    state, _ = leasing._buffer.state()
    assert (state["ledger"]["num_trained"], state["ledger"]["picked"]) == (2, [2, 3])


def test_fit_waits_for_leased_work_even_if_makers_are_finished_or_gone(leasing, makers):
    """The driver handles their failure, and other makers take over their leases."""
    makers["maker"].target.state = "finished"
    leases = ask(leasing, 1)
    waiting = threading.Event()
    leasing._update_late_makers = waiting.set
    fit = Background(leasing.fit, 1, 1)
    assert waiting.wait(PATIENCE)
    makers.kill("maker")
    waiting.clear()
    assert waiting.wait(PATIENCE)
    assert fit.is_running
    leasing.release_maker("maker", "died")
    leasing.buffer_extend(leased_items(leases))
    assert leasing.buffer_get_length() == 0, "a dead maker's deliveries are refused"
    leasing.buffer_extend(leased_items(ask(leasing, 1, maker="other")))
    fit.result()
    assert leasing.trained == [[0, 1]]


def test_the_same_leased_delivery_twice_is_trained_on_once(leasing):
    sent = leased_items(ask(leasing, 1))
    leasing.buffer_extend(sent)
    leasing.buffer_extend(sent)
    leasing.fit(2, 1)
    assert leasing.trained == [[0, 1], [2, 3]]
    assert leasing.buffer_get_length() == 0


def test_malformed_leased_samples_are_refused_and_may_be_sent_again(leasing):
    sent = leased_items(ask(leasing, 1))
    good, sent[1].kl = sent[1].kl, sent[1].kl[:1]
    with pytest.raises(DataError, match=r"kl must be \[3\], got \[1\]"):
        leasing.buffer_extend(sent)
    sent[1].kl = good
    leasing.buffer_extend(sent)
    leasing.fit(1, 1)
    assert leasing.trained == [[0, 1]]


def test_a_batch_deadline_names_the_makers_that_hold_leases(make_trainer):
    rules = LedgerRules(samples_per_version=2, total_samples=8, lead=0, max_staleness=0)
    deadlines = QUICK.model_copy(update={"batch_seconds": 0.1})
    trainer = make_trainer(["slow", "quick"], buffer=LeasedBuffer(rules, 2), deadlines=deadlines)
    slow = trainer.lease(LeaseRequest("slow", 1, 0, 1))
    quick = trainer.lease(LeaseRequest("quick", 1, 0, 1))
    trainer.buffer_extend(leased_items(quick))
    assert len(slow) == len(quick) == 1
    with pytest.raises(DeadlineExceeded, match=r"1 are there.*slow holds 1"):
        trainer.fit(1, 1)


def test_a_trainer_without_leases_refuses_lease_requests(make_trainer):
    with pytest.raises(ConfigError, match=r"options\.rules"):
        make_trainer().lease(LeaseRequest("maker", 1, 0, 8))


class Clumsy(TrainerCallback):
    def on_batch_end(self, metrics, experience):
        raise ZeroDivisionError("one by nothing")


def test_a_callback_that_raises_names_itself(make_trainer):
    trainer = make_trainer(callbacks=[Clumsy()])
    trainer.buffer_extend(items(0, 2))
    with pytest.raises(ZeroDivisionError, match="one by nothing") as caught:
        trainer.fit(1, 1)
    assert caught.value.__notes__ == ["raised in the callback Clumsy, hook on_batch_end"]
    assert trainer.progress().state == "failed"


def test_stop_ends_fit_after_the_current_batch(make_trainer):
    trainer = make_trainer()
    trainer.in_step = trainer.stop
    trainer.buffer_extend(items(0, 6))
    trainer.fit(3, 3)
    assert trainer.trained == [[0, 1]]
    assert trainer.story == ["train", "update 1"]  # the last step is published
    assert trainer.buffer_get_length() == 2


def test_stop_ends_a_wait_for_data(make_trainer, makers):
    trainer = make_trainer(["maker"])
    fit = Background(trainer.fit, 1, 1)
    trainer.stop()
    fit.result()
    assert trainer.trained == []


@pytest.mark.parametrize("steps", [(0, 1), (1, 0), (1, 1, 0)])
def test_impossible_numbers_of_steps_are_refused(make_trainer, steps):
    with pytest.raises(ConfigError, match="must be 1 or more, got 0"):
        make_trainer().fit(*steps)
