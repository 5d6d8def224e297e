"""Plain data parallelism: every rank holds the whole model and its optimizer state, and may compute in bfloat16."""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from coati.trainer.strategies.base import Strategy


class DDPStrategy(Strategy):
    """Whole model on every rank, gradients shared.

    With one rank there is no process group and no wrapper. With more, `prepare` wraps trained models in
    `DistributedDataParallel`: every trainable parameter must take part in the loss.
    """

    def _prepare_trained(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        model = model.to(self.device)
        if self.compute_dtype is not None:
            model.forward = CastWeights(model, self.compute_dtype)
        if optimizer.state:
            # Loading an optimizer's state into itself moves it to where the parameters are now.
            optimizer.load_state_dict(optimizer.state_dict())
        if self.world_size == 1 or not any(parameter.requires_grad for parameter in model.parameters()):
            return model, optimizer
        wrapped = DistributedDataParallel(
            model,
            device_ids=[self.device] if self.device.type == "cuda" else None,
            # Buffers are synchronised once, here; language models do not change them in training.
            broadcast_buffers=False,
            gradient_as_bucket_view=True,
        )
        return wrapped, optimizer

    def unwrap_model(self, model: nn.Module) -> nn.Module:
        """Give the module that went into `prepare`."""
        return model.module if isinstance(model, DistributedDataParallel) else model

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Keep gradients on this rank."""
        return model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext()


class CastWeights:
    """A model's forward pass, made with copies of its weights in another format.

    Makers get the same copies. Gradients arrive in the format of the weights, which may change between passes, but must
    not be replaced by others. FSDP2's mixed-precision policy gives the same bits, but for a single rank it took 1.8
    (Gemini) to 2.3 times (ZeRO-2) the step on an H200 (docs/performance.md).
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        functools.update_wrapper(self, model.forward)
        self._forward = model.forward
        self._dtype = dtype
        self._weights = [weight for weight in model.parameters() if weight.is_floating_point()]
        # A tied weight is read at several places.
        self._places = [
            (module, name, weight)
            for module in model.modules()
            for name, weight in module._parameters.items()
            if weight is not None and weight.is_floating_point()
        ]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The forward pass."""
        swapped = _Swapped(self._places, {weight: weight.to(self._dtype) for weight in self._weights})
        before, _pass.swapped = _pass.swapped, swapped
        try:
            with swapped:
                return self._forward(*args, **kwargs)
        finally:
            _pass.swapped = before


def checkpoint_contexts() -> tuple[AbstractContextManager[object], AbstractContextManager[object]]:
    """`context_fn` of `torch.utils.checkpoint`: what the backward pass computes again sees the copies of its pass."""
    return nullcontext(), _pass.swapped or nullcontext()


class _Swapped:
    """A context in which copies take the places of the weights; it may be entered more than once."""

    def __init__(self, places: Sequence[tuple[nn.Module, str, nn.Parameter]], copies: Mapping[Tensor, Tensor]) -> None:
        self._places = places
        self._copies = copies

    def __enter__(self) -> None:
        for module, name, weight in self._places:
            module._parameters[name] = cast("nn.Parameter", self._copies[weight])

    def __exit__(self, *_: object) -> None:
        for module, name, weight in self._places:
            module._parameters[name] = weight


class _Pass(threading.local):
    """The forward pass that this thread makes."""

    swapped: _Swapped | None = None


_pass = _Pass()
