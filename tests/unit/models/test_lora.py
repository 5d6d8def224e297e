import pytest
import tiny
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from coati.errors import ConfigError, WeightUpdateError
from coati.models import Actor, Critic, LoRASettings
from coati.models.lora import LayerLoRA, LoRAConstructor, as_layer_lora, has_adapters, plain_name

LLAMA = LlamaConfig(
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    vocab_size=20,
    max_position_embeddings=32,
)
GPT2 = GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=20, n_positions=32)
TOKENS = torch.tensor([[1, 5, 7, 3]])


def trained(actor):
    """Return the actor with random adapters: B starts at zero, which would have no effect."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in actor.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return actor


def plain_twin(actor):
    return Actor(tiny.copy_without_adapters(actor.model))


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_reconstructed_weights_match_the_adapted_model(config):
    torch.manual_seed(0)
    adapted = Actor.from_config(config, lora=LoRASettings(rank=2, alpha=6.0)).eval()
    plain = plain_twin(adapted).eval()
    assert not has_adapters(plain.state_dict())
    torch.testing.assert_close(plain(TOKENS).logits, adapted(TOKENS).logits)  # B = 0: adapters change nothing
    trained(adapted)
    settings = LoRAConstructor.extract_lora_config(adapted)
    weights = LoRAConstructor().reconstruct(tiny.adapters_of(adapted), settings, plain.state_dict().get)
    assert (plain(TOKENS).logits - adapted(TOKENS).logits).abs().max() > 1e-2
    plain.load_state_dict(weights, strict=False)
    torch.testing.assert_close(plain(TOKENS).logits, adapted(TOKENS).logits, atol=1e-5, rtol=1e-5)


def test_a_thousand_updates_leave_base_plus_last_delta():
    base = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
    live = {"layer.weight": base.clone()}
    constructor = LoRAConstructor()
    settings = {"layer": LayerLoRA(scale=2.0)}
    generator = torch.Generator().manual_seed(2)
    for _ in range(1000):
        a, b = torch.randn(2, 3, generator=generator), torch.randn(4, 2, generator=generator)
        update = {"layer.lora_A.default.weight": a, "layer.lora_B.default.weight": b}
        live["layer.weight"].copy_(constructor.reconstruct(update, settings, live.get)["layer.weight"])
    torch.testing.assert_close(live["layer.weight"], base + 2.0 * b @ a, atol=1e-6, rtol=0)


def test_a_base_weight_in_an_update_becomes_the_new_base():
    constructor, own = LoRAConstructor(), {"layer.weight": torch.zeros(2, 2)}
    settings = {"layer": LayerLoRA(scale=1.0)}
    ones = {"layer.lora_A.default.weight": torch.ones(1, 2), "layer.lora_B.default.weight": torch.ones(2, 1)}
    full = {"layer.base_layer.weight": torch.full((2, 2), 5.0), **ones}
    assert constructor.reconstruct(full, settings, own.get)["layer.weight"].eq(6.0).all()
    # Not adopted (the update was rejected): the base is still 0.
    assert constructor.reconstruct(ones, settings, own.get)["layer.weight"].eq(1.0).all()
    constructor.reconstruct(full, settings, own.get)
    constructor.adopt()
    # The next update has adapters only: 5 + 1, not 0 + 1 and not 6 + 1.
    assert constructor.reconstruct(ones, settings, own.get)["layer.weight"].eq(6.0).all()


def test_trainable_weights_that_are_not_lora_pass_through():
    constructor = LoRAConstructor()
    head = {"value_head.weight": torch.ones(1, 4)}
    assert constructor.reconstruct(head, {}, {}.get)["value_head.weight"].eq(1.0).all()


def test_scale_is_read_from_the_model():
    critic = Critic.from_config(LLAMA, lora=LoRASettings(rank=4, alpha=8.0, target_modules=("q_proj",)))
    settings = LoRAConstructor.extract_lora_config(critic)
    assert set(settings) == {f"body.layers.{layer}.self_attn.q_proj" for layer in range(2)}
    assert settings["body.layers.0.self_attn.q_proj"] == LayerLoRA(scale=2.0)


@pytest.mark.parametrize(
    ("update", "message"),
    [
        ({"layer.lora_A.default.weight": torch.ones(1, 2)}, "incomplete"),
        (
            {
                "other.lora_A.default.weight": torch.ones(1, 2),
                "other.lora_B.default.weight": torch.ones(2, 1),
            },
            "does not have",
        ),
        (
            {
                "layer.lora_A.default.weight": torch.ones(1, 3),
                "layer.lora_B.default.weight": torch.ones(2, 1),
            },
            r"of shape \[2, 3\] .* has the shape \[2, 2\]",
        ),
    ],
)
def test_adapters_that_do_not_fit_are_rejected(update, message):
    own = {"layer.weight": torch.zeros(2, 2)}
    settings = dict.fromkeys(("layer", "other"), LayerLoRA(scale=1.0))
    with pytest.raises(WeightUpdateError, match=message):
        LoRAConstructor().reconstruct(update, settings, own.get)


def test_saved_actor_is_an_adapter_folder_that_peft_loads(tmp_path):
    torch.manual_seed(0)
    adapted = trained(Actor.from_config(LLAMA, lora=LoRASettings(rank=2))).eval()
    base = plain_twin(adapted)
    base.save_pretrained(tmp_path / "base")
    adapted.save_pretrained(tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "adapter"
    ).eval()
    torch.testing.assert_close(loaded(TOKENS).logits, adapted(TOKENS).logits)


def test_plain_names():
    assert plain_name("model.model.layers.0.q_proj.weight") == "model.model.layers.0.q_proj.weight"
    assert (
        plain_name("model.base_model.model.model.layers.0.q_proj.base_layer.weight")
        == "model.model.layers.0.q_proj.weight"
    )


def test_settings_name_the_rule():
    with pytest.raises(ConfigError, match=r"lora\.target_modules .* lora\.rank"):
        LoRASettings(target_modules=("q_proj",))
    with pytest.raises(ConfigError, match=r"lora\.alpha must be"):
        LoRASettings(rank=1, alpha=0.0)
    with pytest.raises(ConfigError, match=r"lora\.target_modules .*'query'"):
        Actor.from_config(LLAMA, lora=LoRASettings(rank=1, target_modules=("q_proj", "query")))


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_peft_is_told_the_weight_layout(config, recwarn):
    for model in (Actor, Critic):
        model.from_config(config, lora=LoRASettings(rank=2))
    assert [str(warning.message) for warning in recwarn if "fan_in_fan_out" in str(warning.message)] == []


def test_rank_zero_adds_no_adapters():
    assert not has_adapters(Actor.from_config(LLAMA, lora=LoRASettings()).state_dict())


@pytest.mark.parametrize("settings", [7, "rank 2", None, {"r": 2, "lora_alpha": "8"}, {"r": "2"}, {"r": 0}, {}])
def test_invalid_layer_settings_are_rejected(settings):
    with pytest.raises(WeightUpdateError, match="rank"):
        as_layer_lora(settings)
