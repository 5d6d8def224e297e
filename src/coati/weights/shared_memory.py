"""Weights in memory that a trainer shares with makers on the same host: one copy in, and no copy until the commit.

    trainer                                                   maker
    parameters ─ copy ─► snapshot A or B ─ name ────────────► map read-only ─ check ─► stage of views ─ commit: one copy

All receivers map the same pages, so each chunk's checksum is computed by one of them, and none commits before all of
them have answered for theirs.

The sender fills two sets of buffers in turn, so that pages are touched once and makers map them once. A maker that is
in the middle of its work may keep looking at a set for long, so a set is overwritten only after every maker that was
lent it has answered the header of the next update in it; before a maker answers, it drops or copies what it still holds
there (`ServedModels.let_go`). If any did not answer, the set is retired: the sender gets new memory for it, and those
who have the old one mapped keep it.

The buffers are anonymous files (`memfd_create`) that others open through `/proc`. They have no name on any disk, so
nothing has to be cleaned up after a process that was killed: the kernel frees a buffer when the last one who has it
mapped is gone. Unlike `/dev/shm` they do not run into the 64 MiB that containers often give it. Where there is no such
thing (other systems, other containers, other hosts), the probe says so and weights go through the object store.
"""

import contextlib
import dataclasses
import functools
import logging
import mmap
import os
import uuid
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from coati.weights.checksum import bytes_checksum, checksum, hashed_ahead
from coati.weights.lent import LentChunk, ShareProbe, Slot, Snapshots, TakenChunk, copy_all, layout, moved, view
from coati.weights.manifest import UpdateHeader, WeightChunk
from coati.wire import encode, tensor_of

logger = logging.getLogger(__name__)

PROBE_BYTES = 256
# A buffer is as large as all before it, so that there are few of them, up to this: each takes two file descriptors at
# the sender and one at every receiver.
MAX_BUFFER_BYTES = 4 * 2**30


@dataclasses.dataclass(frozen=True)
class MemoryHandle:
    """Where another process of this host finds a buffer."""

    process: int
    descriptor: int
    inode: int  # numbers of processes and descriptors are given out again; this tells whether they still mean the same
    size: int

    @property
    def path(self) -> str:
        """What to open."""
        return f"/proc/{self.process}/fd/{self.descriptor}"


class MemoryBuffer:
    """Memory that other processes can map; it is theirs too once they have, and outlives this object with them."""

    def __init__(self, size: int) -> None:
        self._descriptor = os.memfd_create("coati-weights")
        weakref.finalize(self, os.close, self._descriptor)
        os.ftruncate(self._descriptor, size)  # takes no memory yet
        self._num_reserved = 0
        self.data = torch.from_numpy(np.frombuffer(mmap.mmap(self._descriptor, size), dtype=np.uint8))
        self.handle = MemoryHandle(os.getpid(), self._descriptor, os.fstat(self._descriptor).st_ino, size)

    def reserve(self, size: int) -> int | None:
        """Where the next `size` bytes begin; None if the buffer is full. OSError if the host has no memory for them.

        Without it, writing to memory that is not to be had would kill the process.
        """
        start = self._num_reserved
        if start + size > self.handle.size:
            return None
        os.posix_fallocate(self._descriptor, start, size)
        self._num_reserved += size
        return start


class _Region:
    """Room for one chunk, and what it was divided into last: updates look alike, and making views takes time."""

    def __init__(self, buffer: MemoryBuffer, start: int, size: int) -> None:
        self.buffer = buffer
        self.start = start
        self.size = size
        self.slots: tuple[Slot, ...] = ()
        self.views: list[Tensor] = []
        self._from_zero: tuple[Slot, ...] = ()

    def divide(self, slots: tuple[Slot, ...]) -> None:
        """Make views for slots that count from the region's start."""
        if slots != self._from_zero:
            self._from_zero = slots
            self.slots = moved(slots, self.start)
            self.views = [view(self.buffer.data, slot) for slot in self.slots]


