"""Packed rows give the same log-probs, values and gradients as padded ones, in float64 up to rounding."""

import doctest
import logging

import pytest
import torch
from tiny import make_seeded
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    OPTConfig,
    Phi3Config,
    PhiConfig,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
    StableLmConfig,
)

import coati.models.packing
from coati.models import Actor, Critic, LoRASettings, RewardModel, action_logprobs, packed_attention
from coati.models.actor import Scoring, packed_scoring_problem, score_padded
from coati.models.packed_attention import PACKED_ATTENTION, _by_length, _Heads, drop_flash_on_old_gpus
from coati.models.packing import (
    PACKED_MODEL_TYPES,
    PackedRows,
    log_padding_once,
    packing_problem,
    row_parts,
    row_tokens,
)
from coati.models.value_head import packs

SIZES = {
    "vocab_size": 13,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.5,
}
ENDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}  # the defaults are beyond this small vocabulary
CONFIGS = {
    "llama": lambda: LlamaConfig(**SIZES),
    "llama-tied": lambda: LlamaConfig(**SIZES, tie_word_embeddings=True),
    "mistral": lambda: MistralConfig(**SIZES, sliding_window=None),
    "mistral-window": lambda: MistralConfig(**SIZES, sliding_window=3),
    "qwen2": lambda: Qwen2Config(**SIZES),
    "qwen3": lambda: Qwen3Config(**SIZES, head_dim=4),
    "smollm3": lambda: SmolLM3Config(**SIZES, **ENDS),
    "phi3": lambda: Phi3Config(**SIZES, **ENDS),
    "olmo2": lambda: Olmo2Config(**SIZES, **ENDS),
    "gpt_neox": lambda: GPTNeoXConfig(**{name: size for name, size in SIZES.items() if "key_value" not in name}),
    "gemma": lambda: GemmaConfig(**SIZES, **ENDS, head_dim=4),
    "gemma3": lambda: Gemma3TextConfig(
        **SIZES, **ENDS, head_dim=4, sliding_window=3, layer_types=["sliding_attention", "full_attention"]
    ),
    "phi": lambda: PhiConfig(**SIZES, **ENDS),
    "opt": lambda: OPTConfig(**SIZES, **ENDS, ffn_dim=16, word_embed_proj_dim=8, init_std=0.5),
    "gpt2": lambda: GPT2Config(vocab_size=13, n_embd=8, n_layer=2, n_head=2, n_positions=256, initializer_range=0.5),
}
NUM_ACTIONS = 5
TEMPERATURES = torch.tensor([0.7, 1.0, 1.5, 1.0], dtype=torch.float64)


def causal_lm(name):
    return make_seeded(make_causal_lm, 0, {"name": name})


def make_causal_lm(name):
    return AutoModelForCausalLM.from_config(CONFIGS[name]()).double()


def ragged_batch(prompts=(4, 1, 2, 3), responses=(5, 3, 1, 2)):
    """[4, 9]: prompts padded on the left, responses on the right, garbage in the padding."""
    generator = torch.Generator().manual_seed(1)
    width = max(prompts)
    columns = torch.arange(width + NUM_ACTIONS)
    starts, ends = width - torch.tensor(prompts).unsqueeze(1), width + torch.tensor(responses).unsqueeze(1)
    mask = ((columns >= starts) & (columns < ends)).long()
    return torch.randint(1, 13, mask.shape, generator=generator), mask


def grouped_batch():
    """[4, 45]: three responses to one prompt of 35 tokens, two with a shared prefix, and one to another prompt."""
    sequences, mask = ragged_batch(prompts=(35, 35, 35, 40), responses=(5, 3, 4, 2))
    sequences[1:3, 5:40] = sequences[0, 5:40]
    sequences[2, :42] = sequences[1, :42]
    return sequences, mask


BATCHES = {"ragged": ragged_batch, "grouped": grouped_batch}


