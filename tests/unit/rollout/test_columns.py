"""Decode steps on a CPU: columns match the reference engine, and no column depends on the others."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import tiny
import torch
from engine_protocol import finish, request_of, texts
from tiny import llama
from torch import nn

from coati.rollout import NativeEngine, ReferenceEngine
from coati.rollout.native.blocks import SLOT_TILE
from coati.rollout.native.columns import MAX_CONTEXT, ColumnOperations, Columns
from coati.rollout.native.decoder import Decoder
from coati.rollout.native.operations import Geometry, TorchOperations

SHORT, LONG = 3, 24


@pytest.fixture
def model():
    return llama(0, num_hidden_layers=2, initializer_range=0.3)


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("llama", {}, True),
        ("mistral", {"num_key_value_heads": 2, "sliding_window": None}, True),
        ("qwen2", {"num_key_value_heads": 2}, True),
        ("mistral", {"num_key_value_heads": 2, "sliding_window": 16}, False),
        ("qwen3", {"num_key_value_heads": 2}, False),
        ("phi3", {"sliding_window": None}, True),
        ("phi3", {"sliding_window": None, "rope_parameters": {**tiny.ROPE, "partial_rotary_factor": 0.5}}, False),
        ("gpt2", {}, False),
        ("gemma3", {}, False),
        ("llama", {"hidden_act": "gelu"}, False),
        ("llama", {"max_position_embeddings": MAX_CONTEXT + 1}, False),
        ("llama", {"intermediate_size": 1 << 17}, False),
        ("llama", {"dtype": torch.bfloat16}, False),
    ],
    ids=str,
)
def test_columns_are_for_small_models_like_llama(name, changes, expected):
    assert Decoder(tiny.decoder(name, **changes)).uses_columns is expected


def with_limits(samples, *limits):
    return [sample.changed(limit=limit) for sample, limit in zip(samples, itertools.cycle(limits), strict=False)]


def assert_same(found, expected):
    assert texts(found) == texts(expected)
    for one, response in found.items():
        torch.testing.assert_close(response.log_probs, expected[one].log_probs, atol=1e-5, rtol=0)


def test_samples_stay_in_their_slots_and_others_take_those_that_are_free(model):
    ids = range(3 * SLOT_TILE)
    samples = with_limits(request_of(ids, eos_token_id=[]), *[SHORT] * 7, LONG)
    engine = NativeEngine(model, num_slots=len(ids))
    engine.submit(samples)
    found = finish(engine, len(ids) - len(ids) // 8)
    remaining = {sample.id: sample.place.slot for sample in engine._alive}
    assert remaining == {one: one for one in ids if one % 8 == 7}
    later = with_limits(request_of(range(100, 140), eos_token_id=[]), SHORT, LONG)
    engine.submit(later)
    found |= finish(engine, len(ids) // 8 + len(later))
    assert_same(
        found,
        finish(submitted(ReferenceEngine(model), samples), len(ids))
        | finish(submitted(ReferenceEngine(model), later), len(later)),
    )


def submitted(engine, samples):
    engine.submit(samples)
    return engine


def test_a_kept_sample_continues_when_most_others_have_ended(model):
    kept = [sample.changed(is_kept=True) for sample in request_of([0, 1], eos_token_id=[], limit=4)]
    others = with_limits(request_of(range(2, 2 * SLOT_TILE), eos_token_id=[]), *[SHORT] * 20, LONG)
    whole = texts(finish(submitted(ReferenceEngine(model), request_of([0, 1], eos_token_id=[], limit=9)), 2))
    engine = NativeEngine(model, num_slots=2 * SLOT_TILE)
    engine.submit([*others, *kept])  # the last slots
    found = {}
    while not {0, 1} <= found.keys():
        found |= {sample.id: sample for sample in engine.advance()}
    engine.advance()
    first = {one: found[one].response.tolist() for one in (0, 1)}
    for one in (0, 1):
        engine.extend(one, [], 5)
    while not all(len(found[one].response) == 5 for one in (0, 1)):
        found |= {sample.id: sample for sample in engine.advance()}
    assert {one: first[one] + found[one].response.tolist() for one in (0, 1)} == whole


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_sample_goes_on_in_any_dtype(model, dtype):
    model.to(dtype)
    engine = submitted(NativeEngine(model, num_slots=4), request_of([0, 1], eos_token_id=[], limit=4, is_kept=True))
    first = finish(engine, 2)
    engine.extend(0, [5, 6], 4)
    second = finish(engine, 1)[0]
    expected = submitted(ReferenceEngine(model), request_of([0, 1], eos_token_id=[], limit=4, is_kept=True))
    finish(expected, 2)
    expected.extend(0, [5, 6], 4)
    if dtype != torch.bfloat16:  # whose rounding may change a draw
        assert texts({0: second}) == texts(finish(expected, 1))
    assert all(response.log_probs.isfinite().all() for response in (*first.values(), second))


@pytest.mark.parametrize("name", ["o_proj", "input_layernorm", "q_proj"])
def test_weights_that_take_the_place_of_others_are_found_by_the_next_step(model, name):
    generator = torch.Generator().manual_seed(1)
    engines = []
    for one in (model, llama(0, num_hidden_layers=2, initializer_range=0.3)):
        make = NativeEngine if one is model else ReferenceEngine
        engines.append(submitted(make(one), request_of([0, 1], eos_token_id=[])))
        for _ in range(3):
            engines[-1].advance()
    weights = {
        key: weight + torch.randn(weight.shape, generator=generator)
        for key, weight in model.state_dict().items()
        if f".1.self_attn.{name}" in key or f".1.{name}" in key
    }
    for engine in engines:
        copied = {key: weight.clone() for key, weight in weights.items()}
        engine.model.load_state_dict(copied, strict=False, assign=True)
    assert_same(*[finish(engine, 2) for engine in engines])


def test_weights_that_moved_are_found_by_the_next_step(model):
    """Another engine on the same model joins its weights, and moves them if they were moved since."""
    engine = submitted(NativeEngine(model, num_slots=4), request_of([0, 1], eos_token_id=[]))
    engine.advance()
    for parameter in model.parameters():
        parameter.data = parameter.data * 1.5
    expected = submitted(
        ReferenceEngine(llama(0, num_hidden_layers=2, initializer_range=0.3)), request_of([0, 1], eos_token_id=[])
    )
    expected.advance()
    for parameter in expected.model.parameters():
        parameter.data = parameter.data * 1.5
    assert_same(finish(engine, 2), finish(expected, 2))


def test_what_broken_weights_wrote_does_not_move_with_the_cache(model):
    ids = range(2 * SLOT_TILE)
    weight = model.model.layers[0].self_attn.v_proj.weight
    good = weight.detach().clone()
    engine = NativeEngine(model, num_slots=len(ids))
    with torch.no_grad():
        weight.fill_(torch.nan)
    engine.submit(with_limits(request_of(ids, eos_token_id=[]), *[LONG] * 31, SHORT))
    for _ in range(4):
        engine.advance()
    engine.cancel(range(5, 60))
    engine.advance()
    engine.cancel(ids)
    with torch.no_grad():
        weight.copy_(good)
    again = request_of(ids, eos_token_id=[])
    assert_same(finish(submitted(engine, again), len(ids)), finish(submitted(ReferenceEngine(model), again), len(ids)))


@pytest.mark.parametrize("num_heads", [1, 3])
@pytest.mark.parametrize("num_threads", [1, 3, 4])
def test_samples_do_not_depend_on_the_others_with_several_threads(num_heads, num_threads):
    torch.set_num_threads(num_threads)
    model = llama(0, initializer_range=0.3, hidden_size=24, num_attention_heads=num_heads, num_key_value_heads=1)
    alone = finish(submitted(NativeEngine(model, num_slots=4), request_of([0, 1], eos_token_id=[])), 2)
    among = finish(submitted(NativeEngine(model, num_slots=3 * SLOT_TILE), request_of(range(90), eos_token_id=[])), 90)
    for one in (0, 1):
        assert alone[one].log_probs.tolist() == among[one].log_probs.tolist()


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_column_does_not_depend_on_the_number_of_columns(dtype):
    """Where one product of many columns has other bits than products of a tile, tiles are computed."""
    generator = torch.Generator().manual_seed(0)
    operations = ColumnOperations(GEOMETRY, dtype)
    for size, outputs in [(24, 40), (1024, 256)]:  # MKL's sums over 1,024 depend on the number of columns
        layer = nn.Linear(size, outputs).to(dtype)
        tile = torch.randn(size, SLOT_TILE, generator=generator, dtype=operations.dtype)
        expected = operations.product(layer, Columns(tile)).array.copy()
        for num_tiles in (2, 3, 8):
            columns = torch.randn(size, num_tiles * SLOT_TILE, generator=generator, dtype=operations.dtype)
            columns[:, -SLOT_TILE:] = tile.flip(1)
            found = operations.product(layer, Columns(columns)).array[:, -SLOT_TILE:]
            assert (found == expected[:, ::-1]).all(), (size, num_tiles)


GEOMETRY = Geometry(head_dim=8, num_kv_heads=2, group=3, scale=0.3, rotary_dim=8)


def test_attention_matches_that_of_rows_and_does_not_depend_on_the_others():
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(shape, generator=generator)

    count, length, heads = 2 * SLOT_TILE, 20, 2
    block = SimpleNamespace(rotation="", head_norms=None, window=None)
    angles = {"": (random(length, 8), random(length, 8))}
    projected = random(count, (3 + 2) * heads * 8)
    positions = torch.arange(count) % (length - 1)
    turns = {"": torch.cat(angles[""], dim=1).t().contiguous().numpy()}
    cached = random(2, count + 1, heads, length, 8)
    pages = torch.arange(1, count + 1).unsqueeze(1)
    rows = [tensor.clone() for tensor in cached]
    expected = TorchOperations(GEOMETRY).attention(positions, pages, length, length, angles)(projected, block, *rows)

    def mixed(first, last, num_positions):
        at = [0, *range(first + 1, last + 1)]
        array = torch.cat([part.permute(2, 1, 3, 0)[..., at] for part in cached], dim=1).contiguous().numpy()
        attend = ColumnOperations(GEOMETRY, torch.float32).attention(
            positions.numpy()[first:last], np.arange(last - first), num_positions, turns
        )
        return attend(Columns(projected[first:last].t().contiguous()), block, array).array, array

    whole, array = mixed(0, count, length)
    torch.testing.assert_close(torch.from_numpy(whole.T.copy()), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        torch.from_numpy(array).permute(3, 1, 0, 2), torch.cat(rows, dim=1), atol=1e-5, rtol=1e-5
    )
    part, _ = mixed(SLOT_TILE, count, length - 1)
    assert (part == whole[:, SLOT_TILE:]).all()


def test_unused_slots_write_nothing():
    cached = torch.randn(4, 4, 8, SLOT_TILE + 1)
    before = cached.clone()
    used = np.array([1, 30])
    block = SimpleNamespace(rotation="")
    angles = {"": np.ones((16, 4), np.float32)}
    attend = ColumnOperations(GEOMETRY, torch.float32).attention(np.full(SLOT_TILE, 3), used, 4, angles)
    attend(Columns(torch.randn(2 * 5 * 8, SLOT_TILE)), block, cached.numpy())
    changed = (cached != before).flatten(0, 2).any(dim=0).nonzero().flatten()
    assert changed.tolist() == (used + 1).tolist()