@dataclasses.dataclass
class _Set:
    """The memory of one update, and who may look at it."""

    regions: dict[int, _Region] = dataclasses.field(default_factory=dict)  # by chunk
    buffers: list[MemoryBuffer] = dataclasses.field(default_factory=list)
    receivers: frozenset[str] | None = frozenset()  # None: nobody knows

    def region(self, index: int, size: int) -> _Region:
        """The room of a chunk; updates of adapters only find more in it than they need."""
        if index not in self.regions or self.regions[index].size < size:
            start = self.buffers[-1].reserve(size) if self.buffers else None
            if start is None:
                total = sum(buffer.handle.size for buffer in self.buffers)
                self.buffers.append(MemoryBuffer(max(size, min(total, MAX_BUFFER_BYTES))))
                start = self.buffers[-1].reserve(size)
                assert start is not None, "a new buffer has room for what it was made for"
            self.regions[index] = _Region(self.buffers[-1], start, size)
        return self.regions[index]


class MemorySnapshots(Snapshots):
    """The sender's side: two sets of buffers, filled in turn."""

    instead = "through Ray's object store"
    is_one_check_enough = True  # all receivers look at the same pages

    def __init__(self) -> None:
        self._name = uuid.uuid4().hex
        self._sets = (_Set(), _Set())
        self._turn = 0
        self._is_free = False  # whether the set whose turn it is may be overwritten
        self._has_complained = False
        self._probe_buffer: MemoryBuffer | None = None

    def probe(self) -> ShareProbe:
        """Random bytes that a receiver has to be able to read. OSError if this system shares no memory."""
        if not hasattr(os, "memfd_create"):
            raise OSError("this system has no memfd_create")
        self._probe_buffer = MemoryBuffer(PROBE_BYTES)
        self._probe_buffer.reserve(PROBE_BYTES)
        self._probe_buffer.data.copy_(torch.frombuffer(bytearray(os.urandom(PROBE_BYTES)), dtype=torch.uint8))
        return ShareProbe("memory", self._probe_buffer.handle, bytes_checksum(self._probe_buffer.data))

    def next_lender(self) -> str:
        """The name of the set whose turn it is now."""
        self._turn = 1 - self._turn
        self._is_free = False
        return f"{self._name}-{'AB'[self._turn]}"

    def lend_to(self, receivers: Collection[str]) -> None:
        """These let go of the set. If anyone else was lent it before, it is retired."""
        current = self._sets[self._turn]
        if current.receivers is None or not current.receivers <= set(receivers):
            self.retire()
        current.receivers = frozenset(receivers)
        self._is_free = True

    def chunks(
        self, header: UpdateHeader, shards: Iterable[tuple[str, Mapping[str, Tensor]]], *, has_checksums: bool
    ) -> Iterator[LentChunk | WeightChunk]:
        """Copy each shard into its buffer and describe it. The bytes are there when a chunk is handed out.

        A shard that there is no more shared memory for becomes a chunk for the object store.
        """
        if not self._is_free:
            self.retire()
            self._sets[self._turn].receivers = None
        self._is_free = False
        unhashed = self._unhashed(header, shards)
        if has_checksums:
            for chunk, digest in hashed_ahead(unhashed):
                yield dataclasses.replace(chunk, checksum=digest)
        else:
            for chunk, _ in unhashed:
                yield chunk

    def retire(self) -> None:
        """Somebody may still read the set whose turn it is: it is theirs from now on."""
        current = self._sets[self._turn]
        current.regions, current.buffers, current.receivers = {}, [], frozenset()

    def _unhashed(
        self, header: UpdateHeader, shards: Iterable[tuple[str, Mapping[str, Tensor]]]
    ) -> Iterator[tuple[LentChunk | WeightChunk, Callable[[], int]]]:
        filled = ((module, tensors) for module, tensors in shards if tensors)
        for index, (module, tensors) in enumerate(filled):
            slots, size = layout(tensors)
            region = self._region(index, size)
            if region is None:
                wires = {name: encode(tensor) for name, tensor in tensors.items()}
                stored = WeightChunk(header=header, index=index, module=module, tensors=wires, checksum=None)
                yield stored, functools.partial(checksum, wires)
                continue
            region.divide(slots)
            copy_all(region.views, list(tensors.values()))
            lent = LentChunk(
                header=header,
                index=index,
                module=module,
                slots=region.slots,
                handle=region.buffer.handle,
                checksum=None,
            )
            yield lent, functools.partial(bytes_checksum, _extent(region.buffer.data, region.slots))

    def _region(self, index: int, size: int) -> _Region | None:
        try:
            return self._sets[self._turn].region(index, size)
        except OSError as error:
            if not self._has_complained:
                self._has_complained = True
                logger.warning(
                    "there is no shared memory left for %.0f MiB of weights (%s): they go %s",
                    size / 2**20,
                    error,
                    self.instead,
                )
            return None


