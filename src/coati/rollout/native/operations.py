"""The operations between the matrix products of a decode step, in torch or, on a GPU, as Triton kernels.

Both give the same results up to rounding. The torch version is the reference. CPUs run it too, except in decode steps
of small models (`columns`).
"""

import dataclasses
import functools
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from coati.config.generate import GenerateOptions
from coati.models.tiles import padded_length, tiled_activation
from coati.rollout.native.blocks import is_silu, product
from coati.rollout.sampling import Sampler

logger = logging.getLogger(__name__)

Attention = Callable[[Tensor, Any, Tensor, Tensor], Tensor]
"""(projected, block, keys, values): append the new tokens to the cache [P, K, S, D] and attend; returns [n, H·D]."""
HeadSplit = Callable[[Tensor, Any], tuple[Tensor, Tensor, Tensor]]
"""(projected, block): queries [T, H, D], keys and values [T, K, D], normalised if the block does so, and rotated."""
Angles = dict[str, tuple[Tensor, Tensor]]
"""cos and signed sin of every position, [L, D] each, by `Block.rotation`."""

# Maximum difference between kernels and torch in their trial, where values are around 1 after several roundings.
_KERNEL_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.02}


@dataclasses.dataclass(frozen=True)
class Geometry:
    """Shape of a model's attention: H query heads in K groups (key-value heads) of G, with D dimensions each."""

    head_dim: int
    num_kv_heads: int
    group: int
    scale: float
    rotary_dim: int
    """Number of leading dimensions of a head that are rotated by position; 0 if positions are learned."""


