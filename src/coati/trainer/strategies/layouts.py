"""Data parallelism, and sharding by torch's FSDP2; ZeRO stages differ in when whole weights and gradients are freed."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from coati.errors import ConfigError
from coati.trainer.optim import HybridAdam
from coati.trainer.strategies.base import Strategy


class DDPStrategy(Strategy):
    """Keeps a whole model on every rank and all-reduces gradients.

    With one rank, there is no process group and no wrapper. With several, `prepare` wraps trained models in
    `DistributedDataParallel`, so every trainable parameter must contribute to the loss.
    """

    def _prepare_trained(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        model = model.to(self.device)
        if self.compute_dtype is not None:
            model.forward = CastWeights(model, self.compute_dtype)
        if optimizer.state:
            # Loading the state dict moves the state to the parameters' new device.
            optimizer.load_state_dict(optimizer.state_dict())
        if self.world_size == 1 or not any(parameter.requires_grad for parameter in model.parameters()):
            return model, optimizer
        wrapped = DistributedDataParallel(
            model,
            device_ids=[self.device] if self.device.type == "cuda" else None,
            # The constructor synchronizes buffers once; language models do not change them in training.
            broadcast_buffers=False,
            gradient_as_bucket_view=True,
        )
        return wrapped, optimizer


class CastWeights:
    """A model's forward pass, computed with copies of its weights in another dtype.

    Makers receive the same copies. Gradients have the dtype of the weights. The weights may change in place between
    passes, but must not be replaced. FSDP2's mixed-precision policy gives bit-identical results, but on a single H200 a
    step took 1.8 (Gemini) to 2.3 times (ZeRO-2) as long (docs/performance.md).
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        functools.update_wrapper(self, model.forward)
        self._forward = model.forward
        self._dtype = dtype
        self._weights = [weight for weight in model.parameters() if weight.is_floating_point()]
        # A tied weight is read in several places.
        self._places = [
            (module, name, weight)
            for module in model.modules()
            for name, weight in module._parameters.items()
            if weight is not None and weight.is_floating_point()
        ]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward pass."""
        swapped = _Swapped(self._places, {weight: weight.to(self._dtype) for weight in self._weights})
        token = _swapped.set(swapped)
        try:
            with swapped:
                return self._forward(*args, **kwargs)
        finally:
            _swapped.reset(token)


def checkpoint_contexts() -> tuple[AbstractContextManager[object], AbstractContextManager[object]]:
    """Return contexts for `torch.utils.checkpoint`, in which recomputation uses the weight copies of its pass."""
    return nullcontext(), _swapped.get(nullcontext())


class _Swapped:
    """A context in which copies replace the weights; it may be entered more than once."""

    def __init__(self, places: Sequence[tuple[nn.Module, str, nn.Parameter]], copies: Mapping[Tensor, Tensor]) -> None:
        self._places = places
        self._copies = copies

    def __enter__(self) -> None:
        for module, name, weight in self._places:
            module._parameters[name] = cast("nn.Parameter", self._copies[weight])

    def __exit__(self, *_: object) -> None:
        for module, name, weight in self._places:
            module._parameters[name] = weight


# The swapped weights of the forward pass that this thread is running.
_swapped: ContextVar[AbstractContextManager[object]] = ContextVar("swapped")


class ShardedStrategy(Strategy):
    """Keeps one shard of parameters, gradients and optimizer state on every rank between steps.

    With `cpu_offload`, the shards are in host memory, where the optimizer also steps. `Strategy` has the other options.
    """

    optimizer_class = HybridAdam
    shards_parameters = True
    _reshards_after_forward = False

    def __init__(self, seed: int = 42, cpu_offload: bool = False, **options: Any) -> None:
        super().__init__(seed, **options)
        self._cpu_offload = cpu_offload

    def _prepare_trained(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        """Broadcast rank 0's weights, shard the model in place, and point the optimizer at the shards."""
        if optimizer.state:
            raise ConfigError(
                "prepare must come before the first optimizer step: this optimizer already has state for "
                "parameters that are about to be sharded. Prepare first, then use load_optimizer."
            )
        before = dict(model.named_parameters())
        self._shard(model)
        after = dict(model.named_parameters())
        successor = {id(parameter): after[name] for name, parameter in before.items()}
        for group in optimizer.param_groups:
            group["params"] = [successor[id(parameter)] for parameter in group["params"]]
        return model, optimizer

    def _prepare_for_inference(self, model: nn.Module) -> nn.Module:
        if self.any_rank(any(parameter.is_meta for parameter in model.parameters())):
            self._sync_dtypes(model)
            self._broadcast_from_rank0(model)
        return super()._prepare_for_inference(model)

    def _shard(self, model: nn.Module) -> None:
        """Shard the parameters over all ranks, in place; each transformer block is gathered as one group, the rest too.

        Each group receives rank 0's weights just before it is sharded, so other ranks hold only one whole group.
        """
        if self.world_size > 1:
            self._sync_dtypes(model)
        mesh = init_device_mesh(self.device.type, (self.world_size,))
        offload = CPUOffloadPolicy() if self._cpu_offload and self.device.type != "cpu" else OffloadPolicy()
        reduce_dtype = None if self.compute_dtype is None else torch.float32
        precision = MixedPrecisionPolicy(param_dtype=self.compute_dtype, reduce_dtype=reduce_dtype)
        for module in [*transformer_blocks(model), model]:
            if self.world_size > 1:
                self._broadcast_from_rank0(module)
            fully_shard(
                module,
                mesh=mesh,
                reshard_after_forward=self._reshards_after_forward,
                offload_policy=offload,
                mp_policy=precision,
            )

    def _sync_dtypes(self, model: nn.Module) -> None:
        """Convert tensors to rank 0's dtypes, which only it may have read from a file; refuse a different model."""
        tensors = (*model.named_parameters(), *model.named_buffers())
        layout = [(name, tuple(tensor.shape)) for name, tensor in tensors]
        of_rank0: list[Any] = [(layout, [tensor.dtype for _, tensor in tensors])]
        dist.broadcast_object_list(of_rank0, src=0)
        theirs, dtypes = of_rank0[0]
        differing = set(layout) ^ set(theirs)

        def check() -> None:
            if differing:
                raise ConfigError(
                    f"all ranks must prepare the same model, but {min(differing)} is not on both rank 0 and rank "
                    f"{self.rank}. Build it from the same path or config on every rank."
                )

        self.run_on_all(check, "prepare the model of rank 0")
        for (_, tensor), dtype in zip(tensors, dtypes, strict=True):
            tensor.data = tensor.data.to(dtype)

    @torch.no_grad()
    def _broadcast_from_rank0(self, module: nn.Module) -> None:
        """Copy rank 0's values to a module's tensors that are not sharded yet, allocating those on the meta device."""
        made: dict[Tensor, Any] = {}  # by meta tensor, so that tied weights stay tied
        for part in module.modules():
            for tensors in (part._parameters, part._buffers):
                for key, tensor in tensors.items():
                    if tensor is not None and tensor.is_meta:
                        if tensor not in made:
                            empty = torch.empty_like(tensor, device=self.device)
                            is_trained = tensor.requires_grad
                            made[tensor] = nn.Parameter(empty, is_trained) if tensors is part._parameters else empty
                        tensors[key] = made[tensor]
        for tensor in (*module.parameters(), *module.buffers()):
            if not isinstance(tensor, DTensor):
                staged = tensor.detach().to(self.device).contiguous()
                dist.broadcast(staged, src=0)
                tensor.copy_(staged)


