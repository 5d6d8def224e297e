import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from coati.algos.logprobs import logprobs_and_entropy
from coati.errors import ConfigError

NAN, INF = float("nan"), float("inf")


def random_case(seed, *, batch=2, length=5, vocab=7, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(batch, length, vocab, generator=generator, dtype=torch.float64) * 3
    return logits.to(dtype), torch.randint(vocab, (batch, length), generator=generator)


def plain(logits, tokens, temperature=1.0):
    """The definition, in plain autograd, with one temperature per sample or for all."""
    temperature = torch.as_tensor(temperature, dtype=logits.dtype)
    log_p = (logits / temperature.reshape(*temperature.shape, *[1] * (logits.dim() - temperature.dim()))).log_softmax(
        -1
    )
    return log_p.gather(-1, tokens.unsqueeze(-1)).squeeze(-1), -(log_p.exp() * log_p).sum(-1)


def test_by_hand():
    # logits log 1, log 2, log 5: probabilities 1/8, 2/8, 5/8
    logits = torch.tensor([[1.0, 2.0, 5.0]], dtype=torch.float64).log()
    logprobs, entropy = logprobs_and_entropy(logits, torch.tensor([2]))
    assert logprobs.item() == pytest.approx(math.log(5 / 8))
    assert entropy.item() == pytest.approx(-sum(p * math.log(p) for p in (1 / 8, 2 / 8, 5 / 8)))
    # temperature 1/2 squares the odds: 1, 4, 25 of 30
    squared, none = logprobs_and_entropy(logits, torch.tensor([1]), temperature=0.5, with_entropy=False)
    assert squared.item() == pytest.approx(math.log(4 / 30))
    assert none is None


@given(
    seed=st.integers(0, 2**31),
    batch=st.integers(0, 4),
    length=st.integers(0, 6),
    vocab=st.integers(1, 9),
    chunk_tokens=st.integers(1, 30),
    temperature=st.sampled_from([1.0, 0.7, "per sample"]),
    grads=st.sampled_from(["logprobs", "entropy", "both"]),
)
def test_values_and_gradients_match_plain_autograd(seed, batch, length, vocab, chunk_tokens, temperature, grads):
    logits, tokens = random_case(seed, batch=batch, length=length, vocab=vocab)
    if temperature == "per sample":
        temperature = torch.linspace(0.5, 2.0, batch)
    weights = torch.randn(2, batch, length, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64)
    which = {"logprobs": [0], "entropy": [1], "both": [0, 1]}[grads]
    results = []
    for function in (
        plain,
        lambda *args: logprobs_and_entropy(*args[:2], temperature=args[2], chunk_tokens=chunk_tokens),
    ):
        inputs = logits.clone().requires_grad_()
        found = function(inputs, tokens, temperature)
        sum((weights[index] * found[index]).sum() for index in which).backward()
        results.append((*found, inputs.grad))
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_more_and_fewer_dimensions_and_slices_of_logits():
    logits, tokens = random_case(3, batch=4, length=6)
    expected = plain(logits, tokens)
    nested = logprobs_and_entropy(logits.reshape(2, 2, 6, 7), tokens.reshape(2, 2, 6), chunk_tokens=4)
    single = logprobs_and_entropy(logits[0], tokens[0].int(), chunk_tokens=4)
    sliced = logprobs_and_entropy(logits[:, 2:-1], tokens[:, 2:-1], chunk_tokens=4)
    for which in (0, 1):
        torch.testing.assert_close(nested[which], expected[which].reshape(2, 2, 6))
        torch.testing.assert_close(single[which], expected[which][0])
        torch.testing.assert_close(sliced[which], expected[which][:, 2:-1])


def test_gradients_match_finite_differences():
    logits, tokens = random_case(5, vocab=4)
    options = {"temperature": torch.tensor([0.5, 2.0], dtype=torch.float64), "chunk_tokens": 3}
    assert torch.autograd.gradcheck(lambda z: logprobs_and_entropy(z, tokens, **options), logits.requires_grad_())


def test_impossible_tokens_add_nothing_to_entropy_or_gradient():
    # two of three tokens are equally likely: log 2, with gradient zero because it is the maximum
    logits = torch.tensor([[1.0, 1.0, -INF]], dtype=torch.float64, requires_grad=True)
    entropy = logprobs_and_entropy(logits, torch.tensor([0]))[1]
    assert entropy.item() == pytest.approx(math.log(2))
    grad = torch.autograd.grad(entropy.sum(), logits)[0]
    torch.testing.assert_close(grad, torch.zeros_like(grad))


def test_bfloat16_logits_are_computed_in_float32():
    logits, tokens = random_case(6, dtype=torch.bfloat16)
    wide = plain(logits.float(), tokens, 0.7)[0]
    logprobs = logprobs_and_entropy(logits.requires_grad_(), tokens, temperature=0.7)[0]
    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs, wide)
    assert torch.autograd.grad(logprobs.sum(), logits)[0].dtype == torch.bfloat16


class LargestTensors(TorchDispatchMode):
    """Records the number of elements of the largest result of any operation, per dtype."""

    def __init__(self):
        super().__init__()
        self.largest = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.largest[tensor.dtype] = max(self.largest.get(tensor.dtype, 0), tensor.numel())
        return result


def test_no_float32_tensor_is_larger_than_a_chunk():
    torch.manual_seed(0)
    logits = torch.randn(4, 16, 32, dtype=torch.bfloat16, requires_grad=True)
    tokens = torch.randint(32, (4, 16))
    with LargestTensors() as seen:
        logprobs, entropy = logprobs_and_entropy(logits, tokens, temperature=0.9, chunk_tokens=8)
        (logprobs.sum() + entropy.sum()).backward()
    assert seen.largest[torch.float32] == 8 * 32
    assert seen.largest[torch.bfloat16] == 4 * 16 * 32  # the gradient


@pytest.mark.parametrize("temperature", [0.0, -1.0, NAN, INF, torch.tensor([1.0, 0.0])])
def test_temperature_must_be_positive(temperature):
    with pytest.raises(ConfigError, match="temperature"):
        logprobs_and_entropy(*random_case(7), temperature=temperature)
