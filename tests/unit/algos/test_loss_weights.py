import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coati.algos.losses import clipped, loss_weights, policy_loss
from coati.errors import DataError

NAN, INF = float("nan"), float("inf")
GARBAGE = [NAN, INF, -INF, 1e308]
CLIP = {"surrogate": clipped(0.2, 0.3)}
MODES = ("token", "sequence", "constant")


def random_batch(seed, *, batch=5, length=4):
    """Current and behavior log-probs and advantages [B, T], and a mask that sometimes has an empty row."""
    generator = torch.Generator().manual_seed(seed)
    tensors = torch.randn(3, batch, length, generator=generator, dtype=torch.float64) * 0.7
    mask = torch.rand(batch, length, generator=generator) < 0.6
    return *tensors, mask


def weights_of(mask, mode, *, like):
    """Return the weights of the rows `mask` in a step whose whole mask is `like`."""
    return loss_weights(
        mask,
        mode=mode,
        num_tokens=like.sum(),
        num_sequences=like.shape[0],
        max_length=10,
        dtype=torch.float64,
    )


def with_gradient(loss_of, first, *rest, **options):
    first = first.clone().requires_grad_()
    out = loss_of(first, *rest, **options)
    return [x.detach() for x in out if x is not None], torch.autograd.grad(out[0], first)[0]


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        # 3 + 1 tokens here of 8 in the step; 4 responses in the step; at most 10 tokens each
        ("token", [[1 / 8, 1 / 8, 1 / 8], [1 / 8, 0, 0], [0, 0, 0]]),
        ("sequence", [[1 / 12, 1 / 12, 1 / 12], [1 / 4, 0, 0], [0, 0, 0]]),
        ("constant", [[1 / 40, 1 / 40, 1 / 40], [1 / 40, 0, 0], [0, 0, 0]]),
    ],
)
def test_loss_weights_by_hand(mode, expected):
    mask = torch.tensor([[True, True, True], [True, False, False], [False, False, False]])
    weights = loss_weights(
        mask, mode=mode, num_tokens=torch.tensor(8), num_sequences=4, max_length=10, dtype=torch.float64
    )
    torch.testing.assert_close(weights, torch.tensor(expected, dtype=torch.float64))
    assert loss_weights(mask, mode=mode, num_tokens=8, num_sequences=4, max_length=10).dtype == torch.float32


def test_loss_weights_give_the_means_they_are_named_after():
    losses, _, _, mask = random_batch(3)
    mask[:, 0] = True
    real = [row[keep] for row, keep in zip(losses, mask, strict=True)]
    expected = {
        "token": torch.cat(real).mean(),
        "sequence": torch.stack([row.mean() for row in real]).mean(),
        "constant": torch.cat(real).sum() / (5 * 10),
    }
    for mode in MODES:
        result = (weights_of(mask, mode, like=mask) * losses).sum()
        torch.testing.assert_close(result, expected[mode], rtol=1e-12, atol=1e-12)


def test_an_unknown_mode_is_rejected():
    with pytest.raises(AssertionError, match="batch"):
        loss_weights(torch.ones(2, 2, dtype=torch.bool), mode="batch", num_tokens=4, num_sequences=2, max_length=2)


def test_wrong_masks_and_shapes_are_rejected():
    mask = torch.ones(2, 2, dtype=torch.bool)
    zero = torch.zeros(2, 2)
    with pytest.raises(DataError, match=r"mask must be a bool tensor"):
        loss_weights(mask.long(), mode="token", num_tokens=4, num_sequences=2, max_length=2)
    with pytest.raises(DataError, match=r"reduction must have the shape of its mask"):
        policy_loss(zero, zero, zero, mask, **CLIP, reduction=torch.zeros(2), num_tokens=4)


