"""Weights that stay on the card when sender and receivers sit on the same one.

    sender                                            receiver
    parameters ─ copy ─► snapshot ─ IPC handle ─────► clone ─ check ─► stage ─ commit: copies on the card

The sender keeps one flat buffer for each chunk and uses it again for the next update, so a handle is made once. A
receiver clones a chunk before it acknowledges it, so no receiver reads a snapshot after it has acknowledged the
manifest. It costs the card room for two more copies of the weights: the snapshot, and the stage until its commit.

On CPU tensors in one process the code is the same, but for the handles.
"""

import contextlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from coati.weights.message import Chunk, ChunkInfo, MemoryProbe, checksum, layout, specs_of, views
from coati.weights.transports import ReadChunk, SharedTransport, copy_all

# Checksums look at 64-bit words in rows of so many.
_ROW_WORDS = 4096
# Position of the device among what `reduce_tensor` gives for `rebuild_cuda_tensor`.
_DEVICE_ARGUMENT = 6


class CardHandle(NamedTuple):
    """What another process needs to open a buffer on the card; of a CPU buffer, the buffer itself."""

    rebuild: Any
    arguments: tuple[Any, ...]

    @property
    def key(self) -> object:
        """What tells two handles apart."""
        if self.rebuild is rebuild_cuda_tensor:
            return self.arguments[_DEVICE_ARGUMENT + 1 : _DEVICE_ARGUMENT + 6]  # memory handle, size, offset, counter
        return id(self.arguments[0])


class CardMemory(SharedTransport):
    """The sender's side: chunks whose bytes stay on `device`."""

    # Both sides wait for the card several times for each chunk. On a card that others use too, each wait takes
    # milliseconds, in which a GiB could be copied a few times over.
    least_chunk_mib = 1024.0

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[int, tuple[Tensor, CardHandle]] = {}
        self._retired: list[Tensor] = []

    def probe(self) -> MemoryProbe:
        """Bytes on the card for receivers to try."""
        data = torch.arange(256, dtype=torch.uint8, device=self._device)
        self._retired.append(data)
        total = device_checksum(data)  # waits for the bytes to be there
        return MemoryProbe(card_of(self._device), _share(data), total)

    def retire(self) -> None:
        """Never write or free the snapshots again."""
        self._retired.extend(buffer for buffer, _ in self._buffers.values())
        self._buffers = {}

    def pack(self, index: int, module: str, tensors: Mapping[str, Tensor]) -> Chunk:
        """Copy the tensors into the chunk's snapshot."""
        specs = specs_of(tensors)
        _, size = layout(specs)
        if index not in self._buffers or self._buffers[index][0].numel() != size:
            buffer = torch.zeros(size, dtype=torch.uint8, device=self._device)
            self._buffers[index] = (buffer, _share(buffer))
        buffer, handle = self._buffers[index]
        copy_all(list(views(buffer, specs).values()), list(tensors.values()))
        return Chunk(index=index, info=ChunkInfo(module=module, tensors=specs), handle=handle)

    def checksum(self, chunk: Chunk) -> int:
        """Compute the checksum of a snapshot."""
        return _checksum(chunk.info, self._buffers[chunk.index][0])


class CardReader:
    """The receiver's side: clones chunks onto `device`. Buffers that an update opened stay open for the next one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._open: dict[object, Tensor] = {}
        self._used: set[object] = set()
        self._stream: torch.cuda.Stream | None = None

    def read(self, chunk: Chunk) -> ReadChunk:
        """The chunk's tensors, in memory of the receiver."""
        with self._side_stream():
            key = chunk.handle.key
            if key not in self._open:
                self._open[key] = _open_shared(chunk.handle, self._device)
            self._used.add(key)
            data = self._open[key].clone()
            if data.is_cuda:
                torch.cuda.current_stream(self._device).synchronize()
        tensors = views(data, chunk.info.tensors)
        return ReadChunk(chunk.info, tensors, lambda: self._checksum(chunk.info, data))

    def end_update(self) -> None:
        """Close buffers that this update did not use, such as those of a sender that is gone."""
        self._open = {key: buffer for key, buffer in self._open.items() if key in self._used}
        self._used = set()

    def _checksum(self, info: ChunkInfo, data: Tensor) -> int:
        with self._side_stream():
            return _checksum(info, data)

    def _side_stream(self) -> contextlib.AbstractContextManager[Any]:
        """Staging must not queue up behind the generation that runs meanwhile."""
        if self._device.type != "cuda":
            return contextlib.nullcontext()
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        return torch.cuda.stream(self._stream)


def card_fault(probe: MemoryProbe, device: torch.device) -> str | None:
    """Why a receiver on `device` cannot read the sender's memory; None if it can."""
    if card_of(device) != probe.place:
        return f"it computes on {card_of(device)}, and the sender on {probe.place}"
    try:
        found = device_checksum(_open_shared(probe.handle, device).clone())
    except (RuntimeError, OSError) as error:  # no IPC here: MIG, other containers, an old driver
        return f"it cannot open memory of the sender's process: {error}"
    return None if found == probe.checksum else "it reads other bytes than the sender wrote"


def card_of(device: torch.device) -> str:
    """A name for the physical card behind a device, the same in every process."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else str(device)


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


def _checksum(info: ChunkInfo, data: Tensor) -> int:
    return checksum(info, [device_checksum(data).to_bytes(8, "little")])


def _share(buffer: Tensor) -> CardHandle:
    if not buffer.is_cuda:
        return CardHandle(_itself, (buffer,))
    return CardHandle(*reduce_tensor(buffer))  # type: ignore[no-untyped-call]


def _open_shared(handle: CardHandle, device: torch.device) -> Tensor:
    arguments = handle.arguments
    if handle.rebuild is rebuild_cuda_tensor:  # the card may have another number in this process
        index = torch.cuda.current_device() if device.index is None else device.index
        arguments = (*arguments[:_DEVICE_ARGUMENT], index, *arguments[_DEVICE_ARGUMENT + 1 :])
    opened: Tensor = handle.rebuild(*arguments)
    return opened


def _itself(buffer: Tensor) -> Tensor:
    return buffer
