"""Batch invariance: a token gets the same bits regardless of other rows, their order and padding.

Libraries choose kernels, and thus the rounding, by the shape of an operation. Without gradients, operations therefore
get shapes that depend on a single row only:

    matrix products    a fixed number of rows at a time, the last of them padded with zeros, unless a trial shows that
                       one product of all rows has the same bits (`is_one_product_exact`)
    attention          rows padded to the same length (`padded_length`), unless a flash kernel works row by row
    activations        on a CPU, pieces that vector instructions cover without remainder and threads do not split
    norms              on a GPU, a fixed number of rows at a time

Everything else already works row by row. On a CPU, `coati.rollout.native.columns` has the decode steps. Training does
not need batch invariance. CPUs always compute this way, GPUs only for models marked by `set_batch_invariant`.
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
"""Rows per product in a pass over whole sequences on a CPU: more are hardly faster, fewer need less padding."""
GPU_TILE = 2048
"""Rows per product on a GPU, where smaller products would leave most of it idle."""
_MOST_TRIED = 1 << 28  # multiplications of a product that `is_one_product_exact` tries
_ALIGNMENT = 64  # bytes: of torch's memory on a CPU
_VECTOR = 32  # elements: a multiple of every vector width
_PIECE = 32768  # elements: torch does not split an operation of this size among threads


class _Active(threading.local):
    tile = 0


_active = _Active()


def active_tile() -> int:
    """Return the rows per product of this thread's batch-invariant pass; 0 outside of one."""
    return _active.tile


def set_batch_invariant(model: nn.Module, enabled: bool = True) -> None:
    """Make passes without gradients through a model batch-invariant on GPUs too, which is slower."""
    for module in model.modules():
        module.is_batch_invariant = enabled  # type: ignore[assignment]


def is_batch_invariant(model: nn.Module) -> bool:
    """Return whether a model was marked by `set_batch_invariant`."""
    return bool(getattr(model, "is_batch_invariant", False))


@contextlib.contextmanager
def products_of(tile: int) -> Iterator[None]:
    """Set `active_tile` inside this context."""
    outer, _active.tile = _active.tile, tile
    try:
        yield
    finally:
        _active.tile = outer


@contextlib.contextmanager
def batch_invariant(model: nn.Module, like: Tensor, *, tile: int = 0) -> Iterator[None]:
    """Make an uncompiled model batch-invariant inside this context; only without gradients.

    On a GPU this does nothing unless the model was marked by `set_batch_invariant`. With `tile` 0 the device decides.
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
    """Return a batch-invariant forward for a module whose results depend on the shape; None for other modules."""
    if "forward" in vars(module):  # already replaced by other code
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
    """Return the length that a row is padded to: one of few lengths, with at most a third padding in long rows.

    >>> [padded_length(length) for length in (1, 32, 33, 129, 200)]
    [8, 32, 48, 192, 256]
    """
    step = max(least, (1 << (length - 1).bit_length()) // 4)
    return -(-length // step) * step


def tiled_linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None, *, tile: int = TILE) -> Tensor:
    """Compute `F.linear` in products of `tile` rows each, or in one that has the same bits."""
    rows = inputs.reshape(-1, inputs.shape[-1])
    missing = -len(rows) % tile
    count = len(rows) + missing
    if inputs.device.type != "cpu" or bias is not None or not is_one_product_exact(weight, count, tile=tile):
        return in_tiles(lambda part: F.linear(part, weight, bias), inputs, tile=tile)
    joined = F.linear(F.pad(rows, (0, 0, 0, missing)) if missing else rows, weight)
    return joined[: len(rows)].view(*inputs.shape[:-1], -1)


def is_one_product_exact(weight: Tensor, count: int, *, tile: int, by_columns: bool = False) -> bool:
    """Return whether, on a CPU, one product with `count` rows has the same bits as products with `tile` rows each.

    The rows are inputs of `F.linear` or, with `by_columns`, columns that `weight` is multiplied with.
    """
    if count == tile:
        return True
    is_plain = weight.is_contiguous() or weight.t().is_contiguous()
    # Threads may share sums in any way, and 16 bits show too little of a sum for a trial.
    if not is_plain or torch.get_num_threads() > 1 or weight.element_size() < 4 or count * weight.numel() > _MOST_TRIED:
        return False
    layout = weight.shape, weight.stride(), weight.data_ptr() % _ALIGNMENT // weight.element_size()
    return _try_one_product(layout, weight.dtype, count, tile, by_columns)


@functools.lru_cache(maxsize=4096)
def _try_one_product(layout: Any, dtype: torch.dtype, count: int, tile: int, by_columns: bool) -> bool:
    """Try random numbers: libraries order the terms of a sum by the layout of the factors, not by their values."""
    (num_outputs, num_inputs), generator = layout[0], torch.Generator().manual_seed(0)
    numbers = torch.randn(num_outputs * num_inputs + _ALIGNMENT, generator=generator, dtype=dtype)
    weight = numbers.as_strided(*layout)
    rows = torch.randn(count, num_inputs, generator=generator, dtype=dtype)
    if by_columns:
        columns = rows.t().contiguous()
        return torch.equal(torch.mm(weight, columns), torch.cat(in_column_tiles(weight, columns, tile), dim=1))
    parts = [F.linear(part, weight) for part in torch.split(rows, tile)]
    return torch.equal(F.linear(rows, weight), torch.cat(parts))


def in_column_tiles(weight: Tensor, columns: Tensor, tile: int) -> list[Tensor]:
    """Return the products of `weight` with `tile` columns each."""
    return [torch.mm(weight, part.contiguous()) for part in torch.split(columns, tile, dim=1)]


def in_tiles(function: Callable[[Tensor], Tensor], inputs: Tensor, *, tile: int) -> Tensor:
    """Apply a function of rows to `tile` rows at a time."""
    rows = inputs if inputs.dim() == 2 else inputs.reshape(-1, inputs.shape[-1])
    if len(rows) == tile:
        joined = function(rows)
    else:
        parts = list(torch.split(rows, tile))
        if missing := -len(rows) % tile:
            parts[-1] = F.pad(parts[-1], (0, 0, 0, missing))
        joined = torch.cat([function(part) for part in parts])
        joined = joined[: len(rows)] if missing else joined
    return joined if inputs.dim() == 2 else joined.view(*inputs.shape[:-1], -1)


def tiled_activation(activation: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
    """Apply an elementwise function in whole vectors, because torch computes remainders with different code."""
    # Non-contiguous inputs are computed row by row, each with its own remainder, and GELU with different code.
    inputs, count = inputs.contiguous(), inputs.numel()
    piece = _PIECE if torch.get_num_threads() > 1 else max(count, 1)
    if count <= piece and count % _VECTOR == 0:
        return activation(inputs)
    parts = list(torch.split(inputs.view(-1), piece))
    parts[-1] = F.pad(parts[-1], (0, -count % _VECTOR))
    return torch.cat([activation(part) for part in parts])[:count].view(inputs.shape)
