"""When a decode step runs as Triton kernels, and when it does not."""

import importlib.util

import pytest
import torch

from coati.rollout.native.operations import Geometry, TorchOperations, kernel_problem, operations_for


def geometry(head_dim):
    return Geometry(head_dim=head_dim, num_kv_heads=2, group=2, scale=1.0, rotary_dim=head_dim)


def test_a_cpu_runs_torch():
    assert type(operations_for(torch.zeros(1), geometry(16))) is TorchOperations


def test_heads_that_cannot_be_cut_are_named():
    reason = kernel_problem(torch.device("cpu"), torch.float32, geometry(80))
    assert reason == "heads have 80 dimensions, and the kernels need a power of two from 16 on"


@pytest.mark.skipif(importlib.util.find_spec("triton") is not None, reason="Triton is installed")
def test_a_machine_without_triton_is_told_so():
    assert "No module named 'triton'" in kernel_problem(torch.device("cpu"), torch.float32, geometry(16))
