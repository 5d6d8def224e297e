"""A module's state as a stream of bounded chunks, whether its parameters are whole or sharded over ranks."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def tied_names(module: nn.Module) -> dict[str, str]:
    """Names in the state dict that share their tensor with an earlier name, mapped to that name.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
        >>> net[1].weight = net[0].weight
        >>> tied_names(net)
        {'1.weight': '0.weight'}
    """
    first_name: dict[object, str] = {}
    tied: dict[str, str] = {}
    for name, tensor in _state_tensors(module).items():
        identity = _identity(tensor)
        if identity in first_name:
            tied[name] = first_name[identity]
        else:
            first_name[identity] = name
    return tied


def iter_state_chunks(module: nn.Module, *, max_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Yield the state dict in its own order, in chunks of at most `max_bytes`.

    A tensor larger than that is a chunk of its own. Tied weights come once, under their first name. Tensors
    are detached, whole, on their device and in their dtype; whole parameters still share memory with the
    module. Sharded ones are gathered one at a time, so all ranks must iterate in step, and every rank gets
    every chunk.
    """
    tied = tied_names(module)
    chunk: dict[str, Tensor] = {}
    chunk_bytes = 0
    for name, tensor in _state_tensors(module).items():
        if name in tied:
            continue
        num_bytes = tensor.numel() * tensor.element_size()  # of the whole tensor, also for a DTensor
        if chunk and chunk_bytes + num_bytes > max_bytes:
            yield chunk
            chunk, chunk_bytes = {}, 0
        chunk[name] = whole_tensor(tensor)
        chunk_bytes += num_bytes
    if chunk:
        yield chunk


@torch.no_grad()
def whole_tensor(tensor: Tensor) -> Tensor:
    """The tensor detached, and gathered if it is sharded (then every rank must call this)."""
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        whole: Tensor = tensor.full_tensor()
        return whole
    return tensor


def _state_tensors(module: nn.Module) -> dict[str, Tensor]:
    # keep_vars gives the parameter objects themselves, and with them their identity.
    state = module.state_dict(keep_vars=True)
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def _identity(tensor: Tensor) -> object:
    # A rank's piece of a DTensor may be empty, and empty tensors have no address: ranks would then disagree
    # on what is tied, and wait for each other for ever. The object itself is the same question on every rank.
    if isinstance(tensor, DTensor) or tensor.numel() == 0 or tensor.device.type == "meta":
        return id(tensor)
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
