"""ZeRO: the optimizer's state (stage 1), and the gradients too (stage 2), are spread over the ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from coati.errors import ConfigError
from coati.trainer.optim import HybridAdam
from coati.trainer.strategies.ddp import DDPStrategy
from coati.trainer.strategies.optimizer_files import StateEntry, parameters_of
from coati.trainer.strategies.sharding import check_optimizer_of, prepare_sharded


class LowLevelZeroStrategy(DDPStrategy):
    """Optimizer state sharded over the ranks, and in stage 2 gradients and resting parameters as well.

    Stage 1 is data parallelism in which every parameter's state lives on one rank: that rank updates it and
    sends the new values to the others. Stage 2 shards parameters, gradients and state, and gathers parameters
    for the forward pass, where they stay until the backward pass is done. Weights after a step are those of
    `DDPStrategy`.

    Args:
        stage: 1 or 2.
        seed: for Python's, numpy's and torch's global generators, the same on every rank.
        cpu_offload: keep optimizer state, and in stage 2 the shards too, in host memory, and step there (nothing to
            do on CPUs).
        device: where models compute; by default this rank's GPU, else the CPU.
        backend: torch.distributed backend; by default nccl with gloo on GPUs, gloo on CPUs.
        timeout_seconds: how long any wait for the other ranks may last.
        compute_dtype: bfloat16 to compute in it with weights and optimizer state in the model's own format.
    """

    optimizer_class = HybridAdam
    _always_needs_group = True

    def __init__(
        self,
        stage: Literal[1, 2] = 2,
        seed: int = 42,
        cpu_offload: bool = False,
        *,
        device: str | torch.device | None = None,
        backend: str | None = None,
        timeout_seconds: float = 600,
        compute_dtype: torch.dtype | None = None,
    ) -> None:
        if stage not in (1, 2):
            raise ConfigError(
                f"LowLevelZeroStrategy stage must be 1 or 2, got {stage}. "
                "For sharded parameters (stage 3) use GeminiStrategy."
            )
        super().__init__(
            seed, device=device, backend=backend, timeout_seconds=timeout_seconds, compute_dtype=compute_dtype
        )
        self._stage = stage
        self._shards_parameters = stage == 2
        self._cpu_offload = cpu_offload
        self._owners: dict[Optimizer, list[int]] = {}  # stage 1: parameter index -> rank with its state
        self._steps: dict[Optimizer, _SpreadStep] = {}

    def _prepare_trained(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        if self._stage == 2:
            return prepare_sharded(
                model,
                optimizer,
                device=self.device,
                world_size=self.world_size,
                reshard_after_forward=False,
                cpu_offload=self._cpu_offload,
                compute_dtype=self.compute_dtype,
            )
        check_optimizer_of(optimizer, model.parameters())
        model, optimizer = super()._prepare_trained(model, optimizer)
        self._spread_state(optimizer)
        return model, optimizer

    def _spread_state(self, optimizer: Optimizer) -> None:
        """Make `optimizer.step` update this rank's parameters and take the others from their owners."""
        self._owners[optimizer] = assign_owners([p.numel() for p in parameters_of(optimizer)], self.world_size)
        on_host = _HostStep() if self._cpu_offload and self.device.type != "cpu" else None
        self._steps[optimizer] = step = _SpreadStep(self._owners[optimizer], self.rank, on_host)
        optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: step.begin(optimizer))  # noqa: ARG005
        optimizer.register_step_post_hook(lambda optimizer, args, kwargs: step.end(optimizer))  # noqa: ARG005

    def optimizer_step(self, optimizer: Optimizer) -> None:
        """Step the optimizer. If that fails, parameters, gradients and state are where they were."""
        try:
            super().optimizer_step(optimizer)
        except BaseException:
            if optimizer in self._steps:
                self._steps[optimizer].undo(optimizer)
            raise

    def _load_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        if optimizer in self._steps and self._steps[optimizer].is_on_host:
            load_on_host(optimizer, state)
        else:
            super()._load_optimizer_state(optimizer, state)

    def _holds_state_of(self, optimizer: Optimizer, index: int) -> bool:
        return optimizer not in self._owners or self._owners[optimizer][index] == self.rank

    def _iter_optimizer_state(self, optimizer: Optimizer) -> Iterator[StateEntry]:
        if optimizer not in self._owners:
            yield from super()._iter_optimizer_state(optimizer)
            return
        # Each rank says what it has, tensors by shape and dtype; then owners send them one at a time.
        mine: list[tuple[int, str, Any]] = [
            (entry.index, entry.key, _describe(entry.value)) for entry in super()._iter_optimizer_state(optimizer)
        ]
        everyone: list[Any] = [None] * self.world_size
        dist.all_gather_object(everyone, mine)
        catalogue = sorted((i, key, rank, what) for rank, has in enumerate(everyone) for i, key, what in has)
        parameters = parameters_of(optimizer)
        for index, key, owner, what in catalogue:
            if not isinstance(what, _TensorKind):
                yield StateEntry(index=index, key=key, value=what)
                continue
            if owner == self.rank:
                tensor = optimizer.state[parameters[index]][key].detach().to(self.device).contiguous()
            else:
                tensor = torch.empty(what.shape, dtype=what.dtype, device=self.device)
            dist.broadcast(tensor, src=owner)
            yield StateEntry(index=index, key=key, value=tensor.cpu())


