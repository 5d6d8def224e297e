"""Batch invariance on the CPU: a sample gets the same bits alone, in any batch, at any position, with any padding."""

import functools

import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from coati.models import Actor, Critic, RewardModel, action_logprobs, action_values
from coati.models.tiles import (
    GPU_TILE,
    TILE,
    active_tile,
    batch_invariant,
    is_batch_invariant,
    padded_length,
    set_batch_invariant,
    tiled_activation,
    tiled_linear,
)
from coati.rollout import GenerateOptions, generate, make_engine
from coati.rollout.native.columns import MAX_CONTEXT

# Odd sizes, so that vector instructions leave a remainder.
SIZES = {"hidden_size": 24, "intermediate_size": 37, "num_hidden_layers": 2, "initializer_range": 0.5}
GPT2 = {"n_embd": 24, "n_inner": 37, "n_layer": 2, "initializer_range": 0.5}
LIMIT = 3
prompt = st.lists(st.integers(2, tiny.VOCAB - 1), min_size=1, max_size=24)
companies = st.lists(prompt, max_size=20)


def models():
    return {
        "llama": tiny.llama(1, max_position_embeddings=128, **SIZES),
        "llama by rows": tiny.llama(1, max_position_embeddings=2 * MAX_CONTEXT, **SIZES),
        "gpt2": tiny.gpt2(1, n_positions=128, **GPT2),
        "adapters": Actor(tiny.llama(1, max_position_embeddings=128, **SIZES), lora=lora()),
        "gpt2-adapters": Actor(tiny.gpt2(1, n_positions=128, **GPT2), lora=lora()),
        **{name: tiny.decoder(name, 1, max_position_embeddings=128) for name in ("gemma3", "phi")},
    }


def lora():
    from coati.config import LoRASettings

    return LoRASettings(rank=2)


@pytest.fixture(scope="module")
def policies():
    found = models()
    torch.manual_seed(2)
    for model in found.values():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter)
    return found


@pytest.fixture(scope="module")
def engines(policies):
    return functools.cache(lambda engine, model: make_engine(engine, policies[model]))


def left_padded(rows, more=0):
    width = max(map(len, rows)) + more
    ids = torch.tensor([[tiny.PAD] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return ids, mask


def right_padded(rows, more=0):
    width = max(map(len, rows)) + more
    return (
        torch.tensor([row + [tiny.PAD] * (width - len(row)) for row in rows]),
        torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows]),
    )


def written(engine, rows, ids, *, more=0, limit=LIMIT):
    """Generate with an engine; return tokens and log-probs of each row without padding."""
    input_ids, mask = left_padded(rows, more)
    request = tiny.samples_of(
        input_ids=input_ids,
        attention_mask=mask,
        sample_ids=torch.tensor(ids),
        seed=3,
        options=GenerateOptions(),
        max_new_tokens=limit,
    )
    rollout = generate(engine, request)
    width = rollout.num_prompt_tokens
    return [
        (tokens[is_real].tolist(), log_probs[is_real].tolist())
        for tokens, log_probs, is_real in zip(
            rollout.sequences[:, width:], rollout.action_log_probs, rollout.action_mask, strict=True
        )
    ]


@pytest.mark.parametrize(
    ("engine", "model"),
    [
        ("native", "llama"),
        ("native", "llama by rows"),
        ("native", "adapters"),
        ("native", "gpt2-adapters"),
        ("native", "gemma3"),
        ("native", "phi"),
        ("reference", "gpt2"),
    ],
)
@given(row=prompt, before=companies, after=companies, more=st.integers(0, 40))
def test_engines_are_batch_invariant(engines, engine, model, row, before, after, more):
    engine = engines(engine, model)
    alone = written(engine, [row], [7])
    ids = [*range(100, 100 + len(before)), 7, *range(200, 200 + len(after))]
    together = written(engine, [*before, row, *after], ids, more=more)
    assert together[len(before)] == alone[0]


@pytest.mark.parametrize("model", ["llama", "gpt2", "adapters", "gemma3", "phi"])
@torch.no_grad()
@given(row=prompt, before=companies, after=companies, more=st.integers(0, 40))
def test_scoring_is_batch_invariant(policies, scorers, model, row, before, after, more):
    row = [5, *row]
    alone = scores(policies[model], *scorers, [row], 0)
    company = [[6, *other] for other in before], [[6, *other] for other in after]
    together = scores(policies[model], *scorers, [*company[0], row, *company[1]], more)
    for one, many in zip(alone, together, strict=True):
        assert many[len(before)][: len(one[0])].tolist() == one[0].tolist()


