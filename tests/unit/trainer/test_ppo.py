"""One PPO step compared with plain torch, and its invariance to padding, micro-batches and bad batches."""

import copy
import dataclasses
import functools
import itertools
import logging
import math

import pytest
import torch
from learner_settings import sections
from metric_table import DOCUMENTED
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig

from coati.config import TrainSettings
from coati.errors import CheckpointError, ConfigError, OutOfMemory, TrainingDiverged
from coati.experience_maker import Experience
from coati.models import Actor, Critic
from coati.models.actor import action_logprobs
from coati.trainer.ppo import PPOLearner
from coati.trainer.steps import MAX_SKIPPED_IN_A_ROW
from coati.trainer.strategies import DDPStrategy

VOCAB = 13
SETTINGS = {"actor_lr": 1e-3, "critic_lr": 2e-3, "entropy_coef": 0.01}


pytestmark = pytest.mark.usefixtures("one_process")


@functools.cache
def _template():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=16,
    )
    actor = Actor.from_config(config).double()
    with torch.no_grad():  # the default scale gives a policy that is too flat for the tests
        actor.model.lm_head.weight.mul_(20.0)
    critic = Critic(copy.deepcopy(actor.model))
    nn.init.normal_(critic.value_head.weight, std=0.3)
    return actor, critic


def tiny_models():
    """Build the same actor and critic each time, in float64; the critic has a random head."""
    return copy.deepcopy(_template())


def make_learner(settings=SETTINGS, *, models=None, **kwargs):
    actor, critic = tiny_models() if models is None else models
    return PPOLearner(actor, critic, DDPStrategy(seed=0, device="cpu"), *sections(**settings), **kwargs)


def make_batch(seed=0, *, prompt_lengths=(3, 1, 2, 3), response_lengths=(4, 2, 3, 1)):
    """Build a ragged float64 batch whose old log-probs differ enough from the policy's to be clipped."""
    return copied(_batch(seed, prompt_lengths, response_lengths))


@functools.cache
def _batch(seed, prompt_lengths, response_lengths):
    generator = torch.Generator().manual_seed(seed)
    num_samples, width, actions = len(prompt_lengths), max(prompt_lengths), max(response_lengths)
    positions = torch.arange(width + actions)
    starts = width - torch.tensor(prompt_lengths).unsqueeze(1)
    ends = width + torch.tensor(response_lengths).unsqueeze(1)
    attention_mask = ((positions >= starts) & (positions < ends)).long()
    action_mask = attention_mask[:, width:].bool()

    def noise(scale=1.0):
        return torch.randn(num_samples, actions, generator=generator, dtype=torch.float64) * scale

    sequences = torch.randint(1, VOCAB, (num_samples, width + actions), generator=generator)
    temperatures = torch.full((num_samples,), 1.5, dtype=torch.float64)
    with torch.no_grad():
        own, _ = action_logprobs(_template()[0], sequences, attention_mask, actions, temperatures=temperatures)
    return Experience(
        sequences=sequences * attention_mask,
        action_log_probs=(own + noise(0.3)).masked_fill(~action_mask, 0.0),
        values=noise().masked_fill(~action_mask, 0.0),
        reward=torch.zeros(num_samples, dtype=torch.float64),
        kl=torch.zeros(num_samples, actions, dtype=torch.float64),
        advantages=noise().masked_fill(~action_mask, 0.0),
        attention_mask=attention_mask,
        action_mask=action_mask,
        sample_ids=torch.arange(num_samples) + 100,
        temperatures=temperatures,
    )


def copied(experience):
    return dataclasses.replace(experience, **{name: tensor.clone() for name, tensor in experience.tensors()})


def weights(learner):
    models = {"actor": learner.actor, "critic": learner.critic}
    return {
        f"{label}.{name}": tensor.clone()
        for label, model in models.items()
        for name, tensor in model.state_dict().items()
    }


def optimizer_state(learner):
    return copy.deepcopy([learner.optimizers["actor"].state_dict(), learner.optimizers["critic"].state_dict()])


