"""How torch computes on the CPU, what the errors of a GPU mean, and its second stream."""

import contextlib
import functools
import platform
from collections.abc import Iterator
from pathlib import Path

import torch

from coati.errors import AcceleratorFailed, CoatiError, OutOfMemory

HOST_MEMORY = "DefaultCPUAllocator"
"""What torch's error says if it is the host's memory that ran out."""
_NO_MEMORY = ("out of memory", "Cannot allocate memory", "ALLOC_FAILED", HOST_MEMORY)
_BROKEN = ("CUDA error", "CUDA driver error", "CUBLAS_STATUS", "CUDNN_STATUS", "Triton Error")


def set_up_cpu(num_threads: int = 0) -> None:
    """Use so many threads (0: as many as torch likes), and the quicker matrix products.

    On ARM, torch hands float32 products to oneDNN, whose set-up costs more than a small product (650 µs, else 57,
    64×64 by 64×128, Neoverse N1). It is turned off on ARM without bfloat16, for which it is made: which one is
    used changes the last bits, so it goes by the machine and not by a measurement.
    """
    if num_threads > 0:
        torch.set_num_threads(num_threads)
    if _is_arm_without_bfloat16():
        torch.backends.mkldnn.enabled = False  # type: ignore[assignment]


@functools.cache
def _is_arm_without_bfloat16() -> bool:
    if platform.machine().lower() not in ("aarch64", "arm64"):
        return False
    try:
        features = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:  # not Linux
        return False
    return "bf16" not in features


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
