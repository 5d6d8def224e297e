"""A module's state as a stream of bounded chunks, whether its parameters are whole or sharded over ranks."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from coati.models.memory import state_tensors, tied_names


def iter_state_chunks(
    module: nn.Module, *, max_bytes: int = 1 << 26, names: Collection[str] | None = None
) -> Iterator[dict[str, Tensor]]:
    """Yield the state dict in its own order, in chunks of at most `max_bytes`.

    A tensor larger than that is a chunk by itself. Tied weights come once, under their first name. Tensors
    are detached, whole, on their device and in their dtype; whole parameters still share memory with the
    module. Sharded ones are gathered one at a time, so all ranks must iterate in step, and every rank gets
    every chunk. With `names`, only those are gathered.
    """
    tied = tied_names(module)
    chunk: dict[str, Tensor] = {}
    chunk_bytes = 0
    for name, tensor in state_tensors(module).items():
        if name in tied or (names is not None and name not in names):
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
    """Detach the tensor, and gather it if it is sharded (then every rank must call this)."""
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        whole: Tensor = tensor.full_tensor()
        return whole
    return tensor


def local_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor: its shard, if it is sharded, else all of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def laid_out_like(whole: Tensor, like: Tensor) -> Tensor:
    """This rank's part of a whole tensor, if `like` is sharded, else the tensor; all ranks pass the same one."""
    if not isinstance(like, DTensor):
        return whole
    # Every rank has the whole tensor at hand: src_data_rank=None slices it here and sends nothing.
    sharded: DTensor = distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)
    return sharded
