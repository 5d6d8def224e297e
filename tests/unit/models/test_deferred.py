"""Models without weights: what they remember, where it is in files of any kind, and when they are loaded whole."""

import logging

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM, LlamaForSequenceClassification

from coati.models import Actor, Critic
from coati.models.deferred import deferred_weights, weights_come_later
from coati.models.lora import LoRASettings
from coati.models.value_head import HEAD_FILE


def is_empty(model):
    return all(parameter.is_meta for parameter in model.parameters())


def filled(build):
    """The model built without weights and then filled."""
    with weights_come_later():
        model = build()
    assert is_empty(model)
    deferred_weights(model).fill(model)
    assert not any(parameter.is_meta for parameter in model.parameters())
    return model


def assert_same_weights(ours, theirs):
    expected = dict(theirs.named_parameters())
    assert [name for name, _ in ours.named_parameters()] == list(expected)
    for name, parameter in ours.named_parameters():
        assert parameter.dtype == expected[name].dtype, name
        assert parameter.requires_grad == expected[name].requires_grad, name
        if ".lora_A." not in name:  # drawn anew
            assert torch.equal(parameter, expected[name]), name
    for name, buffer in theirs.named_buffers():
        assert torch.equal(dict(ours.named_buffers())[name], buffer), name


@pytest.mark.parametrize("lora", [None, LoRASettings(rank=2)], ids=["whole", "lora"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("model_class", [Actor, Critic])
def test_files_of_a_causal_model_fill_actor_and_critic(request, tmp_path, model_class, family, lora):
    request.getfixturevalue(family)(seed=3).save_pretrained(tmp_path, max_shard_size="2KB")  # several files
    assert (tmp_path / "model.safetensors.index.json").exists()
    ours = filled(lambda: model_class.from_pretrained(tmp_path, lora=lora))
    assert_same_weights(ours, model_class.from_pretrained(tmp_path, lora=lora))


def test_what_else_a_folder_says_is_kept(llama, tmp_path):
    model = llama()
    model.generation_config.update(do_sample=True, temperature=0.3)
    model.save_pretrained(tmp_path)
    ours = filled(lambda: Actor.from_pretrained(tmp_path, lora=LoRASettings(rank=2)))
    assert ours.model.peft_config["default"].base_model_name_or_path == str(tmp_path)
    inner = ours.model.base_model.model
    assert inner.generation_config.temperature == 0.3
    assert not inner.model.layers[0].mlp.training


def test_tied_weights_stay_tied_and_formats_are_those_asked_for(llama, tmp_path):
    llama(tie_word_embeddings=True).save_pretrained(tmp_path)
    ours = filled(lambda: Actor.from_pretrained(tmp_path, dtype=torch.bfloat16))
    assert ours.model.lm_head.weight is ours.model.model.embed_tokens.weight
    assert_same_weights(ours, Actor.from_pretrained(tmp_path, dtype=torch.bfloat16))


def test_a_critic_finds_its_own_head_and_a_classifiers(llama_config, tmp_path):
    torch.manual_seed(1)
    critic = Critic.from_config(llama_config())
    nn.init.normal_(critic.value_head.weight)
    critic.save_pretrained(tmp_path / "critic")
    assert (tmp_path / "critic" / HEAD_FILE).exists()
    assert_same_weights(filled(lambda: Critic.from_pretrained(tmp_path / "critic")), critic)
    LlamaForSequenceClassification(llama_config(num_labels=1)).save_pretrained(tmp_path / "classifier")
    ours = filled(lambda: Critic.from_pretrained(tmp_path / "classifier"))
    assert ours.value_head.weight.abs().max() > 0
    assert_same_weights(ours, Critic.from_pretrained(tmp_path / "classifier"))


def test_fresh_weights_are_drawn_by_the_models_rule_and_the_seed(llama_config):
    def build(seed):
        torch.manual_seed(seed)
        return filled(lambda: Actor.from_config(llama_config(initializer_range=0.5), lora=LoRASettings(rank=2)))

    one, same, other = build(0), build(0), build(1)
    layer = one.model.base_model.model.model.layers[0]
    assert layer.mlp.up_proj.weight.std() == pytest.approx(0.5, rel=0.2)
    assert layer.input_layernorm.weight.unique().tolist() == [1.0]
    assert layer.mlp.up_proj.lora_B["default"].weight.abs().max() == 0
    assert layer.mlp.up_proj.lora_A["default"].weight.abs().max() <= 1 / 4  # kaiming: 1 / sqrt(16 inputs)
    pairs = zip(one.parameters(), same.parameters(), other.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b, _ in pairs)
    up, up_other = (m.model.base_model.model.model.layers[0].mlp.up_proj.weight for m in (one, other))
    assert not torch.equal(up, up_other)
    assert not torch.equal(up, layer.mlp.gate_proj.weight)  # no two weights share their draws
    assert filled(lambda: Critic.from_config(llama_config())).value_head.weight.abs().max() == 0


def test_the_global_generator_is_left_as_it_was(llama_config):
    with weights_come_later():
        model = Actor.from_config(llama_config())
    before = torch.get_rng_state()
    deferred_weights(model).fill(model)
    assert torch.equal(torch.get_rng_state(), before)


def test_parts_are_filled_one_at_a_time(llama_config):
    with weights_come_later():
        model = Actor.from_config(llama_config(num_hidden_layers=2))
    first, second = model.model.model.layers
    weights = deferred_weights(model)
    weights.fill(model, first)
    assert not is_empty(first)
    assert is_empty(second)
    kept = first.mlp.up_proj.weight
    weights.fill(model, skip=frozenset({second}))
    assert is_empty(second)
    assert first.mlp.up_proj.weight is kept
    assert not model.model.lm_head.weight.is_meta


@pytest.mark.parametrize(
    ("spoil", "options", "reason"),
    [
        (lambda folder: None, {"low_cpu_mem_usage": True}, "the options low_cpu_mem_usage need the weights at once"),
        (lambda folder: (folder / "model.safetensors").rename(folder / "other"), {}, "no local folder with readable"),
        (lambda folder: None, {}, "parameters have other names or shapes there"),
    ],
)
def test_what_cannot_be_deferred_is_loaded_whole_and_said(llama, tmp_path, caplog, spoil, options, reason):
    llama(num_hidden_layers=2).save_pretrained(tmp_path)
    spoil(tmp_path)
    if "names" in reason:  # a file that lacks a layer
        llama().save_pretrained(tmp_path / "one")
        (tmp_path / "one" / "model.safetensors").replace(tmp_path / "model.safetensors")
    with weights_come_later(), caplog.at_level(logging.WARNING):
        try:
            model = Actor.from_pretrained(tmp_path, **options)
        except OSError:
            model = None  # no weights at all: transformers says so
    assert reason in caplog.text
    assert model is None or not is_empty(model)


def test_other_models_are_built_as_ever(llama_config):
    with weights_come_later():
        plain = LlamaForCausalLM(llama_config())
        layer = nn.Linear(2, 2)
    assert not is_empty(plain)
    assert not is_empty(layer)
    assert not is_empty(Actor.from_config(llama_config()))
