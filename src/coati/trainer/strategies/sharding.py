"""Sharding a model's parameters over the ranks, and moving whole tensors into and out of shards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from coati.errors import ConfigError
from coati.models.deferred import deferred_weights


def prepare_sharded(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    device: torch.device,
    world_size: int,
    reshard_after_forward: bool,
    cpu_offload: bool,
    compute_dtype: torch.dtype | None = None,
) -> tuple[nn.Module, Optimizer]:
    """Start from rank 0's weights, shard the model in place and point the optimizer at the shards.

    A model whose weights come later (see `coati.models.deferred`) gets them here, one block at a time: none is ever
    whole.
    """
    before = dict(model.named_parameters())
    check_optimizer_of(optimizer, before.values())
    deferred = deferred_weights(model)
    if deferred is not None and world_size > 1:
        deferred.seed = _of_rank0(deferred.seed, device)
    elif world_size > 1:
        broadcast_from_rank0(model, device)
    model = shard_model(
        model,
        device=device,
        world_size=world_size,
        reshard_after_forward=reshard_after_forward,
        cpu_offload=cpu_offload,
        compute_dtype=compute_dtype,
    )
    after = dict(model.named_parameters())
    successor = {id(parameter): after[name] for name, parameter in before.items()}
    for group in optimizer.param_groups:
        group["params"] = [successor[id(parameter)] for parameter in group["params"]]
    return model, optimizer


@torch.no_grad()
def broadcast_from_rank0(model: nn.Module, device: torch.device) -> None:
    """Give every rank rank 0's parameters and buffers, so that all of them shard the same model."""
    for tensor in (*model.parameters(), *model.buffers()):
        staged = tensor.detach().to(device).contiguous()
        dist.broadcast(staged, src=0)
        tensor.copy_(staged)


def _of_rank0(number: int, device: torch.device) -> int:
    agreed = torch.tensor(number, device=device)
    dist.broadcast(agreed, src=0)
    return int(agreed)


def shard_model(
    model: nn.Module,
    *,
    device: torch.device,
    world_size: int,
    reshard_after_forward: bool,
    cpu_offload: bool,
    compute_dtype: torch.dtype | None = None,
) -> nn.Module:
    """Shard the parameters over all ranks, in place: one group per transformer block, one for the rest.

    Groups are what is gathered together. With `reshard_after_forward` a block is whole only while it
    computes; without, it stays whole from its forward to its backward pass. With `compute_dtype` what is gathered is
    in that format, and gradients are added up in the format of the shards.
    """
    mesh = init_device_mesh(device.type, (world_size,))
    offload: OffloadPolicy = CPUOffloadPolicy() if cpu_offload and device.type != "cpu" else OffloadPolicy()
    precision = MixedPrecisionPolicy(
        param_dtype=compute_dtype, reduce_dtype=None if compute_dtype is None else torch.float32
    )
    deferred = deferred_weights(model)
    blocks = list(transformer_blocks(model))
    for module in [*blocks, model]:
        if deferred is not None:
            deferred.fill(model, module, skip=frozenset(blocks) - {module})
        fully_shard(
            module,
            mesh=mesh,
            reshard_after_forward=reshard_after_forward,
            offload_policy=offload,
            mp_policy=precision,
        )
    if deferred is not None:
        del model.deferred_weights
    assert isinstance(model, FSDPModule)
    return model


def transformer_blocks(model: nn.Module) -> Iterator[nn.Module]:
    """The outermost repeated blocks: members of every `ModuleList` of two or more modules of one class.

    Example:
        >>> blocks = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        >>> list(transformer_blocks(nn.ModuleDict({"head": nn.Linear(2, 1), "layers": blocks})))
        [Linear(in_features=2, out_features=2, bias=True), Linear(in_features=2, out_features=2, bias=True)]
    """
    for child in model.children():
        blocks = list(child) if isinstance(child, nn.ModuleList) else []
        is_stack = len(blocks) > 1 and len({type(block) for block in blocks}) == 1
        if is_stack and all(any(True for _ in block.parameters()) for block in blocks):
            yield from blocks
        else:
            yield from transformer_blocks(child)


def check_optimizer_of(optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> None:
    """Refuse an optimizer that cannot be pointed at shards: one that has state, or other parameters."""
    if optimizer.state:
        raise ConfigError(
            "prepare must come before the first optimizer step: this optimizer already holds state for "
            "parameters that are about to be sharded. Prepare first, then use load_optimizer."
        )
    known = {id(parameter) for parameter in parameters}
    strangers = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in known]
    if strangers:
        raise ConfigError(
            f"prepare((model, optimizer)): the optimizer holds {len(strangers)} parameters that are not the "
            f"model's, the first of shape {tuple(strangers[0].shape)}. Build it over model.parameters()."
        )


def shard_like(whole: Tensor, like: DTensor) -> DTensor:
    """This rank's part of `whole`, laid out as `like` is; every rank passes the same whole tensor."""
    local = _local_part(whole, like).to(device=like.device)
    shard: DTensor = DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    return shard


def copy_whole_into(target: Tensor, whole: Tensor) -> None:
    """Copy a whole tensor into a parameter or buffer, sharded or not."""
    if isinstance(target, DTensor):
        target.to_local().copy_(_local_part(whole, target))
    else:
        target.copy_(whole)


def _local_part(whole: Tensor, like: DTensor) -> Tensor:
    # Every rank has the whole tensor at hand: src_data_rank=None slices it here and sends nothing.
    placed = distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)
    local: Tensor = placed.to_local()
    return local
