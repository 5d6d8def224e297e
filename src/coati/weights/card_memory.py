"""Weights that stay on the card when sender and receivers sit on the same one.

    sender                                            receiver
    parameters ─ copy ─► snapshot ─ IPC handle ─────► clone ─ check ─► stage ─ commit: copies on the card

The sender keeps one flat buffer for each chunk and uses it again for the next update, so a handle is made once. A
receiver clones a chunk before it acknowledges it, so no receiver reads a snapshot after it has acknowledged the
manifest. It costs the card room for two more copies of the weights: the snapshot, and the stage until its commit.

On CPU tensors in one process the code is the same, but for the handles and the checksum.
"""

import dataclasses
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from coati.weights.transports import SharedMemory

# Position of the device among what `reduce_tensor` gives for `rebuild_cuda_tensor`.
_DEVICE_ARGUMENT = 6


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

    def read(self, buffer: Tensor, size: int) -> Tensor:
        """A copy in memory of the receiver."""
        data = buffer[:size].clone()
        if data.is_cuda:
            torch.cuda.current_stream(data.device).synchronize()
        return data


class CardMemory(SharedMemory):
    """The sender's side: a buffer on `device` for each chunk."""

    # Both sides wait for the card several times for each chunk. On a card that others use too, each wait takes
    # milliseconds, in which a GiB could be copied a few times over.
    least_chunk_mib = 1024.0
    is_copied = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        super().__init__()

    def _allocator(self) -> Callable[[int], tuple[Tensor, CardHandle]]:
        device = self._device

        def allocate(size: int) -> tuple[Tensor, CardHandle]:
            buffer = torch.zeros(size, dtype=torch.uint8, device=device)
            return buffer, CardHandle.of(buffer)

        return allocate


def card_of(device: torch.device) -> str:
    """A name for the physical card behind a device, the same in every process."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else str(device)


def _itself(buffer: Tensor) -> Tensor:
    return buffer
