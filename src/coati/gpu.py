"""A GPU: what its errors mean, and a second stream."""

import contextlib
import functools
from collections.abc import Iterator

import torch

from coati.errors import AcceleratorFailed, CoatiError, OutOfMemory

HOST_MEMORY = "DefaultCPUAllocator"
"""What torch's error says if it is the host's memory that ran out."""
_NO_MEMORY = ("out of memory", "Cannot allocate memory", "ALLOC_FAILED", HOST_MEMORY)
_BROKEN = ("CUDA error", "CUDA driver error", "CUBLAS_STATUS", "CUDNN_STATUS", "Triton Error")


@contextlib.contextmanager
def device_errors_explained(what: str, remedy: str) -> Iterator[None]:
    """Turn what torch raises inside, when memory runs out or a GPU fails, into an error of ours.

    `what` names the work and its size; `remedy` is a sentence that says what to change if it needs less memory.
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


@functools.cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """The second stream of a device: always the same, because cuBLAS keeps 32 MiB for each that it computes on.

    Graphs that were captured on this stream compute on it wherever they are replayed; nothing else may run on it then.
    """
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
