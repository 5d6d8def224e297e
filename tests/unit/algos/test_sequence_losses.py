import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coati.algos.losses import clipped, loss_weights, policy_loss
from coati.algos.masked import spread

NAN, INF = float("nan"), float("inf")
GARBAGE = [NAN, INF, -INF, 1e308]
CLIP = {"surrogate": clipped(0.2, 0.3)}


def random_batch(seed, *, batch=5, length=4):
    """Current and behavior log-probs and advantages [B, T], and a mask that sometimes has an empty row."""
    generator = torch.Generator().manual_seed(seed)
    tensors = torch.randn(3, batch, length, generator=generator, dtype=torch.float64) * 0.7
    mask = torch.rand(batch, length, generator=generator) < 0.6
    return *tensors, mask


def sequence_loss(logprobs, behavior, advantages, mask, num_sequences):
    """GSPO's loss, with statistics that are means over the step's 20 tokens."""
    shares = loss_weights(
        mask,
        mode="sequence",
        num_tokens=20,
        num_sequences=num_sequences,
        max_length=4,
        dtype=torch.promote_types(logprobs.dtype, torch.float32),
    )
    return policy_loss(
        *(logprobs, behavior, advantages, mask), **CLIP, num_tokens=20, ratio="sequence", reduction=shares
    )


def with_gradient(loss_of, first, *rest, **options):
    first = first.clone().requires_grad_()
    out = loss_of(first, *rest, **options)
    return [x.detach() for x in out if x is not None], torch.autograd.grad(out[0], first)[0]


