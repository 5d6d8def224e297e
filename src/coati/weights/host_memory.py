"""Weights in memory that a sender shares with receivers on the same host: one copy in, and no copy until the commit.

    sender                                                    receiver
    parameters ─ copy ─► set A or B ─ handle ───────────────► map read-only ─ check ─► stage of views ─ commit: one copy

The sender fills two sets of buffers in turn, so that pages are touched once and mapped once. A receiver that generates
may keep reading a set for long, so a set is overwritten only after every receiver that was lent it has answered the
header of the next update in it; before it answers, a receiver drops or copies what it still holds there
(`ServedModels.release`). If one does not answer, the set is retired: the sender gets new memory for it.

The buffers are anonymous files (`memfd_create`) that others open through `/proc`. They have no name on any disk: the
kernel frees a buffer when the last process that has it mapped ends, even if it was killed. Unlike `/dev/shm` they are
not limited to the 64 MiB that containers often give it. Each takes descriptors in both processes, so a buffer is large
and holds many chunks; memory is taken only for the chunks that are in it.
"""

import contextlib
import dataclasses
import logging
import mmap
import os
import uuid
import weakref
from collections.abc import Collection, Mapping

import numpy as np
import torch
from torch import Tensor

from coati.weights.message import Chunk, ChunkInfo, MemoryProbe, checksum, layout, specs_of, views
from coati.weights.transports import ByValue, ReadChunk, SharedTransport, copy_all
from coati.wire import tensor_of

logger = logging.getLogger(__name__)

PROBE_BYTES = 256
# Addresses of one buffer, unless a single chunk is larger: 64 chunks of the default size.
BUFFER_BYTES = 4 * 2**30


@dataclasses.dataclass(frozen=True)
class MemoryHandle:
    """Where another process of this host finds a buffer."""

    process: int
    descriptor: int
    inode: int  # numbers of processes and descriptors are reused; this tells whether they still mean the same buffer
    size: int
    offset: int = dataclasses.field(default=0, compare=False)  # where a chunk begins; handles tell buffers apart

    @property
    def path(self) -> str:
        """What to open."""
        return f"/proc/{self.process}/fd/{self.descriptor}"


class MemoryBuffer:
    """Memory that other processes can map. It lives until the last process that has it mapped ends."""

    def __init__(self, size: int) -> None:
        """`size` takes addresses only; `reserve` takes memory."""
        descriptor = os.memfd_create("coati-weights")
        weakref.finalize(self, os.close, descriptor)
        os.ftruncate(descriptor, size)
        self.data = torch.from_numpy(np.frombuffer(mmap.mmap(descriptor, size), dtype=np.uint8))
        self.handle = MemoryHandle(os.getpid(), descriptor, os.fstat(descriptor).st_ino, size)
        self._num_reserved = 0

    def reserve(self, end: int) -> None:
        """Take memory for the bytes before `end`. Without it, writing them could kill the process.

        Raises OSError if the host has none.
        """
        if end > self._num_reserved:
            os.posix_fallocate(self.handle.descriptor, self._num_reserved, end - self._num_reserved)
            self._num_reserved = end


@dataclasses.dataclass
class _Set:
    """The memory of one update, and the receivers that may read it."""

    buffers: list[MemoryBuffer] = dataclasses.field(default_factory=list)
    receivers: frozenset[str] = frozenset()
    chunks: dict[int, Tensor] = dataclasses.field(default_factory=dict)  # of this update, by index
    _num_full: int = 0  # buffers that have no room for the next chunk
    _end: int = 0  # of the last chunk, in the buffer after those

    def begin(self) -> None:
        """Fill the buffers from their beginning again."""
        self.chunks, self._num_full, self._end = {}, 0, 0

    def place(self, index: int, size: int) -> MemoryHandle:
        """Make room for a chunk, in `chunks`; returns where it is. Raises OSError without memory for it."""
        while self._num_full < len(self.buffers) and self.buffers[self._num_full].handle.size < self._end + size:
            self._num_full, self._end = self._num_full + 1, 0
        if self._num_full == len(self.buffers):
            self.buffers.append(MemoryBuffer(max(size, BUFFER_BYTES)))
        buffer, offset = self.buffers[self._num_full], self._end
        buffer.reserve(offset + size)
        self._end += size
        self.chunks[index] = buffer.data[offset : offset + size]
        return dataclasses.replace(buffer.handle, offset=offset)


