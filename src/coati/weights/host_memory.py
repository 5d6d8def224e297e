"""Weights in memory that a sender shares with receivers on the same host: one copy in, and no copy until the commit.

    sender                                                    receiver
    parameters ─ copy ─► set A or B ─ handle ───────────────► map read-only ─ check ─► stage of views ─ commit: one copy

There are two sets, filled in turn, so that pages are touched once and mapped once. A receiver that generates may keep
reading a set for long; before it answers the header of the next update in the same set, it drops or copies what it
still holds there (`ServedModels.release`).

The buffers are anonymous files (`memfd_create`) that others open through `/proc`. They have no name on any disk: the
kernel frees a buffer when the last process that has it mapped ends, even if it was killed. Unlike `/dev/shm` they are
not limited to the 64 MiB that containers often give it. Each takes descriptors in both processes, so a buffer is large
and holds many chunks; memory is taken only for the chunks that are in it.
"""

import dataclasses
import mmap
import os
import weakref
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from coati.weights.transports import SharedMemory
from coati.wire import tensor_of

# Addresses of one buffer, unless a single chunk is larger: 64 chunks of the default size.
BUFFER_BYTES = 4 * 2**30


@dataclasses.dataclass(frozen=True)
class MemoryHandle:
    """Where another process of this host finds a chunk."""

    process: int
    descriptor: int
    inode: int  # numbers of processes and descriptors are reused; this tells whether they still mean the same buffer
    size: int
    offset: int = dataclasses.field(default=0, compare=False)

    def open(self, device: torch.device) -> Tensor:  # noqa: ARG002
        """Map the buffer, read-only."""
        path = f"/proc/{self.process}/fd/{self.descriptor}"
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if os.fstat(descriptor).st_ino != self.inode:
                raise OSError(f"{path} is no longer what its owner shared")
            mapping = mmap.mmap(descriptor, self.size, prot=mmap.PROT_READ)
        finally:
            os.close(descriptor)
        return tensor_of(np.frombuffer(mapping, dtype=np.uint8))

    def read(self, buffer: Tensor, size: int) -> Tensor:
        """The sender's memory itself."""
        return buffer[self.offset : self.offset + size]


class MemoryBuffer:
    """Memory that other processes can map. It lives until the last process that has it mapped ends."""

    def __init__(self, size: int) -> None:
        """`size` takes addresses only; `take` takes memory."""
        if not hasattr(os, "memfd_create"):
            raise OSError("this system has no memfd_create")
        descriptor = os.memfd_create("coati-weights")
        weakref.finalize(self, os.close, descriptor)
        os.ftruncate(descriptor, size)
        self.data = torch.from_numpy(np.frombuffer(mmap.mmap(descriptor, size), dtype=np.uint8))
        self.handle = MemoryHandle(os.getpid(), descriptor, os.fstat(descriptor).st_ino, size)
        self._num_taken = 0

    @property
    def num_left(self) -> int:
        """Bytes that can still be taken."""
        return self.handle.size - self._num_taken

    def take(self, size: int) -> tuple[Tensor, MemoryHandle]:
        """Reserve memory for the next bytes; without that, writing them could kill the process.

        Raises OSError if the host has none.
        """
        offset = self._num_taken
        os.posix_fallocate(self.handle.descriptor, offset, size)
        self._num_taken += size
        return self.data[offset : offset + size], dataclasses.replace(self.handle, offset=offset)


class HostMemory(SharedMemory):
    """The sender's side: slots in large buffers."""

    def _allocator(self) -> Callable[[int], tuple[Tensor, MemoryHandle]]:
        buffers: list[MemoryBuffer] = []

        def allocate(size: int) -> tuple[Tensor, MemoryHandle]:
            if not buffers or buffers[-1].num_left < size:
                buffers.append(MemoryBuffer(max(size, BUFFER_BYTES)))
            return buffers[-1].take(size)

        return allocate
