"""Sums, means and whitening over the unpadded entries of a tensor.

Padding may hold anything, `nan` included. So `zero_padding`, which all of `algos` uses, selects instead of multiplying.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from coati.errors import DataError


class MaskedMoments(NamedTuple):
    """Mean, population variance and number of the entries where the mask is True, all scalars; zeros if none is."""

    mean: Tensor
    variance: Tensor
    num_entries: Tensor


def at_least_float32(values: Tensor) -> Tensor:
    """Return `values` as float64 if they are float64, else as float32."""
    return values if values.dtype == torch.float64 else values.float()


def zero_padding(values: Tensor, mask: Tensor, *, name: str = "values") -> Tensor:
    """Return `values` in at least float32, with exact zeros and exactly zero gradient where `mask` is False.

    >>> values = torch.tensor([1.0, float("nan")])
    >>> zero_padding(values, torch.tensor([True, False])).tolist()
    [1.0, 0.0]
    """
    if mask.dtype != torch.bool:
        raise DataError(f"mask must be a bool tensor, got {mask.dtype}. Convert it with mask.bool().")
    if values.shape != mask.shape:
        raise DataError(
            f"{name} must have the shape of its mask {tuple(mask.shape)}, got {tuple(values.shape)}. "
            "Pass one value for each position of the mask."
        )
    wide = at_least_float32(values)
    return torch.where(mask, wide, torch.zeros_like(wide))


def divide_by_count(total: Tensor, count: Tensor | float) -> Tensor:
    """Return `total / count` in the dtype of `total`; a count below 1 is treated as 1, so 0 / 0 is 0."""
    # Convert first: promotion with a float64 count would change the dtype of a float32 loss.
    return total / torch.as_tensor(count, dtype=total.dtype, device=total.device).clamp(min=1.0)


def finite_exp(values: Tensor) -> Tensor:
    """Return exp(values), clamped to stay finite, because inf · 0 is nan."""
    return values.clamp(max=math.floor(math.log(torch.finfo(values.dtype).max))).exp()


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Return the sum of the entries where `mask` is True, a scalar."""
    return zero_padding(values, mask).sum()


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of the entries where `mask` is True, a scalar; 0 if there are none."""
    return divide_by_count(masked_sum(values, mask), mask.sum())


def masked_moments(values: Tensor, mask: Tensor) -> MaskedMoments:
    """Return mean, population variance (divided by n, not n - 1) and count of the entries where `mask` is True."""
    count = mask.sum()
    clean = zero_padding(values, mask)
    rough_mean = divide_by_count(clean.sum(), count)
    # A second pass over the residuals: if all entries are equal, the rounding error of one large float32 sum would
    # look like variance, and whitening would amplify it to noise of size one.
    mean = rough_mean + masked_mean(clean - rough_mean, mask)
    variance = masked_mean((clean - mean).square(), mask)
    return MaskedMoments(mean=mean, variance=variance, num_entries=count)


def masked_whiten(
    values: Tensor,
    mask: Tensor,
    *,
    eps: float = 1e-8,
    moments: MaskedMoments | None = None,  # of a larger batch that contains `values`
) -> Tensor:
    """Return `values` shifted to mean 0 and scaled to variance 1 over the masked entries, and 0 on padding; same shape.

    Fewer than two entries are not scaled. Pass the `moments` of a whole step to whiten its parts consistently.

    >>> masked_whiten(torch.tensor([1.0, 3.0, 9.0]), torch.tensor([True, True, False])).tolist()
    [-1.0, 1.0, 0.0]
    """
    mean, variance, count = masked_moments(values, mask) if moments is None else moments
    # Select before rsqrt: with eps = 0 its gradient at 0 is infinite, and 0 * inf is nan.
    divisor_squared = torch.where(count >= 2, variance + eps, torch.ones_like(variance))
    return zero_padding((zero_padding(values, mask) - mean) * divisor_squared.rsqrt(), mask)


def spread(
    advantages: Tensor,  # [B] one per response
    mask: Tensor,  # [B, T] bool, True on response tokens
) -> Tensor:
    """Repeat each response's advantage at all of its tokens, `[B, T]`, zeros on padding."""
    assert advantages.shape == mask.shape[:1]
    return zero_padding(advantages.unsqueeze(-1).expand(mask.shape), mask, name="advantages")
