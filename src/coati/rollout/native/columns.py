"""A decode step on a CPU: samples are columns, and numpy does what lies between the products.

With a small model a step on a CPU is not made of arithmetic but of operations: one of torch's takes 7 µs in the midst
of others, however short, and one of numpy's 1 to 2. So matrix products, softmax and activations are torch's, and all
else is numpy's, on the same memory. Hidden states are [d, n], one column for each of n samples: norms and rotations run
over long rows, and heads are cut out without a copy. The cache is [L, 2K, D, n] for each layer, keys and then values.

A new token of every sample goes into the same place of the cache, whatever its position in its own text. Keys are
rotated before they are stored, so all that matters is which places a sample may look at: those from its start on.

Shapes: n samples, H query heads in K groups (key-value heads) of G, D dimensions of a head, L places.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from coati.rollout.native.decoder import Decoder, SlotCache

# Weights up to which a model is small, and positions up to which texts are short. Beyond, arithmetic is all, and
# columns gain nothing: with 2 layers of 256 they took 0.64 of the slots' time at 60 positions, 0.97 at 300, 1.35 at
# 800.
_MOST_WEIGHTS = 1 << 25
_MOST_POSITIONS = 256

Floats = NDArray[Any]
"""float32 or float64, as the weights are."""
Integers = NDArray[np.int64]


class ColumnDecoder(Decoder):
    """A decoder that can also run small models by columns, in float32 or float64."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.mlp_size = int(self._layers[0].module.mlp.intermediate_size)
        self._addresses: tuple[int, ...] = ()

    def suits_columns(self, num_positions: int) -> bool:
        """Whether texts of so many positions by this model are for columns."""
        dtype, parameters = self.weight.dtype, self._parameters
        return (
            num_positions <= _MOST_POSITIONS
            and dtype in (torch.float32, torch.float64)
            and all(parameter.dtype == dtype and parameter.device.type == "cpu" for parameter in parameters)
            and sum(parameter.numel() for parameter in parameters) <= _MOST_WEIGHTS
        )

    def find_weights(self) -> None:
        """Look where the weights lie now. What is written there later is seen without another call."""
        if (addresses := self.join_weights()) == self._addresses:
            return
        self._addresses = addresses
        self.columns = [_LayerColumns.of(layer) for layer in self._layers]
        self.last_norm = _Norm(self._final_norm)
        is_plain = type(self._embedding) is nn.Embedding
        weight: Any = self._embedding.weight
        self._table: Floats | None = weight.detach().numpy() if is_plain else None

    def new_columns(self, num_samples: int, num_places: int) -> Tensor:
        """Room for the cache of so many samples; zeros, because what is masked must be numbers all the same."""
        self._angle_columns: Floats = torch.cat(self._rotation(num_places), dim=1).t().contiguous().numpy()
        size = 2 * self._geometry.num_kv_heads * self._geometry.head_dim * num_places * num_samples
        return torch.zeros(len(self._layers) * size, dtype=self.weight.dtype)

    def step_for(self, room: Tensor, num_places: int, num_samples: int) -> "ColumnStep":
        """Steps of so many samples, with their cache in the front of the room."""
        geometry = self._geometry
        shape = (len(self._layers), num_places, 2 * geometry.num_kv_heads, geometry.head_dim, num_samples)
        return ColumnStep(self, geometry, room.numpy()[: math.prod(shape)].reshape(shape), self._angle_columns)

    def read_prompts(self, tokens: Tensor, lengths: Tensor, which: Tensor) -> tuple[Tensor, Floats]:
        """Logits after prompts, [n, vocabulary], and their keys and values, [layers, T, 2K, D, n].

        Sample i has prompt `which[i]` of `tokens` [U, T], which are padded on the right; `lengths` is [U]. All end at
        the last of the T places. What lies before a start is the prompt's first token again: a number, for nobody.
        """
        num_prompts, width = tokens.shape
        cache = self.new_cache(num_prompts, width)
        each = torch.arange(num_prompts)
        logits = self.prefill(tokens, lengths, cache, each, each)
        offsets = (torch.arange(width).unsqueeze(1) - (width - lengths[which])).clamp_(min=0)  # [T, n]
        return logits[which], _by_place(cache, which, offsets)

    def embedded(self, tokens: Integers) -> Floats:
        """Hidden states of tokens, [n, d]."""
        if self._table is None:
            rows: Tensor = self._embedding(torch.from_numpy(tokens))
            return rows.numpy()
        return self._table[tokens]

    def logits(self, rows: Tensor) -> Tensor:
        """Of normed hidden states [n, d]."""
        logits: Tensor = self._head(rows)
        return logits


