"""The Triton kernels of a decode step against the torch functions that define them.

Without a GPU they run in Triton's interpreter, where Triton is installed:

    TRITON_INTERPRET=1 pytest tests/unit/rollout/test_native_kernels.py
"""

import os
from types import SimpleNamespace

import pytest
import tiny
import torch
import transformers

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.skipif(
    DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs a CUDA device, or TRITON_INTERPRET=1",
)

from tiny import samples_of  # noqa: E402

from coati.rollout import GenerateOptions, ReferenceEngine, generate  # noqa: E402
from coati.rollout.native import NativeEngine, decoder, kernels  # noqa: E402
from coati.rollout.native.operations import (  # noqa: E402
    Geometry,
    TorchOperations,
    TritonOperations,
    kernel_problem,
)
from coati.rollout.sampling import inverse_cdf  # noqa: E402

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def dtype(request):
    if DEVICE == "cpu" and request.param == torch.bfloat16:
        pytest.skip("the interpreter has no bfloat16")
    return request.param


def norm_of(width, dtype, seed=9, *, is_shifted=False):
    weight = 1 + 0.1 * random(width, seed=seed, dtype=dtype)
    return SimpleNamespace(weight=weight, **{"eps" if is_shifted else "variance_epsilon": 1e-6})


@pytest.mark.parametrize("width", [64, 96, 896])
@pytest.mark.parametrize("has_delta", [True, False])
@pytest.mark.parametrize("is_shifted", [True, False])
def test_add_norm(width, has_delta, is_shifted, dtype):
    hidden = random(5, width, dtype=dtype)
    delta = random(5, width, seed=1, dtype=dtype) if has_delta else None
    geometry = Geometry(head_dim=16, num_kv_heads=1, group=1, scale=1.0, rotary_dim=16)
    norm = norm_of(width, dtype, is_shifted=is_shifted)
    expected = TorchOperations(geometry).add_norm(hidden, delta, norm)
    found = TritonOperations(geometry).add_norm(hidden, delta, norm)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("shape", [(3,), (2, 3), (1, 4)])
def test_gated(shape, dtype):
    both = random(*shape, 2 * 1500, dtype=dtype)
    expected = torch.nn.functional.silu(both[..., :1500]) * both[..., 1500:]
    torch.testing.assert_close(kernels.gated(both), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize(("num_kv_heads", "group", "dim"), [(2, 7, 64), (1, 1, 16), (4, 2, 32), (2, 20, 16)])
@pytest.mark.parametrize(
    ("norms", "rotary_share", "window"),
    [(None, 1, None), ("llama", 1, None), ("gemma", 1, 40), (None, 0.5, 640), (None, 0, None)],
)
@pytest.mark.parametrize("page_size", [16, 64])
def test_attention_writes_and_reads_the_cache(num_kv_heads, group, dim, norms, rotary_share, window, page_size, dtype):
    """Texts of different lengths, one of them empty, in shuffled pages; the longest is read in parts."""
    width = 1024 // page_size
    positions = torch.tensor([0, 5, 64, 301, 1000], device=DEVICE)
    order = torch.randperm(5 * width, generator=torch.Generator().manual_seed(8))
    pages = 1 + order.view(5, width).to(DEVICE)
    turned = int(rotary_share * dim)
    geometry = Geometry(head_dim=dim, num_kv_heads=num_kv_heads, group=group, scale=dim**-0.5, rotary_dim=turned)
    head_norms = tuple(norm_of(dim, dtype, seed, is_shifted=norms == "gemma") for seed in (9, 3)) if norms else None
    block = SimpleNamespace(rotation="", head_norms=head_norms, window=window)
    projected = random(5, (group + 2) * num_kv_heads * dim, dtype=dtype)
    angles = random(1024, dim, seed=4, dtype=dtype), random(1024, dim, seed=5, dtype=dtype)
    angles[0][:, turned:], angles[1][:, turned:] = 1.0, 0.0
    results = []
    for operations in (TorchOperations(geometry), TritonOperations(geometry)):
        shape = (5 * width + 1, num_kv_heads, page_size, dim)
        keys, values = (random(*shape, seed=seed, dtype=dtype) for seed in (6, 7))
        attend = operations.attention(positions, pages, page_size, 1001, {"": angles})
        mixed = [attend(projected, block, keys, values) for _ in range(2)]  # a call resets its counters
        split = operations.head_split(positions, {"": angles})(projected, block)  # as in prefill
        results.append((*mixed, keys, values, *split))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, atol=2 * TOLERANCE[dtype], rtol=2 * TOLERANCE[dtype])


@pytest.mark.parametrize(("slots", "least", "count"), [(16, 256, 5), (32, 512, 4), (33, 1024, 3)])
def test_many_texts_are_read_in_fewer_parts(slots, least, count, dtype):
    """Most texts are short. Of the long ones some are read in parts, whose results are combined."""
    geometry = Geometry(head_dim=16, num_kv_heads=4, group=2, scale=0.25, rotary_dim=16)
    positions = torch.arange(slots, device=DEVICE)
    positions[:4] = torch.tensor([2299, 1025, 1024, 513])
    parts = kernels.Parts(positions, 2300, geometry)
    assert (parts.least, parts.count) == (least, count)
    pages = 1 + torch.arange(slots * 36, device=DEVICE).view(slots, 36)
    projected = random(slots, 16 * 16, dtype=dtype)
    angles = random(2304, 16, seed=4, dtype=dtype), random(2304, 16, seed=5, dtype=dtype)
    keys, values = (random(slots * 36 + 1, 4, 64, 16, seed=seed, dtype=dtype) for seed in (6, 7))
    block = SimpleNamespace(rotation="", head_norms=None, window=None)
    expected, found = (
        operations.attention(positions, pages, 64, 2300, {"": angles})(projected, block, keys.clone(), values.clone())
        for operations in (TorchOperations(geometry), TritonOperations(geometry))
    )
    torch.testing.assert_close(found, expected, atol=2 * TOLERANCE[dtype], rtol=2 * TOLERANCE[dtype])


