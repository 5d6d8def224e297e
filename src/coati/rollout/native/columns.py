"""A decode step on a CPU, where slots are columns.

A step of a small model consists of many short operations. One of torch's takes 3 µs or more, however short, and one of
numpy's 1 µs. So torch computes matrix products, softmax and activations, and numpy does the rest on the same memory.

Hidden states are arrays [d, n], a column for each of n slots: norms and rotations run over long rows, and heads need no
copies. Each sum adds up its terms in the same order for all columns, however many there are, so that a step is
batch-invariant (see `coati.models.tiles`). n is a number of whole tiles: no column is a remainder of vector operations.

The cache holds the keys and values of slot i in page i + 1, and pages are columns too: [S, K, D, P] in memory.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from coati.models.tiles import tiled_activation
from coati.rollout.native.blocks import SLOT_TILE, matrix_of, product
from coati.rollout.native.operations import Angles, Geometry, rms_of

Floats = NDArray[Any]
"""float32 or, if weights are, float64. Numpy does not know bfloat16."""
Integers = NDArray[np.int64]
Attention = Callable[[Floats, Any, Floats, Floats], Floats]
"""(projected, block, keys, values): append the new tokens to the cache [S, K, D, P] and attend; returns [H·D, n]."""


class ColumnOperations:
    """What `TorchOperations` computes in a decode step, of columns. Weights must stay where they are."""

    def __init__(self, geometry: Geometry, dtype: torch.dtype) -> None:
        self.dtype = torch.promote_types(dtype, torch.float32)
        self._geometry = geometry
        self._weight_dtype = dtype
        self._products: dict[Any, Callable[[Floats], Floats]] = {}
        self._norms: dict[Any, _Norm] = {}

    def product(self, layer: Any, columns: Floats) -> Floats:
        """Apply a linear layer, with or without adapters, or a `FusedLinear`."""
        if (known := self._products.get(layer)) is None:
            known = self._products[layer] = self._product_of(layer)
        return known(columns)

    def _product_of(self, layer: Any) -> Callable[[Floats], Floats]:
        if (matrix := matrix_of(layer)) is not None and self._weight_dtype == self.dtype:
            return _Product(*matrix)

        def apply(columns: Floats) -> Floats:
            rows = torch.from_numpy(columns).t().to(self._weight_dtype)
            return product(layer, rows).t().to(self.dtype).numpy()

        return apply

    def add_norm(self, hidden: Floats, delta: Floats | None, norm: Any) -> tuple[Floats, Floats]:
        """Return `hidden + delta` and its norm."""
        return (total := hidden if delta is None else hidden + delta), self._normed(norm, total)

    def _normed(self, norm: Any, columns: Floats) -> Floats:
        if (known := self._norms.get(norm)) is None:
            known = self._norms[norm] = _Norm(norm, self.dtype)
        return known(columns)

    def activated(self, inputs: Floats, activation: nn.Module) -> Floats:
        """Return `activation(inputs)`."""
        return tiled_activation(activation, torch.from_numpy(inputs)).numpy()

    def gated(self, both: Floats, activation: nn.Module) -> Floats:
        """Return `activation(gate) * up` of gate and up, one below the other."""
        half = len(both) // 2
        result = self.activated(both[:half], activation)
        result *= both[half:]
        return result

    def attention(self, places: Integers, used: Integers, num_positions: int, angles: Angles) -> Attention:
        """Return the attention of all layers for a decode step of n tokens, which are at `places` of their texts.

        Only the slots `used` write to the cache. `num_positions` is one past their largest position.
        """
        geometry, num_kv_heads, count = self._geometry, self._geometry.num_kv_heads, len(places)
        is_each_used, written = len(used) == count, (places[used], slice(None), slice(None), used + 1)
        read = slice(num_positions), slice(None), slice(None), slice(1, count + 1)
        mixed = np.empty((num_kv_heads, geometry.group, geometry.head_dim, count), _numpy_type(self.dtype))
        scores = np.empty((num_positions, *mixed.shape[:2], count), mixed.dtype)
        turns = {kind: [self._at(places, part) for part in both] for kind, both in angles.items()}

        @functools.cache
        def is_hidden(window: int | None) -> NDArray[np.bool_]:
            """Return which positions the tokens do not see, [L, 1, 1, n]."""
            others = np.arange(num_positions)[:, None, None, None]
            return others > places if window is None else (others > places) | (others <= places - window)

        def write(new: Floats, cached: Floats) -> None:
            columns = new.transpose(2, 0, 1)
            cached[written] = columns if is_each_used else columns[used]

        def attend(projected: Floats, block: Any, keys: Floats, values: Floats) -> Floats:
            heads = projected.reshape(-1, geometry.head_dim, count)  # [H + 2K, D, n]
            turned = heads[:-num_kv_heads]
            if block.head_norms is not None:
                parts = zip(block.head_norms, (turned[:-num_kv_heads], turned[-num_kv_heads:]), strict=True)
                turned = np.concatenate([self._normed(norm, part) for norm, part in parts])
            if geometry.rotary_dim:
                cos, signed_sin = turns[block.rotation]
                turned = _rotated(turned, cos, signed_sin, geometry.rotary_dim)
            write(turned[-num_kv_heads:], keys)
            write(heads[-num_kv_heads:], values)
            queries = (turned[:-num_kv_heads] * geometry.scale).reshape(mixed.shape)
            np.einsum("kgdn,lkdn->lkgn", queries, keys[read], out=scores)
            np.copyto(scores, -np.inf, where=is_hidden(block.window))
            weights = torch.softmax(torch.from_numpy(scores), dim=0).numpy()
            np.einsum("lkgn,lkdn->kgdn", weights, values[read], out=mixed)
            return mixed.reshape(-1, count)

        return attend

    def _at(self, places: Integers, table: Tensor) -> Floats:
        """Return rows of a table as columns."""
        return table.to(self.dtype).t().numpy().take(places, axis=1)


class _Product:
    """`weight @ columns + bias`."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = weight.detach()
        self._bias = None if bias is None else bias.detach().numpy()[:, None]
        self._has_same_bits = {SLOT_TILE: True}  # by number of columns: whether one product has the bits of tiles

    def __call__(self, columns: Floats) -> Floats:
        inputs = torch.from_numpy(columns)
        if (is_one := self._has_same_bits.get(columns.shape[1])) is None:
            is_one = self._has_same_bits[columns.shape[1]] = self._try(columns.shape[1])
        result: Floats = (torch.mm(self._weight, inputs) if is_one else self._in_tiles(inputs)).numpy()
        if self._bias is not None:
            result += self._bias
        return result

    def _in_tiles(self, columns: Tensor) -> Tensor:
        return torch.cat([torch.mm(self._weight, tile) for tile in torch.split(columns, SLOT_TILE, dim=1)], dim=1)

    def _try(self, count: int) -> bool:
        """Return whether one product has the bits of tiles, tried with random numbers.

        Libraries choose the order of additions by the shapes, not by the numbers.
        """
        generator = torch.Generator().manual_seed(0)
        columns = torch.randn(self._weight.shape[1], count, generator=generator).type_as(self._weight)
        # Several threads could share the sums in another way next time.
        return torch.get_num_threads() == 1 and torch.equal(torch.mm(self._weight, columns), self._in_tiles(columns))