def _by_place(cache: SlotCache, which: Tensor, offsets: Tensor) -> Floats:
    """Prompts in slots [U, K, T, D] of each layer, as columns of samples: [layers, T, 2K, D, n]."""
    stored = torch.stack([torch.cat(pair, dim=1) for pair in zip(cache.keys, cache.values, strict=True)])
    columns: Floats = stored[:, which, :, offsets].permute(2, 0, 3, 4, 1).numpy()
    return columns


class _Product:
    """Linear layers of one input: columns [d, n] to [out, n].

    Layers that are more than a matrix (LoRA adapters, quantised weights) are called one by one.
    """

    def __init__(self, layers: Sequence[Any], matrix: tuple[Tensor, Tensor | None] | None) -> None:
        self._layers = layers
        self._weight: Tensor | None
        self._weight, bias = (None, None) if matrix is None else matrix
        self._bias = None if bias is None else bias.detach().unsqueeze(1)

    @classmethod
    def of(cls, layer: Any) -> "_Product":
        return cls([layer], (layer.weight.detach(), layer.bias) if type(layer) is nn.Linear else None)

    def write(self, columns: Tensor, out: Tensor) -> None:
        """The layers' outputs, one below the other."""
        if self._weight is None:
            out.copy_(torch.cat([layer(columns.t()) for layer in self._layers], dim=1).t())
        elif self._bias is None:
            torch.mm(self._weight, columns, out=out)
        else:
            torch.addmm(self._bias, self._weight, columns, out=out)

    def add(self, columns: Tensor, out: Tensor) -> None:
        """Add the outputs to what is there."""
        if self._weight is None:
            for layer in self._layers:
                out.add_(layer(columns.t()).t())
            return
        out.addmm_(self._weight, columns)
        if self._bias is not None:
            out.add_(self._bias)


class _Norm:
    """RMS norm of columns, or of each head in them."""

    def __init__(self, norm: Any) -> None:
        self._weight: Floats = norm.weight.detach().numpy()[:, None]
        self._epsilon = float(norm.variance_epsilon)

    def write(self, hidden: Floats, out: Floats) -> None:
        """Of [..., d, n]."""
        np.multiply(hidden, hidden, out=out)
        scale = np.add.reduce(out, axis=-2, keepdims=True)
        np.divide(scale, len(self._weight), out=scale)
        np.add(scale, self._epsilon, out=scale)
        np.sqrt(scale, out=scale)
        np.divide(hidden, scale, out=out)
        np.multiply(out, self._weight, out=out)


class _LayerColumns(NamedTuple):
    """A layer's weights, where they lie."""

    attention_norm: _Norm
    projections: _Product
    head_norms: tuple[_Norm, ...]
    """Of queries and keys; Qwen3 has them, the others have none."""
    output: _Product
    mlp_norm: _Norm
    gate_and_up: _Product
    activation: Any
    is_silu: bool
    down: _Product

    @classmethod
    def of(cls, layer: Any) -> "_LayerColumns":
        attention, mlp = layer.module.self_attn, layer.module.mlp
        return cls(
            _Norm(layer.module.input_layernorm),
            _Product([attention.q_proj, attention.k_proj, attention.v_proj], layer.projections.joined),
            (_Norm(attention.q_norm), _Norm(attention.k_norm)) if hasattr(attention, "q_norm") else (),
            _Product.of(attention.o_proj),
            _Norm(layer.module.post_attention_layernorm),
            _Product([mlp.gate_proj, mlp.up_proj], layer.gate_and_up.joined),
            mlp.act_fn,
            isinstance(mlp.act_fn, nn.SiLU) or type(mlp.act_fn).__name__ == "SiLUActivation",
            _Product.of(mlp.down_proj),
        )


class _Memory(NamedTuple):
    """One piece of memory, for torch and for numpy."""

    tensor: Tensor
    array: Floats

    @classmethod
    def of(cls, *shape: int, dtype: torch.dtype) -> "_Memory":
        tensor = torch.empty(shape, dtype=dtype)
        return cls(tensor, tensor.numpy())


