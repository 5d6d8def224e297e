import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coati.algos.importance import importance_weights
from coati.algos.losses import clipped, loss_weights, policy_loss
from coati.errors import DataError

NAN, INF = float("nan"), float("inf")
GARBAGE = [NAN, INF, -INF, 1e308]
CLIP = {"surrogate": clipped(0.2, 0.3)}


def random_batch(seed, *, batch=5, length=4, dtype=torch.float64):
    """Current, proximal and behavior log-probs, advantages and weights [B, T], and a mask."""
    generator = torch.Generator().manual_seed(seed)
    tensors = (torch.randn(5, batch, length, generator=generator, dtype=torch.float64) * 0.7).to(dtype)
    mask = torch.rand(batch, length, generator=generator) < 0.7
    return [*tensors[:4], tensors[4].abs()], mask


def decoupled(current, proximal, behavior, advantages, weights, mask, num_tokens, reduction=None, clip=CLIP):
    return policy_loss(
        current,
        behavior,
        advantages * weights,
        mask,
        **clip,
        num_tokens=num_tokens,
        reduction=reduction,
        proximal_logprobs=proximal,
    )


def with_gradient(loss_of, first, *rest, **options):
    first = first.clone().requires_grad_()
    out = loss_of(first, *rest, **options)
    return [x.detach() for x in out if x is not None], torch.autograd.grad(out[0], first)[0]