class HostMemory(SharedTransport):
    """The sender's side: two sets of buffers, filled in turn."""

    def __init__(self) -> None:
        self._name = uuid.uuid4().hex
        self._sets = [_Set(), _Set()]
        self._turn = 0
        self._by_value = ByValue()
        self._has_warned = False
        self._probe_buffer: MemoryBuffer | None = None

    def probe(self) -> MemoryProbe:
        """Random bytes for receivers to try."""
        if not hasattr(os, "memfd_create"):
            raise OSError("this system has no memfd_create")
        self._probe_buffer = MemoryBuffer(PROBE_BYTES)
        self._probe_buffer.reserve(PROBE_BYTES)
        self._probe_buffer.data.copy_(torch.frombuffer(bytearray(os.urandom(PROBE_BYTES)), dtype=torch.uint8))
        return MemoryProbe("memory", self._probe_buffer.handle, _probe_checksum(self._probe_buffer.data))

    def begin(self) -> str:
        """Take the other set; returns its name."""
        self._turn = 1 - self._turn
        self._sets[self._turn].begin()
        return f"{self._name}-{'AB'[self._turn]}"

    def lend_to(self, receivers: Collection[str]) -> None:
        """Note who gets this update. If a receiver of the last update in this set is not among them, retire the set."""
        if not self._sets[self._turn].receivers <= set(receivers):
            self.retire()
        self._sets[self._turn].receivers = frozenset(receivers)

    def retire(self) -> None:
        """Take new memory for the current set; receivers that have the old one mapped keep it."""
        self._sets[self._turn] = _Set()

    def pack(self, index: int, module: str, tensors: Mapping[str, Tensor]) -> Chunk:
        """Copy the tensors into shared memory; without memory for them, make a chunk that travels by value."""
        specs = specs_of(tensors)
        _, size = layout(specs)
        current = self._sets[self._turn]
        try:
            handle = current.place(index, size)
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                mib = size / 2**20
                logger.warning("no shared memory left for %.0f MiB of weights (%s): sending them by value", mib, error)
            return self._by_value.pack(index, module, tensors)
        copy_all(list(views(current.chunks[index], specs).values()), list(tensors.values()))
        return Chunk(index=index, info=ChunkInfo(module=module, tensors=specs), handle=handle)

    def checksum(self, chunk: Chunk) -> int:
        """Compute the checksum of what is in shared memory."""
        if chunk.handle is None:
            return self._by_value.checksum(chunk)
        return _checksum(chunk.info, self._sets[self._turn].chunks[chunk.index])


class MemoryReader:
    """The receiver's side: maps buffers read-only, and keeps them mapped for as long as their sender has them."""

    def __init__(self) -> None:
        self._open: dict[MemoryHandle, Tensor] = {}

    @property
    def num_open(self) -> int:
        """Buffers that are mapped."""
        return len(self._open)

    def read(self, chunk: Chunk) -> ReadChunk:
        """The chunk's tensors, as views of the sender's memory. Raises OSError if it cannot be opened."""
        if chunk.handle not in self._open:
            self._open[chunk.handle] = open_memory(chunk.handle)
        data = self._open[chunk.handle][chunk.handle.offset :]
        tensors = views(data, chunk.info.tensors)
        return ReadChunk(chunk.info, tensors, lambda: _checksum(chunk.info, data))

    def end_update(self) -> None:
        """Close buffers that their sender has given up."""
        self._open = {handle: buffer for handle, buffer in self._open.items() if _exists(handle)}


def open_memory(handle: MemoryHandle) -> Tensor:
    """Map another process's buffer, read-only. Raises OSError if this process cannot."""
    descriptor = os.open(handle.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if os.fstat(descriptor).st_ino != handle.inode:
            raise OSError(f"{handle.path} is no longer what its owner shared")
        mapping = mmap.mmap(descriptor, handle.size, prot=mmap.PROT_READ)
    finally:
        os.close(descriptor)
    return tensor_of(np.frombuffer(mapping, dtype=np.uint8))


def memory_fault(probe: MemoryProbe) -> str | None:
    """Why this process cannot read the sender's memory; None if it can."""
    try:
        found = _probe_checksum(open_memory(probe.handle))
    except (OSError, ValueError) as error:  # another host or container, another user, another system
        return f"it cannot open memory of the sender's process: {error}"
    return None if found == probe.checksum else "it reads other bytes than the sender wrote"


def _probe_checksum(data: Tensor) -> int:
    return checksum(ChunkInfo(module="", tensors=()), [data.numpy().data])


def _checksum(info: ChunkInfo, data: Tensor) -> int:
    _, size = layout(info.tensors)
    return checksum(info, [data[:size].numpy().data])


def _exists(handle: MemoryHandle) -> bool:
    with contextlib.suppress(OSError):
        return os.stat(handle.path).st_ino == handle.inode
    return False
