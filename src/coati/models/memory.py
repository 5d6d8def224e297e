"""Storage of a model's weights: on the meta device, in memory or in shards; and iteration over its state dict."""

import contextlib
import contextvars
from collections.abc import Collection, Iterable, Iterator
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

Model = TypeVar("Model", bound=nn.Module)

_shapes_only: contextvars.ContextVar[bool] = contextvars.ContextVar("shapes_only", default=False)
# Options of `from_pretrained` that also apply to a model without weights.
_SHAPE_OPTIONS = {"dtype", "attn_implementation", "trust_remote_code"}


@contextlib.contextmanager
def shapes_only() -> Iterator[None]:
    """Create `Actor` and `Critic` without weights in this context; a sharding `Strategy.prepare` sends rank 0's."""
    token = _shapes_only.set(True)
    try:
        yield
    finally:
        _shapes_only.reset(token)


def wants_shapes_only(options: Iterable[str] = ()) -> bool:
    """Return whether to build a model on the meta device instead of loading it with these options."""
    return _shapes_only.get() and _SHAPE_OPTIONS.issuperset(options)


def copy_mapped_weights(model: Model) -> Model:
    """Copy weights out of the file that transformers maps into memory, on a machine without GPUs.

    Otherwise a write to the file would change a model on the CPU, and truncating the file would crash the process.
    """
    if not torch.cuda.is_available():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.data = tensor.data.clone()
    return model


def tied_names(module: nn.Module) -> dict[str, str]:
    """Map names in the state dict that share their tensor with an earlier name to that earlier name."""
    first_name: dict[object, str] = {}
    tied: dict[str, str] = {}
    for name, tensor in state_tensors(module).items():
        if (first := first_name.setdefault(_identity(tensor), name)) != name:
            tied[name] = first
    return tied


def state_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a module's state dict, with parameters as the objects themselves."""
    return {name: value for name, value in module.state_dict(keep_vars=True).items() if isinstance(value, Tensor)}


def _identity(tensor: Tensor) -> object:
    # A rank's shard of a DTensor may be empty, and empty tensors have no address: ranks would disagree on which
    # weights are tied, and deadlock. Object identity gives the same answer on every rank.
    if isinstance(tensor, DTensor) or tensor.numel() == 0 or tensor.device.type == "meta":
        return id(tensor)
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())


def iter_state_chunks(
    module: nn.Module, *, max_bytes: int = 1 << 26, names: Collection[str] | None = None
) -> Iterator[dict[str, Tensor]]:
    """Yield the state dict in its own order, in chunks as `in_chunks` makes them.

    Tied weights come once, under their first name. Tensors are detached, whole, and may share memory with the module.
    Sharded ones are gathered one at a time, so all ranks must iterate together.
    """
    tied = tied_names(module)
    tensors = ((name, tensor) for name, tensor in state_tensors(module).items() if name not in tied)
    yield from in_chunks((one for one in tensors if names is None or one[0] in names), max_bytes)


def in_chunks(tensors: Iterable[tuple[str, Tensor]], max_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Group named tensors, made whole, into chunks of at most `max_bytes`; a larger tensor is a chunk by itself."""
    chunk: dict[str, Tensor] = {}
    chunk_bytes = 0
    for name, tensor in tensors:
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
    """Return the tensor detached, and gathered if it is sharded (then every rank must call this)."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor, or the tensor itself if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def laid_out_like(whole: Tensor, like: Tensor) -> Tensor:
    """Shard a whole tensor like `like`, or return it if `like` is not sharded; all ranks must pass equal tensors."""
    if not isinstance(like, DTensor):
        return whole
    # Every rank has the whole tensor: src_data_rank=None slices it locally and sends nothing.
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)
