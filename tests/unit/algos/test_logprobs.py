import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from coati.algos import entropy_of, logprobs_and_entropy, logprobs_of
from coati.errors import ConfigError, DataError

NAN, INF = float("nan"), float("inf")


def random_case(seed, *, batch=2, length=5, vocab=7, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(batch, length, vocab, generator=generator, dtype=torch.float64) * 3
    tokens = torch.randint(vocab, (batch, length), generator=generator)
    mask = torch.rand(batch, length, generator=generator) < 0.6
    return logits.to(dtype), tokens, mask


def test_by_hand():
    # logits log 1, log 2, log 5: probabilities 1/8, 2/8, 5/8
    logits = torch.tensor([[1.0, 2.0, 5.0]], dtype=torch.float64).log()
    assert logprobs_of(logits, torch.tensor([2])).item() == pytest.approx(math.log(5 / 8))
    by_hand = -(1 / 8 * math.log(1 / 8) + 2 / 8 * math.log(2 / 8) + 5 / 8 * math.log(5 / 8))
    assert entropy_of(logits).item() == pytest.approx(by_hand)
    # temperature 1/2 squares the odds: 1, 4, 25 of 30
    assert logprobs_of(logits, torch.tensor([1]), temperature=0.5).item() == pytest.approx(math.log(4 / 30))


def test_logprobs_are_log_softmax_at_the_token():
    logits, tokens, _ = random_case(0, dtype=torch.float32)
    expected = torch.log_softmax(logits, -1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    assert torch.equal(logprobs_of(logits, tokens), expected)
    assert torch.equal(logprobs_of(logits[0], tokens[0]), expected[0])
    assert torch.equal(logprobs_of(logits[None], tokens[None].int()), expected[None])


def test_temperature_per_sample_equals_each_sample_alone():
    logits, tokens, _ = random_case(1)
    both = torch.tensor([0.5, 2.0])
    for chunked in (False, True):

        def logprobs_at(logits, tokens, temperature, chunked=chunked):
            if chunked:
                return logprobs_and_entropy(logits, tokens, temperature=temperature, chunk_tokens=3)[0]
            return logprobs_of(logits, tokens, temperature=temperature)

        result = logprobs_at(logits, tokens, both)
        torch.testing.assert_close(result[:1], logprobs_at(logits[:1], tokens[:1], 0.5))
        torch.testing.assert_close(result[1:], logprobs_at(logits[1:], tokens[1:], 2.0))
    torch.testing.assert_close(entropy_of(logits, temperature=both)[1], entropy_of(logits[1] / 2))
    torch.testing.assert_close(entropy_of(logits, temperature=torch.tensor(2.0)), entropy_of(logits / 2))


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    batch=st.integers(0, 4),
    length=st.integers(0, 6),
    vocab=st.integers(1, 9),
    chunk_tokens=st.integers(1, 30),
    temperature=st.sampled_from([1.0, 0.7, "per sample"]),
    is_masked=st.booleans(),
    grads=st.sampled_from(["logprobs", "entropy", "both"]),
)
def test_chunked_equals_unchunked_with_gradients(
    seed, batch, length, vocab, chunk_tokens, temperature, is_masked, grads
):
    logits, tokens, mask = random_case(seed, batch=batch, length=length, vocab=vocab)
    if temperature == "per sample":
        temperature = torch.linspace(0.5, 2.0, batch)
    options = {"temperature": temperature, "mask": mask if is_masked else None}
    generator = torch.Generator().manual_seed(seed + 1)
    weights = torch.randn(2, batch, length, generator=generator, dtype=torch.float64)
    weights[0] *= grads != "entropy"
    weights[1] *= grads != "logprobs"

    plain_logits = logits.clone().requires_grad_()
    plain = logprobs_of(plain_logits, tokens, **options), entropy_of(plain_logits, **options)
    chunked_logits = logits.clone().requires_grad_()
    chunked = logprobs_and_entropy(chunked_logits, tokens, chunk_tokens=chunk_tokens, **options)
    for mine, reference in zip(chunked, plain, strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-12, atol=1e-12)
    (weights[0] * plain[0] + weights[1] * plain[1]).sum().backward()
    if grads == "logprobs":
        (weights[0] * chunked[0]).sum().backward()
    elif grads == "entropy":
        (weights[1] * chunked[1]).sum().backward()
    else:
        (weights[0] * chunked[0] + weights[1] * chunked[1]).sum().backward()
    torch.testing.assert_close(chunked_logits.grad, plain_logits.grad, rtol=1e-12, atol=1e-12)


def test_more_and_fewer_dimensions_and_slices_of_logits():
    logits, tokens, _ = random_case(3, batch=4, length=6)
    expected = logprobs_of(logits, tokens), entropy_of(logits)
    nested = logprobs_and_entropy(logits.reshape(2, 2, 6, 7), tokens.reshape(2, 2, 6), chunk_tokens=4)
    single = logprobs_and_entropy(logits[0], tokens[0], chunk_tokens=4)
    sliced = logprobs_and_entropy(logits[:, 2:-1], tokens[:, 2:-1], chunk_tokens=4)
    for which in (0, 1):
        torch.testing.assert_close(nested[which], expected[which].reshape(2, 2, 6))
        torch.testing.assert_close(single[which], expected[which][0])
        torch.testing.assert_close(sliced[which], expected[which][:, 2:-1])


def test_without_entropy():
    logits, tokens, _ = random_case(4)
    logprobs, entropy = logprobs_and_entropy(logits.requires_grad_(), tokens, with_entropy=False)
    assert entropy is None
    torch.testing.assert_close(logprobs, logprobs_of(logits, tokens))
    logprobs.sum().backward()
    assert logits.grad is not None
    assert logits.grad.abs().sum() > 0


def test_gradients_match_finite_differences():
    logits, tokens, mask = random_case(5, vocab=4)
    logits.requires_grad_()
    temperature = torch.tensor([0.5, 2.0], dtype=torch.float64)
    options = {"temperature": temperature, "mask": mask}
    assert torch.autograd.gradcheck(lambda z: logprobs_of(z, tokens, **options), logits)
    assert torch.autograd.gradcheck(lambda z: entropy_of(z, **options), logits)
    assert torch.autograd.gradcheck(lambda z: logprobs_and_entropy(z, tokens, chunk_tokens=3, **options), logits)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31), garbage=st.sampled_from([NAN, INF, -INF, 1e300]))
