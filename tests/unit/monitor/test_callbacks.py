"""Hooks, their dispatch, and the two performance evaluators under a fake clock."""

import inspect
import logging
import pickle
from types import SimpleNamespace

import pytest
import torch

from coati.actors.callbacks import (
    ExperienceMakerPerformanceEvaluator,
    MakerCallback,
    TrainerCallback,
    TrainerPerformanceEvaluator,
)
from coati.actors.host import Worker
from coati.errors import format_seconds
from coati.monitor.timeline import Timeline


def dispatch(callbacks, hook, *args):
    Worker(None, callbacks, debug=False).notify(hook, *args)


class FakeClock:
    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now

    def pass_seconds(self, seconds: float) -> None:
        self.now += seconds


def two_samples() -> SimpleNamespace:
    """S = 5, A = 3: prompts of 1 and 2 tokens, responses of 3 and 2: 8 tokens, 5 of them responses."""
    return SimpleNamespace(
        sequences=torch.zeros(2, 5, dtype=torch.long),
        attention_mask=torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 0]]),
        action_mask=torch.tensor([[True, True, True], [True, True, False]]),
        action_log_probs=torch.zeros(2, 3),
        reward=torch.zeros(2),
    )


def hooks_of(cls) -> dict[str, list[str]]:
    return {
        name: list(inspect.signature(hook).parameters)[1:] for name, hook in vars(cls).items() if name.startswith("on_")
    }


def test_maker_hooks_are_those_of_the_contract():
    assert hooks_of(MakerCallback) == {
        "on_loop_start": [],
        "on_loop_end": [],
        "on_make_experience_start": [],
        "on_make_experience_end": ["experience"],
        "on_send_start": [],
        "on_send_end": [],
        "on_batch_start": [],
        "on_batch_end": [],
    }


def test_trainer_hooks_are_those_of_the_contract():
    assert hooks_of(TrainerCallback) == {
        "on_fit_start": [],
        "on_fit_end": [],
        "on_episode_start": ["episode"],
        "on_episode_end": ["episode"],
        "on_epoch_start": ["epoch"],
        "on_epoch_end": ["epoch"],
        "on_batch_start": [],
        "on_batch_end": ["metrics", "experience"],
        "on_update_start": [],
        "on_update_end": [],
    }


@pytest.mark.parametrize("cls", [MakerCallback, TrainerCallback])
def test_hooks_do_nothing_unless_overridden(cls):
    for name, parameters in hooks_of(cls).items():
        dispatch([cls()], name, *([None] * len(parameters)))


def test_dispatch_runs_every_callback_in_order():
    seen = []

    class Watcher(TrainerCallback):
        def __init__(self, name):
            self.name = name

        def on_batch_end(self, metrics, experience):
            seen.append((self.name, metrics, experience))

    dispatch([Watcher("a"), Watcher("b")], "on_batch_end", {"loss": 1.0}, "experience")
    assert seen == [("a", {"loss": 1.0}, "experience"), ("b", {"loss": 1.0}, "experience")]


def test_an_exception_in_a_callback_names_it_and_survives_pickling():
    class Clumsy(MakerCallback):
        def on_send_end(self):
            raise KeyError("lost")

    with pytest.raises(KeyError, match="lost") as caught:
        dispatch([MakerCallback(), Clumsy()], "on_send_end")
    (note,) = pickle.loads(pickle.dumps(caught.value)).__notes__
    assert "Clumsy" in note
    assert "hook on_send_end" in note


def connected(evaluator, clock):
    timeline = Timeline(clock=clock)
    evaluator.timeline = timeline
    return evaluator


def spend(evaluator, clock, what, seconds):
    with evaluator.timeline.span(what):
        clock.pass_seconds(seconds)


def make_one(evaluator, clock, experience, make_seconds, send_seconds):
    evaluator.on_batch_start()
    evaluator.on_make_experience_start()
    spend(evaluator, clock, "generate", make_seconds - 0.25)
    spend(evaluator, clock, "score", 0.25)
    evaluator.on_make_experience_end(experience)
    evaluator.on_send_start()
    spend(evaluator, clock, "send", send_seconds)
    evaluator.on_send_end()
    evaluator.on_batch_end()


def test_the_maker_by_hand(caplog):
    clock = FakeClock()
    evaluator = connected(ExperienceMakerPerformanceEvaluator(1000, 100, 10, 1), clock)
    spend(evaluator, clock, "generate", 9.0)  # before the loop
    evaluator.on_loop_start()
    spend(evaluator, clock, "wait_weights", 1.5)
    clock.pass_seconds(0.5)
    make_one(evaluator, clock, two_samples(), 3.0, 0.5)
    make_one(evaluator, clock, two_samples(), 4.0, 0.5)
    with caplog.at_level(logging.INFO, logger="coati.actors.callbacks"):
        evaluator.on_loop_end()
    clock.pass_seconds(100.0)  # time after the loop does not count
    s = evaluator
    assert (s.samples, s.tokens, s.use.elapsed) == (4, 16, 10.0)
    assert s.use.seconds == {"generate": 6.5, "score": 0.5, "send": 1.0, "wait_weights": 1.5}
    assert s.flops_per_token == 2 * 1000 + 2 * 1111  # generation and scoring
    assert caplog.messages == [str(s)]


def test_the_maker_without_masks_counts_every_position():
    clock = FakeClock()
    evaluator = connected(ExperienceMakerPerformanceEvaluator(1, 0, 0, 0), clock)
    experience = two_samples()
    experience.attention_mask = experience.action_mask = None
    evaluator.on_loop_start()
    make_one(evaluator, clock, experience, 1.0, 0.0)
    evaluator.on_loop_end()
    assert evaluator.tokens == 10


