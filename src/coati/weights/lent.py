"""Weights that a sender lends to receivers that can open its memory: only handles travel, and the bytes stay.

    sender                                     receiver
    parameters ─ copy ─► snapshot ─ handle ──► open ─ check ─► stage ─ commit: copies into the parameters

A snapshot has one flat buffer for each chunk, which is used again by later updates. Two kinds of memory can be lent:
that of a card (`device.py`), whose receivers take clones, and that of a host (`shared_memory.py`), whose receivers
look at the sender's own pages and promise when to let go of them.
"""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from coati.errors import WeightUpdateError
from coati.weights.manifest import TensorSpec, UpdateHeader, WeightChunk

# Where tensors begin in a buffer: any dtype is aligned, and so are vectorised loads.
_ALIGNMENT = 256


@dataclasses.dataclass(frozen=True)
class Slot:
    """Where one tensor lies in a chunk's buffer."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    nbytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class LentChunk:
    """Some tensors of one module in a buffer of the sender's; only its handle travels."""

    header: UpdateHeader
    index: int
    module: str
    slots: tuple[Slot, ...]
    handle: Any
    checksum: int | None

    @property
    def nbytes(self) -> int:
        """Payload in bytes."""
        return sum(slot.nbytes for slot in self.slots)

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """Specs of the tensors, in order."""
        return _specs(self.module, self.slots)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TakenChunk:
    """A lent chunk at its receiver: its bytes in memory of the receiver's own, or the sender's memory itself."""

    module: str
    slots: tuple[Slot, ...]
    data: Tensor
    checksum: int | None

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """Specs of the tensors, in order."""
        return _specs(self.module, self.slots)

    def decoded(self) -> dict[str, Tensor]:
        """The tensors, as views."""
        return {slot.name: view(self.data, slot) for slot in self.slots}


@dataclasses.dataclass(frozen=True)
class ShareProbe:
    """A few bytes of the memory that a sender would lend: can you read them?"""

    place: str  # the card, or the host's memory
    handle: Any
    checksum: int


class Snapshots(ABC):
    """The sender's side: memory that chunks are copied into and lent from."""

    instead: str
    """Which way weights go if a receiver cannot open this memory, in words."""
    is_one_check_enough = False
    """Whether all receivers read the very same bytes, so that it is enough if one of them checks a chunk."""
    least_chunk_mib = 0.0
    """Smaller chunks would only take longer: nothing but their handles travels, and each has its price."""

    @abstractmethod
    def probe(self) -> ShareProbe:
        """What a receiver has to be able to open."""

    def next_lender(self) -> str | None:
        """Begin an update: a name for the memory that it will fill, which goes into its header.

        None: receivers take clones before they answer, so that there is nothing to let go of.
        """
        return None

    def lend_to(self, receivers: Collection[str]) -> None:  # noqa: B027
        """These have let go of the memory that `next_lender` named, and get what is written to it now."""

    @abstractmethod
    def chunks(
        self, header: UpdateHeader, shards: Iterable[tuple[str, Mapping[str, Tensor]]], *, has_checksums: bool
    ) -> Iterator[LentChunk | WeightChunk]:
        """Copy each shard into its buffer and describe it. The bytes are there when a chunk is handed out."""

    @abstractmethod
    def retire(self) -> None:
        """The update failed, and somebody may still read its buffers: they are never written again."""


def layout(tensors: Mapping[str, Tensor]) -> tuple[tuple[Slot, ...], int]:
    """Slots one after the other, and the room that they take."""
    slots, offset = [], 0
    for name, tensor in tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        nbytes = tensor.numel() * tensor.element_size()
        slots.append(Slot(name, tuple(tensor.shape), dtype, offset, nbytes))
        offset += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
    return tuple(slots), max(offset, _ALIGNMENT)


def moved(slots: Iterable[Slot], by: int) -> tuple[Slot, ...]:
    """The same slots so many bytes further on."""
    return tuple(dataclasses.replace(slot, offset=slot.offset + by) for slot in slots)


def view(buffer: Tensor, slot: Slot) -> Tensor:
    """The tensor of a slot, in place."""
    end = slot.offset + slot.nbytes
    if end > buffer.numel():
        raise WeightUpdateError(
            f"weight {slot.name!r} ends at byte {end} of a buffer of {buffer.numel()}. Rejected whole."
        )
    return buffer[slot.offset : end].view(getattr(torch, slot.dtype)).view(slot.shape)


def copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy tensors into tensors in as few launches as possible, and return when it is done.

    On a GPU one launch for each tensor would take longer than the bytes do. Whoever read the targets before is waited
    for, on whatever stream that was.
    """
    devices = {tensor.device for tensor in targets if tensor.is_cuda}
    for device in devices:
        torch.cuda.synchronize(device)
    groups: dict[tuple[object, ...], tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        kind = (target.device, target.dtype, source.device, source.dtype)
        into, out_of = groups.setdefault(kind, ([], []))
        into.append(target)
        out_of.append(source)
    with torch.no_grad():
        for into, out_of in groups.values():
            torch._foreach_copy_(into, out_of, non_blocking=True)
    for device in devices:
        torch.cuda.synchronize(device)


def _specs(module: str, slots: Iterable[Slot]) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(module=module, name=slot.name, shape=slot.shape, dtype=slot.dtype) for slot in slots)
