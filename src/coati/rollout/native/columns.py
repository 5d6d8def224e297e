"""A decode step on a CPU, where slots are columns.

A step of a small model consists of many short operations. One of torch's takes 3 µs or more, however short, and one of
numpy's 1 µs. So torch computes matrix products, softmax and activations, and numpy does the rest on the same memory.

Hidden states are arrays [d, n], a column for each of n slots: norms and rotations run over long rows, and heads need no
copies. Each sum adds up its terms in the same order for all columns, however many there are, so that a step is
batch-invariant (see `coati.models.tiles`). n is a number of whole tiles: no column is a remainder of vector operations.

The cache holds the keys and values of slot i in page i + 1, and pages are columns too: [S, 2K, D, P] in memory.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from coati.models.tiles import in_column_tiles, is_one_product_exact, tiled_activation
from coati.rollout.native.blocks import SLOT_TILE, matrix_of, product, tiled
from coati.rollout.native.operations import Geometry, is_silu, rms_of

Floats = NDArray[Any]
"""float32 or, if weights are, float64. Numpy does not know bfloat16."""
Integers = NDArray[np.int64]


class Columns:
    """Memory [d, n], for torch and for numpy."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.array: Floats = tensor.numpy()

    @classmethod
    def empty(cls, *shape: int, dtype: torch.dtype) -> "Columns":
        """Return new memory."""
        return cls(torch.empty(shape, dtype=dtype))

    @functools.cached_property
    def upper(self) -> "Columns":
        """The upper half of the rows."""
        return Columns(self.tensor[: len(self.array) // 2])


Attention = Callable[[Columns, Any, Floats], Columns]
"""(projected, block, cached): append the new tokens to the cache [S, 2K, D, P] and attend; returns [H·D, n]."""


class ColumnOperations:
    """What `TorchOperations` computes in a decode step, of columns. Weights and the number of threads must stay.

    Each result stays valid until the same operation is called again: its memory is used again, which saves time.
    """

    def __init__(self, geometry: Geometry, dtype: torch.dtype) -> None:
        self.dtype = torch.promote_types(dtype, torch.float32)
        self._geometry = geometry
        self._weight_dtype = dtype
        self._known: dict[Any, Any] = {}  # operations by layer or norm
        self._scores, self._weights, self._mixed = (Columns.empty(0, dtype=self.dtype) for _ in range(3))

    def _of(self, part: Any, make: Callable[[Any], Any]) -> Callable[[Any], Columns]:
        """Return the operation of a part of the model."""
        if (known := self._known.get(part)) is None:
            known = self._known[part] = make(part)
        operation: Callable[[Any], Columns] = known
        return operation

    def product(self, layer: Any, columns: Columns) -> Columns:
        """Apply a linear layer, with or without adapters, or a `FusedLinear`."""
        return self._of(layer, self._product_of)(columns)

    def _product_of(self, layer: Any) -> Callable[[Columns], Columns]:
        if (matrix := matrix_of(layer)) is not None and self._weight_dtype == self.dtype:
            return _Product(*matrix)

        def apply(columns: Columns) -> Columns:
            rows = product(layer, columns.tensor.t().to(self._weight_dtype).contiguous())
            return Columns(rows.t().to(self.dtype).contiguous())

        return apply

    def add_norm(self, hidden: Columns, delta: Columns | None, norm: Any) -> tuple[Columns, Columns]:
        """Add `delta` to `hidden`, in place, and return it and its norm."""
        if delta is not None:
            np.add(hidden.array, delta.array, out=hidden.array)
        return hidden, self._normed(norm, hidden.array)

    def _normed(self, norm: Any, columns: Floats) -> Columns:
        if self._weight_dtype != self.dtype:  # a copy of the weights would not follow them
            return _Norm(norm, self.dtype)(columns)
        return self._of(norm, functools.partial(_Norm, dtype=self.dtype))(columns)

    def add(self, one: Columns, other: Columns) -> Columns:
        """Return a sum."""
        return Columns(one.tensor + other.tensor)

    def activated(self, inputs: Columns, activation: nn.Module) -> Columns:
        """Return `activation(inputs)`, if possible in place."""
        if torch.get_num_threads() == 1 and is_silu(activation):
            F.silu(inputs.tensor, inplace=True)
            return inputs
        return Columns(tiled_activation(activation, inputs.tensor))

    def gated(self, both: Columns, activation: nn.Module) -> Columns:
        """Return `activation(gate) * up` of gate and up, one below the other."""
        result = self.activated(both.upper, activation)
        np.multiply(result.array, both.array[len(both.array) // 2 :], out=result.array)
        return result

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
        if self._scores.tensor.shape[-1] != count or len(self._scores.tensor) < num_positions:
            shape = tiled(num_positions), *grouped[:2], count
            self._scores, self._weights = (Columns.empty(*shape, dtype=self.dtype) for _ in range(2))
        mixed = self._mixed.array.reshape(grouped)
        scores, weights = self._scores.array[:num_positions], self._weights.array[:num_positions]
        of_torch = self._scores.tensor[:num_positions], self._weights.tensor[:num_positions]
        turns = {kind: table.take(places, axis=1) for kind, table in angles.items()}
        masks: dict[int | None, Floats] = {}  # what is added to scores, [L, 1, 1, n], by window

        def mask(window: int | None) -> Floats:
            if window not in masks:
                others = np.arange(num_positions)[:, None, None, None]
                is_hidden = others > places
                if window is not None:
                    is_hidden |= others <= places - window
                masks[window] = np.where(is_hidden, scores.dtype.type(-np.inf), scores.dtype.type(0))
            return masks[window]

        def attend(projected: Columns, block: Any, cached: Floats) -> Columns:
            heads = projected.array.reshape(-1, geometry.head_dim, count)  # [H + 2K, D, n]
            queries, stored = heads[: -2 * num_kv_heads], heads[-2 * num_kv_heads :]
            if block.head_norms is not None:
                for norm, part in zip(block.head_norms, (queries, stored[:num_kv_heads]), strict=True):
                    part[:] = self._normed(norm, part).array
            if geometry.rotary_dim:
                _rotate(heads[:-num_kv_heads], turns[block.rotation], geometry.rotary_dim)
            np.multiply(queries, geometry.scale, out=queries)
            new = stored.transpose(2, 0, 1)
            cached[written] = new if is_each_used else new[used]
            keys, values = cached[read][:, :num_kv_heads], cached[read][:, num_kv_heads:]
            np.einsum("kgdn,lkdn->lkgn", queries.reshape(grouped), keys, out=scores)
            np.add(scores, mask(block.window), out=scores)
            torch.softmax(of_torch[0], dim=0, out=of_torch[1])
            np.einsum("lkgn,lkdn->kgdn", weights, values, out=mixed)
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
    """A norm of each column of [..., d, n]."""

    def __init__(self, norm: Any, dtype: torch.dtype) -> None:
        self._is_layer_norm = hasattr(norm, "bias")
        self._eps: float
        self._eps, self._is_shifted = (norm.eps, False) if self._is_layer_norm else rms_of(norm)
        self._weight: Floats = norm.weight.detach().to(dtype).numpy()[:, None]
        bias = getattr(norm, "bias", None)
        self._bias: Floats | None = None if bias is None else bias.detach().to(dtype).numpy()[:, None]
        self._result = Columns.empty(0, dtype=dtype)

    def __call__(self, columns: Floats) -> Columns:
        if self._result.array.shape != columns.shape:
            self._result = Columns.empty(*columns.shape, dtype=self._result.tensor.dtype)
        size, result = columns.shape[-2], self._result.array
        if self._is_layer_norm:
            columns = columns - np.add.reduce(columns, axis=-2, keepdims=True) / size
        scale = np.einsum("...dn,...dn->...n", columns, columns)[..., None, :]
        scale /= size
        scale += self._eps
        np.sqrt(scale, out=scale)
        np.divide(columns, scale, out=result)
        np.multiply(result, 1 + self._weight if self._is_shifted else self._weight, out=result)
        if self._bias is not None:
            np.add(result, self._bias, out=result)
        return self._result


def _rotate(heads: Floats, turns: Floats, rotary_dim: int) -> None:
    """Apply rotary embeddings to [H, D, n] in place: heads · cos + (heads with swapped halves) · signed sin.

    `turns` has cos and signed sin of each dimension, one below the other.
    """
    half, turned = rotary_dim // 2, heads[:, :rotary_dim]
    swapped = np.concatenate([turned[:, half:], turned[:, :half]], axis=1)
    np.multiply(swapped, turns[-heads.shape[1] :][:rotary_dim], out=swapped)
    np.multiply(turned, turns[:rotary_dim], out=turned)
    np.add(turned, swapped, out=turned)
