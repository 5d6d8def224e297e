"""A pass that raises leaves the weights unchanged, and for whole models the next step is unaffected."""

import pytest
import torch
from tiny import actor_and_critic
from tiny import experience as make_experience

from coati.config import AlgorithmSettings, TrainSettings
from coati.trainer.ppo import PPOLearner
from coati.trainer.strategies import DDPStrategy, GeminiStrategy, LowLevelZeroStrategy

STRATEGIES = {
    "ddp": DDPStrategy,
    "zero1": lambda **options: LowLevelZeroStrategy(stage=1, **options),
    "zero2": LowLevelZeroStrategy,
    "gemini": GeminiStrategy,
}


pytestmark = pytest.mark.usefixtures("one_process")


@pytest.fixture
def make_strategy():
    return lambda name, compute_dtype=None: STRATEGIES[name](device="cpu", compute_dtype=compute_dtype)


def make_learner(strategy, **algorithm):
    algorithm = {"correction": "none", **algorithm}
    return PPOLearner(
        *actor_and_critic(num_hidden_layers=2),
        strategy,
        TrainSettings(batch_size=4, micro_batch_size=2, actor_lr=1e-2, critic_lr=1e-2),
        AlgorithmSettings(**algorithm),
        optimizer_class=strategy.optimizer_class,
    )


def published(learner):
    """Return all weights, as makers receive them."""
    return {
        f"{label}.{name}": tensor.clone()
        for label, model in learner.models.items()
        for chunk in learner.strategy.get_model_state_dict_shard(model)
        for name, tensor in chunk.items()
    }


def assert_same(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype, name
        assert torch.equal(ours[name], tensor), name


def fail(*_):
    raise RuntimeError("boom")


def fail_in_backward(_module, _inputs, output):
    output.register_hook(fail)


def fail_once(learner, monkeypatch, model, place, call):
    """Make the `call`-th pass of a model raise: in its second block, in that block's backward pass, or in the loss."""
    layer = learner.models[model].get_submodule("model.model.layers.1" if model == "actor" else "body.layers.1").mlp
    calls = iter(range(1, call + 1))

    def hook(*args):
        if next(calls) == call:
            (fail if place == "forward" else fail_in_backward)(*args)

    with monkeypatch.context() as patch:
        if place == "loss":
            original = learner.policy_objective
            patch.setattr(learner, "policy_objective", lambda *a: fail() if next(calls) == call else original(*a))
        else:
            handle = layer.register_forward_hook(hook)
        with pytest.raises(RuntimeError, match="boom"):
            learner.step(make_experience(0, 4))
        if place != "loss":
            handle.remove()


def check_failures(learner, twin, monkeypatch, rounds):
    """For each round, make `learner` fail several times, then step both and assert that they agree."""
    before = published(learner)
    for step, failures in enumerate(rounds):
        for failure in failures:
            fail_once(learner, monkeypatch, *failure)
            assert_same(published(learner), before)
        ours, theirs = (each.step(make_experience(10 * (step + 1), 4)) for each in (learner, twin))
        for norm in ("policy/grad_norm", "value/grad_norm"):
            assert ours[norm] == theirs[norm], failures
        before = published(learner)
        assert_same(before, published(twin))


@pytest.mark.parametrize("compute_dtype", [None, torch.bfloat16])
def test_a_step_that_raises_leaves_nothing_for_the_next_one(make_strategy, monkeypatch, compute_dtype):
    strategy = make_strategy("ddp", compute_dtype)
    learner, twin = (make_learner(strategy, correction="decoupled") for _ in range(2))
    rounds = [
        [("actor", "forward", 1), ("critic", "forward", 2)],  # the very first passes
        [("critic", "forward", 2), ("critic", "backward", 1)],
        [("actor", "loss", 2), ("actor", "backward", 2)],
    ]
    check_failures(learner, twin, monkeypatch, rounds)


@pytest.mark.parametrize(
    ("name", "place"),
    [("zero1", "forward"), ("zero1", "backward"), ("zero2", "loss"), ("gemini", "forward"), ("gemini", "backward")],
)
def test_sharded_models_can_be_saved_after_it(make_strategy, monkeypatch, name, place):
    learner = make_learner(make_strategy(name))
    learner.step(make_experience(10, 4))
    before = published(learner)
    fail_once(learner, monkeypatch, "actor", place, 2)
    assert_same(published(learner), before)
