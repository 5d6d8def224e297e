"""LoRA updates from trainer to maker: base weights, rejected updates, and size."""

import pytest
import tiny
import torch
from transformers import LlamaConfig
from weight_testing import Maker, deliver, header_of, messages_of

from coati.errors import WeightUpdateError
from coati.models import Actor, Critic, LoRASettings
from coati.models.lora import LoRAConstructor
from coati.models.memory import iter_state_chunks

CONFIG = LlamaConfig(
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    vocab_size=20,
    max_position_embeddings=32,
)
TOKENS = torch.tensor([[1, 5, 7, 3]])
LORA = LoRASettings(rank=2, alpha=6.0)


@pytest.fixture
def trainer():
    torch.manual_seed(0)
    return {
        "actor": Actor.from_config(CONFIG, lora=LORA).eval(),
        "critic": Critic.from_config(CONFIG, lora=LORA).eval(),
    }


@pytest.fixture
def plain_maker(trainer):
    """The same models as they were before LoRA."""
    critic = Critic(tiny.copy_without_adapters(trainer["critic"].body))
    return {"actor": Actor(tiny.copy_without_adapters(trainer["actor"].model)), "critic": critic}


@torch.no_grad()
def train(models, seed):
    """Move the trainable weights, as a trainer would: adapters, and the critic's head."""
    generator = torch.Generator().manual_seed(seed)
    for model in models.values():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)


def publish(models, maker, version):
    """Tiny chunks, so that every update takes many."""
    sent = messages_of(models, header=header_of(version), is_full=False, max_bytes=256)
    assert len(sent.chunks) > 5
    deliver(sent, maker)


def outputs(models):
    with torch.no_grad():
        return models["actor"](TOKENS).logits, models["critic"](TOKENS)


def test_a_full_plain_update_between_adapter_updates_becomes_the_base(trainer, plain_maker):
    maker = Maker(plain_maker)
    train(trainer, 1)
    publish(trainer, maker, 1)
    torch.manual_seed(99)  # other base weights, sent by a plain call
    fresh = {"actor": Actor.from_config(CONFIG), "critic": Critic.from_config(CONFIG)}
    dicts = {label: model.state_dict() for label, model in fresh.items()}
    maker.receiver.receive_plain(dicts, {}, fully_update=True)
    publish(trainer, maker, maker.served.version + 1)
    name = "model.layers.0.self_attn.q_proj"
    layer = trainer["actor"].model.get_submodule(f"base_model.model.{name}")
    delta = layer.scaling["default"] * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    expected = fresh["actor"].model.get_submodule(name).weight + delta
    torch.testing.assert_close(plain_maker["actor"].model.get_submodule(name).weight, expected, atol=1e-6, rtol=0)


def test_the_base_of_an_adapter_is_the_pending_weight_if_one_waits_for_a_batch_to_end(trainer, plain_maker):
    maker = Maker(plain_maker)
    torch.manual_seed(99)
    fresh = {"actor": Actor.from_config(CONFIG), "critic": Critic.from_config(CONFIG)}
    dicts = {label: model.state_dict() for label, model in fresh.items()}
    name = "model.layers.1.mlp.up_proj"
    train(trainer, 1)
    with maker.served.use():  # a batch is in work: both updates wait for it
        maker.receiver.receive_plain(dicts, {}, fully_update=True)
        settings = {"actor": LoRAConstructor.extract_lora_config(trainer["actor"])}
        adapters = tiny.adapters_of(trainer["actor"])
        maker.receiver.receive_plain({"actor": adapters}, settings)
    layer = trainer["actor"].model.get_submodule(f"base_model.model.{name}")
    delta = layer.scaling["default"] * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    expected = fresh["actor"].model.get_submodule(name).weight + delta
    torch.testing.assert_close(plain_maker["actor"].model.get_submodule(name).weight, expected, atol=1e-6, rtol=0)


def test_adapters_without_their_settings_are_rejected_and_change_nothing(trainer, plain_maker):
    maker = Maker(plain_maker, allow_partial_plain=True)
    train(trainer, 1)
    before = [tensor.clone() for tensor in outputs(plain_maker)]
    adapters = tiny.adapters_of(trainer["actor"])
    with pytest.raises(WeightUpdateError, match="without settings"):
        maker.receiver.receive_plain({"actor": adapters}, {})
    assert all(torch.equal(one, other) for one, other in zip(before, outputs(plain_maker), strict=True))
    assert maker.served.version == 0


def bytes_of_half_billion_shape(num_layers):
    """Bytes of the adapters, and of all else, of a model of Qwen2-0.5B's shape with so many layers."""
    config = LlamaConfig(
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=num_layers,
        num_attention_heads=14,
        num_key_value_heads=2,
        vocab_size=151_936,
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        actor = Actor.from_config(config, lora=LoRASettings(rank=8), dtype=torch.bfloat16)
    trainable = {name for name, parameter in actor.named_parameters() if parameter.requires_grad}
    counts = {True: 0, False: 0}
    for chunk in iter_state_chunks(actor, max_bytes=2**26):
        for name, tensor in chunk.items():
            counts[name in trainable] += tensor.numel() * tensor.element_size()
    return counts[True], counts[False]


def test_adapters_of_a_half_billion_model_are_at_most_two_percent_of_its_bytes():
    # Rank 8 on each linear layer is 8 · (in + out) numbers, which peft keeps in float32:
    #   q, o: 896 + 896; k, v: 896 + 128; gate, up, down: 896 + 4864
    adapters, rest = bytes_of_half_billion_shape(1)
    assert adapters == 4 * 8 * (2 * (896 + 896) + 2 * (896 + 128) + 3 * (896 + 4864))
    embedding = 2 * 151_936 * 896
    layer = 2 * (2 * 896 * 896 + 2 * 896 * 128 + 3 * 896 * 4864 + 2 * 896)  # and two norms
    assert rest == embedding + layer + 2 * 896
    assert 24 * adapters <= 0.02 * (embedding + 24 * layer)  # all 24 layers: 1.8 %
