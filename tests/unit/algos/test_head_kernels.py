"""The Triton kernels of a chunk of logits against the torch functions that define them.

Without a GPU they run in Triton's interpreter, where Triton is installed:

    TRITON_INTERPRET=1 pytest tests/unit/algos/test_head_kernels.py
"""

import math
import os

import pytest
import torch

pytest.importorskip("triton")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = pytest.mark.skipif(
    DEVICE.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs a CUDA device, or TRITON_INTERPRET=1",
)

from coati.algos.head_kernels import gradient_in_place, read_off  # noqa: E402
from coati.algos.logprobs import TORCH_HEAD, HeadOperations, head_logprobs_and_entropy  # noqa: E402

KERNELS = HeadOperations(read_off, gradient_in_place)

# Of float32 arithmetic, and of one rounding to the format that gradients are written in.
EXACT = {"rtol": 1e-5, "atol": 2e-6}
ROUNDED = {
    torch.float32: EXACT,
    torch.bfloat16: {"rtol": 1e-2, "atol": 1e-6},
    torch.float16: {"rtol": 2e-3, "atol": 1e-6},
}


@pytest.fixture(params=[torch.float32, torch.float16, torch.bfloat16], ids=["float32", "float16", "bfloat16"])
def dtype(request):
    if DEVICE.type == "cpu" and request.param == torch.bfloat16:
        pytest.skip("the interpreter has no bfloat16")
    return request.param


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


# One step of a row is 4,096 logits in half precision and 2,048 in float32.
@pytest.mark.parametrize("vocabulary", [1, 57, 4096, 10001])
@pytest.mark.parametrize("temperatures", [None, [0.7, 1.0, 2.0]])
@pytest.mark.parametrize("grads", ["logprobs", "entropy", "both"])
def test_numbers_and_gradients_are_torchs(vocabulary, temperatures, grads, dtype):
    logits = 4 * random(3, vocabulary, dtype=dtype)
    tokens = torch.tensor([0, vocabulary // 2, vocabulary - 1], device=DEVICE)
    scale = None if temperatures is None else torch.tensor(temperatures, device=DEVICE).unsqueeze(1)
    by_logprob, by_entropy = random(2, 3, seed=1)
    results = []
    for head in (KERNELS, TORCH_HEAD):
        logprobs, entropy, sums = head.read_off(logits, tokens, scale, with_entropy=True)
        given = (by_logprob if grads != "entropy" else None, by_entropy if grads != "logprobs" else None, entropy)
        results.append((logprobs, entropy, head.gradient(logits.clone(), tokens, scale, sums, *given)))
    ours, theirs = results
    torch.testing.assert_close(ours[0], theirs[0], **EXACT)
    torch.testing.assert_close(ours[1], theirs[1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours[2], theirs[2], **ROUNDED[dtype])
    assert ours[2].dtype == dtype


def test_without_entropy_none_is_read_off(dtype):
    logits, tokens = random(2, 100, dtype=dtype), torch.tensor([3, 99], device=DEVICE)
    logprobs, entropy, _ = KERNELS.read_off(logits, tokens, None, with_entropy=False)
    assert entropy is None
    torch.testing.assert_close(logprobs, logits.float().log_softmax(-1)[[0, 1], [3, 99]], **EXACT)


def test_tokens_that_cannot_come_add_nothing():
    # Two tokens possible, equally, one of them far behind a first step of nothing but -inf: p 1/2, entropy log 2.
    logits = torch.full((1, 9000), -torch.inf, device=DEVICE)
    logits[0, [2, 8000]] = 5.0
    head, tokens = KERNELS, torch.tensor([8000], device=DEVICE)
    logprobs, entropy, sums = head.read_off(logits, tokens, None, with_entropy=True)
    assert logprobs.item() == pytest.approx(-math.log(2))
    assert entropy.item() == pytest.approx(math.log(2))
    ones = torch.ones(1, device=DEVICE)
    gradient = head.gradient(logits, tokens, None, sums, ones, ones, entropy)
    expected = torch.zeros_like(gradient)
    expected[0, 2], expected[0, 8000] = -0.5, 0.5  # the largest entropy there is has no gradient
    torch.testing.assert_close(gradient, expected)


def test_an_impossible_token_and_one_out_of_range():
    logits = random(2, 50)
    logits[0, 7] = -torch.inf
    logprobs, entropy, _ = KERNELS.read_off(logits, torch.tensor([7, 50], device=DEVICE), None, with_entropy=True)
    assert logprobs[0].item() == -math.inf
    assert logprobs[1].isnan()  # and no memory of somebody else's
    assert entropy.isfinite().all()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_with_nan_or_infinity_is_nan_and_its_neighbour_is_not(bad):
    logits = random(2, 6000)
    logits[0, 5990] = bad
    tokens = torch.tensor([1, 1], device=DEVICE)
    head = KERNELS
    logprobs, entropy, sums = head.read_off(logits, tokens, None, with_entropy=True)
    assert logprobs.isnan().tolist() == entropy.isnan().tolist() == [True, False]
    ones = torch.ones(2, device=DEVICE)
    gradient = head.gradient(logits, tokens, None, sums, ones, ones, entropy)
    assert gradient[0].isnan().any()
    assert gradient[1].isfinite().all()


def test_a_likely_token_keeps_the_digits_of_its_gradient():
    # One logit of 300 above ten of 290: 1 - p is 10 e^-10 / (1 + 10 e^-10), a difference of numbers near 1.
    logits = torch.full((1, 11), 290.0, device=DEVICE)
    logits[0, 4] = 300.0
    head, tokens, ones = KERNELS, torch.tensor([4], device=DEVICE), torch.ones(1, device=DEVICE)
    _, _, sums = head.read_off(logits, tokens, None, with_entropy=False)
    gradient = head.gradient(logits, tokens, None, sums, ones, None, None)
    rest = 10 * math.exp(-10)
    assert gradient[0, 4].item() == pytest.approx(rest / (1 + rest), abs=5e-7)  # as near as float32 is to 1


@pytest.mark.parametrize("chunk_tokens", [0, 3])
@pytest.mark.parametrize("temperature", [1.0, 0.7, "per token"])
def test_the_whole_function_with_kernels_gives_what_it_gives_with_torch(chunk_tokens, temperature, dtype, monkeypatch):
    hidden, weight = random(8, 16, dtype=dtype), random(300, 16, seed=1, dtype=dtype)
    bias, tokens = random(300, seed=2, dtype=dtype), torch.arange(0, 240, 30, device=DEVICE)
    if temperature == "per token":
        temperature = torch.linspace(0.5, 2.0, 8, device=DEVICE)
    results = []
    for head in (KERNELS, TORCH_HEAD):
        monkeypatch.setattr("coati.algos.logprobs.head_operations", lambda *_, head=head: head)
        inputs = [tensor.clone().requires_grad_() for tensor in (hidden, weight, bias)]
        logprobs, entropy = head_logprobs_and_entropy(
            *inputs[:2], tokens, bias=inputs[2], temperature=temperature, chunk_tokens=chunk_tokens
        )
        # A sum has a gradient that is one number, spread out: not as it lies in memory.
        results.append((logprobs, entropy, *torch.autograd.grad(logprobs.sum() + 0.1 * entropy.sum(), inputs)))
    tolerance = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, **tolerance)
