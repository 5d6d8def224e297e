"""The trainer's loop and buffer. The trainer runs in the test's process, its makers are fakes in Ray."""

import threading

import pytest
import ray
from ray_testing import (
    PATIENCE,
    QUICK,
    Background,
    FakeMaker,
    Gate,
    RecordingTrainer,
    experience,
    items,
    pass_gate,
)

from coati.errors import ActorNotFound, ConfigError, DataError, DeadlineExceeded, PeerDied
from coati.ray.callbacks import TrainerCallback

pytestmark = pytest.mark.usefixtures("cluster")


@pytest.fixture
def make_trainer(keep):
    return lambda names=(), **kwargs: keep(
        RecordingTrainer(list(names), **{"train_batch_size": 2, "deadlines": QUICK} | kwargs)
    )


@pytest.fixture
def fake_maker(keep, unique):
    name = unique("maker")
    return name, keep(FakeMaker.options(name=name).remote())


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


def test_the_buffer_takes_and_tells_while_fit_computes(make_trainer):
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
    assert trainer.progress().state == "fitting"
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


def test_the_next_batch_is_prepared_while_one_is_trained_on(make_trainer):
    trainer = make_trainer()
    prepared = []
    is_next_ready = threading.Event()

    def prepare(batch):
        prepared.append(batch.sample_ids.tolist())
        if prepared[-1] == [2, 3]:
            is_next_ready.set()
        return batch

    def wait_for_next():
        assert is_next_ready.wait(PATIENCE)

    trainer._prepared = prepare
    trainer.in_step = wait_for_next  # the first step ends only when the second batch is ready
    trainer.buffer_extend(items(0, 4))
    trainer.fit(2, 1)
    assert trainer.trained == [[0, 1], [2, 3]]
    assert prepared[:2] == [[0, 1], [2, 3]]


@ray.remote(concurrency_groups={"buffer_length": 1, "buffer_append": 1, "buffer_sample": 1, "compute": 1}, num_cpus=0)
class GatedTrainer(RecordingTrainer):
    def __init__(self, gate, **kwargs):
        super().__init__([], train_batch_size=2, deadlines=QUICK, **kwargs)
        self.in_step = lambda: pass_gate(gate, "arrive", "step")


def test_in_an_actor_every_concurrency_group_answers_while_fit_computes(keep):
    gate = keep(Gate.remote())
    trainer = keep(GatedTrainer.remote(gate, buffer_limit=1))
    ray.get(trainer.buffer_extend.remote(items(0, 2)), timeout=PATIENCE)
    fit = trainer.fit.remote(3, 1)
    pass_gate(gate, "wait", "step reached")
    ray.get(trainer.buffer_append.remote(experience(2, 2)), timeout=PATIENCE)
    full = trainer.buffer_extend.remote(items(4, 2))  # blocks: one batch waits and that is the limit
    assert ray.get(trainer.buffer_get_length.remote(), timeout=PATIENCE) == 1
    assert ray.get(trainer.progress.remote(), timeout=PATIENCE).state == "fitting"
    assert ray.wait([full, fit], timeout=0)[0] == []
    pass_gate(gate, "open", "step")
    ray.get([full, fit], timeout=PATIENCE)
    assert ray.get(trainer.state.remote())[0] == [[0, 1], [2, 3], [4, 5]]


def test_when_makers_are_finished_the_last_partial_batch_is_trained_on(make_trainer, fake_maker):
    name, maker = fake_maker
    ray.get(maker.set_state.remote("finished"))
    trainer = make_trainer([name])
    trainer.buffer_extend(items(0, 5))
    trainer.fit(total_steps=100, update_steps=2)
    assert trainer.trained == [[0, 1], [2, 3], [4]]
    assert trainer.version == 2  # after batches 0 and 1, and after the partial one


