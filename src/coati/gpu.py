"""How a process behaves on a GPU that it shares with others."""

import ctypes
import logging
from typing import Any

import torch
import torch.distributed as dist

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
