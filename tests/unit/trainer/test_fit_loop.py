"""The order of calls in the training loop."""

import logging
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
    """Records the batches that are given back."""

    num_items_waiting = 0

    def __init__(self):
        super().__init__(1)
        self.given_back = []

    def give_back(self, batch):
        self.given_back.append(int(batch.values.item()))

    def extend(self, items):
        raise AssertionError

    get_length = close = _next_batch = lambda self: None


class Recorder(Trainer):
    """Trains on numbered batches and records all events."""

    def __init__(self, *, num_available=1000, agree=None, should_stop=lambda: False, seed=0):
        self.events = []
        self.trained = []
        self.saved = []
        self._numbers = iter(range(num_available))
        self._agree = agree or super().agree
        self._should_stop = should_stop
        super().__init__([], seed=seed, buffer=Buffer(), host=Host())

    def agree(self, has_data, is_stopped):
        return self._agree(has_data, is_stopped)

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
        number = next(self._numbers, None)
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


def test_a_stop_ends_training_after_the_episode():
    recorder = Recorder(should_stop=lambda: len(recorder.trained) >= 3)
    recorder.fit(10, 2)
    assert recorder.num_fresh == 4
    assert recorder.events.count("publish") == 2
    assert recorder.events[-1] == "fit_end"


def test_a_stop_in_the_middle_of_an_episode_is_reported_as_a_stop(caplog):
    # A batch source that returns None once stopped, as in both trainers.
    recorder = Recorder(num_available=3, should_stop=lambda: len(recorder.trained) >= 3)
    recorder.fit(10, 2)
    assert recorder.num_fresh == 3
    assert recorder.events.count("publish") == 2
    assert recorder.saved == [(2, False), (3, True)]
    assert "training ends after 3 of 10 batches: it was stopped" in caplog.text


def test_a_batch_is_dropped_with_a_warning_if_another_rank_was_stopped(caplog):
    # Called before each episode and for each batch: episode, batch 0, batch 1, where another rank was stopped.
    answers = iter([True, True, False])
    asked = []

    def agree(*mine):
        asked.append(mine)
        return next(answers)

    recorder = Recorder(agree=agree)
    with caplog.at_level(logging.WARNING):
        recorder.fit(4, 4)
    assert recorder.num_fresh == 1
    assert recorder.trained == [0]
    assert recorder._buffer.given_back == [1]
    assert asked == [(True, False)] * 3
    assert "dropped a batch of 1 samples: another rank was stopped" in caplog.text
    assert recorder.events.count("publish") == 1


def test_a_rank_without_data_takes_the_steps_of_the_others_with_empty_batches():
    asked, sizes = [], []
    others = iter([True] * 8 + [False])  # another rank has more data, and then none either

    def agree(has_data, is_stopped):
        asked.append((has_data, is_stopped))
        return (has_data or next(others)) and not is_stopped

    class OneBatch(Recorder):
        def next_batch(self):
            return batch(0) if len(asked) == 1 else None

        def training_step(self, batch):
            sizes.append(batch.num_samples)
            return {}

        def publish(self):
            sizes.append("publish")

        def notify(self, hook, *args):
            pass

    recorder = OneBatch(agree=agree)
    recorder.fit(100, 2, 2)
    assert recorder.num_fresh == 9
    assert sorted(sizes[2:4]) == [0, 1]  # the second epoch repeats both
    assert [*sizes[:2], *sizes[4:]] == [1, 0, "publish", *[0, 0, 0, 0, "publish"] * 3, 0, 0, "publish"]
    assert set(asked) == {(True, False), (False, False)}


def test_a_stopped_rank_reports_the_stop_and_not_missing_data():
    asked = []

    def agree(has_data, is_stopped):
        asked.append((has_data, is_stopped))
        return has_data and not is_stopped

    recorder = Recorder(num_available=1, agree=agree, should_stop=lambda: bool(recorder.trained))
    recorder.fit(4, 4)
    assert recorder.num_fresh == 1
    assert asked == [(True, False), (True, False), (False, True)]


def test_ranks_agree_on_a_stop():
    asked = []

    def agree(*mine):
        asked.append(mine)
        return len(asked) < 3  # another rank was stopped; this one was not

    recorder = Recorder(agree=agree)
    recorder.fit(4, 1)
    assert recorder.num_fresh == 1
    assert asked == [(True, False)] * 3
    assert recorder.events[-1] == "fit_end"


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