def gradients(model, scores, mask):
    model.zero_grad()
    generator = torch.Generator().manual_seed(2)
    for score in scores:
        weights = torch.randn(mask.shape, generator=generator, dtype=torch.float64)
        (score * weights)[mask].sum().backward(retain_graph=True)
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(ours, theirs, *, tolerance=1e-10):
    assert ours.keys() == theirs.keys()
    assert max(float(gradient.abs().max()) for gradient in theirs.values()) > 0.1
    for name, gradient in theirs.items():
        close = {"rtol": tolerance, "atol": tolerance}
        torch.testing.assert_close(ours[name], gradient, **close, msg=lambda m, n=name: f"{n}: {m}")


def gradient_tolerance(name, batch):
    """Return the tolerance: most norms compute in float32, which rounds a sum of gradients unlike the single ones.

    Gemma's norms also add up the gradients of their weights in float32.
    """
    is_exact = name in ("gpt2", "gpt_neox", "opt", "phi") or (batch == "ragged" and "gemma" not in name)
    return 1e-10 if is_exact else 1e-5


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", CONFIGS)
def test_log_probs_entropies_and_gradients_match_the_padded_batch(name, batch):
    model = causal_lm(name)
    assert packed_scoring_problem(model) is None
    sequences, mask = BATCHES[batch]()
    assert (PackedRows.of(sequences, mask).shared is None) == (batch == "ragged")
    scored = mask[:, -NUM_ACTIONS:].bool()
    padded = score_padded(model, sequences, mask, Scoring(NUM_ACTIONS, TEMPERATURES, True))
    expected = gradients(model, padded, scored)
    packed = action_logprobs(model, sequences, mask, NUM_ACTIONS, temperatures=TEMPERATURES, with_entropy=True)
    for ours, theirs in zip(packed, padded, strict=True):
        torch.testing.assert_close(ours[scored], theirs[scored], rtol=1e-10, atol=1e-10)
        assert torch.equal(ours[~scored], torch.zeros_like(ours[~scored]))
    assert_same_gradients(gradients(model, packed, scored), expected, tolerance=gradient_tolerance(name, batch))


def test_every_known_decoder_is_tested():
    assert {config().model_type for config in CONFIGS.values()} == set(PACKED_MODEL_TYPES)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral-window", "opt"])