def test_a_policy_loss_with_shares_by_hand():
    # ratios 1.5, 0.5, 1.1 in the clip range [0.8, 1.3]; advantages 1, 1, -2
    ratios = torch.tensor([[1.5, 0.5, 1.1, 1.0]], dtype=torch.float64)
    behavior = torch.tensor([[-1.0, -2.0, -3.0, NAN]], dtype=torch.float64)
    advantages = torch.tensor([[1.0, 1.0, -2.0, INF]], dtype=torch.float64)
    mask = torch.tensor([[True, True, True, False]])
    shares = torch.tensor([[0.5, 0.25, 0.125, NAN]], dtype=torch.float64)
    out = policy_loss(behavior + ratios.log(), behavior, advantages, mask, **CLIP, num_tokens=3, reduction=shares)
    assert out.loss.item() == pytest.approx(-(1.3 / 2 + 0.5 / 4 - 2.2 / 8))
    assert out.clip_fraction.item() == pytest.approx(1 / 3)
    assert out.ratio_max.item() == pytest.approx(1.5)
    assert out.approx_kl.item() == pytest.approx(sum(r - 1 - math.log(r) for r in (1.5, 0.5, 1.1)) / 3)


@given(
    seed=st.integers(0, 2**31),
    mode=st.sampled_from(MODES),
    garbage=st.lists(st.sampled_from(GARBAGE), min_size=4, max_size=4),
    cuts=st.sets(st.integers(1, 4)),
)
def test_weighted_loss_equals_its_sum_ignores_padding_and_adds_up(seed, mode, garbage, cuts):
    logprobs, behavior, advantages, mask = random_batch(seed)
    weights = weights_of(mask, mode, like=mask)
    tensors = [logprobs, behavior, advantages, weights]
    dirty = [torch.where(mask, x, fill) for x, fill in zip(tensors, garbage, strict=True)]

    def loss_at(inputs, rows):
        first, second, third, weights = (x[rows] for x in inputs)
        return with_gradient(
            policy_loss,
            first,
            second,
            third,
            mask[rows],
            **CLIP,
            reduction=weights,
            num_tokens=mask.sum(),
        )

    whole, whole_grad = loss_at(tensors, slice(None))
    ratio = (logprobs - behavior).exp()
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.3) * advantages)
    torch.testing.assert_close(whole[0], -(weights * surrogate).sum(), rtol=1e-12, atol=1e-12)
    dirty_out, dirty_grad = loss_at(dirty, slice(None))
    assert dirty_out == whole
    assert torch.equal(dirty_grad, whole_grad)

    plain, plain_grad = with_gradient(policy_loss, logprobs, behavior, advantages, mask, **CLIP, num_tokens=mask.sum())
    assert whole[1:] == plain[1:]
    if mode == "token":
        torch.testing.assert_close(whole[0], plain[0], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(whole_grad, plain_grad, rtol=1e-12, atol=1e-12)

    pieces = [loss_at(dirty, slice(a, b)) for a, b in itertools.pairwise([0, *sorted(cuts), 5])]
    total = torch.stack([piece[0][0] for piece in pieces]).sum()
    torch.testing.assert_close(total, whole[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(torch.cat([p[1] for p in pieces]), whole_grad, rtol=0, atol=1e-12)


def test_weighted_loss_differentiates_only_the_policy_and_exactly():
    tensors = [x.requires_grad_() for x in random_batch(1)[:3]]
    mask = random_batch(1)[3]
    weights = weights_of(mask, "sequence", like=mask).requires_grad_()
    out = policy_loss(*tensors, mask, **CLIP, reduction=weights, num_tokens=9)
    out.loss.backward()
    assert tensors[0].grad.abs().sum() > 0
    assert [x.grad for x in (*tensors[1:], weights)] == [None] * 3
    assert not any(x.requires_grad for x in out[1:4])
    _, behavior, advantages = (x.detach() for x in tensors)
    assert torch.autograd.gradcheck(
        lambda x: policy_loss(x, behavior, advantages, mask, **CLIP, reduction=weights, num_tokens=9).loss,
        tensors[0].detach().requires_grad_(),
    )
