"""Log-probs from hidden states on a GPU: compiled, and equal to torch's at realistic sizes."""

import warnings

import pytest
import torch
from torch.nn import functional as F

from coati.algos.logprobs import (
    _add_product,
    _compiled,
    _gradient_in_place,
    _read_off_at_once,
    head_logprobs_and_entropy,
    logprobs_and_entropy,
)

CUDA = torch.device("cuda")
VOCABULARY = 151_936


def random(*shape, seed=0, dtype=torch.bfloat16):
    generator = torch.Generator(device=CUDA).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=CUDA).to(dtype)


@pytest.mark.parametrize("chunk_tokens", [0, 130])
def test_numbers_and_gradients_are_those_of_the_logits(chunk_tokens):
    hidden, weight = random(500, 256), 0.2 * random(VOCABULARY, 256, seed=1)
    tokens = torch.randint(VOCABULARY, (500, 2), device=CUDA)[:, 1]  # with a stride, as a column of a batch has
    temperature = torch.linspace(0.5, 2.0, 500, device=CUDA)
    factors = random(2, 500, seed=2, dtype=torch.float32)
    results = []
    warnings.simplefilter("error", RuntimeWarning)  # what does not compile is computed all the same
    for way in ("head", "logits"):
        inputs = [tensor.detach().clone().requires_grad_() for tensor in (hidden, weight)]
        if way == "head":
            scores = head_logprobs_and_entropy(*inputs, tokens, temperature=temperature, chunk_tokens=chunk_tokens)
        else:
            scores = logprobs_and_entropy(F.linear(*inputs).float(), tokens, temperature=temperature, with_entropy=True)
        grads = torch.autograd.grad(sum((f * s).sum() for f, s in zip(factors, scores, strict=True)), inputs)
        results.append((*scores, *grads))
    for one, other in zip(*results, strict=True):
        assert one.isfinite().all()
        assert (one - other).float().norm() / other.float().norm() < 5e-3


def test_rows_beyond_two_to_the_31_logits():
    count = (1 << 31) // VOCABULARY + 100
    logits = random(1, VOCABULARY).expand(count, -1).contiguous()
    logits[-1] = random(VOCABULARY, seed=3)
    tokens = torch.full((count,), VOCABULARY - 1, device=CUDA)
    expected = logits[[0, -1]].float().log_softmax(-1)
    logprobs, _, sums = _compiled(_read_off_at_once)(logits, tokens, None, False)
    torch.testing.assert_close(logprobs[[0, -1]], expected[:, -1], rtol=1e-5, atol=1e-5)
    ones = torch.ones(count, device=CUDA)
    gradient, of_tokens = _compiled(_gradient_in_place)(logits, tokens, None, sums, ones, None, None)
    gradient = gradient[[0, -1]]
    assert of_tokens[[0, -1], 0].tolist() == pytest.approx((1 - expected[:, -1].exp()).tolist(), rel=1e-2)
    torch.testing.assert_close(gradient[:, :-1].float(), -expected[:, :-1].exp(), rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_of_half_precision_are_added_up_in_float32(dtype):
    left, right = random(300, 1000, dtype=dtype), random(300, 64, seed=1, dtype=dtype)
    total = random(1000, 64, seed=2, dtype=torch.float32)
    expected, address = total.double(), total.data_ptr()
    for _ in range(8):
        _add_product(total, left.T, right)
        expected += left.T.double() @ right.double()
    assert total.data_ptr() == address
    assert (total - expected).norm() / expected.norm() < 2e-3


def test_a_chunk_of_logits_exists_once():
    hidden, weight = random(20_000, 64).requires_grad_(), random(VOCABULARY, 64, seed=1).requires_grad_()
    tokens = torch.randint(VOCABULARY, (20_000,), device=CUDA)
    sum(map(torch.sum, head_logprobs_and_entropy(hidden, weight, tokens))).backward()  # compiles
    hidden.grad = weight.grad = None
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    logprobs, entropy = head_logprobs_and_entropy(hidden, weight, tokens)
    (logprobs.sum() + entropy.sum()).backward()
    heads = 64 * VOCABULARY * (4 + 2 + 2)  # its gradient, in float32 and narrowed, and what one product may take
    assert torch.cuda.max_memory_allocated() - before < 1.1 * 2**30 + heads
