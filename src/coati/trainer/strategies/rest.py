"""A sharded model brought back to rest, wherever its last pass ended.

FSDP2 notes on its modules how far a pass is, and keeps gradients that are not exchanged yet on whole parameters, which
optimizers do not know. After a pass that raised both are still there. torch 2.13 can reset the notes, earlier versions
cannot, and none drops the gradients, so this reads torch's private attributes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule


def bring_to_rest(model: FSDPModule) -> None:
    """Forget the last pass and the whole gradients; shards and their gradients stay. Exchanges nothing."""
    root: Any = model._get_fsdp_state()
    groups = list(_groups(model))
    if root._is_root is not None and not all(map(_is_at_rest, groups)):  # the root is unknown before the first pass
        if hasattr(model, "reset_iter_state"):
            model.reset_iter_state()
        else:
            _forget_pass(root, groups)
    for group in groups:
        for parameter in group.fsdp_params:
            parameter.unsharded_accumulated_grad = None
            whole = getattr(parameter, "_unsharded_param", None)  # there is none before the first pass
            if whole is not None:
                whole.grad = None


def _is_at_rest(group: Any) -> bool:
    return bool(group.is_sharded and group._training_state.name == "IDLE" and not group._post_forward_indices)


def _groups(model: FSDPModule) -> Iterator[Any]:
    """The groups of parameters that are gathered together."""
    assert isinstance(model, nn.Module)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()
            several = getattr(state, "_fsdp_param_groups", None)  # before torch 2.12 a module has one or none
            yield from filter(None, [state._fsdp_param_group] if several is None else several)


def _forget_pass(root: Any, groups: list[Any]) -> None:
    """What `FSDPModule.reset_iter_state` does, for versions of torch without it."""
    streams = ("all_gather_copy_in_stream", "all_gather_stream", "reduce_scatter_stream", "all_reduce_stream")
    if root._device.type == "cuda":  # memory that is freed below may still be written
        for name in streams:
            torch.cuda.current_stream(root._device).wait_stream(getattr(root._comm_ctx, name))
    _clear(root._comm_ctx, "all_gather_state", "reduce_scatter_state", "reduce_scatter_states", "post_forward_order")
    for state in root._state_ctx.all_states:
        state._training_state = type(state._training_state).IDLE
    for group in groups:
        _clear(
            group,
            "_all_gather_result",
            "_post_reduce_event",
            "_all_reduce_state",
            "_reshard_after_forward_event",
            "_partial_reduce_output",
            "_post_forward_indices",
        )
        group._training_state = type(group._training_state).IDLE
        group.reshard()
    root._state_ctx.iter_forward_root = None
    root._state_ctx.post_backward_final_callback_queued = False


def _clear(holder: Any, *names: str) -> None:
    """Empty the lists among the attributes that there are, and set the others to None."""
    for name in names:
        value = getattr(holder, name, None)
        if isinstance(value, list):
            value.clear()
        elif value is not None:
            setattr(holder, name, None)