def test_garbage_under_the_mask_reaches_neither_results_nor_gradients(seed, garbage):
    logits, tokens, mask = random_case(seed)
    results = []
    for fill, bad_token in ((0.0, 0), (garbage, -100)):
        z = torch.where(mask.unsqueeze(-1), logits, fill).requires_grad_()
        ids = torch.where(mask, tokens, bad_token)
        for logprobs, entropy in (
            (logprobs_of(z, ids, mask=mask), entropy_of(z, mask=mask)),
            logprobs_and_entropy(z, ids, mask=mask, chunk_tokens=3),
        ):
            # garbage in the incoming gradient of padding too
            upstream = torch.where(mask, torch.ones_like(logprobs), garbage if fill else 0.0)
            grad = torch.autograd.grad((logprobs, entropy), z, (upstream, upstream))[0]
            assert torch.equal(grad[~mask], torch.zeros_like(grad[~mask]))
            results.append((logprobs.detach(), entropy.detach(), grad))
    for clean, dirty in zip(results[:2], results[2:], strict=True):
        for a, b in zip(clean, dirty, strict=True):
            assert torch.equal(a, b)


def test_impossible_tokens_add_nothing_to_entropy_or_gradient():
    # two of three tokens possible, equally: log 2, with gradient zero because it is the maximum
    logits = torch.tensor([[1.0, 1.0, -INF]], dtype=torch.float64, requires_grad=True)
    for entropy in (entropy_of(logits), logprobs_and_entropy(logits, torch.tensor([0]))[1]):
        assert entropy.item() == pytest.approx(math.log(2))
        grad = torch.autograd.grad(entropy.sum(), logits)[0]
        torch.testing.assert_close(grad, torch.zeros_like(grad))


def test_bfloat16_logits_are_computed_in_float32():
    logits, tokens, _ = random_case(6, dtype=torch.bfloat16)
    wide = logprobs_of(logits.float(), tokens, temperature=0.7)
    logits.requires_grad_()
    for logprobs in (
        logprobs_of(logits, tokens, temperature=0.7),
        logprobs_and_entropy(logits, tokens, temperature=0.7)[0],
    ):
        assert logprobs.dtype == torch.float32
        assert torch.equal(logprobs, wide)
        assert torch.autograd.grad(logprobs.sum(), logits)[0].dtype == torch.bfloat16


class LargestTensors(TorchDispatchMode):
    """Records how many elements the largest result of any operation has, per dtype."""

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
    logits, tokens, _ = random_case(7)
    with pytest.raises(ConfigError, match="temperature must be positive and finite, got"):
        logprobs_of(logits, tokens, temperature=temperature)


def test_wrong_shapes_are_refused_by_name():
    logits, tokens, mask = random_case(8)
    with pytest.raises(DataError, match="logits must be"):
        entropy_of(logits[0, 0])
    with pytest.raises(DataError, match="tokens must have the shape"):
        logprobs_of(logits, tokens[:, 1:])
    with pytest.raises(DataError, match="mask must have the shape"):
        logprobs_of(logits, tokens, mask=mask[:, 1:])
    with pytest.raises(DataError, match="mask must be a bool tensor"):
        logprobs_of(logits, tokens, mask=mask.long())
    with pytest.raises(DataError, match=r"leads \(2, 5\).*got \(5,\)"):
        logprobs_of(logits, tokens, temperature=torch.ones(5))
    with pytest.raises(ConfigError, match="chunk_tokens must be 1 or more, got 0"):
        logprobs_and_entropy(logits, tokens, chunk_tokens=0)