def furthest(one, other):
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def same_bits(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


def same_state(one, other):
    """Whether nested dicts and lists of tensors are bitwise equal."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same_state(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same_state, one, other))
    return one == other


def reference_step(batch, train, algorithm):
    """The same step in plain torch, with textbook formulas and no shared code."""
    actor, critic = tiny_models()
    positions = (batch.attention_mask.cumsum(1) - 1).clamp_min(0)
    inputs = {
        "input_ids": batch.sequences,
        "attention_mask": batch.attention_mask,
        "position_ids": positions,
    }
    actions, mask = batch.num_actions, batch.action_mask
    log_softmax = (actor.model(**inputs).logits / batch.temperatures[:, None, None]).log_softmax(-1)
    log_softmax = log_softmax[:, -actions - 1 : -1]
    logprobs = log_softmax.gather(-1, batch.sequences[:, -actions:, None]).squeeze(-1)
    entropy = -(log_softmax.exp() * log_softmax).sum(-1)
    values = critic.value_head(critic.body(**inputs)[0]).squeeze(-1)[:, -actions - 1 : -1]

    kept = batch.advantages[mask]
    advantages = (batch.advantages - kept.mean()) / (kept.var(correction=0) + 1e-8).sqrt()
    ratio = (logprobs - batch.action_log_probs).exp()
    clipped = ratio.clamp(1 - algorithm.eps_clip, 1 + algorithm.eps_clip)
    policy_loss = -torch.minimum(ratio * advantages, clipped * advantages)[mask].mean()
    actor_loss = policy_loss - algorithm.entropy_coef * entropy[mask].mean()
    target = batch.advantages + batch.values
    near = batch.values + (values - batch.values).clamp(-algorithm.value_clip, algorithm.value_clip)
    critic_loss = 0.5 * torch.maximum((values - target) ** 2, (near - target) ** 2)[mask].mean()

    norms = []
    pairs = ((actor, actor_loss, train.actor_lr), (critic, critic_loss, train.critic_lr))
    for model, loss, lr in pairs:
        optimizer = torch.optim.Adam(model.parameters(), lr=lr)
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), train.max_grad_norm)))
        optimizer.step()
    is_outside = ((ratio > 1 + algorithm.eps_clip) & (advantages > 0)) | (
        (ratio < 1 - algorithm.eps_clip) & (advantages < 0)
    )
    metrics = {
        "actor_loss": policy_loss.item(),
        "critic_loss": critic_loss.item(),
        "policy/entropy": entropy[mask].mean().item(),
        "policy/clip_fraction": float(is_outside[mask].double().mean()),
        "policy/ratio_max": ratio[mask].max().item(),
        "policy/grad_norm": norms[0],
        "value/grad_norm": norms[1],
    }
    names = {"actor": actor, "critic": critic}
    state = {f"{key}.{name}": t for key, model in names.items() for name, t in model.state_dict().items()}
    return state, metrics


def test_one_step_equals_a_hand_written_loop():
    batch = make_batch(seed=1)
    batch.values[0, 0], batch.advantages[0, 0] = -4.0, 4.0  # target near the critic's output, old value far
    expected, expected_metrics = reference_step(batch, *sections(**SETTINGS))
    learner = make_learner()
    before = weights(learner)
    metrics = learner.step(copied(batch))
    assert furthest(weights(learner), expected) < 1e-12
    assert furthest(weights(learner), before) > 1e-4  # Adam's first step is about the learning rate
    for name, value in expected_metrics.items():
        assert metrics[name] == pytest.approx(value, rel=1e-9), name
    assert metrics["policy/clip_fraction"] > 0  # the batch does trigger clipping
    assert metrics["value/clip_fraction"] > 0


@pytest.mark.parametrize("size", [1, 3, 9])
def test_micro_batches_of_any_size_give_the_same_weights(size):
    whole, parts = make_learner(), make_learner(SETTINGS | {"micro_batch_size": size})
    for seed in range(2):  # two steps, so that optimizer state matters
        metrics_whole = whole.step(make_batch(seed))
        metrics_parts = parts.step(make_batch(seed))
    assert furthest(weights(whole), weights(parts)) < 1e-12
    assert metrics_parts == pytest.approx(metrics_whole, rel=1e-9)


def test_garbage_in_the_padding_cannot_matter():
    batch = make_batch()
    garbage = copied(batch)
    is_padding = ~garbage.action_mask
    garbage.action_log_probs[is_padding] = math.nan
    garbage.values[is_padding] = math.inf
    garbage.advantages[is_padding] = -1e30
    garbage.sequences[garbage.attention_mask == 0] = VOCAB - 1
    clean, dirty = make_learner(), make_learner()
    assert clean.step(batch) == dirty.step(garbage)
    assert same_bits(weights(clean), weights(dirty))


@pytest.mark.parametrize(
    ("field", "value", "size"),
    [
        ("advantages", math.nan, 0),
        ("advantages", math.inf, 0),
        ("values", math.nan, 0),
        ("values", -math.inf, 0),
        ("action_log_probs", math.nan, 0),
        (
            "action_log_probs",
            math.nan,
            1,
        ),  # micro-batches before and after the bad one are valid
    ],
)
def test_a_poisoned_batch_changes_nothing_and_is_named(field, value, size, caplog):
    settings = SETTINGS | {"micro_batch_size": size, "lr_schedule": "linear", "total_steps": 9}
    learner, twin = make_learner(settings), make_learner(settings)
    learner.step(make_batch(0))
    twin.step(make_batch(0))
    before, state = weights(learner), optimizer_state(learner)
    poisoned = make_batch(1)
    getattr(poisoned, field)[2, 0] = value
    with caplog.at_level(logging.WARNING):
        metrics = learner.step(poisoned)
    assert same_bits(weights(learner), before)
    assert same_state(optimizer_state(learner), state)
    assert metrics["optim/skipped_batches"] == 1.0
    assert "batch skipped" in caplog.text
    assert "[100, 101, 102, 103]" in caplog.text
    # The next good batch trains as if the bad one had never come, including schedule and gradients.
    learner.step(make_batch(2))
    twin.step(make_batch(2))
    assert same_bits(weights(learner), weights(twin))
    assert not same_bits(weights(learner), before)


@pytest.mark.parametrize("label", ["actor", "critic"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_moves_no_model(label, value):
    learner = make_learner()
    before = weights(learner)
    parameter = list(learner.models[label].parameters())[-1]
    parameter.register_hook(lambda gradient: torch.full_like(gradient, value))
    metrics = learner.step(make_batch())  # the losses are finite
    assert math.isfinite(metrics["actor_loss"] + metrics["critic_loss"])
    assert same_bits(weights(learner), before)
    assert metrics["optim/skipped_batches"] == 1.0


def test_too_many_skipped_batches_in_a_row_end_training():
    learner, poisoned = make_learner(), make_batch(1)
    poisoned.advantages[2, 0] = math.nan
    for _ in range(MAX_SKIPPED_IN_A_ROW - 1):
        learner.step(copied(poisoned))
    learner.step(make_batch(0))  # one good batch resets the count
    for _ in range(MAX_SKIPPED_IN_A_ROW - 1):
        learner.step(copied(poisoned))
    with pytest.raises(TrainingDiverged, match=r"batches in a row were skipped.*train\.actor_lr is 0\.001"):
        learner.step(copied(poisoned))


def test_a_run_that_skipped_every_batch_has_failed():
    learner, poisoned = make_learner(), make_batch(1)
    poisoned.advantages[2, 0] = math.nan
    learner.health.check_progress()  # nothing was skipped yet
    learner.step(poisoned)
    with pytest.raises(TrainingDiverged, match="all 1 batches were skipped"):
        learner.health.check_progress()
    learner.step(make_batch(0))
    learner.health.check_progress()


@pytest.mark.parametrize("policy", ["none", "decoupled"])
def test_a_learning_rate_that_breaks_the_model_is_named(policy):
    settings = {"actor_lr": 1e9, "critic_lr": 1e-3, "correction": policy}
    learner = make_learner(settings)
    batches = (make_batch(seed) for seed in range(2 * MAX_SKIPPED_IN_A_ROW))
    with pytest.raises(TrainingDiverged, match=r"train\.actor_lr is 1e\+09"):
        list(map(learner.step, batches))
    assert all(bool(tensor.isfinite().all()) for tensor in weights(learner).values())


def test_weights_that_a_step_made_infinite_end_training():
    learner = make_learner()
    learner.optimizers["actor"].param_groups[0]["lr"] = math.inf
    with pytest.raises(TrainingDiverged, match=r"weights of the actor .* after optimizer step 1"):
        learner.step(make_batch())


@pytest.mark.parametrize("label", ["actor", "critic"])
def test_a_model_with_a_broken_weight_is_neither_trained_nor_saved(label, tmp_path):
    actor, critic = tiny_models()
    broken = {"actor": actor, "critic": critic}[label]
    name, weight = next(iter(broken.named_parameters()))
    weight.requires_grad_(False).view(-1)[3] = math.nan  # frozen weights count too
    with pytest.raises(CheckpointError, match=f"the {label}"):
        make_learner(models=(actor, critic))
    with pytest.raises(CheckpointError, match=name):
        DDPStrategy(device="cpu").save_model(broken, tmp_path / "model")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("label", ["actor", "critic", "optimizer step of the critic"])
def test_running_out_of_memory_names_the_work_and_the_setting(label, monkeypatch):
    learner = make_learner(SETTINGS | {"micro_batch_tokens": 14})

    def run_out(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    if label in learner.models:
        monkeypatch.setattr(learner.models[label], "forward", run_out)
        what = rf"{label}'s pass over \d samples, \d+ tokens"
        setting = r"train\.micro_batch_tokens, which is 14.*activation_checkpointing"
    else:
        monkeypatch.setattr(learner.optimizers["critic"], "step", run_out)
        what, setting = label, "train.strategy"
    with pytest.raises(OutOfMemory, match=f"{what}.*{setting}.*2.00 GiB"):
        learner.step(make_batch())


class FragileCritic(nn.Module):
    def __init__(self, critic):
        super().__init__()
        self.critic = critic
        self.calls_left = 10**9

    def forward(self, sequences, attention_mask):
        self.calls_left -= 1
        if self.calls_left < 0:
            raise RuntimeError("boom")
        return self.critic(sequences, attention_mask)


def test_a_step_that_raises_leaves_no_gradient_for_the_next_batch():
    settings = SETTINGS | {"micro_batch_size": 2}
    learners = []
    for _ in range(2):
        actor, critic = tiny_models()
        learners.append(make_learner(settings, models=(actor, FragileCritic(critic))))
    learner, twin = learners
    learner.critic.calls_left = 1  # fails in the second micro-batch
    with pytest.raises(RuntimeError, match="boom"):
        learner.step(make_batch(0))
    learner.critic.calls_left = 10**9
    learner.step(make_batch(1))
    twin.step(make_batch(1))
    assert same_bits(weights(learner), weights(twin))


def moved(learner, before, label):
    """Return the norm of a model's step."""
    now = weights(learner)
    squares = [float((now[name] - before[name]).square().sum()) for name in now if name.startswith(label)]
    return math.sqrt(sum(squares))


def test_clipping_bounds_the_gradient_and_zero_leaves_it_alone():
    # Plain SGD with rate 1 moves the weights by exactly the gradient.
    settings = {"actor_lr": 1.0, "critic_lr": 1.0, "max_grad_norm": 0.01}
    clipped = make_learner(settings, optimizer_class=torch.optim.SGD)
    free = make_learner(settings | {"max_grad_norm": 0.0}, optimizer_class=torch.optim.SGD)
    before = weights(clipped)
    metrics_clipped, metrics_free = clipped.step(make_batch()), free.step(make_batch())
    for label, name in (("actor.", "policy/grad_norm"), ("critic.", "value/grad_norm")):
        assert metrics_clipped[name] == metrics_free[name] > 0.02  # the norm before clipping is reported
        assert moved(clipped, before, label) == pytest.approx(0.01, rel=1e-3)
        assert moved(free, before, label) == pytest.approx(metrics_free[name], rel=1e-9)


def test_schedule_and_warm_up_move_the_learning_rate():
    # Two steps of warm-up, 0 and 1/2, then 1 and down to 0 over the 4 steps that remain: 3/4, 1/2, 1/4.
    train = TrainSettings(
        actor_lr=1e-3, critic_lr=4e-3, lr_schedule="linear", warmup_steps=2, total_steps=6, max_grad_norm=0.0
    )
    learner = make_learner(dict(train), optimizer_class=torch.optim.SGD)
    factors = []
    for seed in range(6):
        before = weights(learner)
        metrics = learner.step(make_batch(seed))
        factors.append(metrics["optim/actor_lr"] / 1e-3)
        assert metrics["optim/critic_lr"] == pytest.approx(4 * metrics["optim/actor_lr"])
        # The reported rate is the one that this step used.
        step = metrics["optim/actor_lr"] * metrics["policy/grad_norm"]
        assert moved(learner, before, "actor.") == pytest.approx(step, rel=1e-6)
    assert factors == pytest.approx([0.0, 0.5, 1.0, 0.75, 0.5, 0.25])


def test_a_constant_rate_needs_no_total_and_may_warm_up():
    learner = make_learner({"actor_lr": 1.0, "warmup_steps": 2})
    rates = [learner.step(make_batch(seed))["optim/actor_lr"] for seed in range(5)]
    assert rates == [0.0, 0.5, 1.0, 1.0, 1.0]


def test_every_metric_is_present_and_declared():
    batch = make_batch()
    metrics = make_learner().step(batch)
    expected = {
        *("actor_loss", "critic_loss", "train/tokens", "optim/actor_lr", "optim/critic_lr"),
        *("policy/loss", "policy/clip_fraction", "policy/approx_kl", "policy/entropy", "policy/ratio_max"),
        *("policy/grad_norm", "value/loss", "value/clip_fraction", "value/grad_norm"),
        *("value/explained_variance", "optim/skipped_batches", "train/micro_batch_tokens"),
    }
    assert metrics.keys() == expected
    assert {name for name in metrics if "/" in name} <= DOCUMENTED
    assert all(type(value) is float and math.isfinite(value) for value in metrics.values())
    assert metrics["train/tokens"] == 4 + 2 + 3 + 1
    assert metrics["actor_loss"] == metrics["policy/loss"]
    assert metrics["critic_loss"] == metrics["value/loss"]


def test_explained_variance_by_hand():
    batch = make_batch(response_lengths=(1, 1, 1, 1))
    # targets 1, 3, 5, 7 (variance 5); residuals 1, -1, 1, -1 (variance 1): 1 - 1/5
    batch.advantages = torch.tensor([[1.0], [-1.0], [1.0], [-1.0]], dtype=torch.float64)
    batch.values = torch.tensor([[0.0], [4.0], [4.0], [8.0]], dtype=torch.float64)
    assert make_learner().step(batch)["value/explained_variance"] == pytest.approx(0.8)


def test_an_empty_response_among_others_has_no_influence():
    with_empty = make_batch(prompt_lengths=(3, 2, 3, 1), response_lengths=(4, 0, 3, 2))
    without = with_empty.select(torch.tensor([0, 2, 3]))
    one, other = make_learner(), make_learner()
    one.step(with_empty)
    other.step(copied(without))
    assert furthest(weights(one), weights(other)) < 1e-12


@pytest.mark.parametrize("left", ["columns", "rows", "shapes", "nothing"])
def test_a_batch_without_any_response_is_skipped(left, caplog):
    learner = make_learner()
    learner.step(make_batch(0))
    before, state = weights(learner), optimizer_state(learner)
    batch = make_batch(1)
    if left == "columns":
        batch.action_mask = torch.zeros_like(batch.action_mask)
    elif left == "shapes":
        batch = batch.select(slice(0, 0))
    elif left == "nothing":
        batch = Experience.blank(0)
    else:
        cut = {name: t[:, :0] for name, t in batch.tensors() if t.shape[1:] == batch.action_mask.shape[1:]}
        masks = {"sequences": batch.sequences[:, :3], "attention_mask": batch.attention_mask[:, :3]}
        batch = dataclasses.replace(batch, **cut, **masks)
        assert (batch.num_actions, batch.num_prompt_tokens) == (0, 3)
    metrics = learner.step(batch)
    assert metrics["train/tokens"] == 0.0
    assert all(map(math.isfinite, metrics.values()))
    assert metrics["optim/skipped_batches"] == 1.0
    assert "0 response tokens" in caplog.text
    assert same_bits(weights(learner), before)  # Adam's momentum would have moved them
    assert same_state(optimizer_state(learner), state)


def test_dropout_is_off_so_the_ratio_is_exactly_one_on_its_own_data():
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCAB,
        n_positions=16,
        n_embd=8,
        n_layer=2,
        n_head=2,
        resid_pdrop=0.1,
        embd_pdrop=0.1,
        attn_pdrop=0.1,
    )
    actor = Actor(GPT2LMHeadModel(config))
    actor.train()
    learner = make_learner(models=(actor, Critic(copy.deepcopy(actor.model))))
    batch = make_batch()
    batch = dataclasses.replace(batch, **{name: t.float() for name, t in batch.tensors() if t.is_floating_point()})
    with torch.no_grad():
        own, _ = action_logprobs(
            learner.actor,
            batch.sequences,
            batch.attention_mask,
            batch.num_actions,
            temperatures=batch.temperatures,
        )
    batch.action_log_probs = own
    metrics = learner.step(batch)
    assert metrics["policy/ratio_max"] == 1.0
    assert metrics["policy/approx_kl"] == 0.0
    assert metrics["policy/clip_fraction"] == 0.0


