"""Log-probs from hidden states: the same values and gradients as from logits, without storing the logits."""

import functools
import math
import shutil

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from coati.algos.logprobs import (
    _compiled,
    _compiles,
    _gradient_in_place,
    head_logprobs_and_entropy,
)


def log_softmax(logits, temperature):
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return (wide / torch.as_tensor(temperature, dtype=wide.dtype).reshape(-1, 1)).log_softmax(-1)


def logprobs_of(logits, tokens, *, temperature=1.0):
    """The definition, in plain autograd."""
    return log_softmax(logits, temperature).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def entropy_of(logits, *, temperature=1.0):
    log_p = log_softmax(logits, temperature)
    return -(log_p.exp() * log_p).sum(-1)


def random_case(seed, *, tokens=6, width=4, vocab=7, with_bias=False, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape, scale=1.0):
        return (torch.randn(*shape, generator=generator, dtype=torch.float64) * scale).to(dtype)

    return (
        noise(tokens, width).requires_grad_(),
        noise(vocab, width, scale=1.5).requires_grad_(),
        noise(vocab).requires_grad_() if with_bias else None,
        torch.randint(vocab, (tokens,), generator=generator),
    )


def test_by_hand():
    # One dimension, weights log 1, log 2, log 5, hidden 1: probabilities 1/8, 2/8, 5/8.
    weight = torch.tensor([[1.0], [2.0], [5.0]], dtype=torch.float64).log().requires_grad_()
    hidden = torch.ones(1, 1, dtype=torch.float64, requires_grad=True)
    logprobs, entropy = head_logprobs_and_entropy(hidden, weight, torch.tensor([2]))
    assert logprobs.item() == pytest.approx(math.log(5 / 8))
    assert entropy.item() == pytest.approx(-sum(p * math.log(p) for p in (1 / 8, 2 / 8, 5 / 8)))
    logprobs.sum().backward()
    # Gradient of the head: onehot - p. Of the hidden state: the weight of the token minus the mean weight.
    torch.testing.assert_close(weight.grad.squeeze(1), torch.tensor([-1 / 8, -2 / 8, 3 / 8], dtype=torch.float64))
    assert hidden.grad.item() == pytest.approx(math.log(5) - 2 / 8 * math.log(2) - 5 / 8 * math.log(5))
    # Temperature 1/2 squares the odds: 1, 4, 25 of 30. A bias of log 3 on the first token: 3, 2, 5 of 10.
    squared, _ = head_logprobs_and_entropy(hidden, weight, torch.tensor([1]), temperature=0.5)
    assert squared.item() == pytest.approx(math.log(4 / 30))
    bias = torch.tensor([3.0, 1.0, 1.0], dtype=torch.float64).log()
    moved, none = head_logprobs_and_entropy(hidden, weight, torch.tensor([0]), bias=bias, with_entropy=False)
    assert moved.item() == pytest.approx(math.log(3 / 10))
    assert none is None


