"""This process as a rank of a distributed job: environment variables, device, and collective operations."""

import contextlib
import math
import os
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from coati.errors import CheckpointError, ConfigError, DeadlineExceeded

_T = TypeVar("_T")
_NUMBER_KEYS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT")
_ENV_KEYS = (*_NUMBER_KEYS, "MASTER_ADDR")


class RankInfo(NamedTuple):
    """The rank of this process in the job, as given by the five environment variables."""

    rank: int = 0
    local_rank: int = 0  # index of this process on its machine, from 0
    world_size: int = 1
    rendezvous: str = ""  # host and port of rank 0; empty for a single process

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> "RankInfo":
        """Read the five variables; if none is set, return a single process.

        Raises ConfigError if only some are set or a value is invalid, because the ranks would hang.
        """
        environ = os.environ if environ is None else environ
        given = {key: environ[key] for key in _ENV_KEYS if environ.get(key)}
        if not given:
            return cls()
        with contextlib.suppress(KeyError, ValueError):
            rank, local_rank, world_size, port = (int(given[key]) for key in _NUMBER_KEYS)
            if 0 <= rank < world_size and local_rank >= 0:
                return cls(rank, local_rank, world_size, f"{given['MASTER_ADDR']}:{port}")
        raise ConfigError(
            f"the environment must set all of {', '.join(_ENV_KEYS)} or none, to whole numbers and a host, with "
            f"RANK from 0 to WORLD_SIZE - 1; got {given}. Set all of them, or unset them to train in one process."
        )


class Ranks:
    """This rank, its device, and its collective operations."""

    def __init__(self, *, device: str | torch.device | None, timeout_seconds: float, needs_group: bool) -> None:
        if not timeout_seconds > 0 or math.isinf(timeout_seconds):
            raise ConfigError(f"timeout_seconds must be positive and finite, got {timeout_seconds}.")
        self.timeout_seconds = timeout_seconds
        info = RankInfo.from_env()
        self.rank, self.world_size = info.rank, info.world_size
        self.device = choose_device(device, info.local_rank)  # the device of models and batches
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if self.world_size > 1 or needs_group:
            _join_process_group(info, self.device, timeout_seconds=timeout_seconds)

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of the tensor over all ranks, on the same device; with one rank, the tensor itself."""
        if self.world_size == 1:
            return tensor
        total = tensor.detach().to(self.device, copy=True)
        dist.all_reduce(total)
        return total.to(tensor.device)

    def all_gather(self, vector: Tensor) -> Tensor:
        """Gather every rank's vector, [W, n] from [n], in rank order; all must pass the same length and dtype."""
        if self.world_size == 1:
            return vector.detach().unsqueeze(0)
        mine = vector.detach().to(self.device).contiguous()
        rows = [torch.empty_like(mine) for _ in range(self.world_size)]
        dist.all_gather(rows, mine)
        return torch.stack(rows).to(vector.device)

    def any_rank(self, condition: bool) -> bool:
        """Whether the condition holds on any rank."""
        return bool(self.all_reduce_sum(torch.tensor(int(condition))) > 0)

    def run_on_all(self, work: Callable[[], _T], what: str) -> _T:
        """Run `work` on every rank; if it fails on any, raise on all, so that none waits for a rank that left."""
        failure: Exception | None = None
        try:
            result = work()
        except Exception as error:
            failure = error
        if self.any_rank(failure is not None):
            raise failure or CheckpointError(f"another rank could not {what}; see that rank's error.")
        return result


def choose_device(requested: str | torch.device | None, local_rank: int) -> torch.device:
    """Return the requested device, or else this rank's GPU, or else the CPU."""
    device = torch.device(requested or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device {str(device)!r} needs CUDA, but torch finds none on this machine. Use device='cpu'.")
    return torch.device("cuda", local_rank % torch.cuda.device_count()) if str(device) == "cuda" else device


def random_state(device: torch.device) -> dict[str, Tensor]:
    """Return the states of torch's random generators on the CPU and on `device`."""
    on_gpu = {"random.cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {}
    return {"random.cpu": torch.get_rng_state(), **on_gpu}


def restore_random_state(tensors: dict[str, Tensor], device: torch.device) -> None:
    """Restore the generators from a `random_state`, and remove its entries from `tensors`."""
    torch.set_rng_state(tensors.pop("random.cpu"))
    on_gpu = tensors.pop("random.cuda", None)
    if on_gpu is not None and device.type == "cuda":
        torch.cuda.set_rng_state(on_gpu, device)


def _join_process_group(info: RankInfo, device: torch.device, *, timeout_seconds: float) -> None:
    """Join torch's default process group, creating it if needed."""
    if dist.is_initialized():
        there = (dist.get_rank(), dist.get_world_size())
        if there != (info.rank, info.world_size):
            raise ConfigError(
                f"this process is already rank {there[0]} of {there[1]} in a torch process group, but the "
                f"environment says rank {info.rank} of {info.world_size}. Destroy the group first."
            )
        return
    # On GPUs, gloo gathers offloaded shards, which are in host memory.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=timeout_seconds)
    # Several ranks meet through the environment variables.
    store = dist.HashStore() if info.world_size == 1 else None  # type: ignore[attr-defined]  # mypy sees no export
    try:
        dist.init_process_group(backend, store=store, rank=info.rank, world_size=info.world_size, timeout=timeout)
    except (dist.DistError, TimeoutError) as error:
        said = str(error).strip().split("\n", 1)[0]
        is_late = "timed out" in str(error).lower() or "timeout" in str(error).lower()
        raise (DeadlineExceeded if is_late else ConfigError)(
            f"rank {info.rank} of {info.world_size} could not reach the other ranks at MASTER_ADDR {info.rendezvous} "
            f"within {timeout_seconds:g} s (timeout_seconds). Check that all ranks were started, that the host is "
            f"correct and that the port is free. torch reported: {said}"
        ) from error