def test_the_critics_target_is_advantages_plus_values_regardless_of_whitening():
    whitened, raw = make_learner(), make_learner(SETTINGS | {"whiten_advantages": False})
    metrics = [whitened.step(make_batch()), raw.step(make_batch())]
    one, other = weights(whitened), weights(raw)
    assert all(torch.equal(one[name], other[name]) for name in one if name.startswith("critic."))
    assert not all(torch.equal(one[name], other[name]) for name in one if name.startswith("actor."))
    assert metrics[0]["critic_loss"] == metrics[1]["critic_loss"]


def test_critic_loss_by_hand():
    actor, critic = tiny_models()
    nn.init.zeros_(critic.value_head.weight)  # so v = 0 everywhere
    batch = make_batch()
    batch.values = torch.ones_like(batch.values)
    batch.advantages = torch.ones_like(batch.advantages)
    # target 1 + 1 = 2; clipped v = 1 - 0.4 = 0.6; 0.5 · max((0 - 2)², (0.6 - 2)²) = 0.5 · max(4, 1.96) = 2
    assert make_learner(models=(actor, critic)).step(batch)["critic_loss"] == pytest.approx(2.0)


def test_a_frozen_model_is_refused():
    actor, critic = tiny_models()
    actor.requires_grad_(False)
    with pytest.raises(ConfigError, match="Actor has no trainable parameters"):
        make_learner(models=(actor, critic))


