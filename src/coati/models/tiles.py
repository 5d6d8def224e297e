"""Batch-invariant passes: a token gets the same bits whatever else is computed with it, in any order and padding.

Libraries choose kernels, and with them the rounding, by the shape of an operation. So without gradients, operations get
shapes that the row decides alone:

    matrix products    a fixed number of rows at once; the last tile is padded with zeros
    attention          on a CPU, rows padded to the same length (`padded_length`); flash kernels work row by row
    activations        on a CPU, pieces that fill whole vectors and are not split among threads
    norms              on a GPU, tiles as for products; a CPU computes them row by row

Softmax and embeddings work row by row as they are. Learning needs none of this. CPUs always compute this way, GPUs only
for models marked by `set_batch_invariant`.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

TILE = 128
"""Rows of a product in a pass over whole sequences on a CPU: larger tiles are hardly faster, and waste more."""
GPU_TILE = 2048
"""The same on a GPU: smaller products would leave it idle."""
_VECTOR = 32  # elements: a multiple of what vector instructions take at once
_PIECE = 32768  # elements of an operation that torch does not share among threads


class _Active(threading.local):
    tile = 0


_active = _Active()


def active_tile() -> int:
    """Rows of a product in this thread's batch-invariant pass; 0 outside of one."""
    return _active.tile


def set_batch_invariant(model: nn.Module, enabled: bool = True) -> None:
    """Make passes without gradients through this model batch-invariant on GPUs too, which is slower."""
    for module in model.modules():
        module.is_batch_invariant = enabled  # type: ignore[assignment]


def is_batch_invariant(model: nn.Module) -> bool:
    """Return whether `set_batch_invariant` was called for this model."""
    return bool(getattr(model, "is_batch_invariant", False))


@contextlib.contextmanager
def products_of(tile: int) -> Iterator[None]:
    """Inside, `active_tile` is this number."""
    outer, _active.tile = _active.tile, tile
    try:
        yield
    finally:
        _active.tile = outer


@contextlib.contextmanager
def same_in_any_company(model: nn.Module, like: Tensor, *, tile: int = 0) -> Iterator[None]:
    """Inside, passes without gradients through a model that is not compiled are batch-invariant.

    This holds on a CPU, and on a GPU for models marked by `set_batch_invariant`. `tile` 0 chooses by the device.
    """
    on_cpu = like.device.type == "cpu"
    if torch.is_grad_enabled() or not (on_cpu or is_batch_invariant(model)):
        yield
        return
    tile = tile or (TILE if on_cpu else GPU_TILE)
    modules = list(model.modules())
    is_compiled = any(module._compiled_call_impl is not None for module in modules)
    tiled = [] if is_compiled else [(module, _tiled_forward(module, tile, on_cpu=on_cpu)) for module in modules]
    forwards = {module: forward for module, forward in tiled if forward is not None}
    for module, forward in forwards.items():
        vars(module)["forward"] = forward
    try:
        with products_of(tile):
            yield
    finally:
        for module in forwards:
            vars(module).pop("forward", None)


def _tiled_forward(module: Any, tile: int, *, on_cpu: bool) -> Callable[[Tensor], Tensor] | None:
    """What takes the place of a module's forward pass, if it is one whose results depend on the shape."""
    if "forward" in vars(module):  # someone else's
        return None
    if type(module) is nn.Linear:
        return lambda inputs: tiled_linear(inputs, module.weight, module.bias, tile=tile)
    if type(module) is Conv1D:  # the linear layers of GPT-2
        return lambda inputs: tiled_linear(inputs, module.weight.t(), module.bias, tile=tile)
    if not on_cpu:
        is_norm = type(module).__name__.endswith(("RMSNorm", "LayerNorm"))
        return functools.partial(in_tiles, module.forward, tile=tile) if is_norm else None
    if isinstance(module, nn.SiLU | nn.GELU) or type(module).__module__ == "transformers.activations":
        return functools.partial(tiled_activation, module.forward)
    return None


@functools.cache
def padded_length(length: int, least: int = 8) -> int:
    """How long a row is made: at most about a quarter is padding, and rows have few different lengths.

    >>> [padded_length(length) for length in (1, 32, 33, 129, 200)]
    [8, 32, 48, 192, 256]
    """
    step = max(least, (1 << (length - 1).bit_length()) // 4)
    return -(-length // step) * step


def tiled_linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None, *, tile: int = TILE) -> Tensor:
    """`F.linear`, in products of `tile` rows each."""
    return in_tiles(lambda part: F.linear(part, weight, bias), inputs, tile=tile)


def in_tiles(function: Callable[[Tensor], Tensor], inputs: Tensor, *, tile: int) -> Tensor:
    """A function of rows, called with `tile` rows at a time."""
    rows = inputs.reshape(-1, inputs.shape[-1])
    count = rows.shape[0]
    parts = list(torch.split(rows, tile))
    if missing := tile - parts[-1].shape[0]:
        parts[-1] = F.pad(parts[-1], (0, 0, 0, missing))
    results = [function(part) for part in parts]
    joined = results[0] if len(results) == 1 else torch.cat(results)
    return joined[:count].view(*inputs.shape[:-1], -1)


def tiled_activation(activation: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
    """A function of each element, whose last elements torch would compute by other code than the rest."""
    count = inputs.numel()
    piece = _PIECE if torch.get_num_threads() > 1 else max(count, 1)
    # What is not contiguous is computed row by row, each with a rest of its own, and GELU by other code altogether.
    if count <= piece and count % _VECTOR == 0 and inputs.is_contiguous():
        return activation(inputs)
    parts = list(torch.split(inputs.reshape(-1), piece))
    parts[-1] = F.pad(parts[-1], (0, -count % _VECTOR))
    return torch.cat([activation(part) for part in parts])[:count].view(inputs.shape)