@given(
    seed=st.integers(0, 2**31),
    tokens=st.integers(0, 9),
    vocab=st.integers(1, 9),
    chunk_tokens=st.integers(0, 10),
    temperature=st.sampled_from([1.0, 0.7, "per token"]),
    with_bias=st.booleans(),
    grads=st.sampled_from(["logprobs", "entropy", "both"]),
)
def test_values_and_gradients_match_those_from_logits(seed, tokens, vocab, chunk_tokens, temperature, with_bias, grads):
    hidden, weight, bias, targets = random_case(seed, tokens=tokens, vocab=vocab, with_bias=with_bias)
    if temperature == "per token":
        temperature = torch.linspace(0.5, 2.0, tokens)
    inputs = [tensor for tensor in (hidden, weight, bias) if tensor is not None]
    logits = F.linear(hidden, weight, bias)
    plain = logprobs_of(logits, targets, temperature=temperature), entropy_of(logits, temperature=temperature)
    options = {"temperature": temperature, "chunk_tokens": chunk_tokens}
    factors = torch.randn(2, tokens, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64)
    used = [which for which, name in enumerate(("logprobs", "entropy")) if grads in (name, "both")]
    ours = head_logprobs_and_entropy(hidden, weight, targets, bias=bias, **options)
    expected, came = (
        torch.autograd.grad(sum((factors[which] * pair[which]).sum() for which in used), inputs)
        for pair in (plain, ours)
    )
    for mine, reference in zip((*ours, *came), (*plain, *expected), strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("with_bias", [False, True])
def test_gradients_match_finite_differences(with_bias):
    hidden, weight, bias, targets = random_case(3, tokens=5, width=3, vocab=4, with_bias=with_bias)
    temperature = torch.linspace(0.5, 2.0, 5, dtype=torch.float64)

    def scores(hidden, weight, bias):
        return head_logprobs_and_entropy(hidden, weight, targets, bias=bias, temperature=temperature, chunk_tokens=2)

    assert torch.autograd.gradcheck(scores, (hidden, weight, bias))


def test_an_impossible_token_adds_nothing():
    # Two of three tokens are equally likely: entropy log 2, whose gradient is zero because it is the maximum.
    hidden = torch.zeros(1, 1, dtype=torch.float64, requires_grad=True)
    weight = torch.ones(3, 1, dtype=torch.float64, requires_grad=True)
    bias = torch.tensor([0.0, 0.0, -torch.inf], dtype=torch.float64)
    logprobs, entropy = head_logprobs_and_entropy(hidden, weight, torch.tensor([1]), bias=bias)
    (logprobs + entropy).sum().backward()
    assert logprobs.item() == pytest.approx(-math.log(2))
    assert entropy.item() == pytest.approx(math.log(2))
    assert torch.equal(weight.grad, torch.zeros_like(weight))
    assert hidden.grad.item() == pytest.approx(0.0)


def test_a_frozen_head_gets_no_gradient_and_a_tied_one_both():
    hidden, weight, _, targets = random_case(4, tokens=3, vocab=7)
    logprobs, _ = head_logprobs_and_entropy(hidden, weight.detach(), targets)
    logprobs.sum().backward()
    assert hidden.grad.abs().sum() > 0
    ids = torch.tensor([0, 5, 2])
    by_ours, by_logits = (
        torch.autograd.grad(scores.sum(), weight)[0]
        for scores in (
            head_logprobs_and_entropy(F.embedding(ids, weight), weight, targets, chunk_tokens=2)[0],
            logprobs_of(F.linear(F.embedding(ids, weight), weight), targets),
        )
    )
    torch.testing.assert_close(by_ours, by_logits, rtol=1e-12, atol=1e-12)


def test_bfloat16_is_widened_for_the_softmax_and_for_sums_over_tokens():
    hidden, weight, _, targets = random_case(5, tokens=64, width=8, vocab=16, dtype=torch.bfloat16)
    logits = F.linear(hidden, weight)
    logprobs, entropy = head_logprobs_and_entropy(hidden, weight, targets, chunk_tokens=4)
    assert (logprobs.dtype, entropy.dtype) == (torch.float32, torch.float32)
    torch.testing.assert_close(logprobs, logprobs_of(logits, targets), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(entropy, entropy_of(logits), rtol=1e-5, atol=1e-5)
    grad = torch.autograd.grad(logprobs.sum(), weight)[0]
    exact_inputs = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    exact, _ = head_logprobs_and_entropy(*exact_inputs, targets)
    expected = torch.autograd.grad(exact.sum(), exact_inputs[1])[0]
    assert grad.dtype == torch.bfloat16
    # Adding up 16 chunks in bfloat16 would give an error several times as large.
    assert (grad.double() - expected).norm() / expected.norm() < 0.01


def test_under_autocast_logits_are_bfloat16_and_gradients_have_the_weights_dtype():
    hidden, weight, _, targets = random_case(6, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logprobs, _ = head_logprobs_and_entropy(hidden, weight, targets)
        expected = logprobs_of(F.linear(hidden, weight), targets)
    assert torch.allclose(logprobs, expected, atol=1e-6)
    assert not torch.allclose(logprobs, logprobs_of(hidden @ weight.T, targets), atol=1e-6)
    grads = torch.autograd.grad(logprobs.sum(), (hidden, weight))
    assert {grad.dtype for grad in grads} == {torch.float32}


class LargestTensor(TorchDispatchMode):
    """Records the number of elements of the largest result of any operation."""

    def __init__(self):
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.numel())
        return result


@pytest.mark.parametrize("entropy_coef", [0.0, 1.0])
def test_no_tensor_has_tokens_times_vocabulary_elements(entropy_coef):
    hidden, weight, _, targets = random_case(7, tokens=64, width=4, vocab=32, dtype=torch.float32)
    chunk = 8
    with LargestTensor() as ours:
        logprobs, entropy = head_logprobs_and_entropy(hidden, weight, targets, chunk_tokens=chunk)
        (logprobs.sum() + (entropy_coef * entropy.sum() if entropy_coef else 0.0)).backward()
    assert ours.largest == max(chunk * 32, 64 * 4)
    with LargestTensor() as plain:  # the control: the plain definition does
        logprobs_of(F.linear(hidden, weight), targets).sum().backward()
    assert plain.largest == 64 * 32


def test_an_impossible_token_has_no_gradient_for_a_large_entropy_gradient():
    bias = torch.tensor([0.0, 0.0, -torch.inf])
    weight = torch.ones(3, 1, requires_grad=True)
    _, entropy = head_logprobs_and_entropy(torch.ones(1, 1), weight, torch.tensor([0]), bias=bias)
    (1e6 * entropy).sum().backward()
    assert weight.grad.tolist() == [[0.0]] * 3  # two equally likely tokens: the entropy is at its maximum


def test_a_device_that_cannot_compile_gives_a_warning(monkeypatch):
    def fail(*_):
        raise RuntimeError("backend='inductor' raised:\nRuntimeError: Failed to find C compiler.\n\nmore")

    monkeypatch.setattr(torch, "compile", lambda _: fail)
    with pytest.warns(RuntimeWarning, match="C compiler"):
        assert not _compiles.__wrapped__(torch.device("meta"))


@pytest.mark.parametrize(
    ("dtype", "temperature", "entropy_coef"), [(torch.float32, 0.7, 0.3), (torch.bfloat16, 1.0, 0.0)]
)
def test_compiled_results_match_for_any_number_of_tokens(monkeypatch, dtype, temperature, entropy_coef):
    from torch._dynamo.testing import CompileCounterWithBackend  # slow to import

    counter = CompileCounterWithBackend("aot_eager")  # compiles like a GPU, without a compiler
    compile_by = functools.partial(torch.compile, backend=counter)
    monkeypatch.setattr("coati.algos.logprobs._compiled", functools.cache(lambda f: _compiled_by(f, compile_by)))
    torch.manual_seed(0)
    weight = torch.randn(33, 8).to(dtype).requires_grad_()
    bias = torch.randn(33).to(dtype).requires_grad_()
    for num_tokens in (7, 4, 11, 16):  # chunks of 4, with remainders of 3 and 0
        hidden, targets = torch.randn(num_tokens, 8).to(dtype).requires_grad_(), torch.randint(33, (num_tokens,))
        results = []
        for compiles in (False, True):
            monkeypatch.setattr("coati.algos.logprobs._compiles", lambda _, compiles=compiles: compiles)
            logprobs, entropy = head_logprobs_and_entropy(
                hidden, weight, targets, bias=bias, temperature=temperature, chunk_tokens=4
            )
            loss = (logprobs * logprobs.detach()).sum() + entropy_coef * entropy.sum()
            results.append((logprobs, entropy, *torch.autograd.grad(loss, (hidden, weight, bias))))
        for plain, compiled in zip(*results, strict=True):
            error = (compiled - plain).float().norm() / plain.float().norm()
            assert error < (1e-5 if dtype == torch.float32 else 1e-2)
    assert counter.frame_count == 2  # the forward and the gradient function


def test_compiled_code_accepts_no_tokens(monkeypatch):
    monkeypatch.setattr("coati.algos.logprobs._compiles", lambda _: True)
    monkeypatch.setattr("coati.algos.logprobs._compiled", lambda function: function)  # importing inductor takes 1 s
    hidden, weight, _, targets = random_case(0, tokens=0)
    logprobs, entropy = head_logprobs_and_entropy(hidden, weight, targets)
    grads = torch.autograd.grad(logprobs.sum() + entropy.sum(), (hidden, weight))
    assert (logprobs.shape, entropy.shape) == ((0,), (0,))
    assert not any(grad.any() for grad in grads)


def _compiled_by(function, compile_function):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", compile_function)
        return _compiled.__wrapped__(function)


@pytest.mark.long  # torch compiles C++
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize("has_entropy", [True, False])
def test_the_compiled_gradient_holds_no_second_copy_of_the_logits(has_entropy):
    from torch._inductor.utils import run_and_get_code  # slow to import

    torch._dynamo.reset()
    logits, tokens, ones = torch.randn(8, 512, dtype=torch.bfloat16), torch.arange(8), torch.ones(8)
    given = (None, torch.ones(8, 2), ones, ones if has_entropy else None, ones)
    _, [code] = run_and_get_code(_compiled.__wrapped__(_gradient_in_place), logits, tokens, *given)
    assert "_strided_cpu((s" in code  # the values at the tokens
    assert "512), (512, 1)" not in "".join(line for line in code.splitlines() if "= empty_strided" in line)
