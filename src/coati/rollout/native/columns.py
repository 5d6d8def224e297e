"""A decode step on a CPU of a small model like Llama with a short context, where slots are columns.

It consists of many short operations: one of torch's takes 3 µs or more, one of numpy's 1 µs. So torch computes matrix
products, and numpy the rest on the same memory. Hidden states are arrays [d, n], a column for each of n slots. Sums add
up their terms in the same order for all columns, however many there are, so that a step is batch-invariant (see
`coati.models.tiles`). n is a number of whole tiles: no column is a remainder of vector operations.

The cache holds the keys and values of slot i in page i + 1, and pages are columns too: [S, 2K, D, P] in memory.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from coati.models.tiles import in_column_tiles, is_one_product_exact
from coati.rollout.native.blocks import SLOT_TILE, matrix_of, product, tiled
from coati.rollout.native.operations import Geometry

Floats = NDArray[Any]
"""float32 or float64."""
Integers = NDArray[np.int64]

# Limits of the model, not of a batch, because a sample's bits must not depend on others. With 8 layers of 512, columns
# take 1.3 times as long as rows at 64 positions, and 2.8 times at 1,000.
MAX_WEIGHTS = 1 << 22
MAX_CONTEXT = 256


class Columns:
    """Memory [d, n], for torch and for numpy."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.array: Floats = tensor.numpy()

    @classmethod
    def empty(cls, *shape: int, dtype: torch.dtype) -> "Columns":
        """Return new memory."""
        return cls(torch.empty(shape, dtype=dtype))


Attention = Callable[[Columns, Any, Floats], Columns]
"""(projected, block, cached): append the new tokens to the cache [S, 2K, D, P] and attend; returns [H·D, n]."""


