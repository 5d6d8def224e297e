"""Guards of a training step: memory that runs out, weights and batches that are not finite."""

import contextlib
import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from coati.errors import OutOfMemory

MAX_SKIPPED_IN_A_ROW = 10
"""Batches that may be skipped one after the other before training ends."""


@contextlib.contextmanager
def explained_out_of_memory(what: str, remedy: str) -> Iterator[None]:
    """Turn torch's out-of-memory error into one that says which work needed the memory and what to change."""
    try:
        yield
    except RuntimeError as error:
        # A CPU's allocator raises a plain RuntimeError.
        if not isinstance(error, torch.OutOfMemoryError) and "DefaultCPUAllocator" not in str(error):
            raise
        raise OutOfMemory(f"{what} ran out of memory. {remedy} torch said: {str(error).strip()}") from error


@torch.no_grad()
def weights_are_finite(model: nn.Module) -> bool:
    """Whether no trained weight that this rank holds is NaN or infinite."""
    weights = [_local(weight) for weight in model.parameters() if weight.requires_grad]
    return math.isfinite(nn.utils.get_total_norm([weight for weight in weights if weight.numel() > 0], math.inf))


@torch.no_grad()
def names_not_finite(model: nn.Module) -> list[str]:
    """Names of the weights, frozen ones too, of which this rank holds a part that is NaN or infinite."""
    return [name for name, weight in model.named_parameters() if not bool(_local(weight).isfinite().all())]


def _local(weight: Tensor) -> Tensor:
    return weight.to_local() if isinstance(weight, DTensor) else weight.detach()
