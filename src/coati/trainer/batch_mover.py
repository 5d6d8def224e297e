"""Brings the next batch to the device while the one before is trained on."""

import torch

from coati.experience_maker.base import Experience


class BatchMover:
    """Copies batches to a GPU on a stream of its own; where there is no GPU, batches stay as they are."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Stream has no annotations.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def __call__(self, batch: Experience) -> Experience:
        """The same batch, on the device when this returns. Pinned memory is copied without holding up anybody."""
        if self._stream is None:
            return batch
        with torch.cuda.stream(self._stream):
            batch.to_device(self._device)
        self._stream.synchronize()
        for _, tensor in batch.tensors():
            # The memory belongs to our stream, which may give it out again as soon as it is freed; the training step
            # uses it on the default one.
            tensor.record_stream(torch.cuda.default_stream(self._device))
        return batch
