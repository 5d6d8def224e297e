"""Weights in memory that a sender shares with receivers on the same host: one copy in, and no copy until the commit.

    sender                                                    receiver
    parameters ─ copy ─► set A or B ─ handle ───────────────► map read-only ─ check ─► stage of views ─ commit: one copy

The sender fills two sets of buffers in turn, so that pages are touched once and mapped once. A receiver that generates
may keep reading a set for long, so a set is overwritten only after every receiver that was lent it has answered the
header of the next update in it; before it answers, a receiver drops or copies what it still holds there
(`ServedModels.release`). If one does not answer, the set is retired: the sender gets new memory for it.

The buffers are anonymous files (`memfd_create`) that others open through `/proc`. They have no name on any disk: the
kernel frees a buffer when the last process that has it mapped ends, even if it was killed. Unlike `/dev/shm` they are
not limited to the 64 MiB that containers often give it.
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


@dataclasses.dataclass(frozen=True)
class MemoryHandle:
    """Where another process of this host finds a buffer."""

    process: int
    descriptor: int
    inode: int  # numbers of processes and descriptors are reused; this tells whether they still mean the same buffer
    size: int

    @property
    def path(self) -> str:
        """What to open."""
        return f"/proc/{self.process}/fd/{self.descriptor}"


class MemoryBuffer:
    """Memory that other processes can map. It lives until the last process that has it mapped ends."""

    def __init__(self, size: int) -> None:
        """Raises OSError if the host has no memory for it: without a reservation, writing would kill the process."""
        descriptor = os.memfd_create("coati-weights")
        weakref.finalize(self, os.close, descriptor)
        os.posix_fallocate(descriptor, 0, size)
        self.data = torch.from_numpy(np.frombuffer(mmap.mmap(descriptor, size), dtype=np.uint8))
        self.handle = MemoryHandle(os.getpid(), descriptor, os.fstat(descriptor).st_ino, size)


@dataclasses.dataclass
class _Set:
    """The memory of one update, and the receivers that may read it."""

    buffers: dict[int, MemoryBuffer] = dataclasses.field(default_factory=dict)  # by chunk
    receivers: frozenset[str] = frozenset()

    def buffer(self, index: int, size: int) -> MemoryBuffer:
        """The buffer of a chunk, which may be larger than it needs. Raises OSError without memory for it."""
        if index not in self.buffers or self.buffers[index].handle.size < size:
            self.buffers[index] = MemoryBuffer(size)
        return self.buffers[index]


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
        self._probe_buffer.data.copy_(torch.frombuffer(bytearray(os.urandom(PROBE_BYTES)), dtype=torch.uint8))
        return MemoryProbe("memory", self._probe_buffer.handle, _probe_checksum(self._probe_buffer.data))

    def begin(self) -> str:
        """Take the other set; returns its name."""
        self._turn = 1 - self._turn
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
        try:
            buffer = self._sets[self._turn].buffer(index, size)
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                mib = size / 2**20
                logger.warning("no shared memory left for %.0f MiB of weights (%s): sending them by value", mib, error)
            return self._by_value.pack(index, module, tensors)
        copy_all(list(views(buffer.data, specs).values()), list(tensors.values()))
        return Chunk(index=index, info=ChunkInfo(module=module, tensors=specs), handle=buffer.handle)

    def checksum(self, chunk: Chunk) -> int:
        """Compute the checksum of what is in shared memory."""
        if chunk.handle is None:
            return self._by_value.checksum(chunk)
        return _checksum(chunk.info, self._sets[self._turn].buffers[chunk.index].data)


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
        data = self._open[chunk.handle]
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
