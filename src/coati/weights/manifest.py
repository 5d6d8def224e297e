"""What a weight update consists of, so that a receiver can tell a whole one from a torn one."""

import dataclasses
from collections.abc import Mapping
from typing import Literal, get_args

import numpy as np
from torch import Tensor

from coati.errors import ConfigError
from coati.models.lora import LayerLoRA
from coati.weights.canary import Canary
from coati.weights.checksum import checksum
from coati.wire import WireTensor, decode

# Bytes of one chunk, unless a single tensor is larger.
DEFAULT_CHUNK_MIB = 64

VerifyUpdates = Literal["checksum", "canary", "off"]
"""What a receiver checks beyond names, shapes, dtypes and counts: bytes; bytes and behaviour; neither."""


def check_verify_updates(value: str) -> None:
    """Raise ConfigError unless this is a way to verify updates."""
    if value not in get_args(VerifyUpdates):
        raise ConfigError(f'verify_updates must be "checksum", "canary" or "off", got {value!r}.')


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """Name, shape and dtype of one tensor of one module ("actor" or "critic")."""

    module: str
    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpdateHeader:
    """Travels with every call of one update. `update_id` is unique, so two updates can never mix."""

    update_id: str
    version: int
    source: str
    max_staleness: int | None = None
    """The staleness bound that holds at the receiver while this version serves; None: the one it has."""
    lender: str | None = None
    """The memory of the sender's that this update is lent from and will overwrite: a receiver answers the header when
    it has let go of what it held there."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightChunk:
    """Some tensors of one module, in order, with their fingerprint."""

    header: UpdateHeader
    index: int
    module: str
    tensors: Mapping[str, WireTensor]
    checksum: int | None
    """None: the sender was told not to compute it (verify_updates = "off")."""

    @property
    def nbytes(self) -> int:
        """Payload in bytes."""
        return sum(wire.nbytes for wire in self.tensors.values())

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """Specs of the tensors, in order."""
        return tuple(specs_of(self.module, self.tensors))

    def decoded(self) -> dict[str, Tensor]:
        """The tensors; they share the memory that the chunk came in."""
        return {name: decode(wire) for name, wire in self.tensors.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightManifest:
    """Sent last: everything the update consists of."""

    header: UpdateHeader
    tensors: tuple[TensorSpec, ...]
    chunk_checksums: tuple[int | None, ...]
    is_partial: bool = False
    """Only some of the model's weights travel (LoRA adapters and other trainable weights)."""
    lora: Mapping[str, Mapping[str, LayerLoRA]] = dataclasses.field(default_factory=dict)
    """Module to layer to adapter settings, for a receiver whose model has no adapters of its own."""
    canary: Canary | None = None
    """What the sender's actor computes; the receiver compares after the commit."""

    @property
    def nbytes(self) -> int:
        """Payload in bytes."""
        return sum(int(np.prod(spec.shape, dtype=np.int64)) * _itemsize(spec.dtype) for spec in self.tensors)


def specs_of(module: str, tensors: Mapping[str, WireTensor]) -> list[TensorSpec]:
    """Specs of the tensors of a chunk."""
    return [
        TensorSpec(module=module, name=name, shape=tuple(wire.array.shape), dtype=wire.dtype)
        for name, wire in tensors.items()
    ]


def make_chunk(header: UpdateHeader, index: int, module: str, tensors: Mapping[str, WireTensor]) -> WeightChunk:
    """A chunk with its fingerprint."""
    return WeightChunk(header=header, index=index, module=module, tensors=tensors, checksum=checksum(tensors))


def _itemsize(dtype: str) -> int:
    import torch

    return int(getattr(torch, dtype).itemsize)
