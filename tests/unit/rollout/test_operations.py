"""The choice between Triton kernels and torch for a decode step."""

import dataclasses
import importlib.util

import pytest
import torch

from coati.rollout.native.operations import (
    _KERNEL_TOLERANCE,
    Geometry,
    TorchOperations,
    _trial_errors,
    kernel_problem,
    operations_for,
)


def geometry(head_dim):
    return Geometry(head_dim=head_dim, num_kv_heads=2, group=2, scale=1.0, rotary_dim=head_dim)


def test_a_cpu_uses_torch_operations():
    assert type(operations_for(torch.zeros(1), geometry(16))) is TorchOperations


def test_unsupported_head_sizes_are_reported():
    reason = kernel_problem(torch.device("cpu"), torch.float32, geometry(80))
    assert reason == "heads have 80 dimensions, but the kernels need a power of two of at least 16"


@pytest.mark.skipif(importlib.util.find_spec("triton") is not None, reason="Triton is installed")
def test_missing_triton_is_reported():
    assert "No module named 'triton'" in kernel_problem(torch.device("cpu"), torch.float32, geometry(16))


class RoundedOnce(TorchOperations):
    """Splits in float32 and, like the kernels, rounds the results of norms twice and the rest once."""

    def head_split(self, positions, angles):
        def split(projected, block):
            dim, num_values = self._geometry.head_dim, self._geometry.num_kv_heads
            heads = projected.view(len(projected), -1, dim)
            queries, keys, values = (
                heads[:, : -2 * num_values],
                heads[:, -2 * num_values : -num_values],
                heads[:, -num_values:],
            )
            cos, sin = (table[positions, None].float() for table in angles[block.rotation])
            turned = []
            for norm, part in zip(block.head_norms or (None, None), (queries, keys), strict=True):
                if norm is not None:
                    scale = (part.float().square().mean(-1, keepdim=True) + 1e-6).rsqrt()
                    part = (part.float() * scale).to(part.dtype) * norm.weight
                wide = part.float()
                turned.append((wide * cos + wide.roll(dim // 2, -1) * sin).to(part.dtype))
            return *turned, values

        return split


@pytest.mark.parametrize(
    ("num_kv_heads", "group", "head_dim"),
    [(2, 7, 64), (4, 7, 128), (8, 12, 128)],
)
def test_rounding_alone_passes_the_trial_at_all_sizes(num_kv_heads, group, head_dim):
    size = Geometry(
        head_dim=head_dim, num_kv_heads=num_kv_heads, group=group, scale=head_dim**-0.5, rotary_dim=head_dim
    )
    errors = _trial_errors(RoundedOnce(size), TorchOperations(size), torch.device("cpu"), torch.bfloat16, size)
    assert 0 < errors["head_split"] < _KERNEL_TOLERANCE[torch.bfloat16] / 2


@pytest.mark.parametrize("rotary_dim", [0, 8])
def test_the_trial_rotates_no_more_dimensions_than_the_model(rotary_dim):
    """With learned positions, kernels rotate whole heads by angles that change nothing."""
    model = dataclasses.replace(geometry(16), rotary_dim=rotary_dim)
    as_kernels_do = TorchOperations(dataclasses.replace(model, rotary_dim=rotary_dim or 16))
    errors = _trial_errors(as_kernels_do, TorchOperations(model), torch.device("cpu"), torch.float32, model)
    assert max(errors.values()) < 1e-5
