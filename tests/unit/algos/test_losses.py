import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coati.algos.losses import cispo, clipped, clipped_value_loss, dppo, policy_loss, sapo
from coati.errors import DataError

NAN, INF = float("nan"), float("inf")
GARBAGE = [NAN, INF, -INF, 1e308]


def loss_with(surrogate):
    def loss_of(logprobs, behavior, advantages, mask, num_tokens):
        return policy_loss(logprobs, behavior, advantages, mask, surrogate=surrogate, num_tokens=num_tokens)

    return loss_of


clipped_loss = loss_with(clipped(0.2, 0.3))


def value_loss(values, old_values, returns, mask, num_tokens):
    return clipped_value_loss(values, old_values, returns, mask, clip=0.4, num_tokens=num_tokens)


DIFFERENTIATED = {"clipped": clipped_loss, "sapo": loss_with(sapo(1.0, 1.5)), "value": value_loss}
# The gradient of these is not that of their value, because it treats a weight as a constant.
WEIGHTED = {"cispo": loss_with(cispo(0.5, 1.0)), "dppo": loss_with(dppo(0.2, 0.1, cap=1.5))}
LOSSES = pytest.mark.parametrize("loss_of", (DIFFERENTIATED | WEIGHTED).values(), ids=DIFFERENTIATED | WEIGHTED)


def random_batch(seed, *, batch=5, length=4):
    """Three tensors [B, T] close enough to each other that some tokens are clipped, and a mask."""
    generator = torch.Generator().manual_seed(seed)
    tensors = torch.randn(3, batch, length, generator=generator, dtype=torch.float64) * 0.7
    mask = torch.rand(batch, length, generator=generator) < 0.7
    return *tensors, mask


def with_gradient(loss_of, first, second, third, mask, num_tokens):
    first = first.clone().requires_grad_()
    out = loss_of(first, second, third, mask, num_tokens)
    return [x.detach() for x in out if x is not None], torch.autograd.grad(out[0], first)[0]


def test_policy_loss_by_hand():
    # ratios 1.5, 0.5, 1.5, 0.5, 1.1 and padding; clip range [0.8, 1.2]
    #   advantage +1: min( 1.5,  1.2) =  1.2   clipped
    #   advantage -1: min(-0.5, -0.8) = -0.8   clipped
    #   advantage -1: min(-1.5, -1.2) = -1.5   outside the range, but free to return
    #   advantage +1: min( 0.5,  0.8) =  0.5   outside the range, but free to return
    #   advantage +2: min( 2.2,  2.2) =  2.2
    # sum 1.6, over 5 tokens: loss -0.32, clip fraction 2/5
    ratios = torch.tensor([[1.5, 0.5, 1.5, 0.5, 1.1, 1.0]], dtype=torch.float64)
    behavior = torch.tensor([[-1.0, -2.0, -1.0, -2.0, -3.0, NAN]], dtype=torch.float64)
    logprobs = behavior + ratios.log()
    advantages = torch.tensor([[1.0, -1.0, -1.0, 1.0, 2.0, INF]], dtype=torch.float64)
    mask = torch.tensor([[True, True, True, True, True, False]])
    out = loss_with(clipped(0.2, 0.2))(logprobs, behavior, advantages, mask, mask.sum())
    assert out.loss.item() == pytest.approx(-0.32, abs=1e-12)
    assert out.clip_fraction.item() == pytest.approx(0.4)
    assert out.ratio_max.item() == pytest.approx(1.5)
    # Σ (ratio - 1 - log ratio) over the real tokens: (1.5 + 0.5 + 1.5 + 0.5 + 1.1) - 5 - Σ log
    logs = 2 * math.log(1.5) + 2 * math.log(0.5) + math.log(1.1)
    assert out.approx_kl.item() == pytest.approx((5.1 - 5 - logs) / 5)


