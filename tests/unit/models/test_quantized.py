"""int8 weights: how far off they may be, what they save, and what they leave alone."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from coati.errors import ConfigError
from coati.models import Actor, RewardModel
from coati.models.quantized import QuantizedLinear, bytes_held, quantize_channels, quantize_linear_layers


def test_numbers_and_scales_by_hand():
    # Row 0: largest 2.54, scale 0.02: 2.54 -> 127, -0.05 / 0.02 = -2.5 -> -2 (to even), 0.031 / 0.02 = 1.55 -> 2.
    # Row 1 is all zeros, which have no scale of their own.
    numbers, scale = quantize_channels(torch.tensor([[2.54, -0.05, 0.031], [0.0, 0.0, 0.0]], dtype=torch.float64))
    assert numbers.tolist() == [[127, -2, 2], [0, 0, 0]]
    assert scale.tolist() == pytest.approx([0.02, 1.0])
    assert (numbers.dtype, scale.dtype) == (torch.int8, torch.float32)


@settings(deadline=None, max_examples=50)
@given(
    seed=st.integers(0, 10_000),
    exponent=st.integers(-20, 20),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_no_weight_is_off_by_more_than_half_a_scale(seed, exponent, dtype):
    generator = torch.Generator().manual_seed(seed)
    weight = (torch.randn(5, 7, generator=generator) * 2.0**exponent).to(dtype)
    numbers, scale = quantize_channels(weight)
    error = (numbers.double() * scale.double()[:, None] - weight.double()).abs()
    # 1e-4 of a scale is what float32 may round when it divides and multiplies.
    assert bool((error <= scale.double()[:, None] * (0.5 + 1e-4)).all())
    assert numbers.abs().amax(dim=1).tolist() == [127] * 5  # the whole range is used, in every row


@pytest.mark.parametrize("has_bias", [True, False])
def test_a_layer_computes_with_the_rounded_weights(has_bias):
    torch.manual_seed(0)
    layer = nn.Linear(6, 3, bias=has_bias)
    inputs = torch.randn(2, 4, 6)
    quantized = QuantizedLinear(*quantize_channels(layer.weight), bias=layer.bias)
    rounded = quantized.weight.float() * quantized.scale[:, None]
    torch.testing.assert_close(quantized(inputs), nn.functional.linear(inputs, rounded, layer.bias))
    assert quantized(inputs.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("model", ["llama", "gpt2"])
@pytest.mark.parametrize("is_tied", [True, False])
def test_a_model_keeps_its_head_embeddings_and_norms(request, model, is_tied):
    model = request.getfixturevalue(model)(tie_word_embeddings=is_tied)
    before = {name: value.clone() for name, value in model.named_parameters()}
    # Llama: q, k, v, o, gate, up, down. GPT-2: c_attn, c_proj, c_fc, c_proj.
    assert quantize_linear_layers(model) == (7 if model.config.model_type == "llama" else 4)
    for name, value in model.named_parameters():
        assert torch.equal(value, before[name])
        assert not value.requires_grad
    left = set(dict(model.named_parameters()))
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == is_tied
    assert not any("proj" in name or "c_fc.weight" in name or "c_attn.weight" in name for name in left)


def test_layers_that_share_a_weight_go_on_sharing_it():
    net = nn.ModuleDict({"embed": nn.Embedding(4, 4), **{name: nn.Linear(4, 4) for name in ("a", "b", "like_embed")}})
    net["b"].weight = net["a"].weight
    net["like_embed"].weight = net["embed"].weight
    net["again"] = net["a"]
    assert quantize_linear_layers(net) == 3
    assert net["a"].weight.data_ptr() == net["b"].weight.data_ptr() == net["again"].weight.data_ptr()
    assert type(net["like_embed"]) is nn.Linear
    assert net["like_embed"].weight is net["embed"].weight


@pytest.mark.parametrize(("dtype", "wide_bytes"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_memory_falls_to_a_byte_a_weight(llama, dtype, wide_bytes):
    model = llama(hidden_size=64, intermediate_size=128, num_hidden_layers=2).to(dtype)
    linear = [m for m in model.model.modules() if type(m) is nn.Linear]
    num_weights, num_channels = sum(m.weight.numel() for m in linear), sum(m.out_features for m in linear)
    before = bytes_held(model)
    quantize_linear_layers(model)
    assert before - bytes_held(model) == num_weights * (wide_bytes - 1) - num_channels * 4  # a float32 scale a channel
    assert bytes_held(model) < before * (0.35 if wide_bytes == 4 else 0.6)


def test_log_probs_stay_close_and_the_kl_is_hardly_biased(llama):
    # A model with opinions: its log-probs differ by more than half a nat.
    make = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "initializer_range": 0.1}
    plain, quantized = Actor(llama(**make)), Actor(llama(**make))
    quantize_linear_layers(quantized.model)
    sequences = torch.randint(0, 11, (16, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        exact = plain(sequences).logits.log_softmax(dim=-1)
        rounded = quantized(sequences).logits.log_softmax(dim=-1)
    assert exact.std() > 0.5
    error = (rounded - exact).abs()
    assert 0 < error.mean() < 0.02
    assert error.max() < 0.1
    # A policy that has not moved at all is charged this much: the bias of the penalty, in nats per token.
    spurious = (exact.exp() * (exact - rounded)).sum(dim=-1)
    assert 0 < spurious.mean() < 2e-4


def test_a_reward_model_keeps_its_head(llama):
    model = RewardModel(llama(hidden_size=64, initializer_range=0.1)).eval()
    nn.init.normal_(model.value_head.weight, generator=torch.Generator().manual_seed(0))
    sequences = torch.randint(0, 11, (8, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        exact = model(sequences)
        quantize_linear_layers(model.body)
        rounded = model(sequences)
    assert type(model.value_head) is nn.Linear
    assert 0 < (rounded - exact).abs().max() < 0.05 * exact.std()


def test_weights_that_are_no_numbers_are_an_error_that_names_the_layer(llama):
    model = llama()
    model.model.layers[0].mlp.up_proj.weight.data[0, 0] = float("inf")
    with pytest.raises(ConfigError, match=r"model\.layers\.0\.mlp\.up_proj\.weight holds NaN or infinity"):
        quantize_linear_layers(model)


def test_a_subclass_of_linear_is_left_alone():
    class Special(nn.Linear):
        def forward(self, inputs):
            return super().forward(inputs) + 1

    net = nn.Sequential(Special(2, 2))
    assert quantize_linear_layers(net) == 0
    assert type(net[0]) is Special
