"""How the bytes of a chunk get from a sender to its receivers.

| way | bytes | used where |
|---|---|---|
| by value | travel with the chunk (over Ray: put into the object store once) | anywhere |
| `HostMemory` | stay in memory of the sender that receivers map | sender on the CPU, all receivers on its host |
| `CardMemory` | stay on the card, from where receivers copy them | all receivers on the sender's card |

The sender makes chunks with `value_chunk` or a `SharedMemory`; receivers read all of them with a `ChunkReader`.
"""

import contextlib
import dataclasses
import logging
import os
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from torch import Tensor

from coati.weights.message import Chunk, ChunkInfo, layout, specs_of, views
from coati.wire import WireTensor, decode, encode

logger = logging.getLogger(__name__)

# Checksums on a card look at 64-bit words in rows of so many.
_ROW_WORDS = 4096


class MadeChunk(NamedTuple):
    """A chunk at its sender, without its checksum, and the memory that its bytes are in."""

    chunk: Chunk
    memory: tuple[np.ndarray | Tensor, ...]

    def with_checksum(self) -> Chunk:
        """The chunk with the checksum of what is in its memory now."""
        info = dataclasses.replace(self.chunk.info, checksum=checksum_of(self.chunk.info, self.memory))
        return dataclasses.replace(self.chunk, info=info)


def value_chunk(index: int, module: str, tensors: Mapping[str, Tensor]) -> MadeChunk:
    """Make a chunk that travels with its bytes, in arrays that share memory with contiguous CPU tensors."""
    arrays = tuple(encode(tensor).array for tensor in tensors.values())
    info = ChunkInfo(module=module, tensors=specs_of(tensors))
    return MadeChunk(Chunk(index=index, info=info, arrays=arrays), arrays)


@dataclasses.dataclass
class _Set:
    """The memory of one update: a slot for each chunk, with its handle."""

    allocate: Callable[[int], tuple[Tensor, Any]]
    receivers: frozenset[str] = frozenset()  # those that may read it
    slots: list[tuple[Tensor, Any]] = dataclasses.field(default_factory=list)
    num_used: int = 0

    def fill(self, index: int, module: str, tensors: Mapping[str, Tensor]) -> MadeChunk:
        specs = specs_of(tensors)
        _, size = layout(specs)
        at = self.num_used
        if at == len(self.slots) or self.slots[at][0].numel() < size:
            self.slots[at : at + 1] = [self.allocate(size)]
        slot, handle = self.slots[at]
        self.num_used += 1
        copy_all(list(views(slot, specs).values()), list(tensors.values()))
        return MadeChunk(
            Chunk(index=index, info=ChunkInfo(module=module, tensors=specs), handle=handle), (slot[:size],)
        )


class SharedMemory(ABC):
    """Memory of the sender that receivers open, in sets that are filled in turn.

    An update calls `begin`, `lend_to`, `make_chunk` for each chunk, and `returned_by`. A set is overwritten only after
    every receiver that was lent it has returned it, or has answered the header of the update that does so. If one does
    not answer, another set takes its place.
    """

    least_chunk_mib = 0.0
    """Smaller chunks only take longer."""
    is_copied = False
    """Receivers copy a chunk before they answer it, so there is one set; else they read it until their commit, and
    there are two."""

    def __init__(self) -> None:
        self._name = uuid.uuid4().hex
        self._sets = [_Set(self._allocator()) for _ in range(1 if self.is_copied else 2)]
        self._turn = 0
        self._replaced: list[_Set] = []  # may still be copied by a receiver, so it must not be freed
        self._probed: _Set | None = None  # lives until the next probe
        self._has_warned = False

    @abstractmethod
    def _allocator(self) -> Callable[[int], tuple[Tensor, Any]]:
        """What takes memory for one set: bytes to a flat tensor and the handle that receivers open it with.

        Raises OSError if this system has no such memory, or none left. A handle says by `==` which buffer it means.
        Its `open(device)` opens the buffer; `read(buffer, size)` gives the bytes of the chunk in it.
        """

    def probe(self) -> Chunk:
        """A chunk for receivers to try. Raises OSError if this system shares no such memory."""
        self._probed = _Set(self._allocator())
        random = torch.frombuffer(bytearray(os.urandom(256)), dtype=torch.uint8)
        return self._probed.fill(0, "probe", {"random": random}).with_checksum()

    def begin(self) -> str | None:
        """Begin an update; returns the name of the memory that it will overwrite, if receivers may still read it."""
        self._turn = (self._turn + 1) % len(self._sets)
        self._sets[self._turn].num_used = 0
        return f"{self._name}-{self._turn}" if self._sets[self._turn].receivers or not self.is_copied else None

    def lend_to(self, receivers: Collection[str]) -> None:
        """Note who gets this update. All of them have released the memory that `begin` named."""
        lent = self._sets[self._turn]
        if not lent.receivers <= set(receivers):
            if self.is_copied:
                self._replaced.append(lent)
            lent = self._sets[self._turn] = _Set(self._allocator())
        lent.receivers = frozenset(receivers)

    def returned_by(self, receivers: Collection[str]) -> None:
        """Note who has answered the whole update, or has died."""
        if self.is_copied:
            for lent in (*self._sets, *self._replaced):
                lent.receivers -= frozenset(receivers)
            self._replaced = [lent for lent in self._replaced if lent.receivers]

    def make_chunk(self, index: int, module: str, tensors: Mapping[str, Tensor]) -> MadeChunk:
        """Copy the tensors into shared memory; without memory for them, make a chunk that travels by value."""
        try:
            return self._sets[self._turn].fill(index, module, tensors)
        except OSError as error:
            if not self._has_warned:
                logger.warning("no shared memory left for weights (%s): sending them by value", error)
            self._has_warned = True
            return value_chunk(index, module, tensors)


