"""Messages from a sender of weights to a receiver, and the two transports for their bytes.

Every call carries one `WeightMessage`: a header, chunks of tensors, and a manifest. The manifest comes last and lists
the contents of the update, so that a receiver can detect an incomplete one.

A chunk is one flat buffer (`layout`), which receivers read with a `ChunkReader`. It is sent by value (over Ray, once
for all receivers). If all receivers share the sender's GPU, it stays there in a `SharedGpuMemory`: the sender reuses
the buffer for the next update, and a receiver clones it before it answers, so the GPU holds the weights three times.
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

# Tensors in a buffer start at multiples of this, so that every dtype and vectorized loads are aligned.
ALIGNMENT = 256
_MEMORY_REMEDY = (
    "An update is staged next to the serving weights: give the maker more of the GPU (topology.gpus_per_maker), or "
    "lower its memory use (rollout.prompts_per_batch, rollout.max_new_tokens)."
)
_DEVICE_ARGUMENT = 6  # index of the device among the arguments that `reduce_tensor` returns for `rebuild_cuda_tensor`
_ROW_WORDS = 4096  # `device_checksum` arranges the 64-bit words of a buffer in rows of this length


class TensorSpec(NamedTuple):
    """Name, shape and dtype of a tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpdateHeader:
    """Identifies an update. `update_id` is unique, so two updates cannot be mixed up."""

    update_id: str
    version: int
    source: str  # the sender's name, unique at any time; a sender that replaces another takes over its name
    incarnation: int = 0
    """How often the trainers of the run were restarted; any version of a later incarnation is newer."""

    def __str__(self) -> str:
        return f"weight update {self.update_id} (version {self.version}) from {self.source}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChunkInfo:
    """A chunk's entry in the manifest: its module ("actor" or "critic") and its tensors, in order."""

    module: str
    tensors: tuple[TensorSpec, ...]
    checksum: int = 0  # covers the module, the specs and the bytes

    @property
    def nbytes(self) -> int:
        """Size of the tensors in bytes, without the gaps between them."""
        return sum(spec.nbytes for spec in self.tensors)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chunk:
    """A chunk in flight: either its bytes, or a handle to them in the sender's memory."""

    index: int
    info: ChunkInfo
    data: np.ndarray | None = None  # [n] uint8: the tensors at the offsets of `layout`; None with a handle
    handle: "BufferHandle | None" = None  # opens the same bytes in the sender's memory; None with `data`


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightManifest:
    """The contents of an update."""

    chunks: tuple[ChunkInfo, ...]
    is_full: bool = True
    """Whether all weights of the models are sent, not only the trained ones (such as LoRA adapters)."""
    lora: Mapping[str, Mapping[str, LayerLoRA]] = dataclasses.field(default_factory=dict)
    """Adapter settings by module and layer, for receivers whose models have no adapters."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightMessage:
    """One call to a receiver: any combination of an update's start, some of its chunks, and its end."""

    header: UpdateHeader
    is_start: bool = False
    chunks: tuple[Chunk, ...] = ()
    manifest: WeightManifest | None = None


