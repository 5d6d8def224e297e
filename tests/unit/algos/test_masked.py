import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coati.algos.masked import divide_by_count, masked_mean, masked_moments, masked_sum, masked_whiten, zero_padding
from coati.errors import DataError

NAN, INF = float("nan"), float("inf")


def test_sum_mean_and_moments_by_hand():
    # real entries 1, 2, 6: sum 9, mean 3, variance ((-2)² + (-1)² + 3²) / 3 = 14/3
    values = torch.tensor([[1.0, 2.0, NAN], [6.0, INF, -INF]])
    mask = torch.tensor([[True, True, False], [True, False, False]])
    assert masked_sum(values, mask).item() == 9.0
    assert masked_mean(values, mask).item() == 3.0
    moments = masked_moments(values, mask)
    assert moments.mean.item() == pytest.approx(3.0)
    assert moments.variance.item() == pytest.approx(14 / 3)
    assert moments.num_entries.item() == 3


def test_whiten_by_hand():
    # 1, 3, 5, 7: mean 4, variance (9 + 1 + 1 + 9) / 4 = 5
    values = torch.tensor([[1.0, 3.0, NAN], [5.0, 7.0, INF]], dtype=torch.float64)
    mask = torch.tensor([[True, True, False], [True, True, False]])
    expected = torch.tensor([[-3.0, -1.0, 0.0], [1.0, 3.0, 0.0]], dtype=torch.float64) / 5**0.5
    torch.testing.assert_close(masked_whiten(values, mask, eps=0.0), expected)


@pytest.mark.parametrize("shape", [(2, 3), (0, 3), (2, 0)])
def test_an_empty_mask_gives_zeros(shape):
    values = torch.full(shape, NAN, requires_grad=True)
    mask = torch.zeros(shape, dtype=torch.bool)
    assert masked_sum(values, mask).item() == 0.0
    assert masked_mean(values, mask).item() == 0.0
    assert torch.equal(masked_whiten(values, mask), torch.zeros(shape))
    assert [m.item() for m in masked_moments(values, mask)] == [0.0, 0.0, 0]
    masked_mean(values, mask).backward()
    assert torch.equal(values.grad, torch.zeros(shape))


def test_one_entry_is_shifted_and_not_scaled():
    values = torch.tensor([[5.0, NAN]], requires_grad=True)
    mask = torch.tensor([[True, False]])
    for eps in (1e-8, 0.0):
        whitened = masked_whiten(values, mask, eps=eps)
        assert whitened.tolist() == [[0.0, 0.0]]
        assert torch.autograd.grad(whitened.sum(), values)[0].isfinite().all()


@pytest.mark.parametrize("constant", [0.1, 1000.1, -77777.7])
def test_equal_entries_whiten_to_zero(constant):
    values = torch.full((7, 13), constant)
    assert masked_whiten(values, torch.ones(7, 13, dtype=torch.bool)).abs().max() < 1e-2


@given(
    seed=st.integers(0, 2**31),
    rows=st.integers(1, 5),
    columns=st.integers(2, 7),
    offset=st.floats(-100, 100),
    spread=st.floats(0.1, 100),
)
def test_whitened_entries_have_mean_zero_and_variance_one(seed, rows, columns, offset, spread):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, columns, generator=generator, dtype=torch.float64) * spread + offset
    mask = torch.rand(rows, columns, generator=generator) < 0.7
    mask[0, :2] = True
    values[~mask] = NAN
    # far enough from the rounding of the offset
    values[0, 0], values[0, 1] = offset - spread, offset + spread
    whitened = masked_whiten(values, mask, eps=0.0)
    assert torch.equal(whitened[~mask], torch.zeros(int((~mask).sum()), dtype=torch.float64))
    real = whitened[mask]
    assert abs(real.mean().item()) < 1e-9
    assert real.var(correction=0).item() == pytest.approx(1.0, abs=1e-9)


def test_whitening_ignores_the_order_of_the_batch():
    torch.manual_seed(0)
    values = torch.randn(6, 4, dtype=torch.float64)
    mask = torch.rand(6, 4) < 0.6
    order = torch.randperm(6)
    torch.testing.assert_close(masked_whiten(values[order], mask[order]), masked_whiten(values, mask)[order])


def test_gradient_of_whitening_is_exact_and_zero_on_padding():
    torch.manual_seed(0)
    values = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[True, True, True, False], [True, True, False, False]])
    assert torch.autograd.gradcheck(lambda v: masked_whiten(v, mask), values)
    garbage = torch.where(mask, values.detach(), NAN).requires_grad_()
    (masked_whiten(garbage, mask) ** 3).sum().backward()
    (masked_whiten(values, mask) ** 3).sum().backward()
    assert torch.equal(garbage.grad, values.grad)


def test_half_precision_is_computed_in_float32_and_float64_stays():
    mask = torch.ones(3, dtype=torch.bool)
    # 256 + 1 is not a bfloat16; in bfloat16 the sum would be 256 or 258
    assert masked_sum(torch.tensor([256.0, 1.0, 0.0], dtype=torch.bfloat16), mask).item() == 257.0
    assert masked_sum(torch.ones(3, dtype=torch.float64), mask).dtype == torch.float64


def test_divide_by_count_takes_numbers_and_tensors():
    assert divide_by_count(torch.tensor(6.0), 3).item() == 2.0
    assert divide_by_count(torch.tensor(6.0), torch.tensor(3)).item() == 2.0
    assert divide_by_count(torch.tensor(0.0), 0).item() == 0.0


def test_wrong_masks_are_rejected_by_name():
    with pytest.raises(DataError, match=r"mask must be a bool tensor, got torch\.int64"):
        masked_sum(torch.ones(2), torch.ones(2, dtype=torch.int64))
    with pytest.raises(DataError, match=r"kl must have the shape of its mask \(2, 3\), got \(2,\)"):
        zero_padding(torch.ones(2), torch.ones(2, 3, dtype=torch.bool), name="kl")
