"""What travels from a sender of weights to a receiver: a header, chunks of tensors, and a manifest that lists them.

Every call carries one `WeightMessage`. The manifest comes last and says what the update consists of, so that a receiver
can tell a whole update from a torn one.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from coati.models.lora import LayerLoRA

# Tensors in one buffer begin at multiples of this: any dtype is aligned, and so are vectorised loads.
ALIGNMENT = 256


class TensorSpec(NamedTuple):
    """Name, shape and dtype of one tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpdateHeader:
    """Identifies an update. `update_id` is unique, so two updates can never mix."""

    update_id: str
    version: int
    source: str
    """The sender's name, which no other has at the same time; one that replaces it has it too."""
    incarnation: int = 0
    """How often the trainers of the run were started again: versions of a later start come after all before it."""

    def __str__(self) -> str:
        return f"weight update {self.update_id} (version {self.version}) from {self.source}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChunkInfo:
    """What the manifest lists of a chunk: some tensors of one module ("actor" or "critic"), in order."""

    module: str
    tensors: tuple[TensorSpec, ...]
    checksum: int | None = None
    """Over the module, the specs and the bytes; None until it is computed."""

    @property
    def nbytes(self) -> int:
        """Payload, without the gaps between tensors."""
        return sum(spec.nbytes for spec in self.tensors)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chunk:
    """A chunk on its way: with its bytes, or with what opens them in the sender's memory."""

    index: int
    info: ChunkInfo
    data: np.ndarray | None = None
    """[n] uint8: the tensors, where `layout` says; None with a handle."""
    handle: Any = None
    """What opens the same bytes in the sender's memory, a `CardHandle`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightManifest:
    """Everything an update consists of."""

    chunks: tuple[ChunkInfo, ...]
    is_full: bool = True
    """All weights of the models travel, not only what is trained (LoRA adapters and other weights)."""
    lora: Mapping[str, Mapping[str, LayerLoRA]] = dataclasses.field(default_factory=dict)
    """Module to layer to adapter settings, for a receiver whose model has no adapters."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightMessage:
    """One call to a receiver: the start of an update, some of its chunks, its end, or several of these."""

    header: UpdateHeader
    is_start: bool = False
    chunks: tuple[Chunk, ...] = ()
    manifest: WeightManifest | None = None


def specs_of(tensors: Mapping[str, Tensor]) -> tuple[TensorSpec, ...]:
    """Specs of tensors, in order."""
    return tuple(TensorSpec(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items())


def layout(specs: Sequence[TensorSpec]) -> tuple[tuple[int, ...], int]:
    """Where each tensor begins in a chunk's buffer, and the room that all take.

    Both sides compute it from the specs, so no offset travels and none can be wrong.

    >>> layout((TensorSpec("a", (3,), torch.float32), TensorSpec("b", (), torch.bool)))
    ((0, 256), 512)
    """
    offsets, end = [], 0
    for spec in specs:
        offsets.append(end)
        end += -(-spec.nbytes // ALIGNMENT) * ALIGNMENT
    return tuple(offsets), max(end, ALIGNMENT)


def views(buffer: Tensor, specs: Sequence[TensorSpec]) -> dict[str, Tensor]:
    """The tensors of a chunk, in place in a flat uint8 buffer."""
    offsets, size = layout(specs)
    if size > buffer.numel():
        raise ValueError(f"a chunk of {size} bytes is not in a buffer of {buffer.numel()}")
    return {
        spec.name: buffer[offset : offset + spec.nbytes].view(spec.dtype).view(spec.shape)
        for spec, offset in zip(specs, offsets, strict=True)
    }
