"""Clipping: gradients of several kinds at once, and norms that are not numbers."""

import math

import pytest
import torch

from coati.trainer.strategies.gradient_norm import clip_grads


def params_with(*grads):
    params = [torch.zeros_like(grad) if grad is not None else torch.zeros(1) for grad in grads]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    return params


def clipped(params, max_norm):
    return clip_grads(params, max_norm, device=torch.device("cpu"), all_reduce_sum=lambda total: total)


def test_gradients_of_two_dtypes_have_one_norm_and_are_scaled_alike():
    params = params_with(torch.tensor([3.0]), None, torch.tensor([4.0, 0.0]).bfloat16(), torch.tensor([12.0]).double())
    norm = clipped(params, 6.5)
    assert norm.item() == pytest.approx(13.0)
    grads = [param.grad for param in params if param.grad is not None]
    assert [grad.dtype for grad in grads] == [torch.float32, torch.bfloat16, torch.float64]
    assert [grad.tolist() for grad in grads] == [[pytest.approx(1.5)], [2.0, 0.0], [pytest.approx(6.0)]]


@pytest.mark.parametrize("worst", [math.inf, math.nan, 3e38])
def test_a_norm_that_is_no_number_scales_nothing(worst):
    params = params_with(torch.tensor([1.0, 2.0]), torch.full((2,), worst))
    assert not math.isfinite(clipped(params, 1.0).item())  # 3e38 overflows
    assert params[0].grad.tolist() == [1.0, 2.0]


def test_half_precision_is_summed_in_float32():
    params = params_with(*(torch.ones(1).bfloat16() for _ in range(1000)))
    assert clipped(params, 0).item() == pytest.approx(1000**0.5, rel=1e-6)
