"""The core classes on a GPU: same numbers as on the CPU, in-place commits, pinned memory."""

import copy

import torch
from transformers import LlamaConfig
from weight_testing import Maker, deliver, messages_of

from coati.config import TrainSettings
from coati.experience_buffer.utils import make_experience_batch, split_experience_batch
from coati.experience_maker import NaiveExperienceMaker
from coati.models import Actor, Critic, RewardModel
from coati.trainer.ppo import PPOLearner
from coati.trainer.strategies import DDPStrategy

CONFIG = LlamaConfig(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=50,
    max_position_embeddings=64,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)


def make_models(device):
    torch.manual_seed(0)
    actor = Actor.from_config(CONFIG)
    reward = RewardModel.from_config(CONFIG)
    torch.nn.init.normal_(reward.value_head.weight)
    models = (actor, Critic(copy.deepcopy(actor.model)), reward, copy.deepcopy(actor))
    return tuple(model.to(device).eval() for model in models)


def make_experience(device):
    maker = NaiveExperienceMaker(*make_models(device), seed=3)
    prompts = torch.randint(3, 50, (16, 6), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(prompts)
    mask[::2, :2] = 0
    return maker.make_experience(prompts, mask, max_new_tokens=12)


def test_experience_on_the_gpu_equals_the_cpus():
    on_cpu, on_gpu = make_experience("cpu"), make_experience("cuda")
    assert on_gpu.sequences.device.type == "cuda"
    assert torch.equal(on_cpu.sequences, on_gpu.sequences.cpu())
    for name in ("action_log_probs", "values", "reward", "kl", "advantages"):
        torch.testing.assert_close(getattr(on_gpu, name).cpu(), getattr(on_cpu, name), atol=2e-4, rtol=2e-4)


def test_a_step_on_the_gpu_equals_the_cpus():
    experience = make_experience("cpu")
    weights = {}
    for device in ("cpu", "cuda"):
        actor, critic, _, _ = make_models("cpu")
        settings = TrainSettings(actor_lr=1e-3, critic_lr=1e-3, micro_batch_size=5)
        learner = PPOLearner(actor, critic, DDPStrategy(device=device), settings)
        batch = make_experience_batch(split_experience_batch(experience)).pin_memory()
        for _ in range(3):
            learner.step(batch)
        weights[device] = {name: tensor.cpu() for name, tensor in learner.actor.state_dict().items()}
    for name, tensor in weights["cpu"].items():
        torch.testing.assert_close(weights["cuda"][name], tensor, atol=2e-3, rtol=1e-2)


def test_pinned_memory_is_pinned():
    experience = make_experience("cpu").pin_memory()
    assert experience.sequences.is_pinned()
    experience.to_device("cuda")
    assert experience.sequences.is_cuda


def test_weights_from_one_gpu_model_commit_into_another_bit_for_bit_in_bfloat16():
    torch.manual_seed(1)
    source = Actor.from_config(CONFIG, dtype=torch.bfloat16).to("cuda")
    target = Actor.from_config(CONFIG, dtype=torch.bfloat16).to("cuda")
    addresses = {name: tensor.data_ptr() for name, tensor in target.state_dict().items()}
    maker = Maker({"actor": target})
    deliver(messages_of({"actor": source}, max_bytes=2**20), maker)
    assert maker.served.version == 1
    for name, tensor in target.state_dict().items():
        assert torch.equal(tensor, source.state_dict()[name])
        assert tensor.data_ptr() == addresses[name]  # in place: a captured graph would still read it
