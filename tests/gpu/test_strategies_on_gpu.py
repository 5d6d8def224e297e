"""Every strategy on one GPU: same weights as on the CPU, shards where expected, files that load both ways."""

import pytest
import torch
from torch import nn
from transformers import LlamaConfig

from coati.config import TrainSettings
from coati.experience_maker import Experience
from coati.models import Actor, Critic
from coati.models.memory import whole_tensor
from coati.trainer.ppo import PPOLearner
from coati.trainer.strategies import DDPStrategy, GeminiStrategy, LowLevelZeroStrategy

STRATEGIES = {
    "ddp": lambda **options: DDPStrategy(**options),
    "zero1": lambda **options: LowLevelZeroStrategy(stage=1, **options),
    "zero1-offload": lambda **options: LowLevelZeroStrategy(stage=1, cpu_offload=True, **options),
    "zero2": lambda **options: LowLevelZeroStrategy(stage=2, **options),
    "zero2-offload": lambda **options: LowLevelZeroStrategy(stage=2, cpu_offload=True, **options),
    "gemini": lambda **options: GeminiStrategy(**options),
    "gemini-offload": lambda **options: GeminiStrategy(cpu_offload=True, **options),
}
OFFLOADED = {"zero1-offload", "zero2-offload", "gemini-offload"}
SETTINGS = TrainSettings(actor_lr=1e-3, critic_lr=1e-3, micro_batch_size=3)


@pytest.fixture(autouse=True)
def _leave_the_group():
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=50,
        max_position_embeddings=64,
    )
    folder = tmp_path_factory.mktemp("models")
    Actor.from_config(config).save_pretrained(folder / "actor")
    critic = Critic.from_pretrained(folder / "actor")
    nn.init.normal_(critic.value_head.weight, std=0.3)
    critic.save_pretrained(folder / "critic")
    return folder


def make_learner(folder, strategy, dtype=torch.float64, settings=SETTINGS):
    with strategy.model_init_context():
        actor = Actor.from_pretrained(folder / "actor", dtype=dtype)
        critic = Critic.from_pretrained(folder / "critic", dtype=dtype)
    return PPOLearner(actor, critic, strategy, settings, optimizer_class=strategy.optimizer_class)


def make_batch(seed, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)

    def noise(shift=0.0):
        return torch.randn(8, 12, generator=generator, dtype=dtype) + shift

    return Experience(
        sequences=torch.randint(3, 50, (8, 18), generator=generator),
        action_log_probs=0.1 * noise() - 3.9,
        values=noise(),
        reward=torch.zeros(8, dtype=dtype),
        kl=torch.zeros(8, 12, dtype=dtype),
        advantages=noise(),
        attention_mask=torch.ones(8, 18, dtype=torch.long),
        action_mask=torch.ones(8, 12, dtype=torch.bool),
    )


def weights(learner):
    return {
        f"{label}.{name}": tensor.cpu().clone()
        for label, model in learner.models.items()
        for chunk in learner.strategy.get_model_state_dict_shard(model)
        for name, tensor in chunk.items()
    }


def assert_close(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=0, atol=5e-6)


@pytest.mark.parametrize("name", STRATEGIES)
def test_steps_shards_and_files(folder, name, tmp_path):
    on_cpu = make_learner(folder, DDPStrategy(device="cpu"))
    learner = make_learner(folder, STRATEGIES[name](device="cuda"))
    for seed in range(3):
        on_cpu.step(make_batch(seed))
        learner.step(make_batch(seed))
    assert_close(weights(learner), weights(on_cpu))
    resting = {parameter.device.type for parameter in learner.actor.parameters()}
    assert resting == ({"cpu"} if name in OFFLOADED else {"cuda"})
    state = learner.optimizers["actor"].state.values()
    moments = {value.device.type for held in state for key, value in held.items() if key != "step"}
    assert moments == ({"cpu"} if name in OFFLOADED else {"cuda"})
    for label, model in learner.models.items():
        learner.strategy.save_model(model, tmp_path / label)
        learner.strategy.save_optimizer(learner.optimizers[label], tmp_path / f"{label}-optimizer")
    resumed = make_learner(folder, DDPStrategy(device="cpu"))
    for source, target in ((tmp_path, resumed), (tmp_path, learner)):
        for label, model in target.models.items():
            target.strategy.load_model(model, source / label)
            target.strategy.load_optimizer(target.optimizers[label], source / f"{label}-optimizer")
    for again in (on_cpu, resumed, learner):
        again.step(make_batch(3))
    assert_close(weights(resumed), weights(on_cpu))
    assert_close(weights(learner), weights(on_cpu))


def watch_gradients(learner):
    """Collects the actor's and the critic's whole gradients of every step, before they are clipped."""
    strategy, plain, seen = learner.strategy, learner.strategy.clip_grad_norm, []

    def clip_grad_norm(model, max_norm):
        parameters = strategy.unwrap_model(model).parameters()
        seen.append(torch.cat([whole_tensor(parameter.grad).cpu().flatten() for parameter in parameters]))
        return plain(model, max_norm)

    strategy.clip_grad_norm = clip_grad_norm
    return seen


@pytest.mark.parametrize("name", STRATEGIES)
def test_mixed_precision_trains_near_float32(folder, name):
    plain = make_learner(folder, DDPStrategy(device="cuda"), torch.float32)
    mixed = make_learner(folder, STRATEGIES[name](device="cuda", compute_dtype=torch.bfloat16), torch.float32)
    expected_gradients, gradients = watch_gradients(plain), watch_gradients(mixed)
    for seed in range(2):
        expected = plain.step(make_batch(seed, torch.float32))
        metrics = mixed.step(make_batch(seed, torch.float32))
    assert metrics["optim/skipped_batches"] == 0
    assert metrics["policy/entropy"] == pytest.approx(expected["policy/entropy"], rel=0.02)
    assert {tensor.dtype for tensor in weights(mixed).values()} == {torch.float32}
    assert len(gradients) == len(expected_gradients) == 4
    for ours, theirs in zip(gradients, expected_gradients, strict=True):
        assert ours.dtype == torch.float32
        assert 0 < (ours - theirs).norm() < 0.2 * theirs.norm()  # not the same: it did compute in bfloat16


def test_offloading_holds_less_on_the_gpu():
    config = LlamaConfig(
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=512,
        max_position_embeddings=64,
    )
    held = {}
    for name in ("gemini", "gemini-offload"):
        strategy = STRATEGIES[name](device="cuda")
        before = torch.cuda.memory_allocated()
        with strategy.model_init_context():
            models = Actor.from_config(config, dtype=torch.float32), Critic.from_config(config, dtype=torch.float32)
        learner = PPOLearner(*models, strategy, SETTINGS, optimizer_class=strategy.optimizer_class)
        learner.step(make_batch(0, torch.float32))
        held[name] = torch.cuda.memory_allocated() - before
        del learner, models
    assert held["gemini-offload"] < 0.1 * held["gemini"]