@pytest.fixture(scope="module")
def scorers():
    kinds = [kind(tiny.llama(4, max_position_embeddings=128, **SIZES)) for kind in (Critic, RewardModel)]
    torch.manual_seed(5)
    for model in kinds:
        torch.nn.init.normal_(model.value_head.weight)
    return kinds


def scores(policy, critic, reward_model, rows, more):
    """Return log-probs, values and rewards; all but the first token are the response."""
    sequences, mask = right_padded(rows, more)
    num_actions = sequences.shape[1] - 1
    logprobs, _ = action_logprobs(policy, sequences, mask, num_actions, temperatures=torch.full([len(rows)], 0.7))
    values = action_values(critic, sequences, mask, num_actions)
    lengths = [len(row) - 1 for row in rows]
    rewards = reward_model(sequences, mask).unsqueeze(1)
    return (
        [one[:length] for one, length in zip(logprobs, lengths, strict=True)],
        [one[:length] for one, length in zip(values, lengths, strict=True)],
        rewards,
    )


@torch.no_grad()
@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("tile", [32, 128])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("inner", "outer"), [(4, 2), (24, 37), (64, 1), (64, 200), (300, 77), (2000, 8)])
def test_rows_of_a_product_do_not_depend_on_their_position(num_threads, inner, outer, has_bias, tile):
    torch.set_num_threads(num_threads)
    torch.manual_seed(0)
    weight, row = torch.randn(outer, inner), torch.randn(inner)
    bias = torch.randn(outer) if has_bias else None
    alone = tiled_linear(row.unsqueeze(0), weight, bias, tile=tile)[0]
    for count in (2, 31, 64, 65, 200, 256, 300):
        for place in (0, count // 2, count - 1):
            rows = torch.randn(count, inner)
            rows[place] = row
            assert torch.equal(tiled_linear(rows, weight, bias, tile=tile)[place], alone)
    assert torch.allclose(alone, F.linear(row, weight, bias), atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("activation", [F.silu, F.gelu, torch.sigmoid])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_activations_do_not_depend_on_their_position(activation, num_threads):
    torch.set_num_threads(num_threads)
    torch.manual_seed(0)
    for width in (37, 64):  # 32 rows of any width together leave no remainder
        part_of_rows = torch.randn(32, 2 * width)[:, :width]
        alone = torch.cat([tiled_activation(activation, row) for row in part_of_rows.split(1)])
        assert torch.equal(tiled_activation(activation, part_of_rows), alone)
    values = torch.randn(100_003)
    alone = torch.cat([tiled_activation(activation, part) for part in values[-300:].split(1)])
    whole = tiled_activation(activation, values)
    assert torch.equal(whole[-300:], alone)
    assert torch.allclose(whole, activation(values), atol=1e-6)


def test_batch_invariance_is_off_with_gradients():
    layer, inputs = torch.nn.Linear(4, 5), torch.randn(3, 4)
    with batch_invariant(layer, inputs):
        assert active_tile() == 0
        layer(inputs).sum().backward()
    assert layer.weight.grad is not None
    with torch.no_grad(), batch_invariant(layer, inputs):
        assert active_tile() == TILE
        assert "forward" in vars(layer)
    assert "forward" not in vars(layer)
    assert active_tile() == 0


@torch.no_grad()
def test_a_gpu_does_it_for_marked_models_only(monkeypatch):
    model, on_gpu = tiny.llama(1, num_hidden_layers=2), torch.empty(0, device="meta")  # any device but the CPU
    ids = torch.arange(2, 14).unsqueeze(0)
    expected = model(ids).logits
    with batch_invariant(model, on_gpu):
        assert active_tile() == 0
    set_batch_invariant(model)
    assert is_batch_invariant(model)
    shapes, linear = set(), F.linear
    monkeypatch.setattr(F, "linear", lambda rows, *rest: (shapes.add(rows.shape[0]), linear(rows, *rest))[1])
    norms = []
    norm_class = type(model.model.norm)
    plain = norm_class.forward
    monkeypatch.setattr(norm_class, "forward", lambda norm, rows: (norms.append(rows.shape[0]), plain(norm, rows))[1])
    with batch_invariant(model, on_gpu):
        assert active_tile() == GPU_TILE
        found = model(ids).logits
    assert shapes == {*norms} == {GPU_TILE}
    assert torch.allclose(found, expected, atol=1e-5)
    set_batch_invariant(model, False)
    with batch_invariant(model, on_gpu):
        assert active_tile() == 0


@given(length=st.integers(1, 100_000))
def test_rows_get_little_padding(length):
    padded = padded_length(length)
    assert length <= padded < length + max(8, length / 2)
    assert padded_length(length + 1) >= padded == padded_length(padded)
