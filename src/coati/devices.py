"""Devices: CPU set-up, clear errors for GPU failures, and the second CUDA stream."""

import contextlib
import functools
import platform
from collections.abc import Iterator
from pathlib import Path

import torch

from coati.errors import AcceleratorFailed, CoatiError, OutOfMemory

HOST_MEMORY = "DefaultCPUAllocator"  # part of torch's error message when host memory ran out
_OUT_OF_MEMORY = ("out of memory", "Cannot allocate memory", "ALLOC_FAILED", HOST_MEMORY)
_GPU_FAILURE = ("CUDA error", "CUDA driver error", "CUBLAS_STATUS", "CUDNN_STATUS", "Triton Error")


def set_up_cpu(num_threads: int = 0) -> None:
    """Set the number of threads (0: torch's default), and disable oneDNN where it is slow.

    On ARM, torch passes float32 products to oneDNN, whose set-up costs more than a small product (64×64 by 64×128 on a
    Neoverse N1: 650 µs with it, 57 µs without). It is disabled on ARM without bfloat16, which it is made for. This
    changes the last bits of results, so the choice depends on the machine and not on a measurement.
    """
    if num_threads > 0:
        torch.set_num_threads(num_threads)
    is_arm, features = platform.machine().lower() in ("aarch64", "arm64"), Path("/proc/cpuinfo")  # of Linux
    if is_arm and features.exists() and "bf16" not in features.read_text(encoding="utf-8"):
        torch.backends.mkldnn.enabled = False  # type: ignore[assignment]


@contextlib.contextmanager
def device_errors_explained(what: str, remedy: str) -> Iterator[None]:
    """Raise OutOfMemory or AcceleratorFailed in place of torch's errors for exhausted memory and GPU failures.

    `what` names the work and its size; `remedy` is a sentence that says how to use less memory.
    """
    try:
        yield
    except CoatiError:
        raise
    except (RuntimeError, MemoryError, OSError) as error:
        text = str(error).strip()
        if isinstance(error, torch.OutOfMemoryError | MemoryError) or any(mark in text for mark in _OUT_OF_MEMORY):
            raise OutOfMemory(f"{what} ran out of memory{_memory_there()}. {remedy} torch said: {text}") from error
        if isinstance(error, torch.AcceleratorError) or any(mark in text for mark in _GPU_FAILURE):
            raise AcceleratorFailed(
                f"{what} failed on the GPU, which this process cannot use any more. `coati train --resume` continues "
                "from the last checkpoint. The cause may be an earlier kernel: set CUDA_LAUNCH_BLOCKING=1 to get the "
                f"error where it happens. torch said: {text}"
            ) from error
        raise


def _memory_there() -> str:
    """Describe the GPU memory in use; an empty string if this process holds none."""
    own = torch.cuda.memory_reserved()
    if not own:
        return ""
    free, total = torch.cuda.mem_get_info()
    return f" ({own / 2**30:.1f} GiB held by this process, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free)"


@functools.cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the second stream of a device, always the same one, because cuBLAS keeps 32 MiB for each stream it uses.

    Graphs that were captured on this stream run on it wherever they are replayed; run nothing else on it meanwhile.
    """
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
