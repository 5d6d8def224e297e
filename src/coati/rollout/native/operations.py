"""What happens between the matrix products of a decode step: with torch, or as Triton kernels where there is a GPU.

Both compute the same, up to rounding. The torch functions are the definition, and what CPUs run.
"""

import dataclasses
import functools
import importlib.util
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclasses.dataclass(frozen=True)
class Geometry:
    """How a model's attention is cut: H query heads in K groups (key-value heads) of G, of D dimensions."""

    head_dim: int
    num_kv_heads: int
    group: int
    scale: float


class TorchOperations:
    """Plain torch, on any device."""

    def __init__(self, geometry: Geometry) -> None:
        self._geometry = geometry

    def add_norm(self, hidden: Tensor, delta: Tensor | None, norm: Any) -> tuple[Tensor, Tensor]:
        """`hidden + delta`, and its RMS norm, [n, d] each."""
        hidden = hidden if delta is None else hidden + delta
        return hidden, rms_norm(norm, hidden)

    def gated(self, both: Tensor, activation: nn.Module) -> Tensor:
        """`activation(gate) * up` of [n, gate and up]."""
        gate, up = both.chunk(2, dim=-1)
        result: Tensor = activation(gate) * up
        return result

    def attention(self, positions: Tensor, num_positions: int, angles: tuple[Tensor, Tensor]) -> "TorchAttention":
        """The attention of one decode step; `num_positions` is one past the largest position."""
        return TorchAttention(self._geometry, positions, num_positions, angles)


class TorchAttention:
    """Attention of all layers in one decode step, for which positions and masks are prepared once."""

    def __init__(
        self, geometry: Geometry, positions: Tensor, num_positions: int, angles: tuple[Tensor, Tensor]
    ) -> None:
        self._geometry = geometry
        self._positions, self._num_positions = positions, num_positions
        self._cos, self._sin = (table[positions].unsqueeze(1) for table in angles)  # [n, 1, D]
        self._slots = torch.arange(len(positions), device=positions.device)
        visible = torch.arange(num_positions, device=positions.device) <= positions.unsqueeze(1)  # [n, L]
        self._mask = visible[:, None, None]

    def __call__(self, projected: Tensor, module: Any, keys: Tensor, values: Tensor) -> Tensor:
        """Append keys and values of the new tokens to the cache [N, K, L, D], and attend: [n, H·D]."""
        geometry, count = self._geometry, len(self._positions)
        queries, new_keys, new_values = split_heads(projected, module, geometry, self._cos, self._sin)
        keys[self._slots, :, self._positions] = new_keys
        values[self._slots, :, self._positions] = new_values
        # The G queries of a group stand where several tokens of one head would, so keys are read once and as
        # they are: no copies of them for each query head.
        mixed = F.scaled_dot_product_attention(
            queries.reshape(count, geometry.num_kv_heads, geometry.group, geometry.head_dim),
            keys[:count, :, : self._num_positions],
            values[:count, :, : self._num_positions],
            attn_mask=self._mask,
            scale=geometry.scale,
        )  # [n, K, G, D]
        return mixed.reshape(count, -1)


class TritonOperations:
    """The same, one kernel each."""

    def __init__(self, geometry: Geometry) -> None:
        from coati.rollout.native import kernels

        self._kernels = kernels
        self._geometry = geometry
        self._plain = TorchOperations(geometry)

    def add_norm(self, hidden: Tensor, delta: Tensor | None, norm: Any) -> tuple[Tensor, Tensor]:
        """As above."""
        return self._kernels.add_norm(hidden, delta, norm.weight, norm.variance_epsilon)

    def gated(self, both: Tensor, activation: nn.Module) -> Tensor:
        """As above; activations other than SiLU stay with torch."""
        if not isinstance(activation, nn.SiLU) and type(activation).__name__ != "SiLUActivation":
            return self._plain.gated(both, activation)
        return self._kernels.gated(both)

    def attention(self, positions: Tensor, num_positions: int, angles: tuple[Tensor, Tensor]) -> Any:  # noqa: ARG002
        """As above; each slot's own position says how far its program reads."""
        return functools.partial(self._attend, positions, angles)

    def _attend(
        self,
        positions: Tensor,
        angles: tuple[Tensor, Tensor],
        projected: Tensor,
        module: Any,
        keys: Tensor,
        values: Tensor,
    ) -> Tensor:
        norms = None
        if hasattr(module, "q_norm"):
            norms = (module.q_norm.weight, module.k_norm.weight, module.q_norm.variance_epsilon)
        geometry = self._geometry
        return self._kernels.attend(
            projected, positions, keys, values, *angles, group=geometry.group, scale=geometry.scale, norms=norms
        )


def operations_for(device: torch.device, geometry: Geometry) -> TorchOperations | TritonOperations:
    """Kernels where there is a GPU that runs them and the heads have a size that they can cut."""
    is_cut_evenly = geometry.head_dim >= 16 and geometry.head_dim & (geometry.head_dim - 1) == 0
    if device.type == "cuda" and is_cut_evenly and has_triton():
        return TritonOperations(geometry)
    return TorchOperations(geometry)


@functools.cache
def has_triton() -> bool:
    """Whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


def split_heads(
    projected: Tensor, module: Any, geometry: Geometry, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [..., H, D], keys and values [..., K, D] of a layer, rotated."""
    heads = projected.view(*projected.shape[:-1], -1, geometry.head_dim)  # [..., H + 2K, D]
    num_rotated = heads.shape[-2] - geometry.num_kv_heads
    values = heads[..., num_rotated:, :]
    rotated = _rotated(_normed(module, heads[..., :num_rotated, :], geometry.num_kv_heads), cos, sin)
    num_queries = num_rotated - geometry.num_kv_heads
    return rotated[..., :num_queries, :], rotated[..., num_queries:, :], values


def rms_norm(norm: Any, hidden: Tensor) -> Tensor:
    """The model's norm, without its detours."""
    return F.rms_norm(hidden, (hidden.shape[-1],), norm.weight, norm.variance_epsilon)


def _normed(attention: Any, heads: Tensor, num_kv_heads: int) -> Tensor:
    """Qwen3 normalises each head, queries and keys with weights of their own; the others do not."""
    if not hasattr(attention, "q_norm"):
        return heads
    queries, keys = torch.split(heads, [heads.shape[-2] - num_kv_heads, num_kv_heads], dim=-2)
    return torch.cat([rms_norm(attention.q_norm, queries), rms_norm(attention.k_norm, keys)], dim=-2)


def _rotated(heads: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """Rotary positions: each half of a head times cos, plus the other half times sin, minus in the first half."""
    return torch.addcmul(heads * cos, heads.roll(heads.shape[-1] // 2, dims=-1), signed_sin)