class LowLevelZeroStrategy(ShardedStrategy):
    """ZeRO stages 1 and 2: parameters are gathered for the forward pass and stay whole until the backward pass ends.

    Stage 1 exchanges parameters and gradients once per step, stage 2 shards gradients after each micro-batch.
    """

    def __init__(self, stage: Literal[1, 2] = 2, seed: int = 42, cpu_offload: bool = False, **options: Any) -> None:
        if stage not in (1, 2):
            raise ConfigError(
                f"LowLevelZeroStrategy stage must be 1 or 2, got {stage}. "
                "For sharded parameters (stage 3) use GeminiStrategy."
            )
        super().__init__(seed, cpu_offload, **options)
        self._stage = stage

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context in which stage 1 keeps gradients and parameters whole; does nothing in stage 2."""
        return _keep_unsharded(model) if self._stage == 1 and isinstance(model, FSDPModule) else nullcontext()


class GeminiStrategy(ShardedStrategy):
    """ZeRO stage 3: every rank keeps one shard of everything; a block is whole only while it computes."""

    _reshards_after_forward = True


@contextmanager
def _keep_unsharded(model: FSDPModule) -> Iterator[None]:
    model.set_requires_gradient_sync(False)
    model.set_reshard_after_backward(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)
        model.set_reshard_after_backward(True)


def transformer_blocks(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost repeated blocks: the members of each `ModuleList` of two or more modules of one class."""
    for child in model.children():
        blocks = list(child) if isinstance(child, nn.ModuleList) else []
        is_stack = len(blocks) > 1 and len({type(block) for block in blocks}) == 1
        if is_stack and all(any(True for _ in block.parameters()) for block in blocks):
            yield from blocks
        else:
            yield from transformer_blocks(child)