def test_the_maker_resets_with_each_loop():
    clock = FakeClock()
    evaluator = connected(ExperienceMakerPerformanceEvaluator(1, 1, 1, 1), clock)
    for _ in range(2):
        evaluator.on_loop_start()
        make_one(evaluator, clock, two_samples(), 1.0, 1.0)
        evaluator.on_loop_end()
    assert (evaluator.samples, evaluator.use.elapsed) == (2, 2.0)


def run_episode(evaluator, clock, index, learn_seconds, *, batches=1):
    evaluator.on_episode_start(index)
    evaluator.on_epoch_start(0)
    for _ in range(batches):
        spend(evaluator, clock, "wait_data", 1.0)
        evaluator.on_batch_start()
        spend(evaluator, clock, "train", learn_seconds)
        evaluator.on_batch_end({"actor_loss": 0.0}, two_samples())
    evaluator.on_epoch_end(0)
    evaluator.on_update_start()
    spend(evaluator, clock, "publish", 0.25)
    evaluator.on_update_end()
    evaluator.on_episode_end(index)


@pytest.mark.parametrize(("enable_grad_checkpoint", "per_weight"), [(False, 6), (True, 8)])
@pytest.mark.parametrize("first_episode", [0, 40])  # a resumed run needs a warm-up too
def test_the_trainer_by_hand(caplog, enable_grad_checkpoint, per_weight, first_episode):
    clock = FakeClock()
    evaluator = connected(TrainerPerformanceEvaluator(1000, 100, enable_grad_checkpoint), clock)
    evaluator.on_fit_start()
    run_episode(evaluator, clock, first_episode, 60.0)  # warm-up
    run_episode(evaluator, clock, first_episode + 1, 2.0, batches=2)
    run_episode(evaluator, clock, first_episode + 2, 2.0, batches=2)
    with caplog.at_level(logging.INFO, logger="coati.actors.callbacks"):
        evaluator.on_fit_end()
    s = evaluator
    assert (s.samples, s.tokens, s.use.elapsed) == (8, 32, 12.5)
    assert s.use.seconds == {"train": 8.0, "publish": 0.5, "wait_data": 4.0}
    assert s.flops_per_token == per_weight * 1100
    assert caplog.messages == [str(s)]


def test_a_trainer_that_only_warmed_up_reports_that():
    clock = FakeClock()
    evaluator = connected(TrainerPerformanceEvaluator(1, 1, ignore_first_episodes=2), clock)
    evaluator.on_fit_start()
    run_episode(evaluator, clock, 0, 2.0)
    run_episode(evaluator, clock, 1, 2.0)
    evaluator.on_fit_end()
    assert (evaluator.samples, evaluator.use.elapsed) == (4, 6.5)


def test_no_warm_up_counts_the_first_episode():
    clock = FakeClock()
    evaluator = connected(TrainerPerformanceEvaluator(1, 1, ignore_first_episodes=0), clock)
    evaluator.on_fit_start()
    run_episode(evaluator, clock, 0, 2.0)
    run_episode(evaluator, clock, 1, 2.0)
    assert evaluator.samples == 4


def test_empty_runs_do_not_divide_by_zero(caplog):
    maker = ExperienceMakerPerformanceEvaluator(1, 1, 1, 1)
    trainer = TrainerPerformanceEvaluator(1, 1)
    with caplog.at_level(logging.INFO, logger="coati.actors.callbacks"):
        maker.on_loop_start()
        maker.on_loop_end()
        trainer.on_fit_start()
        trainer.on_fit_end()
    assert ["nothing to measure" in message for message in caplog.messages] == [True, True]


def test_evaluators_pickle_before_use():
    for evaluator in (ExperienceMakerPerformanceEvaluator(1, 2, 3, 4), TrainerPerformanceEvaluator(1, 2)):
        assert pickle.loads(pickle.dumps(evaluator)).samples == 0


def test_rates_by_hand():
    clock = FakeClock()
    evaluator = connected(ExperienceMakerPerformanceEvaluator(1_500_000, 0, 0, 0), clock)
    evaluator.on_loop_start()
    evaluator.on_loop_end()
    assert str(evaluator) == "Experience maker: 0 samples in 0 s, so nothing to measure"
    for what, seconds in {"generate": 1.6, "score": 0.4, "send": 0.04, "wait_room": 0.04, "publish": 1.0}.items():
        spend(evaluator, clock, what, seconds)
    clock.pass_seconds(0.92)  # in no span
    batch = SimpleNamespace(sequences=torch.zeros(100, 30, dtype=torch.long), attention_mask=None)
    evaluator.on_make_experience_end(batch)
    evaluator.on_loop_end()
    assert str(evaluator).splitlines() == [
        "Experience maker: 100 samples (25.00/s, 40 ms each), 3,000 tokens (750/s) in 4 s, 4.50 GFLOP/s",
        "  of the time: generate 40%, score 10%, send 1%, wait for room 1%, publish 25%",
    ]


def test_a_run_too_quick_to_time_has_no_rates():
    evaluator = connected(TrainerPerformanceEvaluator(1, 1), FakeClock())
    evaluator.on_fit_start()
    evaluator.on_batch_end({}, two_samples())
    evaluator.on_fit_end()  # a coarse clock can read the same twice
    assert "nothing to measure" in str(evaluator)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0 s"),
        (2e-6, "2 us"),
        (0.9997, "1000 ms"),
        (0.25, "250 ms"),
        (1.0, "1 s"),
        (60.0, "1 min 00 s"),
        (7323.4, "122 min 03 s"),
    ],
)
def test_durations_have_suitable_units(value, text):
    assert format_seconds(value) == text
