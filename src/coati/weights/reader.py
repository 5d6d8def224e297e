"""How a receiver gets at chunks that a sender lends it, whatever memory they are in."""

import torch

from coati.weights.device import DeviceReader, why_not_on_device
from coati.weights.lent import LentChunk, ShareProbe, TakenChunk
from coati.weights.shared_memory import MemoryHandle, MemoryReader, why_not_in_memory


class LentReader:
    """Opens the buffers of lent chunks and keeps them open for the next update."""

    def __init__(self, device: torch.device) -> None:
        self._on_device = DeviceReader(device)
        self._in_memory = MemoryReader()

    @property
    def num_mapped(self) -> int:
        """Buffers of other processes' memory that are mapped here."""
        return self._in_memory.num_open

    def take(self, chunk: LentChunk, *, may_look: bool, may_trust: bool = False) -> tuple[TakenChunk, int | None]:
        """The chunk, and the checksum of what arrived (None if it was sent without one, or not looked at).

        With `may_look` it may stay in the sender's memory; whoever says so lets go of it when the sender asks. With
        `may_trust` its bytes need not be looked at, because somebody else who reads the same memory does.
        """
        if not isinstance(chunk.handle, MemoryHandle):
            return self._on_device.clone(chunk)
        return self._in_memory.take(chunk, may_look=may_look, may_trust=may_trust)

    def end_update(self) -> None:
        """Close what later updates will not use."""
        self._on_device.forget_unused()
        self._in_memory.forget_gone()


def why_not_shared(probe: ShareProbe, device: torch.device) -> str:
    """Why a receiver on `device` cannot take the sender's chunks where they are; empty if it can."""
    if isinstance(probe.handle, MemoryHandle):
        return why_not_in_memory(probe)
    return why_not_on_device(probe, device)