class ChunkReader:
    """The receiver's side. What an update opened stays open for the next two, because senders fill two sets in turn."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._open: dict[Any, Tensor] = {}
        self._used: set[Any] = set()
        self._used_before: set[Any] = set()
        self._stream: torch.cuda.Stream | None = None

    def read(self, chunk: Chunk) -> dict[str, Tensor]:
        """The chunk's tensors, in the memory that it came in. Raises an error if they are not what was sent."""
        info = chunk.info
        with self._side_stream():
            memory: tuple[np.ndarray | Tensor, ...]
            if chunk.handle is None:
                memory, tensors = chunk.arrays, _decoded(chunk)
            else:
                data = self._data(chunk.handle, layout(info.tensors)[1])
                memory, tensors = (data,), views(data, info.tensors)
            if info.checksum is not None and (found := checksum_of(info, memory)) != info.checksum:
                raise ValueError(f"its checksum is {found:#x}, but was {info.checksum:#x} when it was sent")
        return tensors

    def end_update(self) -> None:
        """Close what neither this update nor the one before used, such as memory of a sender that is gone."""
        kept = self._used | self._used_before
        self._open = {handle: buffer for handle, buffer in self._open.items() if handle in kept}
        self._used, self._used_before = set(), self._used

    def _data(self, handle: Any, size: int) -> Tensor:
        if handle not in self._open:
            self._open[handle] = handle.open(self.device)
        self._used.add(handle)
        data: Tensor = handle.read(self._open[handle], size)
        return data

    def _side_stream(self) -> contextlib.AbstractContextManager[Any]:
        """Staging must not queue up behind the generation that runs meanwhile."""
        if self.device.type != "cuda":
            return contextlib.nullcontext()
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        return torch.cuda.stream(self._stream)


def _decoded(chunk: Chunk) -> dict[str, Tensor]:
    tensors = {}
    for spec, array in zip(chunk.info.tensors, chunk.arrays, strict=True):
        if array.shape != spec.shape:
            raise ValueError(f"weight {spec.name!r} should have shape {spec.shape}, got {array.shape}")
        tensors[spec.name] = decode(WireTensor(array, spec.dtype))
    return tensors


def checksum_of(info: ChunkInfo, memory: Iterable[np.ndarray | Tensor]) -> int:
    """XXH3 over a chunk's description and its bytes (on a card, their `device_checksum`): any flipped bit changes it.

    It runs at the speed of memory. It is no protection against a sender with bad intentions.
    """
    digest = xxhash.xxh3_64(f"{info.module} {info.tensors}".encode())
    for data in memory:
        if isinstance(data, Tensor) and data.is_cuda:
            digest.update(device_checksum(data).to_bytes(8, "little"))
        else:
            digest.update(np.ascontiguousarray(data).reshape(-1).view(np.uint8).data)
    return digest.intdigest()


@torch.no_grad()
def device_checksum(data: Tensor) -> int:
    """Sum of the 64-bit words times odd numbers that count up, modulo 2⁶⁴, over a flat uint8 tensor.

    A flipped bit k of word i changes it by ± 2ᵏ·(2i + 1), which is never 0 modulo 2⁶⁴. Exact on every device.

    >>> device_checksum(torch.tensor([1, 0, 0, 0, 0, 0, 0, 0, 2], dtype=torch.uint8))  # 1·1 + 2·3
    7
    """
    if data.numel() % 8:
        data = torch.nn.functional.pad(data, (0, 8 - data.numel() % 8))
    words = data.view(torch.int64)
    num_rows = words.numel() // _ROW_WORDS
    whole, rest = words[: num_rows * _ROW_WORDS].view(num_rows, _ROW_WORDS), words[num_rows * _ROW_WORDS :]
    # Σ wᵢ·(2i + 1) by sums over columns and over rows, which need no room: i = row·_ROW_WORDS + column.
    factors = torch.arange(_ROW_WORDS, dtype=torch.int64, device=data.device) * 2 + 1
    row_starts = torch.arange(num_rows, dtype=torch.int64, device=data.device) * (2 * _ROW_WORDS)
    total = (whole.sum(dim=0) * factors).sum() + (whole.sum(dim=1) * row_starts).sum()
    total += (rest * (factors[: rest.numel()] + 2 * _ROW_WORDS * num_rows)).sum()
    return int(total.item()) % 2**64


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
