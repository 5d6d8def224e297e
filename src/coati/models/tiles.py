"""Batch invariance on the CPU: a token gets the same bits regardless of other rows, their order and padding.

Libraries choose kernels, and thus the rounding, by the shape of an operation. Without gradients, operations therefore
get shapes that depend on a single row only:

    matrix products             a fixed number of rows at a time, the last of them padded with zeros
    attention                   batches of rows that are padded to the same length, see `padded_length`
    activations                 pieces that vector instructions cover without remainder and threads do not split

Norms, softmax and embeddings already work row by row. Training does not need batch invariance.
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
"""Rows per product in a pass over whole sequences: more are hardly faster, fewer need less padding."""
_VECTOR = 32  # elements: a multiple of every vector width
_PIECE = 32768  # elements: torch does not split an operation of this size among threads


class _Active(threading.local):
    depth = 0


_active = _Active()


def is_same_in_any_company() -> bool:
    """Return whether this thread is inside `same_in_any_company`."""
    return _active.depth > 0


@contextlib.contextmanager
def same_in_any_company(model: nn.Module, like: Tensor, *, tile: int = TILE) -> Iterator[None]:
    """Make an uncompiled model batch-invariant inside this context; only on a CPU and without gradients."""
    if like.device.type != "cpu" or torch.is_grad_enabled():
        yield
        return
    modules = list(model.modules())
    is_compiled = any(module._compiled_call_impl is not None for module in modules)
    tiled = [] if is_compiled else [(module, _tiled_forward(module, tile)) for module in modules]
    forwards = {module: forward for module, forward in tiled if forward is not None}
    for module, forward in forwards.items():
        vars(module)["forward"] = forward
    _active.depth += 1
    try:
        yield
    finally:
        _active.depth -= 1
        for module in forwards:
            vars(module).pop("forward", None)


def _tiled_forward(module: Any, tile: int) -> Callable[[Tensor], Tensor] | None:
    """Return a batch-invariant forward for a module whose results depend on the shape; None for other modules."""
    if "forward" in vars(module):  # already replaced by other code
        return None
    if type(module) is nn.Linear:
        return lambda inputs: tiled_linear(inputs, module.weight, module.bias, tile=tile)
    if type(module) is Conv1D:  # the linear layers of GPT-2
        return lambda inputs: tiled_linear(inputs, module.weight.t(), module.bias, tile=tile)
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
    """Compute `F.linear` in products of `tile` rows each."""
    rows = inputs.reshape(-1, inputs.shape[-1])
    count = rows.shape[0]
    parts = list(torch.split(rows, tile))
    if missing := tile - parts[-1].shape[0]:
        parts[-1] = F.pad(parts[-1], (0, 0, 0, missing))
    products = [F.linear(part, weight, bias) for part in parts]
    joined = products[0] if len(products) == 1 else torch.cat(products)
    return joined[:count].view(*inputs.shape[:-1], -1)


def tiled_activation(activation: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
    """Apply an elementwise function in whole vectors, because torch computes remainders with different code."""
    count = inputs.numel()
    piece = _PIECE if torch.get_num_threads() > 1 else max(count, 1)
    # Non-contiguous inputs are computed row by row, each with its own remainder, and GELU with different code.
    if count <= piece and count % _VECTOR == 0 and inputs.is_contiguous():
        return activation(inputs)
    parts = list(torch.split(inputs.reshape(-1), piece))
    parts[-1] = F.pad(parts[-1], (0, -count % _VECTOR))
    return torch.cat([activation(part) for part in parts])[:count].view(inputs.shape)