class _SpreadStep:
    """A step in which this rank updates its own parameters, and takes the others from their owners."""

    def __init__(self, owners: Sequence[int], rank: int, on_host: _HostStep | None) -> None:
        self._owners = owners
        self._rank = rank
        self._on_host = on_host
        self._hidden: dict[Tensor, Tensor | None] = {}  # gradients of parameters that are others'

    @property
    def is_on_host(self) -> bool:
        """Whether state rests in host memory, beside parameters on a GPU."""
        return self._on_host is not None

    def begin(self, optimizer: Optimizer) -> None:
        """Leave the optimizer only what it is to update: it skips parameters without a gradient, and has no state."""
        if self._on_host is not None:
            self._on_host.undo(optimizer)  # a step that failed outside of `optimizer_step`
        self._hidden.clear()
        for parameter, owner in zip(parameters_of(optimizer), self._owners, strict=True):
            if owner != self._rank:
                self._hidden[parameter], parameter.grad = parameter.grad, None
        if self._on_host is not None:
            self._on_host.begin(optimizer, [p for p in parameters_of(optimizer) if p.grad is not None])

    def end(self, optimizer: Optimizer) -> None:
        """Send the new values to the others, and take theirs."""
        if self._on_host is not None:
            self._on_host.end(optimizer)
        self._unhide()
        pending = [
            dist.broadcast(parameter.detach(), src=owner, async_op=True)
            for parameter, owner in zip(parameters_of(optimizer), self._owners, strict=True)
        ]
        for work in pending:
            work.wait()

    def undo(self, optimizer: Optimizer) -> None:
        """The step failed: parameters, gradients and state are found again where they were."""
        if self._on_host is not None:
            self._on_host.undo(optimizer)
        self._unhide()

    def _unhide(self) -> None:
        for parameter, grad in self._hidden.items():
            parameter.grad = grad
        self._hidden.clear()


class _HostStep:
    """An optimizer step on copies in host memory, where the state stays.

    The copies stand in for the parameters in the optimizer for the length of the step. The parameters themselves stay
    where they are: one whose device changed would lose the hooks that exchange its gradient.
    """

    def __init__(self) -> None:
        self._copies: dict[Tensor, Tensor] = {}

    def begin(self, optimizer: Optimizer, parameters: Iterable[Tensor]) -> None:
        """Let the optimizer find copies of these parameters, which have gradients, and their state beside them."""
        for parameter in parameters:
            assert parameter.grad is not None
            copy = parameter.detach().to("cpu", copy=True)
            copy.grad = parameter.grad.to("cpu")
            self._copies[parameter] = copy
            if state := optimizer.state.pop(parameter, None):
                optimizer.state[copy] = {key: _on_host(value) for key, value in state.items()}
        _replace(optimizer, self._copies)

    def end(self, optimizer: Optimizer) -> None:
        """Write the new values into the parameters, and let the optimizer have those again."""
        for parameter, copy in self._copies.items():
            parameter.detach().copy_(copy)
        self.undo(optimizer)

    def undo(self, optimizer: Optimizer) -> None:
        """Let the optimizer have the parameters again, with the state that is beside their copies."""
        for parameter, copy in self._copies.items():
            if state := optimizer.state.pop(copy, None):
                optimizer.state[parameter] = state
        _replace(optimizer, {copy: parameter for parameter, copy in self._copies.items()})
        self._copies.clear()


def load_on_host(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """`optimizer.load_state_dict(state)`, without moving the state to where the parameters are."""
    # torch asks a parameter for its device and dtype, and for nothing else.
    stand_ins = {parameter: torch.empty(0, dtype=parameter.dtype) for parameter in parameters_of(optimizer)}
    parameters = {stand_in: parameter for parameter, stand_in in stand_ins.items()}
    _replace(optimizer, stand_ins)
    try:
        optimizer.load_state_dict(state)
    finally:
        for stand_in, parameter in parameters.items():
            if stand_in in optimizer.state:
                optimizer.state[parameter] = optimizer.state.pop(stand_in)
        _replace(optimizer, parameters)


def _on_host(value: Any) -> Any:
    return value.cpu() if isinstance(value, Tensor) else value


def _replace(optimizer: Optimizer, others: Mapping[Tensor, Tensor]) -> None:
    for group in optimizer.param_groups:
        group["params"] = [others.get(parameter, parameter) for parameter in group["params"]]


@dataclass(frozen=True, kw_only=True)
class _TensorKind:
    """What a rank must know to receive a tensor."""

    shape: torch.Size
    dtype: torch.dtype


def _describe(value: Any) -> Any:
    return _TensorKind(shape=value.shape, dtype=value.dtype) if isinstance(value, Tensor) else value


def assign_owners(sizes: Sequence[int], world_size: int) -> list[int]:
    """Spread parameters over ranks, largest first, each to the rank that has least; the same on every rank.

    Example:
        >>> assign_owners([4, 3, 2, 5], 2)
        [1, 1, 0, 0]
    """
    loads = [0] * world_size
    owners = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        owner = min(range(world_size), key=lambda rank: (loads[rank], rank))
        owners[index] = owner
        loads[owner] += sizes[index]
    return owners