class MemoryReader:
    """The receiver's side: maps buffers read-only, and keeps them mapped for as long as their sender has them."""

    def __init__(self) -> None:
        self._open: dict[MemoryHandle, Tensor] = {}

    @property
    def num_open(self) -> int:
        """Buffers that are mapped."""
        return len(self._open)

    def take(self, chunk: LentChunk, *, may_look: bool, may_trust: bool) -> tuple[TakenChunk, int | None]:
        """The chunk, and the checksum of what is there (None if it was sent without one, or not looked at).

        With `may_look` it stays in the sender's memory; if then also `may_trust`, its bytes are not looked at yet.
        """
        if chunk.handle not in self._open:
            self._open[chunk.handle] = open_memory(chunk.handle)
        data, slots = self._open[chunk.handle], chunk.slots
        if not may_look:
            data = _extent(data, slots).clone()
            slots = moved(slots, -slots[0].offset) if slots else slots
        is_left_to_others = may_look and may_trust  # a copy of ours is ours to check
        found = None if chunk.checksum is None or is_left_to_others else bytes_checksum(_extent(data, slots))
        return TakenChunk(module=chunk.module, slots=slots, data=data, checksum=chunk.checksum), found

    def forget_gone(self) -> None:
        """At the end of an update: close what its sender has given up, or died with."""
        self._open = {handle: buffer for handle, buffer in self._open.items() if _is_there(handle)}


def open_memory(handle: MemoryHandle) -> Tensor:
    """Another process's buffer, read-only. OSError if it is not to be had here."""
    descriptor = os.open(handle.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if os.fstat(descriptor).st_ino != handle.inode:
            raise OSError(f"{handle.path} is no longer what its owner shared")
        mapping = mmap.mmap(descriptor, handle.size, prot=mmap.PROT_READ)
    finally:
        os.close(descriptor)
    return tensor_of(np.frombuffer(mapping, dtype=np.uint8))


def why_not_in_memory(probe: ShareProbe) -> str:
    """Why this process cannot take chunks out of the sender's memory; empty if it can."""
    try:
        found = bytes_checksum(open_memory(probe.handle))
    except (OSError, ValueError) as error:  # another host or container, another user, another system
        return f"it cannot open memory of the sender's process: {error}"
    return "" if found == probe.checksum else "it reads other bytes than the sender wrote"


def taken_checksum(chunk: TakenChunk) -> int:
    """The checksum of a chunk that was taken without looking at its bytes."""
    return bytes_checksum(_extent(chunk.data, chunk.slots))


def _extent(data: Tensor, slots: Sequence[Slot]) -> Tensor:
    """From the first byte of the first slot to the last of the last."""
    return data[slots[0].offset : slots[-1].offset + slots[-1].nbytes] if slots else data[:0]


def _is_there(handle: MemoryHandle) -> bool:
    with contextlib.suppress(OSError):
        return os.stat(handle.path).st_ino == handle.inode
    return False
