"""A step whose pass runs out of memory starts over with half the tokens, and gives the result of that size."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from learner_settings import sections
from tiny import actor_and_critic, items

from coati.batching import make_experience_batch
from coati.config import TrainSettings
from coati.errors import OutOfMemory
from coati.trainer import steps as steps_module
from coati.trainer.ppo import PPOLearner
from coati.trainer.steps import FIXED_PASS, LARGEST_PASS, PassSize
from coati.trainer.strategies import DDPStrategy

pytestmark = pytest.mark.usefixtures("one_process", "quick_collections")

NUM_SAMPLES, SAMPLE_TOKENS = 8, 5


@pytest.fixture(autouse=True)
def first_size(monkeypatch):
    """Make the initial size larger than a batch of these tests, which has 40 tokens."""
    monkeypatch.setattr(steps_module, "FIXED_PASS", 64)


def make_batch(first=0):
    return make_experience_batch(items(first, NUM_SAMPLES))


def make_learner(tokens="auto", models=None, **settings):
    strategy = DDPStrategy(device="cpu")
    train, algorithm = sections(micro_batch_tokens=tokens, actor_lr=1e-2, critic_lr=1e-2, **settings)
    models = models or actor_and_critic()
    return PPOLearner(*models, strategy, train, algorithm, optimizer_class=strategy.optimizer_class)


@contextlib.contextmanager
def memory_for(limit, learner, label="actor", *, backward=False, error=None):
    """Make passes of a model fail above `limit` tokens; yields the list of tokens of all its passes."""
    seen = []
    fits = (lambda tokens: tokens <= limit()) if callable(limit) else (lambda tokens: tokens <= limit)
    error = error or torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    def raise_error(*_):
        raise error

    def allocate(_module, _args, kwargs, output):
        seen.append(kwargs["input_ids"].numel())
        if not fits(seen[-1]) and not backward:
            raise_error()
        elif not fits(seen[-1]) and output[0].requires_grad:
            output[0].register_hook(raise_error)

    body = learner.models[label]
    body = body.model.model if label == "actor" else body.body
    handle = body.register_forward_hook(allocate, with_kwargs=True)
    yield seen
    handle.remove()


def published(learner):
    return {
        f"{label}.{name}": tensor.clone()
        for label, model in learner.models.items()
        for chunk in learner.strategy.get_model_state_dict_shard(model)
        for name, tensor in chunk.items()
    }


def assert_same_steps(learner, twin, num_steps=2):
    """Assert that steps of both give bit-identical results; the first step of `learner` may start over."""
    for step in range(num_steps):
        ours, theirs = (make_batch(100 * step) for _ in range(2))
        assert learner.step(ours) == twin.step(theirs)
        for (name, tensor), (_, other) in zip(ours.tensors(), theirs.tensors(), strict=True):
            assert torch.equal(tensor, other), name  # including what the step added for later epochs
    weights = published(twin)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in published(learner).items())
    for label, optimizer in twin.optimizers.items():
        mine = learner.optimizers[label].state_dict()["state"]
        for key, state in optimizer.state_dict()["state"].items():
            assert all(torch.equal(mine[key][name], value) for name, value in state.items()), label


@pytest.mark.parametrize(
    ("label", "backward", "correction"),
    [("actor", False, "none"), ("actor", True, "decoupled"), ("critic", False, "decoupled")],
)
def test_a_step_that_starts_over_equals_one_of_the_smaller_size(label, backward, correction):
    learner, twin = make_learner(correction=correction), make_learner(16, correction=correction)
    with memory_for(20, learner, label, backward=backward) as seen:
        assert_same_steps(learner, twin)
    # 40 tokens fail, and so do 30, the most under half of 64; the second step starts with the size that fits.
    assert [tokens for tokens in seen if tokens > 20] == [40, 30]
    assert learner.step(make_batch())["train/micro_batch_tokens"] == 16


def test_a_single_sample_that_does_not_fit_is_an_error_and_leaves_nothing_behind():
    learner, twin = make_learner(), make_learner(8, activation_checkpointing=True)
    with memory_for(4, learner), pytest.raises(OutOfMemory, match=r"1 samples, 5 tokens.*rollout\.max_new_tokens"):
        learner.step(make_batch())
    assert_same_steps(learner, twin)  # at the size that it had reached


def test_checkpointing_is_turned_on_when_a_single_sample_does_not_fit():
    learner, twin = make_learner(), make_learner(16, activation_checkpointing=True)
    block = learner.actor.model.model.layers[0]
    with memory_for(lambda: 20 if block.gradient_checkpointing else 4, learner) as seen:
        assert_same_steps(learner, twin)
    assert seen[:6] == [40, 30, 15, 5, 40, 30]  # all sizes without checkpointing, then with it until one fits
    assert all(tokens <= 20 for tokens in seen[6:])


def test_a_model_without_checkpointing_support_raises_out_of_memory():
    learner = make_learner()
    learner.models["critic"].body.supports_gradient_checkpointing = False
    with memory_for(4, learner, "critic"), pytest.raises(OutOfMemory, match="1 samples"):
        learner.step(make_batch())


@pytest.mark.parametrize("tokens", [64, 0])
def test_a_fixed_size_is_not_changed(tokens):
    learner = make_learner(tokens)
    before = published(learner)
    with memory_for(20, learner) as seen, pytest.raises(OutOfMemory, match=r"train\.micro_batch_tokens.*to 20"):
        learner.step(make_batch())
    assert seen == [40]
    assert all(torch.equal(tensor, before[name]) for name, tensor in published(learner).items())


def test_running_out_of_host_memory_does_not_shrink_passes():
    learner = make_learner()
    error = RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")
    with memory_for(20, learner, error=error) as seen, pytest.raises(OutOfMemory, match="DefaultCPUAllocator"):
        learner.step(make_batch())
    assert seen == [40]


@pytest.mark.parametrize(
    ("device", "world_size", "shards", "expected"),
    [
        ("cpu", 1, False, FIXED_PASS),
        ("cpu", 2, False, FIXED_PASS),
        ("cuda", 1, False, LARGEST_PASS),
        ("cuda", 1, True, FIXED_PASS),  # FSDP2 cannot abort a pass
        ("cuda", 2, False, FIXED_PASS),  # a rank cannot abort a pass in which others wait for it
    ],
)
def test_auto_starts_with(monkeypatch, device, world_size, shards, expected):
    monkeypatch.setattr(steps_module, "FIXED_PASS", FIXED_PASS)
    strategy = SimpleNamespace(device=torch.device(device), world_size=world_size, shards_parameters=shards)
    size = PassSize(TrainSettings(), strategy, lambda: None)
    assert size.tokens == expected
    assert PassSize(TrainSettings(micro_batch_tokens=7), strategy, lambda: None).tokens == 7