class _Norm:
    """A norm of each column of [..., d, n]."""

    def __init__(self, norm: Any, dtype: torch.dtype) -> None:
        self._is_layer_norm = hasattr(norm, "bias")
        self._eps: float
        self._eps, self._is_shifted = (norm.eps, False) if self._is_layer_norm else rms_of(norm)
        self._weight = _current(norm.weight, dtype)
        self._bias = _current(norm.bias, dtype) if self._is_layer_norm and norm.bias is not None else None

    def __call__(self, columns: Floats) -> Floats:
        size = columns.shape[-2]
        if self._is_layer_norm:
            columns = columns - np.add.reduce(columns, axis=-2, keepdims=True) / size
        result = columns * columns
        scale = np.add.reduce(result, axis=-2, keepdims=True)
        scale /= size
        scale += self._eps
        np.sqrt(scale, out=scale)
        np.divide(columns, scale, out=result)
        result *= 1 + self._weight() if self._is_shifted else self._weight()
        if self._bias is not None:
            result += self._bias()
        return result


def _current(parameter: Tensor, dtype: torch.dtype) -> Callable[[], Floats]:
    """Return a function for the current values of a parameter, as a column [d, 1]."""
    detached = parameter.detach()
    if parameter.dtype != dtype:
        return lambda: detached.to(dtype).numpy()[:, None]
    column: Floats = detached.numpy()[:, None]
    return lambda: column


def _numpy_type(dtype: torch.dtype) -> Any:
    return np.float64 if dtype == torch.float64 else np.float32


def _rotated(heads: Floats, cos: Floats, signed_sin: Floats, rotary_dim: int) -> Floats:
    """Apply rotary embeddings to [H, D, n]: heads · cos + (heads with swapped halves) · signed sin."""
    half = rotary_dim // 2
    swapped = np.concatenate([heads[:, half:rotary_dim], heads[:, :half], heads[:, rotary_dim:]], axis=1)
    swapped *= signed_sin
    swapped += heads * cos
    return swapped
