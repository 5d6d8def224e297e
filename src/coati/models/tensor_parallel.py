"""One model over several ranks, for reading only: each layer's matrices are cut, and each rank keeps a piece.

Which matrices are cut, and how, is the model's own plan (`base_model_tp_plan` of its transformers config, `_tp_plan` of
its class). A column-parallel layer computes some of its outputs; the row-parallel layer behind it takes those as its
inputs, and one all-reduce adds up what the ranks have. Attention heads go with their outputs. What the plan does not
name (embeddings, norms) is whole on every rank.

A piece is kept as a `DTensor`, which knows the whole weight's shape: checks of names and shapes see whole weights, and
a weight update is dealt out by that. The arithmetic runs on the plain local tensors, without DTensor's dispatch, which
is Python for every call.

All ranks get the same outputs to the last bit: what is added up or gathered is added up or gathered once, for all. They
must run the same calls in the same order; `coati.experience_maker.lock_step` sees to that. There is no backward pass.
"""

import re
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from coati.errors import ConfigError
from coati.models.actor import Actor
from coati.models.value_head import ValueHeadModel

_COLUMN, _ROW = ("colwise",), ("rowwise",)
_COLUMN_GATHERED = ("colwise_gather_output", "colwise_rep")  # two names that transformers has had for it
_WHOLE = ("replicated", "replicated_with_grad_allreduce")  # the second differs only in training
_STYLES = (*_COLUMN, *_ROW, *_COLUMN_GATHERED, *_WHOLE)


class ColumnLinear(nn.Module):
    """Some outputs of a linear layer, or all of them where they are gathered."""

    def __init__(self, layer: nn.Linear, mesh: DeviceMesh, *, is_gathered: bool) -> None:
        super().__init__()
        self.weight = _cut(layer.weight, mesh, dim=0)
        self.bias = None if layer.bias is None else _cut(layer.bias, mesh, dim=0)
        self._group = mesh.get_group()
        self._is_gathered = is_gathered

    def forward(self, inputs: Tensor) -> Tensor:
        """[..., in] to this rank's outputs [..., out / ranks], or to all of them."""
        bias = None if self.bias is None else local_part(self.bias)
        outputs = nn.functional.linear(inputs, local_part(self.weight), bias)
        if not self._is_gathered:
            return outputs
        parts = [torch.empty_like(outputs) for _ in range(dist.get_world_size(self._group))]
        dist.all_gather(parts, outputs.contiguous(), group=self._group)
        return torch.cat(parts, dim=-1)


class RowLinear(nn.Module):
    """A linear layer that has this rank's part of the inputs; the sum over the ranks is the layer's output."""

    def __init__(self, layer: nn.Linear, mesh: DeviceMesh) -> None:
        super().__init__()
        self.weight = _cut(layer.weight, mesh, dim=1)
        self.bias = layer.bias  # whole, and added once
        self._group = mesh.get_group()

    def forward(self, inputs: Tensor) -> Tensor:
        """This rank's [..., in / ranks] to the whole [..., out]."""
        outputs = nn.functional.linear(inputs, local_part(self.weight)).contiguous()
        dist.all_reduce(outputs, group=self._group)
        return outputs if self.bias is None else outputs + self.bias


@torch.no_grad()
def cut_model(model: nn.Module, mesh: DeviceMesh) -> int:
    """Cut a whole model in place, the same on all ranks of the mesh, and return how many layers were cut.

    The model may be on the CPU still: only this rank's pieces go to the mesh's device; move the rest with `.to`.
    Raises ConfigError for a model that has no plan, whose plan has a style we do not know, or that does not go into so
    many parts.
    """
    inner = _transformers_model(model)
    plan = plan_of(inner)
    _check_divisible(inner, mesh.size())
    tied = {id(inner.get_input_embeddings().weight)}
    num_cut = 0
    for name, layer in list(inner.named_modules()):
        style = plan.get(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name))
        # A head that is tied to the embeddings is whole, as they are.
        if style is None or style in _WHOLE or not isinstance(layer, nn.Linear) or id(layer.weight) in tied:
            continue
        owner, _, attribute = name.rpartition(".")
        cut: nn.Module = (
            RowLinear(layer, mesh)
            if style in _ROW
            else ColumnLinear(layer, mesh, is_gathered=style in _COLUMN_GATHERED)
        )
        setattr(inner.get_submodule(owner), attribute, cut)
        num_cut += 1
    model.requires_grad_(False)
    return num_cut


def plan_of(model: Any) -> dict[str, str]:
    """The tensor-parallel plan of a transformers model: layer name, with * for numbers, to style."""
    config = model.config.get_text_config()
    body = getattr(config, "base_model_tp_plan", None)
    if not body:
        raise ConfigError(
            f"topology.tensor_parallel above 1 needs a model with a tensor-parallel plan in transformers, and "
            f"{type(model).__name__} has none. Set it to 1."
        )
    prefix = "" if model.base_model is model else f"{model.base_model_prefix}."
    plan = {f"{prefix}{name}": style for name, style in body.items()}
    plan |= getattr(type(model), "_tp_plan", None) or {}
    if unknown := sorted({style for style in plan.values() if style not in _STYLES}):
        raise ConfigError(
            f"topology.tensor_parallel above 1 knows the styles {', '.join(_STYLES)}, but the plan of "
            f"{type(model).__name__} also has {', '.join(unknown)}. Set it to 1."
        )
    return plan


def local_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor, cut or whole; a view, not a copy."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def parts_of(whole: Tensor, like: DTensor) -> list[Tensor]:
    """The pieces of a whole tensor, cut as `like` is, one for each rank."""
    (placement,) = like.placements
    assert isinstance(placement, Shard)
    return [part.contiguous() for part in whole.chunk(like.device_mesh.size(), dim=placement.dim)]


def _cut(whole: Tensor, mesh: DeviceMesh, *, dim: int) -> nn.Parameter:
    part = whole.chunk(mesh.size(), dim=dim)[mesh.get_local_rank()]
    # A copy, so that the whole is let go.
    local = part.to(mesh.device_type, copy=True, memory_format=torch.contiguous_format)
    shape, stride = whole.shape, whole.stride()
    dtensor = DTensor.from_local(local, mesh, [Shard(dim)], run_check=False, shape=shape, stride=stride)
    return nn.Parameter(dtensor, requires_grad=False)


def _transformers_model(model: nn.Module) -> Any:
    inner: Any = model.model if isinstance(model, Actor) else model.body if isinstance(model, ValueHeadModel) else model
    if hasattr(inner, "get_base_model"):
        raise ConfigError(
            "topology.tensor_parallel above 1 does not work with LoRA adapters in a maker. Set it to 1, or "
            "lora.rank to 0."
        )
    return inner


def _check_divisible(model: Any, num_parts: int) -> None:
    config = model.config.get_text_config()
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        count = getattr(config, name, None)
        if count is not None and count % num_parts:
            raise ConfigError(
                f"topology.tensor_parallel must divide the model's {name} ({count} in {type(model).__name__}), got "
                f"{num_parts}."
            )
    head = model.get_output_embeddings()
    is_tied = head is not None and head.weight is model.get_input_embeddings().weight
    if head is not None and not is_tied and head.weight.shape[0] % num_parts:
        raise ConfigError(
            f"topology.tensor_parallel must divide the vocabulary of {type(model).__name__} ({head.weight.shape[0]}), "
            f"got {num_parts}."
        )
