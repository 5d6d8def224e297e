"""Which way a trainer's weights go: in memory that its makers can open too, or through the object store."""

import logging

import torch

from coati.ray.weight_channel import WeightChannel
from coati.weights import DeviceSnapshots, MemorySnapshots, Snapshots

logger = logging.getLogger(__name__)


class WeightPath:
    """Asks the makers once whether they can open the trainer's memory: its card's, or its host's.

    While makers join they are asked before every update: one that was not there before may sit elsewhere.

    What each rank of a group is told is its own affair: all gather the same weights either way.
    """

    def __init__(self, channel: WeightChannel, device: torch.device) -> None:
        self._channel = channel
        self._device = device
        self._snapshots: Snapshots | None = None
        self._has_asked = False

    @property
    def snapshots(self) -> Snapshots | None:
        """What to lend weights from; None: they go through the object store."""
        if not self._has_asked or self._channel.has_newcomers:
            self._has_asked = True
            self._snapshots = self._shared()
        return self._snapshots

    def ask_again(self) -> None:
        """The makers are others than they were: ask them before the next update."""
        self._has_asked = False

    def _shared(self) -> Snapshots | None:
        # Kept if there are any: pages that were touched once are worth keeping.
        snapshots = self._snapshots or self._make_snapshots()
        try:
            probe = snapshots.probe()
        except OSError as error:
            logger.warning("weights go %s: %s", snapshots.instead, error)
            return None
        return snapshots if self._channel.all_can_open(probe, instead=snapshots.instead) else None

    def _make_snapshots(self) -> Snapshots:
        return DeviceSnapshots(self._device) if self._device.type == "cuda" else MemorySnapshots()