class ColumnOperations:
    """What `TorchOperations` computes in a decode step, of columns, for weights that stay in place.

    The number of threads must stay. A result stays valid until its operation is called again, which uses its memory.
    """

    def __init__(self, geometry: Geometry, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._geometry = geometry
        self._known: dict[Any, Any] = {}  # operations by layer or norm
        self._mixed = Columns.empty(0, dtype=dtype)
        self._scores: Floats = np.empty(0)

    def _of(self, part: Any, make: Callable[[Any], Any]) -> Callable[[Any], Columns]:
        """Return the operation of a part of the model."""
        if (known := self._known.get(part)) is None:
            known = self._known[part] = make(part)
        return known  # type: ignore[no-any-return]

    def product(self, layer: Any, columns: Columns) -> Columns:
        """Apply a linear layer, with or without adapters, or a `FusedLinear`."""
        return self._of(layer, self._product_of)(columns)

    def _product_of(self, layer: Any) -> Callable[[Columns], Columns]:
        if (matrix := matrix_of(layer)) is not None:
            return _Product(*matrix)
        return lambda columns: Columns(product(layer, columns.tensor.t().contiguous()).t().contiguous())

    def add_norm(self, hidden: Columns, delta: Columns | None, norm: Any) -> tuple[Columns, Columns]:
        """Add `delta` to `hidden`, in place, and return it and its norm."""
        if delta is not None:
            np.add(hidden.array, delta.array, out=hidden.array)
        return hidden, self._of(norm, _Norm)(hidden.array)

    def gated(self, both: Columns, _activation: nn.Module) -> Columns:
        """Return `silu(gate) * up` of gate and up, one below the other."""
        gate = Columns(both.tensor[: len(both.array) // 2])
        divisor = np.exp(np.negative(gate.array))
        np.add(divisor, 1, out=divisor)
        np.divide(gate.array, divisor, out=gate.array)
        np.multiply(gate.array, both.array[len(gate.array) :], out=gate.array)
        return gate

    def attention(self, places: Integers, used: Integers, num_positions: int, angles: dict[str, Floats]) -> Attention:
        """Return the attention of all layers for a decode step of n tokens, which are at `places` of their texts.

        Only the slots `used` write to the cache. `num_positions` is one past their largest position, and `angles` has
        cos and signed sin of every position, [2·D, L], by `Block.rotation`.
        """
        geometry, num_kv_heads, count = self._geometry, self._geometry.num_kv_heads, len(places)
        grouped = num_kv_heads, geometry.group, geometry.head_dim, count
        is_each_used, written = len(used) == count, (places[used], slice(None), slice(None), used + 1)
        read = slice(num_positions), slice(None), slice(None), slice(1, count + 1)
        if self._mixed.tensor.shape[-1] != count:
            self._mixed = Columns.empty(num_kv_heads * geometry.group * geometry.head_dim, count, dtype=self.dtype)
        if self._scores.shape[-1] != count or len(self._scores) < num_positions:
            self._scores = np.empty((tiled(num_positions), *grouped[:2], count), self._mixed.array.dtype)
        mixed, scores = self._mixed.array.reshape(grouped), self._scores[:num_positions]
        turns = {kind: table.take(places, axis=1) for kind, table in angles.items()}
        is_hidden = np.arange(num_positions)[:, None, None, None] > places
        mask = np.where(is_hidden, scores.dtype.type(-np.inf), scores.dtype.type(0))  # [L, 1, 1, n]

        def attend(projected: Columns, block: Any, cached: Floats) -> Columns:
            heads = projected.array.reshape(-1, geometry.head_dim, count)  # [H + 2K, D, n]
            queries, stored = heads[: -2 * num_kv_heads], heads[-2 * num_kv_heads :]
            _rotate(heads[:-num_kv_heads], turns[block.rotation])
            np.multiply(queries, geometry.scale, out=queries)
            new = stored.transpose(2, 0, 1)
            cached[written] = new if is_each_used else new[used]
            keys, values = cached[read][:, :num_kv_heads], cached[read][:, num_kv_heads:]
            np.einsum("kgdn,lkdn->lkgn", queries.reshape(grouped), keys, out=scores)
            np.add(scores, mask, out=scores)
            np.exp(np.subtract(scores, scores.max(axis=0), out=scores), out=scores)
            np.divide(scores, scores.sum(axis=0), out=scores)
            np.einsum("lkgn,lkdn->kgdn", scores, values, out=mixed)
            return self._mixed

        return attend


class _Product:
    """`weight @ columns + bias`."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = weight.detach()
        self._bias = None if bias is None else bias.detach().numpy()[:, None]
        self._result = Columns.empty(0, 0, dtype=weight.dtype)
        self._is_exact = True  # whether one product of these columns has the bits of tiles

    def __call__(self, columns: Columns) -> Columns:
        count = columns.array.shape[1]
        if self._result.array.shape[1] != count:
            self._result = Columns.empty(len(self._weight), count, dtype=self._weight.dtype)
            self._is_exact = is_one_product_exact(self._weight, count, tile=SLOT_TILE, by_columns=True)
        if self._is_exact:
            torch.mm(self._weight, columns.tensor, out=self._result.tensor)
        else:
            torch.cat(in_column_tiles(self._weight, columns.tensor, SLOT_TILE), dim=1, out=self._result.tensor)
        if self._bias is not None:
            np.add(self._result.array, self._bias, out=self._result.array)
        return self._result


class _Norm:
    """The RMS norm of each column."""

    def __init__(self, norm: Any) -> None:
        self._weight: Floats = norm.weight.detach().numpy()[:, None]
        self._eps = float(norm.variance_epsilon)
        self._result = Columns.empty(0, dtype=norm.weight.dtype)

    def __call__(self, columns: Floats) -> Columns:
        if self._result.array.shape != columns.shape:
            self._result = Columns.empty(*columns.shape, dtype=self._result.tensor.dtype)
        result, scale = self._result.array, np.einsum("dn,dn->n", columns, columns)
        scale /= len(columns)
        scale += self._eps
        np.sqrt(scale, out=scale)
        np.divide(columns, scale, out=result)
        np.multiply(result, self._weight, out=result)
        return self._result


def _rotate(heads: Floats, turns: Floats) -> None:
    """Apply rotary embeddings to [H, D, n] in place: heads · cos + (heads with swapped halves) · signed sin.

    `turns` has cos and signed sin of each dimension, one below the other.
    """
    size = heads.shape[1]
    swapped = np.concatenate([heads[:, size // 2 :], heads[:, : size // 2]], axis=1)
    np.multiply(swapped, turns[size:], out=swapped)
    np.multiply(heads, turns[:size], out=heads)
    np.add(heads, swapped, out=heads)