def test_decoupled_loss_by_hand():
    # current / proximal 1.5, 0.5, 1.5, 1.1; clip range [0.8, 1.3]; weights 2, 0.5, 1, 0
    #   advantage +1: 2   · min( 1.5,  1.3) =  2.6   clipped
    #   advantage -1: 0.5 · min(-0.5, -0.8) = -0.4   clipped
    #   advantage -1: 1   · min(-1.5, -1.3) = -1.5
    #   advantage +9: 0   · anything        =  0
    # sum 0.7 over 4 tokens; the gradient of a free token is -w · ratio · A / 4
    ratios = torch.tensor([[1.5, 0.5, 1.5, 1.1, 1.0]], dtype=torch.float64)
    proximal = torch.tensor([[-1.0, -2.0, -1.0, -2.0, NAN]], dtype=torch.float64)
    behavior = torch.tensor([[-1.5, -1.0, -1.0, -3.0, INF]], dtype=torch.float64)
    advantages = torch.tensor([[1.0, -1.0, -1.0, 9.0, -INF]], dtype=torch.float64)
    weights = torch.tensor([[2.0, 0.5, 1.0, 0.0, NAN]], dtype=torch.float64)
    mask = torch.tensor([[True, True, True, True, False]])
    current = proximal + ratios.log()
    out, grad = with_gradient(decoupled, current, proximal, behavior, advantages, weights, mask, 4)
    log_ratios = (current - behavior)[mask]
    expected_kl = (log_ratios.exp() - 1 - log_ratios).sum().item() / 4
    assert [x.item() for x in out] == pytest.approx([-0.7 / 4, 0.5, expected_kl, 1.5])
    expected = torch.tensor([[0.0, 0.0, 1.5 / 4, 0.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(grad, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@given(seed=st.integers(0, 2**31))
def test_on_policy_the_decoupled_loss_equals_the_clipped_loss_exactly(dtype, seed):
    (current, proximal, _, advantages, _), mask = random_batch(seed, dtype=dtype)
    weights = importance_weights(proximal, proximal, mask, level="sequence", kind="truncate", cap=2.0)
    out, grad = with_gradient(decoupled, current, proximal, proximal, advantages, weights, mask, num_tokens=mask.sum())
    plain, plain_grad = with_gradient(policy_loss, current, proximal, advantages, mask, **CLIP, num_tokens=mask.sum())
    assert out == plain
    assert [x.dtype for x in out] == [x.dtype for x in plain]
    assert torch.equal(grad, plain_grad)


@given(seed=st.integers(0, 2**31))
def test_decoupled_loss_equals_its_formula(seed):
    (current, proximal, behavior, advantages, weights), mask = random_batch(seed)
    ratio = (current - proximal).exp()
    surrogate = weights * torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.3) * advantages)
    out = decoupled(current, proximal, behavior, advantages, weights, mask, 7)
    torch.testing.assert_close(out.loss, -surrogate[mask].sum() / 7, rtol=1e-12, atol=1e-12)


def test_uncut_weights_and_an_open_clip_give_the_plain_importance_ratio():
    # proximal/behavior · current/proximal = current/behavior: the proximal policy drops out
    (current, proximal, behavior, advantages, _), mask = random_batch(8)
    weights = importance_weights(proximal, behavior, mask, level="token", kind="truncate", cap=INF)
    is_open = {"surrogate": clipped(INF, INF)}
    out = decoupled(current, proximal, behavior, advantages, weights, mask, 3, clip=is_open)
    expected = -((current - behavior).exp() * advantages)[mask].sum() / 3
    torch.testing.assert_close(out.loss, expected, rtol=1e-12, atol=0)


def test_a_token_of_weight_zero_may_overflow():
    # exp(1000) is inf, and a negative advantage is not clipped there: only the weight excludes it
    current = torch.tensor([[1000.0, 0.0]], requires_grad=True)
    zero, mask = torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool)
    weights = torch.tensor([[0.0, 1.0]])
    out = decoupled(current, zero, zero, zero - 1, weights, mask, 2)
    out.loss.backward()
    assert out.loss.item() == 0.5
    assert out.clip_fraction.item() == 0.0
    assert current.grad.tolist() == [[0.0, 0.5]]


@given(
    is_reduced=st.booleans(),
    seed=st.integers(0, 2**31),
    garbage=st.lists(st.sampled_from(GARBAGE), min_size=6, max_size=6),
    cuts=st.sets(st.integers(1, 4)),
)
def test_padding_does_not_matter_and_micro_batches_add_up(is_reduced, seed, garbage, cuts):
    tensors, mask = random_batch(seed)
    tensors.append(
        loss_weights(mask, mode="sequence", num_tokens=9, num_sequences=5, max_length=9, dtype=torch.float64)
    )
    count = mask.sum()

    def loss_at(inputs, rows):
        *others, reduction = (x[rows] for x in inputs)
        return with_gradient(decoupled, *others, mask[rows], count, reduction=reduction if is_reduced else None)

    whole, whole_grad = loss_at(tensors, slice(None))
    dirty = [torch.where(mask, x, fill) for x, fill in zip(tensors, garbage, strict=True)]
    dirty_out, dirty_grad = loss_at(dirty, slice(None))
    assert dirty_out == whole
    assert torch.equal(dirty_grad, whole_grad)
    assert torch.equal(whole_grad[~mask], torch.zeros_like(whole_grad[~mask]))
    pieces = [loss_at(dirty, slice(a, b)) for a, b in itertools.pairwise([0, *sorted(cuts), 5])]
    for which, full in enumerate(whole):
        parts = torch.stack([piece[0][which] for piece in pieces])
        combined = parts.max() if which == 3 else parts.sum()  # ratio_max is the only maximum
        torch.testing.assert_close(combined, full, rtol=0, atol=1e-12)
    torch.testing.assert_close(torch.cat([p[1] for p in pieces]), whole_grad, rtol=0, atol=1e-12)


def test_a_reduction_gives_the_weighted_loss_of_weighted_advantages():
    (current, proximal, behavior, advantages, weights), mask = random_batch(5)
    reduction = loss_weights(mask, mode="constant", num_tokens=9, num_sequences=5, max_length=9, dtype=torch.float64)
    out = decoupled(current, proximal, behavior, advantages, weights, mask, mask.sum(), reduction)
    expected = policy_loss(
        current, proximal, advantages * weights, mask, **CLIP, reduction=reduction, num_tokens=mask.sum()
    )
    torch.testing.assert_close(out.loss, expected.loss, rtol=1e-12, atol=0)
    assert out.clip_fraction == expected.clip_fraction


@pytest.mark.parametrize("seed", range(3))
def test_only_the_current_policy_is_differentiated_and_exactly(seed):
    tensors, mask = random_batch(seed)
    for tensor in tensors:
        tensor.requires_grad_()
    out = decoupled(*tensors, mask, mask.sum())
    out.loss.backward()
    assert tensors[0].grad.abs().sum() > 0
    assert [tensor.grad for tensor in tensors[1:]] == [None] * 4
    assert not any(x.requires_grad for x in out[1:4])
    rest = [tensor.detach() for tensor in tensors[1:]]
    assert torch.autograd.gradcheck(
        lambda x: decoupled(x, *rest, mask, mask.sum())[0], tensors[0].detach().requires_grad_()
    )


@pytest.mark.parametrize("shape", [(2, 3), (2, 0), (0, 3)])
def test_no_response_tokens_give_zero(shape):
    garbage, mask = torch.full(shape, NAN), torch.zeros(shape, dtype=torch.bool)
    out, grad = with_gradient(decoupled, *[garbage] * 5, mask, 0)
    assert [x.item() for x in out] == [0.0] * 4
    assert torch.equal(grad, torch.zeros(shape))


def test_shapes_that_differ_from_the_mask_are_rejected():
    zero, mask = torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool)
    with pytest.raises(DataError, match="proximal_logprobs must have the shape"):
        decoupled(zero, zero[:, :1], zero, zero, zero, mask, 2)
    with pytest.raises(DataError, match="reduction must have the shape"):
        decoupled(zero, zero, zero, zero, zero, mask, 2, reduction=torch.zeros(1))
