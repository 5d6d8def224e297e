"""The order of calls in the training loop."""

import weakref

import pytest
import torch

from coati.actors.host import Host
from coati.actors.trainer import Trainer
from coati.errors import ConfigError
from coati.experience_buffer.buffer import SampleBuffer
from coati.experience_maker import Experience


def batch(number):
    floats = torch.full((1, 1), float(number))
    return Experience(torch.zeros(1, 2), floats, floats, torch.zeros(1), floats, floats, None, None)


class Buffer(SampleBuffer):
    num_items_waiting = 0

    def extend(self, items):
        raise AssertionError

    get_length = close = _next_batch = lambda self: None


class Recorder(Trainer):
    """Trains on numbered batches and records all events."""

    def __init__(self, *, num_available=1000, should_stop=lambda: False, seed=0):
        self.events = []
        self.trained = []
        self.saved = []
        self._numbers = iter(range(num_available))
        self._should_stop = should_stop
        super().__init__([], seed=seed, buffer=Buffer(1), host=Host())

    def should_stop(self):
        return self._should_stop()

    def publish(self):
        self.events.append("publish")

    def _update_remote_makers(self, fully_update=False):
        raise AssertionError

    def checkpoint(self, num_fresh, *, was_stopped=False):
        self.saved.append((num_fresh, was_stopped))

    @property
    def num_fresh(self):
        """Batches trained on at the last `checkpoint` call."""
        return self.saved[-1][0]

    def next_batch(self):
        number = None if self.should_stop() else next(self._numbers, None)
        return None if number is None else batch(number)

    def training_step(self, batch):
        number = int(batch.values.item())
        self.trained.append(number)
        self.events.append(f"train {number}")
        return {"loss": float(number)}

    def notify(self, hook, *args):
        if hook == "on_batch_end":
            metrics, experience = args
            assert metrics == {"loss": float(experience.values.item())}
            args = (int(experience.values.item()),)
        self.events.append(" ".join([hook.removeprefix("on_"), *map(str, args)]))


def of_batch(number):
    return ["batch_start", f"train {number}", f"batch_end {number}"]


def test_the_exact_sequence_for_five_batches_in_episodes_of_two_with_three_epochs():
    recorder = Recorder()
    recorder.fit(5, 2, 3)
    assert recorder.num_fresh == 5
    trained = recorder.trained
    expected = ["fit_start"]
    position = 0
    for episode, fresh in enumerate(([0, 1], [2, 3], [4])):  # the remainder forms the last episode
        expected.append(f"episode_start {episode}")
        for epoch in range(3):
            order = trained[position : position + len(fresh)]
            assert sorted(order) == fresh
            if epoch == 0:
                assert order == fresh  # in order of arrival
            position += len(fresh)
            expected.append(f"epoch_start {epoch}")
            for number in order:
                expected += of_batch(number)
            expected.append(f"epoch_end {epoch}")
        expected += ["update_start", "publish", "update_end", f"episode_end {episode}"]
    expected.append("fit_end")
    assert recorder.events == expected
    assert position == len(trained) == 15


def test_later_epochs_are_shuffled_differently_and_repeatably():
    first, again, other = Recorder(seed=3), Recorder(seed=3), Recorder(seed=4)
    for recorder in (first, again, other):
        recorder.fit(16, 8, 3)
    assert first.trained == again.trained
    assert first.trained != other.trained
    epochs = [first.trained[start : start + 8] for start in range(0, 48, 8)]
    for episode, fresh in enumerate((list(range(8)), list(range(8, 16)))):
        in_order, *shuffled = epochs[3 * episode : 3 * episode + 3]
        assert in_order == fresh
        assert all(sorted(order) == fresh and order != fresh for order in shuffled)
    offsets = [tuple(number % 8 for number in epochs[index]) for index in (1, 2, 4, 5)]
    assert len(set(offsets)) == 4  # no two epochs of a run share their order


def test_when_data_ends_early_a_partial_episode_is_trained_and_published(caplog):
    recorder = Recorder(num_available=3)
    recorder.fit(6, 2, 2)
    assert recorder.num_fresh == 3
    assert recorder.trained[4:] == [2, 2]  # the single batch of the second episode, in both epochs
    assert recorder.events.count("publish") == 2
    assert recorder.events[-1] == "fit_end"
    assert [record.getMessage() for record in caplog.records] == [
        "training ends after 3 of 6 batches: no more data came"
    ]


def test_an_episode_without_any_batch_publishes_nothing(caplog):
    recorder = Recorder(num_available=2)
    recorder.fit(4, 2, 2)
    assert recorder.num_fresh == 2
    assert recorder.events.count("publish") == 1
    assert "epoch_start 1" not in recorder.events[recorder.events.index("episode_start 1") :]
    assert recorder.events[-2:] == ["episode_end 1", "fit_end"]
    assert "2 of 4" in caplog.text


def test_a_stop_in_the_middle_of_an_episode_is_reported_as_a_stop(caplog):
    caplog.set_level("INFO")
    recorder = Recorder(should_stop=lambda: len(recorder.trained) >= 3)
    recorder.fit(10, 2)
    assert recorder.num_fresh == 3
    assert recorder.events.count("publish") == 2
    assert recorder.saved == [(2, False), (3, True)]
    assert "training ends after 3 of 10 batches: it was stopped" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "name"),
    [((0, 1, 1), "total_steps"), ((1, 0, 1), "update_steps"), ((1, 1, 0), "train_epochs")],
)
def test_zeros_are_refused_before_training_starts(arguments, name):
    recorder = Recorder()
    with pytest.raises(ConfigError, match=f"fit's {name} must be 1 or more, got 0"):
        recorder.fit(*arguments)
    assert recorder.events == []


@pytest.mark.parametrize(("epochs", "most_alive"), [(1, 1), (2, 4)])
def test_batches_are_kept_only_for_later_epochs(epochs, most_alive):
    made, counts = [], []

    class Counter(Recorder):
        def notify(self, hook, *args):
            pass

        def next_batch(self):
            fresh = batch(0)
            made.append(weakref.ref(fresh))
            return fresh

        def training_step(self, _):
            counts.append(sum(one() is not None for one in made))
            return {}

    Counter().fit(4, 4, epochs)
    assert max(counts) == most_alive


def test_each_row_has_the_rewards_of_the_samples_of_its_step():
    def rewarded(number):
        experience = batch(number)
        experience.reward = torch.tensor([float(number)])
        return experience

    trainer = Recorder(num_available=3)
    trainer.next_batch = lambda: next((rewarded(number) for number in trainer._numbers), None)
    trainer.run_episodes(4, 2, 2)  # the last batch never comes
    rows = [record["metrics"] for record in trainer.report().records.records if "metrics" in record]
    assert [row["reward/mean"] for row in rows if "loss" in row] == [float(number) for number in trainer.trained]


def test_a_trainer_without_a_reference_reports_the_kl_that_samples_have():
    trainer = Recorder()

    def has_kl_after(number):
        trainer.train_on(batch(number))  # with a KL of `number`
        return "kl/per_sample" in trainer.report().records.records[-1]["metrics"]

    assert [has_kl_after(number) for number in (0, 7)] == [False, True]
    trainer.has_reference = True
    assert has_kl_after(0), "measured, and 0 because the policy is still the reference"