def specs_of(tensors: Mapping[str, Tensor]) -> tuple[TensorSpec, ...]:
    """Return the specs of tensors, in order."""
    return tuple(TensorSpec(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items())


def layout(specs: Sequence[TensorSpec]) -> tuple[tuple[int, ...], int]:
    """Return each tensor's offset in a chunk's buffer, and the buffer's size in bytes. Both sides compute this.

    >>> layout((TensorSpec("a", (3,), torch.float32), TensorSpec("b", (), torch.bool)))
    ((0, 256), 512)
    """
    offsets, end = [], 0
    for spec in specs:
        offsets.append(end)
        end += -(-spec.nbytes // ALIGNMENT) * ALIGNMENT
    return tuple(offsets), max(end, ALIGNMENT)


def tensor_views(buffer: Tensor, specs: Sequence[TensorSpec]) -> dict[str, Tensor]:
    """Return the tensors of a chunk as views of its flat uint8 buffer."""
    offsets, _ = layout(specs)
    return {
        spec.name: buffer[offset : offset + spec.nbytes].view(spec.dtype).view(spec.shape)
        for spec, offset in zip(specs, offsets, strict=True)
    }


def value_chunk(index: int, module: str, tensors: Mapping[str, Tensor]) -> Chunk:
    """Copy tensors into a chunk that is sent by value."""
    memory = torch.zeros(layout(specs_of(tensors))[1], dtype=torch.uint8)
    return Chunk(index=index, info=_fill(memory, module, tensors), data=memory.numpy())


def _fill(memory: Tensor, module: str, tensors: Mapping[str, Tensor]) -> ChunkInfo:
    """Copy tensors into the memory of a chunk; return its manifest entry."""
    info = ChunkInfo(module=module, tensors=specs_of(tensors))
    copy_all(list(tensor_views(memory, info.tensors).values()), list(tensors.values()))
    return dataclasses.replace(info, checksum=checksum_of(info, memory))


@dataclasses.dataclass(frozen=True)
class BufferHandle:
    """Opens a GPU buffer in another process; for a CPU buffer it holds the buffer itself."""

    device: str  # see `physical_device`
    key: Hashable  # identifies the buffer
    rebuild: Callable[..., Tensor] = dataclasses.field(compare=False)
    arguments: tuple[Any, ...] = dataclasses.field(compare=False)

    @classmethod
    def of(cls, buffer: Tensor) -> "BufferHandle":
        """Create the handle of a buffer."""
        name = physical_device(buffer.device)
        if not buffer.is_cuda:
            return cls(name, id(buffer), torch.as_tensor, (buffer,))
        rebuild, arguments = reduce_tensor(buffer)  # type: ignore[no-untyped-call]
        key = arguments[_DEVICE_ARGUMENT + 1 : _DEVICE_ARGUMENT + 6]  # memory handle, size, offset, counter
        return cls(name, key, rebuild, arguments)

    def open(self, device: torch.device) -> Tensor:
        """Open the buffer; fails where CUDA IPC does not work: MIG, separate containers, old drivers."""
        if (here := physical_device(device)) != self.device:
            raise OSError(f"it is on {self.device}, but this maker runs on {here}")
        arguments = self.arguments
        if device.type == "cuda":  # the GPU may have another index in this process
            index = torch.cuda.current_device() if device.index is None else device.index
            arguments = (*arguments[:_DEVICE_ARGUMENT], index, *arguments[_DEVICE_ARGUMENT + 1 :])
        return self.rebuild(*arguments)


class SharedGpuMemory:
    """GPU memory of the sender that receivers copy from: one buffer per chunk, which the next update overwrites.

    A receiver that reads too late detects it by the checksum.
    """

    # Both sides synchronize with the GPU several times per chunk. On a shared GPU each synchronization takes
    # milliseconds, in which several GiB could be copied.
    least_chunk_mib = 1024.0

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[int, tuple[Tensor, BufferHandle]] = {}

    def probe(self) -> Chunk:
        """Return a small chunk for receivers to try. Raises RuntimeError if this system cannot share GPU memory."""
        random = torch.frombuffer(bytearray(os.urandom(256)), dtype=torch.uint8)
        return self.make_chunk(-1, "probe", {"random": random})

    def make_chunk(self, index: int, module: str, tensors: Mapping[str, Tensor]) -> Chunk:
        """Copy the tensors into the buffer of the chunk with this index."""
        size = layout(specs_of(tensors))[1]
        if index not in self._buffers or self._buffers[index][0].numel() < size:
            buffer = torch.zeros(size, dtype=torch.uint8, device=self._device)
            self._buffers[index] = buffer, BufferHandle.of(buffer)
        buffer, handle = self._buffers[index]
        return Chunk(index=index, info=_fill(buffer[:size], module, tensors), handle=handle)


class ChunkReader:
    """Reads chunks on the receiver's side. Opened buffers stay open for later updates, until others replace them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._open: dict[int, tuple[BufferHandle, Tensor]] = {}  # by chunk index
        # Staging uses its own stream, so that it does not queue behind generation.
        self._side_stream: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if device.type == "cuda":
            self._side_stream = torch.cuda.stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]

    def read(self, chunk: Chunk) -> dict[str, Tensor]:
        """Return the chunk's tensors in memory that the sender cannot change; ValueError if the checksum differs."""
        info = chunk.info
        size = layout(info.tensors)[1]
        with self._side_stream:
            # Not under `device_errors_explained`: if this fails, the sender may be gone, not the GPU.
            buffer = None if chunk.handle is None else self._open_buffer(chunk.index, chunk.handle)
            with device_errors_explained(f"staging {size} bytes of weights", _MEMORY_REMEDY):
                data = tensor_of(np.asarray(chunk.data)) if buffer is None else buffer[:size].clone()
                if data.is_cuda:
                    torch.cuda.current_stream(data.device).synchronize()
                found = checksum_of(info, data)
            if found != info.checksum:
                raise ValueError(f"its checksum is {found:#x}, but was {info.checksum:#x} when it was sent")
        return tensor_views(data, info.tensors)

    def _open_buffer(self, index: int, handle: BufferHandle) -> Tensor:
        if index not in self._open or self._open[index][0] != handle:
            self._open[index] = handle, handle.open(self.device)
        return self._open[index][1]


def physical_device(device: torch.device) -> str:
    """Return a name of the physical GPU behind a device that is the same in every process."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else str(device)


def checksum_of(info: ChunkInfo, memory: Tensor) -> int:
    """Return the XXH3 of a chunk's description and its bytes (on a GPU, of their `device_checksum`)."""
    digest = xxhash.xxh3_64(f"{info.module} {info.tensors}".encode())
    digest.update(device_checksum(memory).to_bytes(8, "little") if memory.is_cuda else memory.numpy().data)
    return digest.intdigest()


@torch.no_grad()
def device_checksum(data: Tensor) -> int:
    """Return Σ wᵢ·(2i + 1) modulo 2⁶⁴ over the 64-bit words wᵢ of a flat uint8 tensor, the same on every device.

    A flip of bit k in word i changes it by ± 2ᵏ·(2i + 1), which is never 0 modulo 2⁶⁴, so it detects any single flip.

    >>> device_checksum(torch.tensor([1, 0, 0, 0, 0, 0, 0, 0, 2], dtype=torch.uint8))  # 1·1 + 2·3
    7
    """
    if data.numel() % 8:
        data = torch.nn.functional.pad(data, (0, 8 - data.numel() % 8))
    words = data.view(torch.int64)
    num_rows = words.numel() // _ROW_WORDS
    whole, rest = words[: num_rows * _ROW_WORDS].view(num_rows, _ROW_WORDS), words[num_rows * _ROW_WORDS :]
    # With i = row·_ROW_WORDS + column, sums over columns and rows suffice, which need no temporary memory.
    factors = torch.arange(_ROW_WORDS, dtype=torch.int64, device=data.device) * 2 + 1
    row_starts = torch.arange(num_rows, dtype=torch.int64, device=data.device) * (2 * _ROW_WORDS)
    total = (whole.sum(dim=0) * factors).sum() + (whole.sum(dim=1) * row_starts).sum()
    total += (rest * (factors[: rest.numel()] + 2 * _ROW_WORDS * num_rows)).sum()
    return int(total.item()) % 2**64


def copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy sources to targets in few kernel launches, after all work queued on any stream; wait until it is done."""
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