class TorchOperations:
    """The operations in plain torch, for any device."""

    draw: Any = None  # the default of `Sampler`

    def __init__(self, geometry: Geometry) -> None:
        self._geometry = geometry

    product = staticmethod(product)

    def add_norm(self, hidden: Tensor, delta: Tensor | None, norm: Any) -> tuple[Tensor, Tensor]:
        """Return `hidden + delta` and its norm, [n, d] each."""
        hidden = hidden if delta is None else hidden + delta
        return hidden, normed(norm, hidden)

    def activated(self, inputs: Tensor, activation: nn.Module) -> Tensor:
        """Return `activation(inputs)`."""
        return tiled_activation(activation, inputs) if inputs.device.type == "cpu" else activation(inputs)

    def gated(self, both: Tensor, activation: nn.Module) -> Tensor:
        """Return `activation(gate) * up` of [..., gate and up]."""
        gate, up = both.chunk(2, dim=-1)
        return self.activated(gate, activation) * up

    def head_split(self, positions: Tensor, angles: Angles) -> HeadSplit:
        """Return the function by which all layers split their projections of tokens at these positions."""
        num_values, rotary_dim = self._geometry.num_kv_heads, self._geometry.rotary_dim
        turns = {kind: (cos[positions, None], sin[positions, None]) for kind, (cos, sin) in angles.items()}

        def split(projected: Tensor, block: Any) -> tuple[Tensor, Tensor, Tensor]:
            heads = projected.view(len(projected), -1, self._geometry.head_dim)  # [T, H + 2K, D]
            turned, values = heads[:, :-num_values], heads[:, -num_values:]
            if block.head_norms is not None:
                parts = zip(block.head_norms, (turned[:, :-num_values], turned[:, -num_values:]), strict=True)
                turned = torch.cat([normed(norm, part) for norm, part in parts], dim=1)
            if rotary_dim:
                turned = _rotated_heads(turned, *turns[block.rotation], rotary_dim)
            return turned[:, :-num_values], turned[:, -num_values:], values

        return split

    def attention(
        self, positions: Tensor, pages: Tensor, page_size: int, num_positions: int, angles: Angles
    ) -> Attention:
        """Return the attention of all layers for one decode step over texts in `pages` [n, M].

        `num_positions` is one past the largest position.
        """
        geometry, count = self._geometry, len(positions)
        split = self.head_split(positions, angles)
        new_pages = pages.gather(1, (positions // page_size).unsqueeze(1)).squeeze(1)
        offsets = positions % page_size
        calls = _attention_calls(positions, num_positions, pages, page_size)
        longest = max(call.length for call in calls)

        @functools.cache
        def masks(window: int | None) -> list[Tensor]:
            """Return the mask of each call in layers with this sliding window."""
            is_visible = visible(positions, longest, window)  # [n, L]
            return [call.in_order(is_visible)[:, None, None, : call.length] for call in calls]

        def attend(projected: Tensor, block: Any, keys: Tensor, values: Tensor) -> Tensor:
            queries, new_keys, new_values = split(projected, block)
            keys[new_pages, :, offsets] = new_keys
            values[new_pages, :, offsets] = new_values
            # The G queries of a group take the place of tokens of one head, so keys are read once, and not copied
            # for each query head.
            queries = queries.reshape(count, geometry.num_kv_heads, geometry.group, geometry.head_dim)
            parts = []
            for call, mask in zip(calls, masks(block.window), strict=True):
                mixed = F.scaled_dot_product_attention(
                    call.in_order(queries),
                    call.positions_of(keys),
                    call.positions_of(values),
                    attn_mask=mask,
                    scale=geometry.scale,
                )
                parts.append(call.of_slots(mixed.flatten(1)))  # [n, H·D] together
            if len(parts) == 1:
                return parts[0]
            return torch.cat(parts)[torch.cat([call.slots for call in calls]).argsort()]

        return attend


class _AttentionCall(NamedTuple):
    """Slots that attend in one call, and the part of the cache that it reads."""

    slots: Any  # [m] indices, or a slice with all of them
    pages: Tensor  # page tables of these slots, [m, pages of a text]
    length: int  # positions read of each text
    span: int  # if above 0, pages below this one are read where they are, in their order

    def in_order(self, of_slots: Tensor) -> Tensor:
        """Return rows of slots in the order in which texts are read. Those of pages without a slot are never used."""
        rows = of_slots[self.slots]
        if not self.span:
            return rows
        return rows.new_zeros(self.span, *rows.shape[1:]).index_copy_(0, self.pages[:, 0], rows)

    def of_slots(self, ordered: Tensor) -> Tensor:
        """Return rows in the order of slots, given those in the order of texts."""
        return ordered.index_select(0, self.pages[:, 0]) if self.span else ordered

    def positions_of(self, cached: Tensor) -> Tensor:
        """Return the positions of these texts that are read, [texts, K, length, D]."""
        if self.span:
            return cached[: self.span, :, : self.length]
        return cached[self.pages].transpose(1, 2).flatten(2, 3)[:, :, : self.length]


def _attention_calls(positions: Tensor, num_positions: int, pages: Tensor, page_size: int) -> list[_AttentionCall]:
    """Return the calls of a step. On a CPU, how many positions are read for a slot depends on this slot alone."""
    if positions.device.type != "cpu":
        return [_AttentionCall(slice(None), pages[:, : -(-num_positions // page_size)], num_positions, 0)]
    lengths = [min(slot_length(position + 1), pages.shape[1] * page_size) for position in positions.tolist()]
    different, of_slots = sorted({*lengths}), torch.tensor(lengths)
    calls = []
    for length in different:
        slots = slice(None) if len(different) == 1 else (of_slots == length).nonzero().squeeze(1)
        mine = pages[slots, : -(-length // page_size)]
        # Moving queries is cheaper than moving keys and values, unless most pages in between belong to other calls.
        span = int(mine.max()) + 1 if mine.shape[1] == 1 else 0
        calls.append(_AttentionCall(slots, mine, length, span if span <= 2 * len(mine) else 0))
    return calls


def slot_length(num_positions: int) -> int:
    """Return how many positions of a slot's cache a CPU reads: few different lengths, because each is a call."""
    return padded_length(num_positions, 32)


class TritonOperations(TorchOperations):
    """The same operations with Triton kernels, where there is one."""

    def __init__(self, geometry: Geometry) -> None:
        from coati.rollout.native import kernels

        super().__init__(geometry)
        self._kernels = kernels

    def add_norm(self, hidden: Tensor, delta: Tensor | None, norm: Any) -> tuple[Tensor, Tensor]:
        """Return `hidden + delta` and its norm, [n, d] each; torch computes LayerNorm."""
        if hasattr(norm, "bias"):  # a LayerNorm, or adapters around one
            return super().add_norm(hidden, delta, norm)
        return self._kernels.add_norm(hidden, delta, norm.weight, *_rms(norm))

    def gated(self, both: Tensor, activation: nn.Module) -> Tensor:
        """Return `activation(gate) * up` of [..., gate and up]; torch computes activations other than SiLU."""
        if not is_silu(activation):
            return super().gated(both, activation)
        return self._kernels.gated(both)

    def draw(self, logits: Tensor, uniforms: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Return tokens drawn by inverse CDF, and their log-probs at a temperature, [n] each."""
        return self._kernels.draw(logits, uniforms, temperature)

    def head_split(self, positions: Tensor, angles: Angles) -> HeadSplit:
        """Return the function by which all layers split their projections; see `TorchOperations.head_split`."""
        geometry, num_kv_heads = self._geometry, self._geometry.num_kv_heads

        def split(projected: Tensor, block: Any) -> tuple[Tensor, Tensor, Tensor]:
            options = {"geometry": geometry, "norms": _head_norms(block)}
            turned = self._kernels.rotate(projected, positions, angles[block.rotation], **options)
            values = projected.view(len(projected), -1, geometry.head_dim)[:, -num_kv_heads:]
            return turned[:, :-num_kv_heads], turned[:, -num_kv_heads:], values

        return split

    def attention(
        self, positions: Tensor, pages: Tensor, page_size: int, num_positions: int, angles: Angles
    ) -> Attention:
        """Return the attention of all layers for one decode step, which reads each slot up to its position only."""
        del page_size
        parts = self._kernels.Parts(positions, num_positions, self._geometry)

        def attend(projected: Tensor, block: Any, keys: Tensor, values: Tensor) -> Tensor:
            options = {"geometry": self._geometry, "norms": _head_norms(block), "window": block.window}
            mixed: Tensor = self._kernels.attend(
                projected, positions, pages, keys, values, angles[block.rotation], parts, **options
            )
            return mixed

        return attend


def _head_norms(block: Any) -> tuple[Tensor, Tensor, float, bool] | None:
    """Return the weights of the query and key norms, their eps and whether they are shifted; None without norms."""
    if block.head_norms is None:
        return None
    of_queries, of_keys = block.head_norms
    return of_queries.weight, of_keys.weight, *_rms(of_queries)


def operations_for(like: Tensor, geometry: Geometry) -> TorchOperations:
    """Return Triton operations on a GPU where a trial shows that they match torch; torch operations otherwise.

    `like` is a weight of the model, for its device and dtype.
    """
    if like.device.type != "cuda":
        return TorchOperations(geometry)
    if reason := kernel_problem(like.device, like.dtype, geometry):
        logger.warning("generating without Triton kernels, which is slower: %s", reason)
        return TorchOperations(geometry)
    return TritonOperations(geometry)


@functools.cache
def kernel_problem(device: torch.device, dtype: torch.dtype, geometry: Geometry) -> str | None:
    """Return why the Triton kernels cannot be used for such a model on this machine; None if they can.

    Triton compiles with whatever compiler and driver it finds, so its kernels are tested before they are used.
    """
    if geometry.head_dim < 16 or geometry.head_dim & (geometry.head_dim - 1):
        return f"heads have {geometry.head_dim} dimensions, but the kernels need a power of two of at least 16"
    if dtype not in _KERNEL_TOLERANCE:
        return f"weights are {dtype}, but the kernels accumulate in float32"
    try:
        kernels, plain = TritonOperations(geometry), TorchOperations(geometry)
        errors = _trial_errors(kernels, plain, device, dtype, geometry)
    except Exception as error:  # not installed, no compiler, or an unsupported GPU or driver
        return f"{type(error).__name__}: {error}"
    wrong = [name for name, error in errors.items() if not error <= _KERNEL_TOLERANCE[dtype]]
    return f"their results differ from torch's ({', '.join(wrong)})" if wrong else None


@torch.no_grad()
def _trial_errors(
    kernels: TritonOperations, plain: TorchOperations, device: torch.device, dtype: torch.dtype, geometry: Geometry
) -> dict[str, float]:
    """Return the largest difference between kernels and torch on three slots of different lengths, by operation."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    kv_heads, dim = geometry.num_kv_heads, geometry.head_dim
    norm = SimpleNamespace(weight=random(48), variance_epsilon=1e-6)
    hidden, delta, both = random(3, 48), random(3, 48), random(2, 3, 96)
    # Within ±1 like cos and sin, or products would be so large that rounding looks like an error.
    query_norm, key_norm = (SimpleNamespace(weight=random(dim).sin(), variance_epsilon=1e-6) for _ in range(2))
    shifted = SimpleNamespace(weight=random(dim).sin(), eps=1e-6)
    blocks = [
        SimpleNamespace(rotation="", head_norms=head_norms, window=window)  # like Llama, Qwen3 and Gemma 3
        for head_norms, window in ((None, None), ((query_norm, key_norm), None), ((shifted, shifted), 700))
    ]
    projected = random(3, (geometry.group + 2) * kv_heads * dim)
    # Texts of 3 pages each; the last is long enough to be read in parts.
    cache, angles = random(2, 10, kv_heads, 512, dim), (random(1536, dim).sin(), random(1536, dim).sin())
    angles[0][:, geometry.rotary_dim :], angles[1][:, geometry.rotary_dim :] = 1.0, 0.0  # not rotated
    pages = torch.tensor([[3, 4, 5], [1, 2, 9], [6, 8, 7]], device=device)
    positions = torch.tensor([0, 7, 1234], device=device)
    logits, uniforms = random(3, 5000), torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64, device=device)
    results = []
    for run in (kernels, plain):
        keys, values = cache.clone()
        attend = run.attention(positions, pages, 512, 1235, {"": angles})
        mixed = [attend(projected, block, keys, values).flatten() for block in blocks]
        drawn = Sampler(GenerateOptions(), draw=run.draw)(logits, uniforms)
        results.append(
            {
                "add_norm": torch.cat(run.add_norm(hidden, delta, norm)),
                "gated": run.gated(both, nn.SiLU()),
                "head_split": torch.cat([*run.head_split(positions, {"": angles})(projected, blocks[1])], dim=1),
                "attention": torch.cat([*mixed, keys.flatten(), values.flatten()]),
                "draw": torch.cat([part.double() for part in drawn]),
            }
        )
    return {name: float((found - results[1][name]).abs().max()) for name, found in results[0].items()}


def visible(positions: Tensor, num_positions: int, window: int | None) -> Tensor:
    """Return a mask of the positions that tokens at `positions` attend to, [n, num_positions]."""
    columns, own = torch.arange(num_positions, device=positions.device), positions.unsqueeze(1)
    return columns <= own if window is None else (columns <= own) & (columns > own - window)


def normed(norm: Any, hidden: Tensor) -> Tensor:
    """Apply a norm of the model with one fused torch operation instead of its module."""
    shape = hidden.shape[-1:]
    if (eps := getattr(norm, "variance_epsilon", None)) is not None:
        return F.rms_norm(hidden, shape, norm.weight, eps)
    if hasattr(norm, "bias"):  # a LayerNorm, or adapters around one
        return F.layer_norm(hidden, shape, norm.weight, norm.bias, norm.eps)
    return F.rms_norm(hidden.float(), shape, 1.0 + norm.weight.float(), norm.eps).type_as(hidden)


def _rms(norm: Any) -> tuple[float, bool]:
    """Return the eps of an RMS norm, and whether its weights are offsets from 1, like Gemma's."""
    return (norm.variance_epsilon, False) if hasattr(norm, "variance_epsilon") else (norm.eps, True)


def _rotated_heads(heads: Tensor, cos: Tensor, signed_sin: Tensor, rotary_dim: int) -> Tensor:
    """Apply rotary embeddings: heads · cos + (heads with swapped halves) · signed sin."""
    other, rest = heads[..., :rotary_dim].roll(rotary_dim // 2, dims=-1), heads[..., rotary_dim:]
    if rotary_dim < heads.shape[-1]:
        other = torch.cat([other, rest], dim=-1)  # times 0
    return torch.addcmul(heads * cos, other, signed_sin)
