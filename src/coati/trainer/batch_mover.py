"""Brings the next batch to the device while the one before is trained on."""

import torch

from coati.experience import Experience


class BatchMover:
    """Copies batches to a GPU on a stream of its own; where there is no GPU, batches stay as they are.

    `used_on` is the stream of the training steps, if that is not the default one.
    """

    def __init__(self, device: torch.device, used_on: torch.cuda.Stream | None = None) -> None:
        self._device = device
        self._used_on = used_on
        # Stream has no annotations.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def __call__(self, batch: Experience) -> Experience:
        """The same batch, on the device when this returns. Pinned memory is copied without holding up anybody."""
        if self._stream is None:
            return batch
        with torch.cuda.stream(self._stream):
            batch.to_device(self._device)
        self._stream.synchronize()
        used_on = self._used_on or torch.cuda.default_stream(self._device)
        for _, tensor in batch.tensors():
            # The memory belongs to our stream, which may give it out again as soon as it is freed; the training step
            # uses it on another one.
            tensor.record_stream(used_on)
        return batch
