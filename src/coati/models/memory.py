"""Where a model's weights lie: nowhere yet, in memory of their own, and once where several names share a tensor."""

import contextlib
import contextvars
from collections.abc import Iterable, Iterator
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

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
    """Copy weights that were just loaded out of the file that they still are, on a machine without GPUs.

    transformers maps safetensors files into memory. A model that stays on the CPU would change while it serves if the
    file were written to, and its process would end if the file were cut short. Where there are GPUs, models go
    to one, which is a copy, and the host may have no room for another.
    """
    if not torch.cuda.is_available():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.data = tensor.data.clone()
    return model


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
