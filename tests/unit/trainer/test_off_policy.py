"""Corrections for data from an older policy: no effect on-policy, and the correct effect off-policy."""

import copy
import dataclasses

import pytest
import torch
from torch import nn
from transformers import LlamaConfig

from coati.algos.advantages import gae, shaped_rewards
from coati.algos.masked import masked_whiten
from coati.config import AlgorithmSettings, TrainSettings
from coati.experience_maker import Experience
from coati.models import Actor, Critic, action_logprobs, action_values
from coati.trainer.ppo import PPOLearner
from coati.trainer.strategies import DDPStrategy

GAMMA, LAM, KL_COEF = 0.9, 0.8, 0.2
MAKER = {"gamma": GAMMA, "lam": LAM, "kl_coef": KL_COEF}


@pytest.fixture(scope="module")
def models():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=13,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=16,
    )
    actor = Actor.from_config(config).double()
    with torch.no_grad():
        actor.model.lm_head.weight.mul_(20.0)
    critic = Critic(copy.deepcopy(actor.model))
    nn.init.normal_(critic.value_head.weight, std=0.3)
    return actor.eval(), critic.eval()


def make_batch(models, *, shift=0.0):
    """Build a batch as if sampled from the models; `shift` is the distance to the behavior policy, in nats."""
    actor, critic = models
    generator = torch.Generator().manual_seed(1)
    sequences = torch.randint(1, 13, (4, 7), generator=generator)
    mask = torch.ones(4, 7, dtype=torch.long)
    mask[0, 5:] = 0
    action_mask = mask[:, 3:].bool()
    with torch.no_grad():
        logprobs, _ = action_logprobs(actor, sequences, mask, 4)
        values = action_values(critic, sequences, mask, 4).masked_fill(~action_mask, 0.0)
    noise = torch.randn(4, 4, generator=generator, dtype=torch.float64)
    reward = torch.randn(4, generator=generator, dtype=torch.float64)
    kl = noise.abs().masked_fill(~action_mask, 0.0)
    rewards = shaped_rewards(reward, kl, action_mask, kl_coef=KL_COEF)
    return Experience(
        sequences,
        (logprobs - shift * noise).masked_fill(~action_mask, 0.0),
        values,
        reward,
        kl,
        gae(rewards, values, action_mask, gamma=GAMMA, lam=LAM),
        mask,
        action_mask,
    )


def learner_of(models, micro_batch_size=0, **settings):
    train = TrainSettings(actor_lr=1e-3, critic_lr=1e-3, micro_batch_size=micro_batch_size)
    algorithm = AlgorithmSettings(**MAKER, **{"correction": "none"} | settings)
    return PPOLearner(*copy.deepcopy(models), DDPStrategy(seed=0, device="cpu"), train, algorithm)


def trained(models, batch, *, steps=2, **kwargs):
    learner = learner_of(models, **kwargs)
    for _ in range(steps):
        metrics = learner.step(batch)
    return {name: t.clone() for m in (learner.actor, learner.critic) for name, t in m.state_dict().items()}, metrics


@pytest.fixture(scope="module")
def plain(models):
    """Weights of plain PPO after two steps on data of the policy itself (0.0), and on older data (0.5)."""
    return {shift: trained(models, make_batch(models, shift=shift))[0] for shift in (0.0, 0.5)}


CORRECTIONS = [
    {"correction": "decoupled"},
    {"correction": "decoupled", "importance": "mask", "importance_level": "sequence"},
    {"correction": "decoupled", "importance": "none"},
]


@pytest.mark.parametrize("correction", CORRECTIONS, ids=str)
def test_on_policy_steps_equal_plain_ppo_exactly(models, plain, correction):
    corrected, metrics = trained(models, make_batch(models), **correction)
    for name, tensor in plain[0.0].items():
        torch.testing.assert_close(corrected[name], tensor, atol=1e-12, rtol=0)
    assert metrics["off_policy/effective_samples"] == pytest.approx(1.0)
    assert metrics["off_policy/ratio_max"] == pytest.approx(1.0)


