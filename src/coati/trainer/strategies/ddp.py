"""Plain data parallelism: every rank holds the whole model and its whole optimizer state."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Unpack

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from coati.trainer.strategies.base import Strategy, StrategyOptions
from coati.trainer.strategies.cast_weights import CastWeights


class DDPStrategy(Strategy):
    """Whole model on every rank, gradients shared.

    With one rank there is no process group and no wrapper, and training gives the same bits as a hand-written torch
    loop. With more, `prepare` wraps trained models in `DistributedDataParallel`: call a wrapped model through its
    `forward`, and reach everything else with `unwrap_model`.

    Args:
        seed: see `Strategy`, as for all other options.
        find_unused_parameters: set it if some trainable parameters take no part in the loss of some step
            (torch then raises an error that says so; with `compute_dtype` it does not, and they get zeros). It costs a
            walk over the graph in every backward pass, so it is off.

    Example:
        >>> import torch
        >>> strategy = DDPStrategy(seed=0, device="cpu")
        >>> model = nn.Linear(2, 1)
        >>> model, optimizer = strategy.prepare((model, torch.optim.Adam(model.parameters())))
        >>> strategy.backward(model(torch.ones(1, 2)).sum(), model, optimizer)
        >>> strategy.optimizer_step(optimizer)
    """

    def __init__(
        self, seed: int = 42, *, find_unused_parameters: bool = False, **options: Unpack[StrategyOptions]
    ) -> None:
        super().__init__(seed, **options)
        self._find_unused_parameters = find_unused_parameters

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
            find_unused_parameters=self._find_unused_parameters,
        )
        return wrapped, optimizer

    def unwrap_model(self, model: nn.Module) -> nn.Module:
        """Give the module that went into `prepare`."""
        return model.module if isinstance(model, DistributedDataParallel) else model

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Keep gradients on this rank."""
        return model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext()
