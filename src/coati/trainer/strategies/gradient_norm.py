"""The global gradient norm, over ranks and shards, and clipping to it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from coati.errors import ConfigError


@torch.no_grad()
def clip_grads(
    params: Sequence[Tensor],
    max_norm: float,
    *,
    device: torch.device,
    all_reduce_sum: Callable[[Tensor], Tensor],
) -> Tensor:
    """Scale the gradients so that their joint 2-norm is at most `max_norm`; return the norm before scaling.

    `max_norm` 0 or infinity only measures. A norm that is not finite is returned as it is and scales nothing:
    whether to skip the step is the caller's decision, and scaling by nan would destroy the evidence.
    """
    if not max_norm >= 0:
        raise ConfigError(f"max_grad_norm must be 0 or more, got {max_norm}. Use 0 to measure without clipping.")
    norm = _global_norm(params, device=device, all_reduce_sum=all_reduce_sum)
    if max_norm == 0 or math.isinf(max_norm):
        return norm
    # The arithmetic of torch.nn.utils.clip_grad_norm_, so that one rank gives the same bits as plain torch.
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    scale = torch.where(norm.isfinite(), scale, torch.ones_like(scale))  # no wait for the device
    for param in params:
        if param.grad is not None:
            grad = param.grad.to_local() if isinstance(param.grad, DTensor) else param.grad
            grad.mul_(scale.to(device=grad.device))
    return norm


def _global_norm(
    params: Sequence[Tensor], *, device: torch.device, all_reduce_sum: Callable[[Tensor], Tensor]
) -> Tensor:
    whole, shards = [], []
    for param in params:
        if isinstance(param.grad, DTensor):
            shards.append(_norm(param.grad.to_local(), device))
        elif param.grad is not None:
            whole.append(_norm(param.grad, device))
    # Ranks must agree on whether to talk, so this asks about parameters, not about who got a gradient.
    if not any(isinstance(param, DTensor) for param in params):
        return _norm_of_norms(whole, device)
    # Each rank holds its own part of a sharded gradient, and the same copy of a whole one: only shards add
    # up. Squares are summed in float64: a gradient that explodes must not overflow before its norm does.
    local = _norm_of_norms(shards, device)
    of_shards = all_reduce_sum(local.double().square()).sqrt().to(local.dtype)
    return _norm_of_norms([*whole, of_shards], device)


def _norm(grad: Tensor, device: torch.device) -> Tensor:
    # Half precision has 8 bits: the sum over a model is carried in float32.
    dtype = grad.dtype if grad.dtype in (torch.float32, torch.float64) else torch.float32
    norm: Tensor = torch.linalg.vector_norm(grad, 2.0, dtype=dtype)
    return norm.to(device)


def _norm_of_norms(norms: Sequence[Tensor], device: torch.device) -> Tensor:
    if not norms:
        return torch.zeros((), device=device)
    common = max((norm.dtype for norm in norms), key=lambda dtype: dtype.itemsize)
    total: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(common) for norm in norms]), 2.0)
    return total