@pytest.mark.parametrize("correction", CORRECTIONS, ids=str)
def test_off_policy_steps_differ_from_plain_ppo(models, plain, correction):
    corrected, metrics = trained(models, make_batch(models, shift=0.5), **correction)
    assert any((corrected[name] - tensor).abs().max() > 1e-6 for name, tensor in plain[0.5].items())
    assert metrics["off_policy/effective_samples"] < 0.99
    assert metrics["off_policy/log_ratio"] > 0.1


@pytest.mark.parametrize("correction", CORRECTIONS, ids=str)
def test_micro_batches_do_not_matter(models, correction):
    whole, _ = trained(models, make_batch(models, shift=0.5), **correction)
    parts, _ = trained(models, make_batch(models, shift=0.5), micro_batch_size=3, **correction)
    for name, tensor in whole.items():
        torch.testing.assert_close(parts[name], tensor, atol=1e-10, rtol=0)


def test_the_first_decoupled_step_is_the_weighted_policy_gradient(models):
    # In the first step current = proximal, so the ratio is 1 and the gradient is -Σ w · A · ∇log π / tokens.
    batch = make_batch(models, shift=0.5)
    mask = batch.action_mask
    actor = copy.deepcopy(models[0])
    logprobs, _ = action_logprobs(actor, batch.sequences, batch.attention_mask, 4)
    with torch.no_grad():
        w = (logprobs - batch.action_log_probs).exp().clamp(max=2.0) * mask
        advantages = masked_whiten(batch.advantages, mask)
    loss = -(w * advantages * logprobs).sum() / mask.sum()
    expected = torch.autograd.grad(loss, actor.model.lm_head.weight)[0]
    learner = learner_of(models, correction="decoupled")
    seen = []
    learner.strategy.clip_grad_norm = lambda model, _: (
        seen.append(  # the gradients before the step
            {name: p.grad.clone() for name, p in model.named_parameters()}
        )
        or torch.tensor(1.0)
    )
    learner.step(batch)
    torch.testing.assert_close(seen[0]["model.lm_head.weight"], expected, atol=1e-12, rtol=1e-9)


def test_later_epochs_are_held_to_the_proximal_policy_of_the_first(models):
    batch = make_batch(models, shift=0.5)
    learner = learner_of(models, correction="decoupled")
    learner.step(batch)
    first = batch.proximal_log_probs.clone()
    metrics = learner.step(batch)
    assert torch.equal(batch.proximal_log_probs, first)
    assert metrics["policy/ratio_max"] > 1.0  # the policy has moved away from it


def test_proximal_log_probs_come_from_the_pass_itself(models):
    batch = make_batch(models, shift=0.5)
    expected, _ = action_logprobs(models[0], batch.sequences, batch.attention_mask, batch.num_actions)
    models[0].lora_dropout = torch.nn.Dropout(0.5)  # the learner turns it off
    learner = learner_of(models, micro_batch_size=3, correction="decoupled")
    calls = []
    learner.actor.register_forward_pre_hook(lambda *_: calls.append(1))
    counts = []
    for _ in range(2):
        calls.clear()
        learner.step(batch)
        counts.append(len(calls))
    assert counts == [2, 2]  # two micro-batches, one call each
    mask = batch.full_action_mask()
    torch.testing.assert_close(batch.proximal_log_probs, expected.masked_fill(~mask, 0.0).detach(), atol=1e-12, rtol=0)


def test_an_empty_batch_gets_proximal_log_probs_like_those_of_other_ranks(models):
    batch = Experience.blank(0)
    learner_of(models, correction="decoupled").step(batch)
    assert batch.num_samples == 0
    assert batch.proximal_log_probs.shape == (0, 1)


def test_proximal_log_probs_survive_dataclass_copies(models):
    batch = make_batch(models, shift=0.5)
    learner_of(models, correction="decoupled").step(batch)
    assert dataclasses.replace(batch).proximal_log_probs is not None
    assert batch.select(slice(0, 2)).proximal_log_probs.shape == (2, 4)
