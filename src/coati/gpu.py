"""A GPU: what its errors mean, and the streams and processors that a process shares with others."""

import contextlib
import functools
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from coati.errors import AcceleratorFailed, CoatiError, ConfigError, OutOfMemory

HOST_MEMORY = "DefaultCPUAllocator"
"""What torch's error says if it is the host's memory that ran out."""
_NO_MEMORY = ("out of memory", "Cannot allocate memory", "ALLOC_FAILED", HOST_MEMORY)
_BROKEN = ("CUDA error", "CUDA driver error", "CUBLAS_STATUS", "CUDNN_STATUS", "Triton Error")


@contextlib.contextmanager
def device_errors_explained(what: str, remedy: str) -> Iterator[None]:
    """Turn what torch raises inside, when memory runs out or a GPU fails, into an error of ours.

    `what` names the work and its size, and `remedy` is a sentence that says what to change if it needs less memory.
    """
    try:
        yield
    except CoatiError:
        raise
    except (RuntimeError, MemoryError, OSError) as error:
        text = str(error).strip()
        if isinstance(error, torch.OutOfMemoryError | MemoryError) or any(mark in text for mark in _NO_MEMORY):
            raise OutOfMemory(f"{what} ran out of memory{_memory_there()}. {remedy} torch said: {text}") from error
        if isinstance(error, torch.AcceleratorError) or any(mark in text for mark in _BROKEN):
            raise AcceleratorFailed(
                f"{what} failed on the GPU, which this process cannot use any more. `coati train --resume` continues "
                "from the last checkpoint. The cause may be an earlier kernel: with CUDA_LAUNCH_BLOCKING=1 the error "
                f"comes where it happens. torch said: {text}"
            ) from error
        raise


def _memory_there() -> str:
    """How much of the GPU was taken, and by whom, in words; nothing if this process has no memory of one."""
    own = torch.cuda.memory_reserved()
    if not own:
        return ""
    free, total = torch.cuda.mem_get_info()
    return f" ({own / 2**30:.1f} GiB held by this process, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free)"


class ProcessorShare:
    """Some of a card's processors, for work that leaves the others to another process.

    Under NVIDIA's MPS the large kernels of training leave no processor to the many small ones of generation. What is
    launched inside `used()` stays on `share` of the processors.
    """

    def __init__(self, device: torch.device, share: float) -> None:
        self._device = device
        total = torch.cuda.get_device_properties(device).multi_processor_count
        try:
            from torch.cuda.green_contexts import GreenContext

            context: Any = GreenContext.create(num_sms=processors_of(share, total), device_id=device.index or 0)
            self.stream: torch.cuda.Stream = context.Stream()
            self.side_stream: torch.cuda.Stream = context.Stream()
            self._context = context  # owns the streams, so it stays as long as this does
        except (ImportError, AttributeError, RuntimeError) as error:
            raise ConfigError(
                'topology.gpu_sharing = "mps" needs a torch and a driver that can keep work to a part of a card (CUDA '
                f'12.4, torch 2.11), got torch {torch.__version__}: {error}. Set it to "slices".'
            ) from error
        _shares[self.stream.cuda_stream] = self

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Launch what comes inside on the share, after all that was launched before and before all that follows."""
        outside = torch.cuda.current_stream(self._device)
        self.stream.wait_stream(outside)
        try:
            with torch.cuda.stream(self.stream):
                yield
        finally:
            outside.wait_stream(self.stream)


_shares: weakref.WeakValueDictionary[int, ProcessorShare] = weakref.WeakValueDictionary()
"""By the handle of their streams."""


class SideStream:
    """A second stream: it runs after what was launched before this object was made, and concurrently with the rest.

    What is launched there, and code that waits for it, need not wait for long work that is under way. On a CPU
    everything stays in its order.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = side_stream(device) if device.type == "cuda" else None
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(device))

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Launch what comes inside there; the stream that was current waits for it afterwards."""
        if self._stream is None:
            yield
            return
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)


def side_stream(device: torch.device) -> torch.cuda.Stream:
    """The second stream of the current one, on the same processors: always the same.

    cuBLAS gets a workspace for each stream that it computes on, 32 MiB on an H200, and torch never frees one. Graphs
    that were captured on this stream compute on it wherever they are replayed, so nothing else may run on it then.
    """
    share = _shares.get(torch.cuda.current_stream(device).cuda_stream)
    return _second_stream(device) if share is None else share.side_stream


@functools.cache
def _second_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def processors_of(share: float, total: int) -> int:
    """How many of `total` processors a share is: they are given out in groups of 8.

    >>> processors_of(0.5, 132)
    64
    """
    return max(8, min(total, round(share * total) // 8 * 8))
