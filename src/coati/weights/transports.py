"""How the bytes of a chunk get from a sender to its receivers.

| transport | bytes | used where |
|---|---|---|
| `ByValue` | travel with the chunk (over Ray: put into the object store once) | anywhere |
| `HostMemory` | stay in memory of the sender that receivers map | sender on the CPU, all receivers on its host |
| `CardMemory` | stay on the card, from where receivers copy them | all receivers on the sender's card |

A transport is the sender's side; each has a reader on the receiver's side.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from coati.weights.message import Chunk, ChunkInfo, MemoryProbe, checksum, raw_bytes, specs_of
from coati.wire import WireTensor, decode, encode


class ReadChunk(NamedTuple):
    """A chunk at its receiver."""

    info: ChunkInfo
    tensors: Mapping[str, Tensor]
    checksum: Callable[[], int]  # of the bytes that are there now


class Transport(ABC):
    """The sender's side. An update calls `begin`, `lend_to`, `pack` for each chunk, and `retire` if it fails."""

    least_chunk_mib = 0.0
    """Smaller chunks only take longer."""

    @abstractmethod
    def pack(self, index: int, module: str, tensors: Mapping[str, Tensor]) -> Chunk:
        """Make a chunk, without its checksum. Its bytes are in place when this returns."""

    @abstractmethod
    def checksum(self, chunk: Chunk) -> int:
        """Compute the checksum of a chunk of this update. May be called in another thread."""

    def begin(self) -> str | None:
        """Begin an update; returns the name of the memory that it will overwrite, if receivers may still read it."""
        return None

    def lend_to(self, receivers: Collection[str]) -> None:  # noqa: B027
        """Note who gets this update. All of them have released the memory that `begin` named."""

    def retire(self) -> None:  # noqa: B027
        """Never write to this update's memory again: it failed, and a receiver may still read it."""


class ByValue(Transport):
    """The bytes travel with the chunk; until it is sent, they are the sender's own parameters where possible."""

    def pack(self, index: int, module: str, tensors: Mapping[str, Tensor]) -> Chunk:
        """Make a chunk of arrays that share memory with contiguous CPU tensors."""
        arrays = tuple(encode(tensor).array for tensor in tensors.values())
        return Chunk(index=index, info=ChunkInfo(module=module, tensors=specs_of(tensors)), arrays=arrays)

    def checksum(self, chunk: Chunk) -> int:
        """Compute the checksum of the chunk's arrays."""
        return checksum(chunk.info, map(raw_bytes, chunk.arrays))


def read_value(chunk: Chunk) -> ReadChunk:
    """The receiver's side of `ByValue`: the chunk's tensors, in the memory that it came in."""
    tensors = {}
    for spec, array in zip(chunk.info.tensors, chunk.arrays, strict=True):
        if array.shape != spec.shape:
            raise ValueError(f"weight {spec.name!r} should have shape {spec.shape}, got {array.shape}")
        tensors[spec.name] = decode(WireTensor(array, spec.dtype))
    return ReadChunk(chunk.info, tensors, lambda: checksum(chunk.info, map(raw_bytes, chunk.arrays)))


class SharedTransport(Transport):
    """A transport whose bytes stay in memory of the sender, which receivers must be able to open."""

    @abstractmethod
    def probe(self) -> MemoryProbe:
        """Bytes for receivers to try. Raises OSError if this system shares no such memory."""


def copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy tensors into tensors in as few launches as possible, and return when it is done.

    On a GPU one launch for each tensor would take longer than the bytes do. Work on the targets that was queued on any
    stream ends first.
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