def test_sequence_loss_by_hand():
    # clip range [0.8, 1.3]; s = exp(mean log ratio)
    #   ratios 4, 0.25: s = 1, A = 3:   3
    #   ratio 2.25:     s = 2.25, A = 2: 1.3 · 2 = 2.6, clipped
    #   ratios 0.25, 1: s = 0.5, A = 4: 2, free to return
    #   no token, A = 100: 0
    # over 4 responses; the gradient of each of the n tokens is -s · A / n / 4
    ratios = torch.tensor([[4.0, 0.25], [2.25, 1.0], [0.25, 1.0], [1.0, 1.0]], dtype=torch.float64)
    behavior = torch.tensor([[-1.0, -2.0], [-3.0, NAN], [-1.0, -1.0], [INF, NAN]], dtype=torch.float64)
    mask = torch.tensor([[True, True], [True, False], [True, True], [False, False]])
    advantages = torch.tensor([3.0, 2.0, 4.0, 100.0], dtype=torch.float64).unsqueeze(1).expand(4, 2)
    out, grad = with_gradient(sequence_loss, behavior + ratios.log(), behavior, advantages, mask, 4)
    kl = [r - 1 - math.log(r) for r in (4.0, 0.25, 2.25, 0.25, 1.0)]
    assert [x.item() for x in out] == pytest.approx([-7.6 / 4, 1 / 20, sum(kl) / 20, 2.25])
    expected = torch.tensor([[-3 / 8, -3 / 8], [0.0, 0.0], [-2 / 8, -2 / 8], [0.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(grad, expected)


@given(seed=st.integers(0, 2**31))
def test_sequence_loss_and_gradient_match_the_paper(seed):
    logprobs, behavior, advantages, mask = random_batch(seed)
    advantages = advantages[:, 0]

    def by_definition(logprobs):
        total = torch.zeros((), dtype=torch.float64)
        for b, keep in enumerate(mask):
            if keep.any():
                s = (logprobs[b, keep] - behavior[b, keep]).mean().exp()
                total = total - torch.minimum(s * advantages[b], s.clamp(0.8, 1.3) * advantages[b])
        # connects the graph to the input even if no row has a token
        return (total / 5 + 0 * logprobs.sum(),)

    (expected,), expected_grad = with_gradient(by_definition, logprobs)
    out, grad = with_gradient(sequence_loss, logprobs, behavior, spread(advantages, mask), mask, 5)
    torch.testing.assert_close(out[0], expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grad, expected_grad, rtol=1e-12, atol=1e-12)


def test_with_advantages_per_token_each_token_follows_its_own():
    # s = exp((log 2 + log 0.5 + 0) / 3) = 1; advantages 3, -6, 0: the value is their mean, -1;
    # each token's gradient is -s · A_t / 3
    logprobs = torch.tensor([[2.0, 0.5, 1.0]], dtype=torch.float64).log()
    advantages = torch.tensor([[3.0, -6.0, 0.0]], dtype=torch.float64)
    mask = torch.ones(1, 3, dtype=torch.bool)
    out, grad = with_gradient(sequence_loss, logprobs, torch.zeros_like(logprobs), advantages, mask, 1)
    assert out[0].item() == pytest.approx(1.0)
    torch.testing.assert_close(grad, torch.tensor([[-1.0, 2.0, 0.0]], dtype=torch.float64))


def test_for_one_token_responses_the_sequence_loss_is_the_clipped_loss():
    logprobs, behavior, advantages, _ = random_batch(6, length=1)
    mask = torch.tensor([[True], [True], [False], [True], [True]])
    out, grad = with_gradient(sequence_loss, logprobs, behavior, advantages, mask, 4)
    plain, plain_grad = with_gradient(policy_loss, logprobs, behavior, advantages, mask, **CLIP, num_tokens=4)
    torch.testing.assert_close(out[0], plain[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grad, plain_grad, rtol=1e-12, atol=1e-12)


@given(
    seed=st.integers(0, 2**31),
    garbage=st.lists(st.sampled_from(GARBAGE), min_size=3, max_size=3),
    cuts=st.sets(st.integers(1, 4)),
)
def test_padding_does_not_matter_and_micro_batches_add_up(seed, garbage, cuts):
    *tensors, mask = random_batch(seed)
    whole, whole_grad = with_gradient(sequence_loss, *tensors, mask, 5)
    dirty = [torch.where(mask, x, fill) for x, fill in zip(tensors, garbage, strict=True)]
    dirty_out, dirty_grad = with_gradient(sequence_loss, *dirty, mask, 5)
    assert dirty_out == whole
    assert torch.equal(dirty_grad, whole_grad)
    assert torch.equal(whole_grad[~mask], torch.zeros_like(whole_grad[~mask]))
    pieces = [
        with_gradient(sequence_loss, *(x[a:b] for x in dirty), mask[a:b], 5)
        for a, b in itertools.pairwise([0, *sorted(cuts), 5])
    ]
    for which, full in enumerate(whole):
        parts = torch.stack([piece[0][which] for piece in pieces])
        combined = parts.max() if which == 3 else parts.sum()  # ratio_max is the only maximum
        torch.testing.assert_close(combined, full, rtol=0, atol=1e-12)
    torch.testing.assert_close(torch.cat([p[1] for p in pieces]), whole_grad, rtol=0, atol=1e-12)


def test_the_order_of_the_batch_does_not_matter():
    *tensors, mask = random_batch(11, batch=8)
    order = torch.randperm(8, generator=torch.Generator().manual_seed(3))
    there, there_grad = with_gradient(sequence_loss, *tensors, mask, 8)
    here, here_grad = with_gradient(sequence_loss, *(x[order] for x in tensors), mask[order], 8)
    torch.testing.assert_close(there, here, rtol=0, atol=1e-12)
    torch.testing.assert_close(there_grad[order], here_grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_gradients_match_finite_differences_and_reach_only_the_policy(seed):
    logprobs, behavior, advantages, mask = random_batch(seed)
    advantages = advantages[:, :1].repeat(1, 4)
    for tensor in (logprobs, behavior, advantages):
        tensor.requires_grad_()
    out = sequence_loss(logprobs, behavior, advantages, mask, 5)
    out.loss.backward()
    assert logprobs.grad.abs().sum() > 0
    assert behavior.grad is None
    assert advantages.grad is None
    assert not any(x.requires_grad for x in out[1:4])
    assert torch.autograd.gradcheck(
        lambda x: sequence_loss(x, behavior.detach(), advantages.detach(), mask, 5)[0], logprobs
    )


@pytest.mark.parametrize("shape", [(2, 3), (2, 0), (0, 3)])
def test_no_response_tokens_give_zero(shape):
    garbage, mask = torch.full(shape, NAN), torch.zeros(shape, dtype=torch.bool)
    out, grad = with_gradient(sequence_loss, garbage, garbage, garbage, mask, 0)
    assert [x.item() for x in out] == [0.0] * 4
    assert torch.equal(grad, torch.zeros(shape))


def test_bfloat16_is_computed_in_float32_and_a_clipped_overflow_is_not_nan():
    *tensors, mask = random_batch(2)
    half = [x.bfloat16() for x in tensors]
    out, grad = with_gradient(sequence_loss, *half, mask, 5)
    wide, _ = with_gradient(sequence_loss, *(x.float() for x in half), mask, 5)
    assert all(x.dtype == torch.float32 for x in out)
    assert out == wide
    assert grad.dtype == torch.bfloat16
    huge, mask = torch.tensor([[1000.0, 0.0]]), torch.ones(1, 2, dtype=torch.bool)
    out, grad = with_gradient(sequence_loss, huge, torch.zeros(1, 2), torch.ones(1, 2), mask, 1)
    assert out[0].item() == pytest.approx(-1.3)
    assert grad.tolist() == [[0.0, 0.0]]
