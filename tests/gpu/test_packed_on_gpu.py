"""Packed rows on a GPU: the half-precision kernel agrees with padding, and compiled blocks learn."""

import copy

import pytest
import torch
from torch.nn import functional as F
from transformers import Qwen2Config

from coati.algos.logprobs import head_logprobs_and_entropy, logprobs_and_entropy
from coati.models import Actor, action_logprobs, packed_attention
from coati.models.actor import Scoring, score_padded
from coati.models.packing import PackedRows

CONFIG = Qwen2Config(
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=1000,
    max_position_embeddings=512,
)


def actor_of(dtype):
    torch.manual_seed(0)
    return Actor.from_config(CONFIG, dtype=dtype).to("cuda").eval()


def ragged_batch():
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([300, 5, 40, 129, 256]).unsqueeze(1)
    mask = (torch.arange(300) < lengths).long()
    return torch.randint(3, 1000, mask.shape, generator=generator).cuda(), mask.cuda()


def grouped_batch():
    """Rows 1 to 4 have their first 200 tokens in common, which are computed once."""
    sequences, _ = ragged_batch()
    sequences[2:, :200] = sequences[1, :200]
    mask = (torch.arange(300) < torch.tensor([300, 300, 201, 250, 256]).unsqueeze(1)).long().cuda()
    assert PackedRows.of(sequences, mask).shared is not None
    return sequences, mask


BATCHES = {"ragged": ragged_batch, "grouped": grouped_batch}


def gradient(actor, logprobs):
    actor.zero_grad()
    logprobs.sum().backward()
    return torch.cat([p.grad.flatten().float() for p in actor.parameters()])


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.05), (torch.float32, 1e-4)])
def test_log_probs_and_gradients_are_those_of_the_padded_batch(dtype, tolerance, batch):
    actor, (sequences, mask) = actor_of(dtype), BATCHES[batch]()
    scored = mask[:, 1:].bool()
    padded, _ = score_padded(actor.model, sequences, mask, Scoring(299))
    expected = gradient(actor, padded[scored])
    packed, _ = action_logprobs(actor, sequences, mask, 299)
    assert packed_attention._FLASH is not None
    assert (packed - padded)[scored].abs().max() < tolerance
    ours = gradient(actor, packed[scored])
    assert (ours - expected).norm() / expected.norm() < tolerance


def test_float32_weights_compute_in_bfloat16_under_autocast():
    actor, (sequences, mask) = actor_of(torch.float32), ragged_batch()
    plain, _ = action_logprobs(actor, sequences, mask, 299)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        mixed, _ = action_logprobs(actor, sequences, mask, 299)
    assert not torch.equal(mixed, plain)
    assert (mixed - plain).abs().max() < 0.05
    assert gradient(actor, mixed).isfinite().all()
    assert all(parameter.grad.dtype == torch.float32 for parameter in actor.parameters())


def test_compiled_blocks_give_the_same_log_probs_for_any_batch():
    actor, (sequences, mask) = actor_of(torch.bfloat16), ragged_batch()
    compiled = copy.deepcopy(actor)
    for block in compiled.model.model.layers:
        block.compile(dynamic=True)
    whole = (sequences, mask)
    parts = [tuple(part[rows] for part in whole) for rows in (slice(0, 5), slice(0, 2), slice(1, 4))]
    for rows, attention_mask in (*parts, grouped_batch(), whole):
        expected, _ = action_logprobs(actor, rows, attention_mask, 299)
        logprobs, _ = action_logprobs(compiled, rows, attention_mask, 299)
        assert (logprobs - expected).abs().max() < 0.05
        one, other = gradient(compiled, logprobs), gradient(actor, expected)
        assert (one - other).norm() / other.norm() < 0.05


def test_memory_of_the_log_prob_step_does_not_grow_with_the_vocabulary_times_tokens(monkeypatch):
    monkeypatch.setattr("coati.algos.logprobs._CHUNK_BYTES", 256 * 32000 * 2)
    weight = torch.randn(32000, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    tokens = torch.randint(32000, (8192,), device="cuda")

    def peak(score):
        hidden = torch.randn(8192, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        score(hidden).sum().backward()
        return torch.cuda.max_memory_allocated() - before

    for _ in range(2):  # the first compiles, and tries kernels
        ours = peak(lambda hidden: head_logprobs_and_entropy(hidden, weight, tokens)[0])
    with_logits = peak(lambda hidden: logprobs_and_entropy(F.linear(hidden, weight), tokens)[0])
    assert with_logits > 8192 * 32000 * 2 * 2  # the logits, and their gradient
    assert ours < with_logits / 8
