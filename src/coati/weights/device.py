"""Weights that stay on the card when trainer and maker sit on the same one.

    trainer                                           maker
    parameters ─ copy ─► snapshot ─ IPC handle ─────► clone ─ check ─► stage ─ commit: copies on the device

The sender keeps one flat buffer for each chunk and uses it again for the next update, so a handle is made once. A
receiver copies a chunk into memory of its own before it acknowledges it; when all have acknowledged the manifest,
nobody reads the snapshot any more. It costs the card room for two more copies of the weights: the snapshot, and the
stage until its commit.

Nothing here needs a GPU but the handles: on CPU tensors, in one process, everything else is the same code.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from coati.weights.lent import LentChunk, ShareProbe, Snapshots, TakenChunk, copy_all, layout, view
from coati.weights.manifest import UpdateHeader

# Checksums look at 64-bit words in rows of so many.
_ROW_WORDS = 4096
# Position of the device among what `reduce_tensor` gives for `rebuild_cuda_tensor`.
_DEVICE_ARGUMENT = 6


class DeviceSnapshots(Snapshots):
    """The sender's side: chunks whose bytes stay on `device`."""

    instead = "through host memory"
    # Both sides wait for the card several times for each chunk. On one that others use too, that is a turn of theirs
    # each time: milliseconds, in which a GiB could be copied a few times over.
    least_chunk_mib = 1024.0

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[int, tuple[Tensor, Any]] = {}
        self._retired: list[Tensor] = []

    def probe(self) -> ShareProbe:
        """What a receiver has to be able to open."""
        data = torch.arange(256, dtype=torch.uint8, device=self._device)
        self._retired.append(data)
        total = device_checksum(data)  # waits for the bytes to be there
        return ShareProbe(card_of(self._device), _share(data), total)

    def chunks(
        self, header: UpdateHeader, shards: Iterable[tuple[str, Mapping[str, Tensor]]], *, has_checksums: bool
    ) -> Iterator[LentChunk]:
        """Copy each shard into its snapshot and describe it. The bytes are there when a chunk is handed out."""
        filled = ((module, tensors) for module, tensors in shards if tensors)
        for index, (module, tensors) in enumerate(filled):
            slots, size = layout(tensors)
            buffer, handle = self._buffer(index, size)
            copy_all([view(buffer, slot) for slot in slots], list(tensors.values()))
            checksum = device_checksum(buffer) if has_checksums else None
            yield LentChunk(header=header, index=index, module=module, slots=slots, handle=handle, checksum=checksum)

    def retire(self) -> None:
        """An update failed, and somebody may still read its snapshots: they are never written or freed again."""
        self._retired.extend(buffer for buffer, _ in self._buffers.values())
        self._buffers = {}

    def _buffer(self, index: int, size: int) -> tuple[Tensor, Any]:
        if index not in self._buffers or self._buffers[index][0].numel() != size:
            buffer = torch.zeros(size, dtype=torch.uint8, device=self._device)
            self._buffers[index] = (buffer, _share(buffer))
        return self._buffers[index]


class DeviceReader:
    """The receiver's side: clones chunks onto `device`. Buffers that an update opened stay open for the next one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._open: dict[object, Tensor] = {}
        self._used: set[object] = set()
        self._stream: torch.cuda.Stream | None = None

    def clone(self, chunk: LentChunk) -> tuple[TakenChunk, int | None]:
        """The chunk in our own memory, and the checksum of what arrived (None if it was sent without one)."""
        if self._device.type == "cuda":
            # A stream of its own: staging must not queue up behind the generation that goes on meanwhile.
            if self._stream is None:
                self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            with torch.cuda.stream(self._stream):
                return self._clone(chunk)
        return self._clone(chunk)

    def forget_unused(self) -> None:
        """At the end of an update: close what it did not use, such as the buffers of a sender that is gone."""
        self._open = {key: buffer for key, buffer in self._open.items() if key in self._used}
        self._used = set()

    def _clone(self, chunk: LentChunk) -> tuple[TakenChunk, int | None]:
        key = _key(chunk.handle)
        if key not in self._open:
            self._open[key] = _open_shared(chunk.handle, self._device)
        self._used.add(key)
        data = self._open[key].clone()
        found = None if chunk.checksum is None else device_checksum(data)
        if data.is_cuda:
            torch.cuda.current_stream(self._device).synchronize()
        return TakenChunk(module=chunk.module, slots=chunk.slots, data=data, checksum=chunk.checksum), found


def why_not_on_device(probe: ShareProbe, device: torch.device) -> str:
    """Why a receiver on `device` cannot take the sender's chunks; empty if it can."""
    if card_of(device) != probe.place:
        return f"it computes on {card_of(device)}, and the sender on {probe.place}"
    try:
        found = device_checksum(_open_shared(probe.handle, device).clone())
    except (RuntimeError, OSError) as error:  # no IPC here: MIG, other containers, an old driver
        return f"it cannot open memory of the sender's process: {error}"
    return "" if found == probe.checksum else "it reads other bytes than the sender wrote"


def card_of(device: torch.device) -> str:
    """A name for the physical card behind a device; the same for every process, whatever each may see."""
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


def _share(buffer: Tensor) -> Any:
    """What another process needs to open the buffer; a CPU tensor is for this process only."""
    if not buffer.is_cuda:
        return _itself, (buffer,)
    return reduce_tensor(buffer)  # type: ignore[no-untyped-call]


def _open_shared(handle: Any, device: torch.device) -> Tensor:
    rebuild, arguments = handle
    if rebuild is rebuild_cuda_tensor:  # the card may have another number in this process
        index = torch.cuda.current_device() if device.index is None else device.index
        arguments = (*arguments[:_DEVICE_ARGUMENT], index, *arguments[_DEVICE_ARGUMENT + 1 :])
    opened: Tensor = rebuild(*arguments)
    return opened


def _key(handle: Any) -> object:
    """What tells two handles apart."""
    rebuild, arguments = handle
    if rebuild is rebuild_cuda_tensor:
        return arguments[_DEVICE_ARGUMENT + 1 : _DEVICE_ARGUMENT + 6]  # memory handle, size, offset, counter
    return id(arguments[0])


def _itself(buffer: Tensor) -> Tensor:
    return buffer