def test_values_and_rewards_match_the_padded_batch(name, batch, monkeypatch):
    critic, reward_model = Critic(causal_lm(name)), RewardModel(causal_lm(name))
    nn.init.normal_(critic.value_head.weight)
    nn.init.normal_(reward_model.value_head.weight)
    sequences, mask = BATCHES[batch]()
    assert packs(critic)
    packed, rewards = critic(sequences, mask), reward_model(sequences, mask)
    ours = gradients(critic, [packed], mask.bool())
    monkeypatch.setattr("coati.models.value_head.packing_problem", lambda body: "disabled by the test")
    padded = critic(sequences, mask)
    torch.testing.assert_close(packed, padded * mask, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(rewards, reward_model(sequences, mask), rtol=1e-10, atol=1e-10)
    theirs = gradients(critic, [padded], mask.bool())
    assert_same_gradients(ours, theirs, tolerance=gradient_tolerance(name, batch))


def test_adapters_are_applied_and_only_they_get_gradients():
    actor = Actor(causal_lm("llama"), lora=LoRASettings(rank=2)).double()
    for name, parameter in actor.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    sequences, mask = ragged_batch()
    scored = mask[:, -NUM_ACTIONS:].bool()
    assert packed_scoring_problem(actor) is None
    packed = action_logprobs(actor, sequences, mask, NUM_ACTIONS)[:1]
    padded = score_padded(actor.model, sequences, mask, Scoring(NUM_ACTIONS))[:1]
    torch.testing.assert_close(packed[0][scored], padded[0][scored], rtol=1e-10, atol=1e-10)
    ours = gradients(actor, packed, scored)
    assert all("lora_" in name for name in ours)
    assert_same_gradients(ours, gradients(actor, padded, scored))


def test_a_row_does_not_see_its_neighbours():
    model = causal_lm("llama")
    sequences, mask = ragged_batch()
    together, _ = action_logprobs(model, sequences, mask, NUM_ACTIONS)
    for row in range(len(sequences)):
        alone, _ = action_logprobs(model, sequences[row : row + 1], mask[row : row + 1], NUM_ACTIONS)
        torch.testing.assert_close(together[row : row + 1], alone, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("window", [None, 50])
def test_attention_of_rows_of_very_different_lengths(window):
    # Short rows share one call, those from 128 to 255 tokens another; the rows are not in order of length.
    lengths = (3, 200, 1, 130, 64, 127)
    total = sum(lengths)
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(total, heads, 4, generator=generator, dtype=torch.float64, requires_grad=True)
        for heads in (4, 2, 2)
    )
    mixed = _by_length(_Heads(query, key, value), lengths, scale=0.3, window=window)
    rows = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    at = torch.arange(total)
    distance = at.unsqueeze(1) - at
    sees = (rows.unsqueeze(1) == rows) & (distance >= 0) & (distance < (window or total))
    scores = torch.einsum("qhd,khd->hqk", query, key.repeat_interleave(2, dim=1)) * 0.3
    weights = scores.masked_fill(~sees, -torch.inf).softmax(-1)
    expected = torch.einsum("hqk,khd->qhd", weights, value.repeat_interleave(2, dim=1))
    torch.testing.assert_close(mixed, expected, rtol=1e-10, atol=1e-10)
    factors = torch.randn(mixed.shape, generator=generator, dtype=torch.float64)
    ours, theirs = (
        torch.autograd.grad((result * factors).sum(), (query, key, value), retain_graph=True)
        for result in (mixed, expected)
    )
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("capability", "is_kept"), [((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_gpus_before_ampere_do_not_use_the_variable_length_kernel(capability, is_kept, monkeypatch):
    monkeypatch.setattr(packed_attention, "_FLASH", object())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    drop_flash_on_old_gpus(torch.device("cuda"))
    assert (packed_attention._FLASH is not None) == is_kept


def test_a_packed_model_still_computes_ordinary_calls_exactly():
    model = causal_lm("llama")
    sequences, mask = ragged_batch()
    before = model(sequences, attention_mask=mask).logits
    written = model.generate(sequences[:, :4], attention_mask=mask[:, :4], max_new_tokens=3, do_sample=False)
    action_logprobs(model, sequences, mask, NUM_ACTIONS)
    assert model.config._attn_implementation == PACKED_ATTENTION
    assert torch.equal(model(sequences, attention_mask=mask).logits, before)
    again = model.generate(sequences[:, :4], attention_mask=mask[:, :4], max_new_tokens=3, do_sample=False)
    assert torch.equal(again, written)
    assert PACKED_ATTENTION not in str(model.config.to_diff_dict())  # it is not saved
    twin = AutoModelForCausalLM.from_config(model.config).double().eval()  # and a config with it still works
    twin.load_state_dict(model.state_dict())
    assert torch.equal(twin(sequences, attention_mask=mask).logits, before)


def test_empty_rows_and_empty_batches():
    model = causal_lm("llama")
    critic = Critic(model)
    sequences, mask = ragged_batch()
    expected, _ = action_logprobs(model, sequences[1:], mask[1:], NUM_ACTIONS)
    mask[0] = 0
    logprobs, _ = action_logprobs(model, sequences, mask, NUM_ACTIONS)
    torch.testing.assert_close(logprobs[1:], expected, rtol=1e-10, atol=1e-10)
    assert torch.equal(logprobs[0], torch.zeros_like(logprobs[0]))
    assert action_logprobs(model, sequences, torch.zeros_like(mask), NUM_ACTIONS)[0].shape == (4, NUM_ACTIONS)
    assert critic(sequences, torch.zeros_like(mask)).shape == sequences.shape


def test_the_first_token_of_a_row_is_not_scored():
    sequences, mask = torch.tensor([[6, 7, 8], [0, 4, 5]]), torch.tensor([[1, 1, 1], [0, 1, 1]])
    logprobs, _ = action_logprobs(causal_lm("llama"), sequences, mask, 2)
    assert (logprobs == 0).tolist() == [[False, False], [True, False]]


def test_a_batch_without_scored_tokens_still_gives_every_weight_a_gradient():
    # An all-reduce of gradients waits for every weight on every rank.
    model = causal_lm("llama")
    sequences, mask = ragged_batch()
    mask[:, -NUM_ACTIONS:] = 0
    logprobs, _ = action_logprobs(model, sequences, mask, NUM_ACTIONS)
    logprobs.sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert torch.equal(parameter.grad, torch.zeros_like(parameter.grad))


def test_unknown_models_are_padded_and_logged_once(caplog):
    log_padding_once.cache_clear()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(StableLmConfig(**SIZES)).double().eval()
    sequences, mask = ragged_batch()
    with caplog.at_level(logging.INFO, logger="coati.models.packing"):
        for _ in range(2):
            logprobs, _ = action_logprobs(Actor(model), sequences, mask, NUM_ACTIONS)
            Critic(model)(sequences, mask)
    expected, _ = score_padded(model, sequences, mask, Scoring(NUM_ACTIONS))
    assert torch.equal(logprobs, expected)
    reason = f"is not one of the known decoders ({', '.join(PACKED_MODEL_TYPES)})"
    assert [record.getMessage() for record in caplog.records] == [
        f"StableLmForCausalLM is called with padding: StableLmForCausalLM {reason}",
        f"StableLmModel is called with padding: StableLmModel {reason}",
    ]


def test_the_reason_against_packing_is_returned():
    model = causal_lm("llama")
    assert packing_problem(nn.Linear(1, 1)) == "Linear is not a transformers model"
    model.lm_head.register_forward_hook(lambda *_: None)
    assert packed_scoring_problem(model) == "its output head has forward hooks"
    model.lm_head = nn.Sequential(model.lm_head)
    assert packed_scoring_problem(model) == "its output head is a Sequential, not a plain nn.Linear"
    capped = causal_lm("gemma3")
    capped.config.final_logit_softcapping = 3.0
    assert packed_scoring_problem(capped) == "its logits are capped (final_logit_softcapping)"
    eager = causal_lm("qwen2")
    eager.set_attn_implementation("eager")
    assert packed_scoring_problem(eager) == "its attention implementation is 'eager', not 'sdpa'"

    class Wrapper(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

    assert "wrap it in Actor" in packed_scoring_problem(Wrapper(causal_lm("llama")))
    assert packed_scoring_problem(Wrapper(Actor(causal_lm("llama")))) is None


def test_parts_of_a_batch_respect_both_limits():
    assert row_parts([]) == []
    assert row_parts([5, 5, 5]) == [slice(0, 3)]
    assert row_parts([5, 5, 5], max_rows=2) == [slice(0, 2), slice(2, 3)]
    assert row_parts([5, 5, 5, 1], max_rows=3, max_tokens=10) == [slice(0, 2), slice(2, 4)]
    assert row_parts([99, 1, 99], max_tokens=10) == [slice(0, 1), slice(1, 2), slice(2, 3)]  # no row is dropped
    sequences, mask = ragged_batch()
    assert row_tokens(sequences, mask, is_packed=True) == [9, 4, 3, 5]
    assert row_tokens(sequences, mask, is_packed=False) == row_tokens(sequences, None, is_packed=True) == [9] * 4


def test_docstring_examples_run():
    result = doctest.testmod(coati.models.packing)
    assert result.attempted > 0
    assert result.failed == 0


def test_holes_in_a_row_are_removed():
    model = causal_lm("llama")
    sequences, mask = ragged_batch()
    mask[0, 2] = 0  # positions of the padded call skip it too
    packed = PackedRows.of(sequences, mask)
    assert packed.positions[:8].tolist() == list(range(8))
    scored = mask[:, -NUM_ACTIONS:].bool()
    ours, _ = action_logprobs(model, sequences, mask, NUM_ACTIONS)
    theirs, _ = score_padded(model, sequences, mask, Scoring(NUM_ACTIONS))
    torch.testing.assert_close(ours[scored], theirs[scored], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("mask", [[[1, 1, 1], [1, 1, 1]], [[0, 1, 1], [1, 1, 1]]], ids=["even", "ragged"])
def test_training_works_after_scoring_in_inference_mode(llama, mask):
    sequences, mask = torch.tensor([[3, 4, 5], [6, 7, 8]]), torch.tensor(mask)
    critic = Critic(llama(seed=2))
    with torch.inference_mode():
        critic(sequences, mask)
    critic(sequences, mask).sum().backward()
    assert critic.value_head.weight.grad.abs().sum() > 0
