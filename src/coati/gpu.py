"""Memory, streams and processors of a GPU that a process shares with others."""

import contextlib
import ctypes
import functools
import logging
import weakref
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from coati.errors import ConfigError

logger = logging.getLogger(__name__)

STACK_BYTES = 256
"""Stack of a GPU thread in processes that share a card; the driver's default is 1024."""

_STACK_SIZE = 0  # the driver's CU_LIMIT_STACK_SIZE


def share_gpu(device: torch.device) -> None:
    """Hold less of a card that other processes need too; nothing happens on a CPU.

    The driver sets aside a stack for every thread that the card could run at once: of the 621 MiB that a process takes
    on an H200 before it has computed anything, 198 are the difference between stacks of 1024 and of 256 bytes. The
    driver grows them again, once, when a kernel needs more, because the compiler has noted how much that is. It cannot
    note it for kernels that call through tables, as NCCL's do, so a process with a process group keeps the default.
    """
    if device.type != "cuda" or dist.is_initialized():
        return
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        logger.debug("the stack limit of %s stays as it is: %s", device, error)
        return
    with torch.cuda.device(device):
        torch.cuda.synchronize()  # now this thread has a context, which is what the driver's limits are of
        lower_stack_limit(driver)


class ProcessorShare:
    """Some of a card's processors, for work that leaves the others to another process.

    Kernels of two processes run at the same time only under NVIDIA's MPS, and then large ones, as training has them,
    leave no processor to the many small ones of generation: those wait until a large one ends. What is launched inside
    `used()` stays on `share` of the processors.
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


@contextlib.contextmanager
def without_cudnn_attention() -> Iterator[None]:
    """Use any attention kernel but cuDNN's, which plans for each new shape of a batch: 47 ms on the host of an H200."""
    was_on = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(was_on)


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


def lower_stack_limit(driver: Any) -> None:
    """Lower the stack of the current context's threads to `STACK_BYTES`, unless it is lower.

    `driver` has `cuCtxGetLimit` and `cuCtxSetLimit`. If it refuses, everything stays as it is.
    """
    try:
        before = stack_limit(driver)
        if before > STACK_BYTES:
            _check(driver.cuCtxSetLimit(_STACK_SIZE, ctypes.c_size_t(STACK_BYTES)))
            logger.debug("lowered the stack of GPU threads from %d to %d bytes", before, STACK_BYTES)
    except (OSError, AttributeError) as error:  # a driver without these functions is an AttributeError of ctypes
        logger.debug("the stack of GPU threads stays as it is: %s", error)


def stack_limit(driver: Any) -> int:
    """Bytes of stack that a thread of the current context has. OSError if the driver does not say."""
    found = ctypes.c_size_t()
    _check(driver.cuCtxGetLimit(ctypes.byref(found), _STACK_SIZE))
    return found.value


def _check(status: int) -> None:
    if status != 0:
        raise OSError(f"the CUDA driver answered with error {status}")
