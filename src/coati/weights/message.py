"""What travels from a sender of weights to a receiver, and how its bytes get there.

Every call carries one `WeightMessage`: a header, chunks of tensors, a manifest that lists them. The manifest comes last
and says what the update consists of, so that a receiver can tell a whole update from a torn one.

| way | bytes | used where |
|---|---|---|
| by value | travel with the chunk (over Ray: put into the object store once) | anywhere |
| `CardMemory` | stay on the card, from where receivers copy them | all receivers on the sender's card |

A chunk is one flat buffer (`layout`), which receivers read with a `ChunkReader`. On a card the sender uses the buffer
of a chunk again for the next update, and a receiver clones it before it answers: the weights are there three times.
"""

import contextlib
import dataclasses
import math
import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from coati.devices import device_errors_explained
from coati.models.lora import LayerLoRA
from coati.wire import tensor_of

# Tensors in one buffer begin at multiples of this: any dtype is aligned, and so are vectorised loads.
ALIGNMENT = 256
_NO_ROOM = (
    "An update is staged beside the weights that serve: give the maker more of the GPU (topology.gpus_per_maker), or "
    "leave it more memory (rollout.prompts_per_batch, rollout.max_new_tokens)."
)
# Position of the device among what `reduce_tensor` gives for `rebuild_cuda_tensor`.
_DEVICE_ARGUMENT = 6
# Checksums on a card look at 64-bit words in rows of so many.
_ROW_WORDS = 4096


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
    checksum: int = 0
    """Over the module, the specs and the bytes."""

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
    handle: "CardHandle | None" = None
    """What opens the same bytes in the sender's memory."""


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
    """Where each tensor begins in a chunk's buffer, and the room that all take; both sides compute it.

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


def value_chunk(index: int, module: str, tensors: Mapping[str, Tensor]) -> Chunk:
    """Copy tensors into a chunk that travels with its bytes."""
    memory = torch.zeros(layout(specs_of(tensors))[1], dtype=torch.uint8)
    return Chunk(index=index, info=_fill(memory, module, tensors), data=memory.numpy())


def _fill(memory: Tensor, module: str, tensors: Mapping[str, Tensor]) -> ChunkInfo:
    """Copy tensors into the memory of a chunk; returns what the manifest lists of it."""
    info = ChunkInfo(module=module, tensors=specs_of(tensors))
    copy_all(list(views(memory, info.tensors).values()), list(tensors.values()))
    return dataclasses.replace(info, checksum=checksum_of(info, memory))


@dataclasses.dataclass(frozen=True)
class CardHandle:
    """What another process needs to open a buffer on the card; of a CPU buffer, the buffer itself."""

    card: str
    key: Hashable  # what tells two buffers apart
    rebuild: Callable[..., Tensor] = dataclasses.field(compare=False)
    arguments: tuple[Any, ...] = dataclasses.field(compare=False)

    @classmethod
    def of(cls, buffer: Tensor) -> "CardHandle":
        """Share a buffer."""
        card = card_of(buffer.device)
        if not buffer.is_cuda:
            return cls(card, id(buffer), _itself, (buffer,))
        rebuild, arguments = reduce_tensor(buffer)  # type: ignore[no-untyped-call]
        key = arguments[_DEVICE_ARGUMENT + 1 : _DEVICE_ARGUMENT + 6]  # memory handle, size, offset, counter
        return cls(card, key, rebuild, arguments)

    def open(self, device: torch.device) -> Tensor:
        """Open the buffer; fails without IPC: with MIG, in other containers, with an old driver."""
        if (here := card_of(device)) != self.card:
            raise OSError(f"it is on {self.card}, and this maker computes on {here}")
        arguments = self.arguments
        if device.type == "cuda":  # the card may have another number in this process
            index = torch.cuda.current_device() if device.index is None else device.index
            arguments = (*arguments[:_DEVICE_ARGUMENT], index, *arguments[_DEVICE_ARGUMENT + 1 :])
        return self.rebuild(*arguments)


class CardMemory:
    """Memory on the sender's card that receivers copy from: a buffer for each chunk, which the next update overwrites.

    A receiver that reads too late notices by the checksum.
    """

    # Both sides wait for the card several times for each chunk. On a card that others use too, each wait takes
    # milliseconds, in which a GiB could be copied a few times over.
    least_chunk_mib = 1024.0

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[int, tuple[Tensor, CardHandle]] = {}

    def probe(self) -> Chunk:
        """A chunk for receivers to try. Raises RuntimeError if this system shares no such memory."""
        random = torch.frombuffer(bytearray(os.urandom(256)), dtype=torch.uint8)
        return self.make_chunk(-1, "probe", {"random": random})

    def make_chunk(self, index: int, module: str, tensors: Mapping[str, Tensor]) -> Chunk:
        """Copy the tensors into the buffer of a chunk of this number."""
        size = layout(specs_of(tensors))[1]
        if index not in self._buffers or self._buffers[index][0].numel() < size:
            buffer = torch.zeros(size, dtype=torch.uint8, device=self._device)
            self._buffers[index] = buffer, CardHandle.of(buffer)
        buffer, handle = self._buffers[index]
        return Chunk(index=index, info=_fill(buffer[:size], module, tensors), handle=handle)


class ChunkReader:
    """The receiver's side. Buffers that an update opened stay open for the next, until others take their place."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._open: dict[int, tuple[CardHandle, Tensor]] = {}  # by number of chunk
        self._stream: torch.cuda.Stream | None = None

    def read(self, chunk: Chunk) -> dict[str, Tensor]:
        """The chunk's tensors, in memory that stays as it is. Raises an error if they are not what was sent."""
        info = chunk.info
        size = layout(info.tensors)[1]
        with self._side_stream():
            # Not the GPU's failure, if it fails: it may be the handle of a sender that is gone.
            buffer = None if chunk.handle is None else self._opened(chunk.index, chunk.handle)
            with device_errors_explained(f"staging {size} bytes of weights", _NO_ROOM):
                data = tensor_of(np.asarray(chunk.data)) if buffer is None else buffer[:size].clone()
                if data.is_cuda:
                    torch.cuda.current_stream(data.device).synchronize()
                found = checksum_of(info, data)
            if found != info.checksum:
                raise ValueError(f"its checksum is {found:#x}, but was {info.checksum:#x} when it was sent")
        return views(data, info.tensors)

    def _opened(self, index: int, handle: CardHandle) -> Tensor:
        if index not in self._open or self._open[index][0] != handle:
            self._open[index] = handle, handle.open(self.device)
        return self._open[index][1]

    def _side_stream(self) -> contextlib.AbstractContextManager[Any]:
        """Staging must not queue up behind the generation that runs meanwhile."""
        if self.device.type != "cuda":
            return contextlib.nullcontext()
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        return torch.cuda.stream(self._stream)


def card_of(device: torch.device) -> str:
    """A name for the physical card behind a device, the same in every process."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else str(device)


def _itself(buffer: Tensor) -> Tensor:
    return buffer


def checksum_of(info: ChunkInfo, memory: Tensor) -> int:
    """XXH3 over a chunk's description and its bytes (on a card, their `device_checksum`): any flip changes it."""
    digest = xxhash.xxh3_64(f"{info.module} {info.tensors}".encode())
    digest.update(device_checksum(memory).to_bytes(8, "little") if memory.is_cuda else memory.numpy().data)
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
    """Copy tensors into tensors in few launches, after work that is queued on any stream; return when it is done."""
    devices = {tensor.device for tensor in (*targets, *sources) if tensor.is_cuda}
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