def test_policy_gradient_by_hand():
    # d(-ratio · A)/dlogprob = -ratio · A, and 0 where clipped; over 4 tokens
    ratios = torch.tensor([[1.5, 1.1, 0.5, 0.9]], dtype=torch.float64)
    logprobs = ratios.log().requires_grad_()
    advantages = torch.tensor([[1.0, 2.0, -1.0, 0.0]], dtype=torch.float64)
    mask = torch.ones(1, 4, dtype=torch.bool)
    out = loss_with(clipped(0.2, 0.2))(logprobs, torch.zeros_like(ratios), advantages, mask, 4)
    out.loss.backward()
    expected = torch.tensor([[0.0, -2.2 / 4, 0.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(logprobs.grad, expected)


def test_the_two_clip_bounds_are_distances_from_one():
    # advantage +1, ratio 2: clipped at 1 + 0.5;  advantage -1, ratio 0.1: clipped at 1 - 0.25
    logprobs = torch.tensor([[2.0, 0.1]], dtype=torch.float64).log()
    advantages = torch.tensor([[1.0, -1.0]], dtype=torch.float64)
    mask = torch.ones(1, 2, dtype=torch.bool)
    out = loss_with(clipped(0.25, 0.5))(logprobs, torch.zeros_like(logprobs), advantages, mask, 1)
    assert out.loss.item() == pytest.approx(-(1.5 - 0.75), abs=1e-12)


@given(seed=st.integers(0, 2**31))
def test_policy_loss_is_the_textbook_minimum(seed):
    logprobs, behavior, advantages, mask = random_batch(seed)
    ratio = (logprobs - behavior).exp()
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.3) * advantages)
    out = clipped_loss(logprobs, behavior, advantages, mask, 7)
    torch.testing.assert_close(out.loss, -(surrogate[mask].sum()) / 7, rtol=1e-12, atol=1e-12)


def test_a_ratio_that_overflows_is_clipped_without_nan():
    # exp(1000) is inf; with a positive or zero advantage the clip makes it a constant
    logprobs = torch.tensor([[1000.0, 1000.0]], requires_grad=True)
    advantages = torch.tensor([[1.0, 0.0]])
    mask = torch.ones(1, 2, dtype=torch.bool)
    out = clipped_loss(logprobs, torch.zeros(1, 2), advantages, mask, 2)
    out.loss.backward()
    assert out.loss.item() == pytest.approx(-1.3 / 2)
    assert logprobs.grad.tolist() == [[0.0, 0.0]]


def test_value_loss_by_hand():
    # old value 1, clip 0.5
    #   v 3.0, R 2: max((3 - 2)², (1.5 - 2)²)     = 1      moved too far, overshot: free
    #   v 2.0, R 3: max((2 - 3)², (1.5 - 3)²)     = 2.25   moved too far towards R: clipped
    #   v 1.2, R 2: max((1.2 - 2)², (1.2 - 2)²)   = 0.64
    # 0.5 · 3.89 / 3
    values = torch.tensor([[3.0, 2.0, 1.2, NAN]], dtype=torch.float64, requires_grad=True)
    old_values = torch.tensor([[1.0, 1.0, 1.0, INF]], dtype=torch.float64)
    returns = torch.tensor([[2.0, 3.0, 2.0, -INF]], dtype=torch.float64)
    mask = torch.tensor([[True, True, True, False]])
    out = clipped_value_loss(values, old_values, returns, mask, clip=0.5, num_tokens=mask.sum())
    assert out.loss.item() == pytest.approx(0.5 * 3.89 / 3)
    assert out.clip_fraction.item() == pytest.approx(1 / 3)
    out.loss.backward()
    # (v - R) / 3, and 0 where clipped
    expected = torch.tensor([[1 / 3, 0.0, -0.8 / 3, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(values.grad, expected)


@LOSSES
@given(seed=st.integers(0, 2**31), garbage=st.lists(st.sampled_from(GARBAGE), min_size=3, max_size=3))
def test_padding_garbage_changes_neither_results_nor_gradients(loss_of, seed, garbage):
    *tensors, mask = random_batch(seed)
    clean = with_gradient(loss_of, *tensors, mask, mask.sum())
    dirty_tensors = [torch.where(mask, x, fill) for x, fill in zip(tensors, garbage, strict=True)]
    dirty = with_gradient(loss_of, *dirty_tensors, mask, mask.sum())
    for a, b in zip(clean[0], dirty[0], strict=True):
        assert torch.equal(a, b)
    assert torch.equal(clean[1], dirty[1])
    assert torch.equal(clean[1][~mask], torch.zeros_like(clean[1][~mask]))


@LOSSES
@given(seed=st.integers(0, 2**31), cuts=st.sets(st.integers(1, 4)))
def test_micro_batches_add_up(loss_of, seed, cuts):
    *tensors, mask = random_batch(seed)
    num_tokens = mask.sum()
    whole, whole_grad = with_gradient(loss_of, *tensors, mask, num_tokens)
    bounds = [0, *sorted(cuts), 5]
    pieces = [
        with_gradient(loss_of, *(x[a:b] for x in tensors), mask[a:b], num_tokens) for a, b in itertools.pairwise(bounds)
    ]
    for which, full in enumerate(whole):
        parts = torch.stack([piece[0][which] for piece in pieces])
        combined = parts.max() if which == 3 else parts.sum()  # ratio_max is the only maximum
        torch.testing.assert_close(combined, full, rtol=0, atol=1e-12)
    torch.testing.assert_close(torch.cat([p[1] for p in pieces]), whole_grad, rtol=0, atol=1e-12)


@LOSSES
def test_the_order_of_the_batch_does_not_matter(loss_of):
    *tensors, mask = random_batch(11, batch=8)
    order = torch.randperm(8, generator=torch.Generator().manual_seed(3))
    there, there_grad = with_gradient(loss_of, *tensors, mask, mask.sum())
    here, here_grad = with_gradient(loss_of, *(x[order] for x in tensors), mask[order], mask.sum())
    for a, b in zip(there, here, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    torch.testing.assert_close(there_grad[order], here_grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize("loss_of", DIFFERENTIATED.values(), ids=DIFFERENTIATED)
@pytest.mark.parametrize("seed", range(3))
def test_gradients_match_finite_differences(loss_of, seed):
    first, second, third, mask = random_batch(seed)
    first.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: loss_of(x, second, third, mask, mask.sum())[0], first)


@LOSSES
@pytest.mark.parametrize("shape", [(2, 3), (2, 0), (0, 3)])
def test_no_response_tokens_give_zero(loss_of, shape):
    garbage = torch.full(shape, NAN)
    mask = torch.zeros(shape, dtype=torch.bool)
    out, grad = with_gradient(loss_of, garbage, garbage, garbage, mask, mask.sum())
    assert [x.item() for x in out] == [0.0] * len(out)
    assert torch.equal(grad, torch.zeros(shape))


@LOSSES
def test_only_the_first_argument_is_differentiated(loss_of):
    first, second, third, mask = random_batch(1)
    for tensor in (first, second, third):
        tensor.requires_grad_()
    out = loss_of(first, second, third, mask, mask.sum())
    out[0].backward()
    assert first.grad.abs().sum() > 0
    assert second.grad is None
    assert third.grad is None
    assert not any(x.requires_grad for x in out[1:4])


@LOSSES
def test_bfloat16_is_computed_in_float32_and_float64_stays(loss_of):
    *tensors, mask = random_batch(2)
    half = [x.bfloat16() for x in tensors]
    out, grad = with_gradient(loss_of, *half, mask, mask.sum())
    wide, _ = with_gradient(loss_of, *(x.float() for x in half), mask, mask.sum())
    assert all(x.dtype == torch.float32 for x in out)
    assert out == wide
    assert grad.dtype == torch.bfloat16
    assert all(x.dtype == torch.float64 for x in loss_of(*tensors, mask, mask.sum().float())[:4])


def test_a_tensor_of_the_wrong_shape_is_rejected_by_name():
    mask = torch.ones(2, 3, dtype=torch.bool)
    ok = torch.zeros(2, 3)
    with pytest.raises(DataError, match=r"advantages must have the shape of its mask \(2, 3\), got \(2, 1\)"):
        clipped_loss(ok, ok, torch.zeros(2, 1), mask, 6)
    with pytest.raises(DataError, match="old_values must have the shape"):
        value_loss(ok, torch.zeros(2), ok, mask, 6)


def test_a_value_within_the_range_is_not_clipped_because_of_rounding():
    old, current = torch.tensor([[0.3]]), torch.tensor([[0.1]])
    assert old + (current - old) != current  # the clipped estimate is rounded, and further from the target
    mask = torch.ones(1, 1, dtype=torch.bool)
    out = clipped_value_loss(current, old, torch.full((1, 1), 0.2), mask, clip=0.4, num_tokens=1)
    assert out.clip_fraction == 0
