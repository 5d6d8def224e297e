"""Weights in one format that compute in another."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import Tensor, nn

from coati.trainer.strategies.sharding import transformer_blocks


class CastWeights:
    """A model's forward pass, made with copies of its weights in another format.

    The copies are what makers get of these weights, so learner and engine compute with the same numbers. Gradients
    arrive in the weights' own format, and add up in it over passes and ranks. Outside of a pass the model is as it was:
    what is trained and saved is the weights themselves.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> model.forward = CastWeights(model, torch.bfloat16)
        >>> output = model(torch.ones(1, 2, dtype=torch.bfloat16))
        >>> output.sum().backward()
        >>> output.dtype, model.weight.dtype, model.weight.grad.dtype
        (torch.bfloat16, torch.float32, torch.float32)
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self._forward = model.forward
        functools.update_wrapper(self, model.forward)
        self._dtype = dtype
        self._groups = list(_groups_of(model))
        indices = {parameter: index for index, parameter in enumerate(p for group in self._groups for p in group)}
        self._places = [
            (module, name, parameter, indices[parameter])
            for module in model.modules()
            for name, parameter in module._parameters.items()
            if parameter in indices
        ]
        """Where each weight is read, tied ones at several places."""
        self._copies: Sequence[Tensor] = ()
        """Those of the pass that is under way."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The forward pass."""
        casts = (_Cast.apply(self._dtype, *group) for group in self._groups)  # type: ignore[no-untyped-call]
        self._copies = [copy for group in casts for copy in group]
        try:
            with self._used(self._copies):
                return self._forward(*args, **kwargs)
        finally:
            self._copies = ()  # autograd keeps those that it needs

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """`context_fn` of `torch.utils.checkpoint`: what is computed anew in the backward pass sees the same copies."""
        return contextlib.nullcontext(), self._used(self._copies)

    @contextlib.contextmanager
    def _used(self, copies: Sequence[Tensor]) -> Iterator[None]:
        """The copies where the weights are."""
        for module, name, _, index in self._places:
            module._parameters[name] = cast("nn.Parameter", copies[index])
        try:
            yield
        finally:
            for module, name, parameter, _ in self._places:
                module._parameters[name] = parameter


def _groups_of(model: nn.Module) -> Iterator[list[nn.Parameter]]:
    """The weights of each transformer block, then the others; frozen ones apart, for they need no gradient.

    Those of a group get their gradients together, so that ranks exchange a block's while the one before is computed.
    """
    seen: set[nn.Parameter] = set()
    for module in (*transformer_blocks(model), model):
        weights = [weight for weight in module.parameters() if weight.is_floating_point() and weight not in seen]
        seen.update(weights)
        for is_trained in (True, False):
            if group := [weight for weight in weights if weight.requires_grad == is_trained]:
                yield group


class _Cast(torch.autograd.Function):
    """Many tensors to another format, in few kernels; their gradients back to the tensors' own."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.dtypes = [tensor.dtype for tensor in tensors]
        return tuple(_cast(tensors, [dtype] * len(tensors)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        came = [(grad, dtype) for grad, dtype in zip(grads, ctx.dtypes, strict=True) if grad is not None]
        cast_back = iter(_cast([grad for grad, _ in came], [dtype for _, dtype in came]))
        return (None, *(None if grad is None else next(cast_back) for grad in grads))


def _cast(tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    copies = [torch.empty_like(tensor, dtype=dtype) for tensor, dtype in zip(tensors, dtypes, strict=True)]
    if copies:
        torch._foreach_copy_(copies, list(tensors))
    return copies