class ColumnStep:
    """Decode steps of n samples: their cache, and memory for what a step computes."""

    def __init__(self, decoder: ColumnDecoder, geometry: Any, cache: Floats, angles: Floats) -> None:
        self.cache = cache  # [layers, L, 2K, D, n]
        self._decoder, self._angles, self._scale = decoder, angles, geometry.scale
        dtype = decoder.weight.dtype
        dim, kv_heads, count = geometry.head_dim, geometry.num_kv_heads, cache.shape[4]
        num_queries, hidden_size = kv_heads * geometry.group, decoder.weight.shape[0]
        self._kv_heads = kv_heads
        self._hidden = _Memory.of(hidden_size, count, dtype=dtype)
        self._normed = _Memory.of(hidden_size, count, dtype=dtype)
        self._projected = _Memory.of((num_queries + 2 * kv_heads) * dim, count, dtype=dtype)
        self._mixed = _Memory.of(num_queries * dim, count, dtype=dtype)
        self._mlp = _Memory.of(2 * decoder.mlp_size, count, dtype=dtype)
        self._gate = _Memory(self._mlp.tensor[: decoder.mlp_size], self._mlp.array[: decoder.mlp_size])
        self._up = self._mlp.array[decoder.mlp_size :]
        self._scores = _Memory.of(cache.shape[1], kv_heads, geometry.group, count, dtype=dtype)
        heads = self._projected.array.reshape(-1, dim, count)
        self._queries, self._stored = heads[:num_queries], heads[num_queries:]
        self._rotated, self._swapped = heads[:-kv_heads], np.empty_like(heads[:-kv_heads])
        grouped = (kv_heads, geometry.group, dim, count)
        self._grouped_queries, self._grouped_mixed = self._queries.reshape(grouped), self._mixed.array.reshape(grouped)

    def __call__(self, tokens: Integers, positions: Integers, first: int, place: int, mask: Floats | None) -> Tensor:
        """Put one token of each sample at a place; logits of the next, [n, vocabulary].

        `positions` [n] are those in the sample's own text. Nobody looks before the place `first`; `mask` is added to
        the scores, [place + 1 - first, 1, 1, n], where some may see less.
        """
        hidden, normed = self._hidden, self._normed
        hidden.array[:] = self._decoder.embedded(tokens).T
        angles = self._angles.take(positions, axis=1)
        cos, sin = angles[: len(angles) // 2], angles[len(angles) // 2 :]
        seen = self.cache[:, first : place + 1]
        scores = _Memory(self._scores.tensor[: seen.shape[1]], self._scores.array[: seen.shape[1]])
        for index, layer in enumerate(self._decoder.columns):
            layer.attention_norm.write(hidden.array, out=normed.array)
            layer.projections.write(normed.tensor, out=self._projected.tensor)
            self._rotate(layer, cos, sin)
            self.cache[index, place] = self._stored
            self._attend(seen[index], scores, mask)
            layer.output.add(self._mixed.tensor, out=hidden.tensor)
            layer.mlp_norm.write(hidden.array, out=normed.array)
            self._feed_forward(layer)
        self._decoder.last_norm.write(hidden.array, out=normed.array)
        return self._decoder.logits(normed.tensor.t())

    def _rotate(self, layer: _LayerColumns, cos: Floats, sin: Floats) -> None:
        """Each half of a head times cos, plus the other half times sin, minus in the first half."""
        rotated, swapped, half = self._rotated, self._swapped, len(cos) // 2
        if layer.head_norms:
            for norm, heads in zip(layer.head_norms, (self._queries, self._stored[: self._kv_heads]), strict=True):
                norm.write(heads.copy(), out=heads)
        swapped[:, :half], swapped[:, half:] = rotated[:, half:], rotated[:, :half]
        np.multiply(rotated, cos, out=rotated)
        np.multiply(swapped, sin, out=swapped)
        np.add(rotated, swapped, out=rotated)

    def _attend(self, seen: Floats, scores: _Memory, mask: Floats | None) -> None:
        """Of the queries to what is seen, [L, 2K, D, n]; `scores` is memory for [L, K, G, n]."""
        np.einsum("kgdn,lkdn->lkgn", self._grouped_queries, seen[:, : self._kv_heads], out=scores.array)
        np.multiply(scores.array, self._scale, out=scores.array)
        if mask is not None:
            np.add(scores.array, mask, out=scores.array)
        weights = torch.softmax(scores.tensor, dim=0).numpy()
        np.einsum("lkgn,lkdn->kgdn", weights, seen[:, self._kv_heads :], out=self._grouped_mixed)

    def _feed_forward(self, layer: _LayerColumns) -> None:
        layer.gate_and_up.write(self._normed.tensor, out=self._mlp.tensor)
        gate = self._gate
        if layer.is_silu:  # in place: memory for the result took a millisecond of 64 × 16 tokens
            F.silu(gate.tensor, inplace=True)
        else:
            gate.array[:] = layer.activation(gate.tensor).numpy()
        np.multiply(gate.array, self._up, out=gate.array)
        layer.down.add(gate.tensor, out=self._hidden.tensor)