def test_only_the_critic_learns_during_its_warmup_even_after_a_resume():
    learner = make_learner(SETTINGS | {"critic_warmup_steps": 2})
    seen = [weights(learner)]
    for _ in range(3):
        learner.step(make_batch())
        seen.append(weights(learner))
    for label, has_moved in [("actor", [False, False, True]), ("critic", [True, True, True])]:
        of_model = [{name: x for name, x in each.items() if name.startswith(label)} for each in seen]
        assert [not same_bits(*pair) for pair in itertools.pairwise(of_model)] == has_moved
    resumed = make_learner(SETTINGS | {"critic_warmup_steps": 2})
    learner = make_learner(SETTINGS | {"critic_warmup_steps": 2})
    learner.step(make_batch())
    resumed.restore(learner.state())
    before = weights(resumed)
    resumed.step(make_batch())
    assert torch.equal(before["actor.model.lm_head.weight"], weights(resumed)["actor.model.lm_head.weight"])
    resumed.step(make_batch())
    assert not torch.equal(before["actor.model.lm_head.weight"], weights(resumed)["actor.model.lm_head.weight"])


def test_the_critic_learns_towards_the_returns_if_the_batch_has_them():
    batch = make_batch()
    same, other = copied(batch), copied(batch)
    same.returns, other.returns = batch.advantages + batch.values, batch.values + 1.0
    learners = [make_learner() for _ in range(3)]
    metrics = [learner.step(each) for learner, each in zip(learners, (batch, same, other), strict=True)]
    assert same_bits(weights(learners[0]), weights(learners[1]))
    assert metrics[2]["critic_loss"] != metrics[0]["critic_loss"]
    assert metrics[2]["actor_loss"] == metrics[0]["actor_loss"]