def test_makers_that_die_while_fit_waits_are_an_error(make_trainer, fake_maker):
    name, maker = fake_maker

    class Killer(TrainerCallback):
        def on_episode_start(self, episode):  # fit has seen the maker, and begins to wait
            ray.kill(maker)

    trainer = make_trainer([name], callbacks=[Killer()])
    with pytest.raises(PeerDied, match=f"every maker is gone \\({name} is gone\\)"):
        trainer.fit(1, 1)
    assert trainer.progress().state == "failed"


def test_makers_that_die_while_fit_computes_are_an_error(make_trainer, fake_maker):
    name, maker = fake_maker
    trainer = make_trainer([name])
    trainer.in_step = lambda: ray.kill(maker)
    trainer.buffer_extend(items(0, 2))
    with pytest.raises(PeerDied, match=f"{name} is gone"):
        trainer.fit(2, 1)


def test_a_maker_name_that_does_not_exist_is_named(make_trainer):
    trainer = make_trainer(["no-such-maker"])
    with pytest.raises(ActorNotFound, match=r"no maker actor named 'no-such-maker' appeared within 1\.5 s"):
        trainer.fit(1, 1)


def test_a_trainer_fed_by_hand_needs_no_makers(make_trainer):
    trainer = make_trainer(["no-such-maker"])
    trainer.buffer_append(experience(0, 4))
    trainer.fit(2, 2)
    assert trainer.trained == [[0, 1], [2, 3]]


def test_waiting_too_long_for_a_batch_says_what_is_there(make_trainer, fake_maker):
    name, _ = fake_maker
    trainer = make_trainer([name], deadlines=QUICK.model_copy(update={"batch_seconds": 1.5}))
    trainer.buffer_extend(items(0, 1))
    with pytest.raises(DeadlineExceeded, match=f"for a batch of 2 samples; 1 are there. Makers: {name} is working"):
        trainer.fit(1, 1)


def test_the_same_delivery_twice_is_trained_on_once(make_trainer):
    trainer = make_trainer()
    sent = items(0, 4)
    for number, one in enumerate(sent):
        one.delivery_id = ("maker>trainer", number)
    trainer.buffer_extend(sent[:2])
    trainer.buffer_extend(sent[:3])  # a retry, and one more
    trainer.buffer_extend(sent[2:])
    trainer.fit(2, 1)
    assert trainer.trained == [[0, 1], [2, 3]]
    assert trainer.buffer_get_length() == 0


def test_a_refused_delivery_does_not_count_as_delivered(make_trainer):
    trainer = make_trainer()
    sent = items(0, 2)
    for number, one in enumerate(sent):
        one.delivery_id = ("maker>trainer", number)
    good, sent[1].kl = sent[1].kl, sent[1].kl[:1]
    with pytest.raises(DataError, match=r"kl must be \[3\], got \[1\]"):
        trainer.buffer_extend(sent)
    sent[1].kl = good
    trainer.buffer_extend(sent)
    trainer.fit(1, 1)
    assert trainer.trained == [[0, 1]]


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


def test_stop_ends_fit_after_the_batch_in_work(make_trainer):
    trainer = make_trainer()
    trainer.in_step = trainer.stop
    trainer.buffer_extend(items(0, 6))
    trainer.fit(3, 3)
    assert trainer.trained == [[0, 1]]
    assert trainer.story == ["train", "update 1"]  # what was learnt is published
    assert trainer.buffer_get_length() == 2


def test_stop_ends_a_wait_for_data(make_trainer, fake_maker):
    name, _ = fake_maker
    trainer = make_trainer([name])
    fit = Background(trainer.fit, 1, 1)
    trainer.stop()
    fit.result()
    assert trainer.trained == []


@pytest.mark.parametrize("steps", [(0, 1), (1, 0), (1, 1, 0)])
def test_impossible_numbers_of_steps_are_refused(make_trainer, steps):
    with pytest.raises(ConfigError, match="must be 1 or more, got 0"):
        make_trainer().fit(*steps)