@pytest.mark.parametrize("vocabulary", [56, 2048, 5000])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_draws_match_the_inverse_cdf(vocabulary, temperature, dtype):
    logits = 3 * random(32, vocabulary, dtype=dtype)
    uniforms = torch.rand(32, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    uniforms[0], uniforms[1] = 0.0, 0.999
    tokens, log_probs = kernels.draw(logits, uniforms, temperature)
    expected = torch.log_softmax(logits.float() / temperature, dim=-1)
    drawn = torch.stack([inverse_cdf(expected, (uniforms + nudge).clamp(0.0, 1.0)) for nudge in (-1e-6, 0.0, 1e-6)])
    # Equal, or adjacent if the uniform number is within rounding of the boundary between two tokens.
    assert (tokens == drawn).any(dim=0).all()
    assert (tokens == drawn[1]).sum() >= 31
    torch.testing.assert_close(log_probs, expected.gather(1, tokens[:, None]).squeeze(1), atol=1e-5, rtol=1e-5)


def test_a_token_without_mass_is_never_drawn():
    logits = torch.full((3, 5000), float("-inf"), device=DEVICE)
    logits[:, 4321] = 1.0
    logits[2, 7] = 1.0
    uniforms = torch.tensor([0.0, 1.0 - 2**-53, 0.25], dtype=torch.float64, device=DEVICE)
    tokens, log_probs = kernels.draw(logits, uniforms, 1.0)
    assert tokens.tolist() == [4321, 4321, 7]
    torch.testing.assert_close(log_probs.exp().cpu(), torch.tensor([1.0, 1.0, 0.5]))


def test_nan_logits_give_nan_log_probs_and_a_valid_token():
    logits = torch.full((1, 5000), float("nan"), device=DEVICE)
    tokens, log_probs = kernels.draw(logits, torch.tensor([0.5], dtype=torch.float64, device=DEVICE), 1.0)
    assert 0 <= int(tokens) < 5000
    assert log_probs.isnan().all()


def test_kernels_with_wrong_results_are_not_used(monkeypatch):
    geometry = Geometry(head_dim=16, num_kv_heads=2, group=3, scale=0.25, rotary_dim=16)
    assert kernel_problem(torch.device(DEVICE), torch.float32, geometry) is None
    monkeypatch.setattr(kernels, "gated", lambda both: both[..., :48])
    kernel_problem.cache_clear()
    assert kernel_problem(torch.device(DEVICE), torch.float32, geometry) == (
        "their results differ from torch's (gated)"
    )
    kernel_problem.cache_clear()


@pytest.mark.parametrize("family", ["qwen2", "qwen3", *tiny.ARCHITECTURES])
@pytest.mark.parametrize("num_prompts", [1, 3, 4])  # prompts have 4 tokens: as many prompts as tokens, and fewer
@pytest.mark.parametrize("do_sample", [True, False])
def test_the_engine_matches_the_reference_engine(family, num_prompts, do_sample, monkeypatch):
    shape = {
        "vocab_size": 29, "hidden_size": 48, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3,
        "num_key_value_heads": 1, "max_position_embeddings": 64, "initializer_range": 0.4, "head_dim": 16,
    }  # fmt: skip
    torch.manual_seed(0)
    if family in tiny.ARCHITECTURES:
        sizes = {"head_dim": 16} if "gemma" in family else {"hidden_size": 64}
        sizes |= {"word_embed_proj_dim": 64} if family == "opt" else {}
        model = tiny.decoder(family, vocab_size=29, **sizes).to(DEVICE)
    else:
        config = transformers.Qwen2Config(**shape) if family == "qwen2" else transformers.Qwen3Config(**shape)
        model = transformers.AutoModelForCausalLM.from_config(config).eval().to(DEVICE)
    ids = torch.randint(3, 29, (num_prompts, 4), generator=torch.Generator().manual_seed(1))
    ids = ids.repeat_interleave(2, dim=0).to(DEVICE)  # two samples per prompt
    request = samples_of(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        sample_ids=torch.arange(len(ids)),
        seed=0,
        options=GenerateOptions.parse(eos_token_id=[2], pad_token_id=0, do_sample=do_sample),
        max_new_tokens=6,
    )
    monkeypatch.setattr(decoder, "operations_for", lambda _, geometry: TritonOperations(geometry))
    ours, theirs = generate(NativeEngine(model), request), generate(ReferenceEngine(model), request)
    assert ours.sequences.tolist() == theirs.sequences.tolist()
    torch.testing.assert_close(ours.action_log_probs, theirs.action_log_probs, atol=1e-4, rtol=1e-4)
