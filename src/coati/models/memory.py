"""Where a model's weights lie: nowhere yet, in memory of their own, in shards; and how they are read, each once."""

import contextlib
import contextvars
from collections.abc import Collection, Iterable, Iterator
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

Model = TypeVar("Model", bound=nn.Module)

_shapes_only: contextvars.ContextVar[bool] = contextvars.ContextVar("shapes_only", default=False)
# Options of `from_pretrained` that mean the same without weights.
_SHAPE_OPTIONS = {"dtype", "attn_implementation", "trust_remote_code"}


@contextlib.contextmanager
def shapes_only() -> Iterator[None]:
    """Make `Actor` and `Critic` in here without weights; a sharding strategy's `prepare` gives them rank 0's."""
    token = _shapes_only.set(True)
    try:
        yield
    finally:
        _shapes_only.reset(token)


def are_shapes_enough(options: Iterable[str] = ()) -> bool:
    """Whether to build a model on the meta device instead of loading it with these options."""
    return _shapes_only.get() and _SHAPE_OPTIONS.issuperset(options)


def own_memory(model: Model) -> Model:
    """Copy weights out of the file that transformers maps into memory, on a machine without GPUs.

    A model on the CPU would change if the file were written to, and its process end if it were cut short.
    """
    if not torch.cuda.is_available():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.data = tensor.data.clone()
    return model


def tied_names(module: nn.Module) -> dict[str, str]:
    """Names in the state dict that share their tensor with an earlier name, mapped to that name."""
    first_name: dict[object, str] = {}
    tied: dict[str, str] = {}
    for name, tensor in state_tensors(module).items():
        identity = _identity(tensor)
        if identity in first_name:
            tied[name] = first_name[identity]
        else:
            first_name[identity] = name
    return tied


def state_tensors(module: nn.Module) -> dict[str, Tensor]:
    """The tensors of a module's state dict; parameters as the objects they are."""
    # keep_vars gives the parameter objects themselves, and with them their identity.
    state = module.state_dict(keep_vars=True)
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def _identity(tensor: Tensor) -> object:
    # A rank's piece of a DTensor may be empty, and empty tensors have no address: ranks would then disagree
    # on what is tied, and wait for each other for ever. The object itself is the same question on every rank.
    if isinstance(tensor, DTensor) or tensor.numel() == 0 or tensor.device.type == "meta":
        return id(tensor)
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())


def iter_state_chunks(
    module: nn.Module, *, max_bytes: int = 1 << 26, names: Collection[str] | None = None
) -> Iterator[dict[str, Tensor]]:
    """Yield the state dict in its own order, in chunks of at most `max_bytes`.

    A larger tensor is a chunk by itself. Tied weights come once, under their first name. Tensors are detached, whole,
    and may share memory with the module. Sharded ones are gathered one at a time: all ranks must iterate in step.
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
