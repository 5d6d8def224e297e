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
    scale = (max_norm / (norm + 1e-6)).item()
    if math.isfinite(norm.item()) and scale < 1.0:
        for grads in _alike([_local(param.grad) for param in params if param.grad is not None]):
            torch._foreach_mul_(grads, scale)
    return norm


def _global_norm(
    params: Sequence[Tensor], *, device: torch.device, all_reduce_sum: Callable[[Tensor], Tensor]
) -> Tensor:
    grads = [param.grad for param in params if param.grad is not None]
    whole = _norms([grad for grad in grads if not isinstance(grad, DTensor)], device)
    shards = _norms([grad.to_local() for grad in grads if isinstance(grad, DTensor)], device)
    # Ranks must agree on whether to talk, so this asks about parameters, not about who got a gradient.
    if not any(isinstance(param, DTensor) for param in params):
        return _norm_of_norms(whole, device)
    # Each rank holds its own part of a sharded gradient, and the same copy of a whole one: only shards add
    # up. Squares are summed in float64: a gradient that explodes must not overflow before its norm does.
    local = _norm_of_norms(shards, device)
    of_shards = all_reduce_sum(local.double().square()).sqrt().to(local.dtype)
    return _norm_of_norms([*whole, of_shards.unsqueeze(0)], device)


def _norms(grads: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """The norms of the gradients on `device`, a vector for each kind of them."""
    norms: list[Tensor] = []
    for alike in _alike(grads):
        # Half precision has 8 bits: the sum over a model is carried in float32.
        dtype = alike[0].dtype if alike[0].dtype in (torch.float32, torch.float64) else torch.float32
        norms.append(torch.stack(torch._foreach_norm(alike, 2.0, dtype=dtype)).to(device))
    return norms


def _alike(grads: Sequence[Tensor]) -> list[list[Tensor]]:
    """The gradients by device and dtype, so that one call takes all of a kind."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for grad in grads:
        groups.setdefault((grad.device, grad.dtype), []).append(grad)
    return list(groups.values())


def _local(grad: Tensor) -> Tensor:
    return grad.to_local() if isinstance(grad, DTensor) else grad


def _norm_of_norms(norms: Sequence[Tensor], device: torch.device) -> Tensor:
    if not norms:
        return torch.zeros((), device=device)
    common = max((norm.dtype for norm in norms), key=lambda dtype: dtype.itemsize)
    total: Tensor = torch.linalg.vector_norm(torch.cat([norm.to(common) for norm in norms]), 2.0)
    return total
