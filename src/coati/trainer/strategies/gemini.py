"""Fully sharded training: parameters, gradients and optimizer state, on the devices or in host memory."""

from __future__ import annotations

import logging
from typing import Literal, get_args

import torch
from torch import nn
from torch.optim import Optimizer

from coati.errors import ConfigError
from coati.trainer.optim import HybridAdam
from coati.trainer.strategies.base import Strategy
from coati.trainer.strategies.sharding import prepare_sharded

logger = logging.getLogger(__name__)

PlacementPolicy = Literal["static", "auto", "cpu"]
"""Where shards rest: on the device, wherever they fit, or in host memory."""

# The rest of the free memory is left to activations and to the block that is gathered.
_MEMORY_SHARE = 0.6


class GeminiStrategy(Strategy):
    """Every rank keeps one shard of parameters, gradients and state; a block is whole only while it computes.

    Args:
        placement_policy: `static` keeps shards on the device; `cpu` keeps them, and the optimizer's work, in
            host memory; `auto` chooses `cpu` for a model whose shards would fill more than 60 % of the GPU
            memory that is free when it is prepared. On a machine without GPUs all three are the same.
        seed: for Python's, numpy's and torch's global generators, the same on every rank.
        device: where models compute; by default this rank's GPU, else the CPU.
        backend: torch.distributed backend; by default nccl with gloo on GPUs, gloo on CPUs.
        timeout_seconds: how long any wait for the other ranks may last.
        compute_dtype: bfloat16 to compute in it with weights and optimizer state in the model's own format.
    """

    optimizer_class = HybridAdam
    _always_needs_group = True
    _shards_parameters = True

    def __init__(
        self,
        placement_policy: PlacementPolicy = "static",
        seed: int = 42,
        *,
        device: str | torch.device | None = None,
        backend: str | None = None,
        timeout_seconds: float = 600,
        compute_dtype: torch.dtype | None = None,
    ) -> None:
        if placement_policy not in get_args(PlacementPolicy):
            raise ConfigError(
                f"GeminiStrategy placement_policy must be one of {', '.join(get_args(PlacementPolicy))}, "
                f"got {placement_policy!r}."
            )
        super().__init__(
            seed, device=device, backend=backend, timeout_seconds=timeout_seconds, compute_dtype=compute_dtype
        )
        self._placement_policy = placement_policy

    def _prepare_trained(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        return prepare_sharded(
            model,
            optimizer,
            device=self.device,
            world_size=self.world_size,
            reshard_after_forward=True,
            cpu_offload=self._offloads(model),
            compute_dtype=self.compute_dtype,
        )

    def _offloads(self, model: nn.Module) -> bool:
        if self._placement_policy != "auto" or self.device.type != "cuda":
            return self._placement_policy == "cpu"
        free_bytes, _ = torch.cuda.mem_get_info(self.device)
        needed_bytes = training_bytes(model) / self.world_size
        is_tight = needed_bytes > _MEMORY_SHARE * free_bytes
        # One rank that is short of memory decides for all: a collective has one layout.
        offload = bool(self.all_reduce_sum(torch.tensor(int(is_tight))) > 0)
        logger.info(
            "placement_policy auto: shards need %.1f GiB of %.1f GiB free, so they rest %s",
            needed_bytes / 2**30,
            free_bytes / 2**30,
            "in host memory" if offload else "on the device",
        )
        return offload


def training_bytes(model: nn.Module) -> int:
    """Memory of the parameters, and for trainable ones of a gradient and Adam's two moments.

    Example:
        >>> training_bytes(nn.Linear(2, 2, bias=False))  # 4 weights × 4 bytes × 4 copies
        64
    """
    return sum(
        parameter.numel() * parameter.element_size() * (4 if parameter.requires_grad else 1)
        for parameter in model.parameters()
    )
