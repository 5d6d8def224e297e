"""The base of all strategies: place models, run backward and step over all ranks; stream, save and load weights."""

import os
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from coati.devices import device_errors_explained
from coati.errors import ConfigError, OutOfMemory
from coati.models.memory import iter_state_chunks, shapes_only, tied_names
from coati.trainer.strategies.files import (
    MODEL_MARKERS,
    OPTIMIZER_MARKERS,
    copy_into,
    iter_state,
    names_to_save,
    optimizer_settings,
    read_optimizer,
    read_tensors,
    replace_folder,
    write_model,
    write_optimizer,
)
from coati.trainer.strategies.ranks import Ranks

_PathLike = str | os.PathLike[str]


class Strategy(Ranks, ABC):
    """Distributes models, gradients and optimizer state over the ranks of a training job.

    The constructor reads `RANK`, `LOCAL_RANK`, `WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT`, seeds Python, numpy and
    torch identically on every rank, and joins the process group. All ranks must call the methods in the same order,
    except `unwrap_model` and `model_init_context`.

    Args:
        seed: the same seed on every rank makes all ranks build the same models.
        device: device of the models; by default this rank's GPU, or else the CPU.
        timeout_seconds: timeout of every wait for other ranks.
        compute_dtype: bfloat16 for mixed precision: weights, gradients and optimizer state keep the model's dtype.
    """

    optimizer_class: type[Optimizer] = torch.optim.Adam  # the optimizer class that learners should use

    shards_parameters = False  # whether parameters are sharded, so that no rank holds a whole model

    def __init__(
        self,
        seed: int = 42,
        *,
        device: str | torch.device | None = None,
        timeout_seconds: float = 600,
        compute_dtype: torch.dtype | None = None,
    ) -> None:
        if compute_dtype not in (None, torch.bfloat16):
            raise ConfigError(
                f"compute_dtype must be torch.bfloat16 or None, got {compute_dtype}. Other dtypes lose small gradients."
            )
        self.compute_dtype = compute_dtype
        super().__init__(device=device, timeout_seconds=timeout_seconds, needs_group=self.shards_parameters)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)

    # Placing models

    def model_init_context(self) -> AbstractContextManager[None]:
        """Return a context in which to build the models to train, on the CPU; `prepare` moves them to the device.

        With sharded parameters, `Actor` and `Critic` load weights on rank 0 only, which `prepare` broadcasts by block.
        """
        return shapes_only() if self.shards_parameters and self.rank > 0 else nullcontext()

    def prepare(self, *models_or_pairs: nn.Module | tuple[nn.Module, Optimizer]) -> Any:
        """Place models and optimizers, and return their replacements: one for one argument, otherwise a tuple.

        A `(model, optimizer)` pair is for training and starts with rank 0's weights; a model alone is for inference.
        """
        remedy = 'Use a smaller model or dtype, more of the GPU or, for training, the strategy "zero2" or "gemini".'
        with device_errors_explained(f"placing models on {self.device}", remedy):
            prepared = tuple(self._prepare_one(argument) for argument in models_or_pairs)
        return prepared[0] if len(prepared) == 1 else prepared

    def _prepare_one(self, argument: Any) -> nn.Module | tuple[nn.Module, Optimizer]:
        is_pair = isinstance(argument, tuple | list) and len(argument) == 2
        model, optimizer = argument if is_pair else (argument, None)
        if not isinstance(model, nn.Module) or not isinstance(optimizer, Optimizer | None):
            raise ConfigError(
                f"prepare takes models and (model, optimizer) pairs, got {type(argument).__name__}. "
                "Pass prepare(model) or prepare((model, optimizer), ...)."
            )
        if isinstance(model, DistributedDataParallel | FSDPModule):
            raise ConfigError("prepare got a model that is already prepared. Prepare each model once.")
        if optimizer is None:
            return self._prepare_for_inference(model)
        own = {id(parameter) for parameter in model.parameters()}
        if any(id(parameter) not in own for group in optimizer.param_groups for parameter in group["params"]):
            raise ConfigError(
                f"prepare got a pair whose optimizer has parameters that {type(model).__name__} does not have. Build "
                "the optimizer from model.parameters(), after the last change to the model."
            )
        return self._prepare_trained(model, optimizer)

    def _prepare_for_inference(self, model: nn.Module) -> nn.Module:
        return model.to(self.device)

    @abstractmethod
    def _prepare_trained(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        """Place a model for training, and adapt its optimizer to the placed parameters."""

    def unwrap_model(self, model: nn.Module) -> nn.Module:
        """Return the module that was passed to `prepare`, with its own attributes and state-dict names."""
        return model.module if isinstance(model, DistributedDataParallel) else model

    # Training

    def backward(self, loss: Tensor, model: nn.Module, optimizer: Optimizer) -> None:  # noqa: ARG002
        """Add the loss's gradients to the model's. After all ranks' calls, gradients are SUMMED over ranks.

        A loss divided by the token count of *all* ranks therefore gives exactly the gradient of the joined batch. Wrap
        forward and backward of all but the last call before a step in `no_sync(model)`.
        """
        # Data parallelism averages gradients over ranks; the factor turns the mean into a sum.
        (loss * self.world_size if self.world_size > 1 else loss).backward()  # type: ignore[no-untyped-call]

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context that delays the all-reduce of whole gradients; sharded ones are exchanged regardless."""
        return model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext()

    def clip_grad_norm(self, model: nn.Module, max_norm: float) -> Tensor:
        """Clip gradients by their global 2-norm over ranks and shards; return the norm before clipping, a scalar.

        With `max_norm` 0, or if the norm is not finite, gradients are left unchanged.
        """
        assert max_norm >= 0
        parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
        norm = nn.utils.get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        norm = norm.to(self.device)
        # Scaling by NaN would hide which gradients are finite; the caller decides whether to skip the step.
        if max_norm > 0 and bool(norm.isfinite()):
            nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        return norm

    def optimizer_step(self, optimizer: Optimizer) -> None:
        """Step the optimizer. Gradients are kept; call `optimizer.zero_grad()` before the next `backward`."""
        optimizer.step()

    # Streaming, saving and loading weights

    def get_model_state_dict_shard(
        self,
        model: nn.Module,
        *,
        shard_size: float = 64,
        dtype: torch.dtype | None = None,
        names: Collection[str] | None = None,
    ) -> Iterator[dict[str, Tensor]]:
        """Stream the unwrapped model's state dict, or the tensors `names`, in chunks of at most `shard_size` MiB.

        `dtype` converts floating-point tensors; by default each keeps its own. See `iter_state_chunks`.
        """
        if not shard_size > 0:
            raise ConfigError(f"shard_size must be a positive number of MiB, got {shard_size}.")
        chunks = iter_state_chunks(self.unwrap_model(model), max_bytes=int(shard_size * 2**20), names=names)
        if dtype is None:
            return chunks
        return (
            {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in chunk.items()}
            for chunk in chunks
        )

    def save_model(
        self,
        model: nn.Module,
        path: _PathLike,
        only_rank0: bool = False,  # noqa: ARG002
        *,
        add: Callable[[Path], object] = lambda _: None,
    ) -> None:
        """Write the model to the folder `path`, with its own `save_pretrained` if it has one; with LoRA, the adapters.

        Only rank 0 writes, regardless of `only_rank0`. The folder is created atomically and replaces an existing model
        folder; `add` may write more files into it. Raises CheckpointError if a weight is NaN or infinite.
        """
        write_weights = self.model_writer(model)

        def write(folder: Path) -> None:
            write_weights(folder)
            add(folder)

        self._save_folder(Path(path), write, MODEL_MARKERS)

    def model_writer(self, model: nn.Module, *, into: dict[str, Tensor] | None = None) -> Callable[[Path], None]:
        """Gather a model in rank 0's host memory; return a function with which rank 0 writes it into a folder.

        With `into`, the copies go to these buffers, made on first use; the function may then run later, in a thread.
        """
        module = self.unwrap_model(model)
        chunks, tied = iter_state_chunks(module, names=names_to_save(module)), tied_names(module)
        gathered = self._gathered((item for chunk in chunks for item in chunk.items()), into)
        return lambda folder: write_model(module, gathered(), tied, folder)

    def load_model(self, model: nn.Module, path: _PathLike) -> None:
        """Load a model saved by any strategy. If names or shapes mismatch on any rank, no rank loads anything."""
        module = self.unwrap_model(model)
        tensors = self.run_on_all(lambda: read_tensors(module, Path(path)), f"load {path}")
        self.run_on_all(lambda: copy_into(module, tensors), f"load all of {path}")

    def save_optimizer(self, optimizer: Optimizer, path: _PathLike, only_rank0: bool = False) -> None:  # noqa: ARG002
        """Write the full optimizer state to the folder `path`; any strategy with any number of ranks can load it."""
        self._save_folder(Path(path), self.optimizer_writer(optimizer), OPTIMIZER_MARKERS)

    def optimizer_writer(
        self, optimizer: Optimizer, *, into: dict[str, Tensor] | None = None
    ) -> Callable[[Path], None]:
        """Gather an optimizer's state and return a function that writes it; see `model_writer`."""
        settings, gathered = optimizer_settings(optimizer), self._gathered(iter_state(optimizer), into)
        return lambda folder: write_optimizer(settings, gathered(), folder)

    def load_optimizer(self, optimizer: Optimizer, path: _PathLike) -> None:
        """Load a saved optimizer, including learning rates. If it is invalid on any rank, no rank loads anything."""
        state = self.run_on_all(lambda: read_optimizer(optimizer, Path(path)), f"load {path}")
        self.run_on_all(lambda: optimizer.load_state_dict(state), f"load all of {path}")

    def _gathered(
        self, stream: Iterable[tuple[str, Any]], into: dict[str, Tensor] | None
    ) -> Callable[[], dict[str, Any]]:
        """Copy the stream, which all ranks gather by iterating it, to rank 0's host memory.

        Return a function that returns the copies by name, or raises OutOfMemory if they did not fit.
        """
        kept: dict[str, Any] = {}
        failure: OutOfMemory | None = None
        for name, value in stream:
            if self.rank != 0 or failure is not None:
                continue
            try:
                with device_errors_explained(
                    "copying models and optimizers to host memory",
                    "A checkpoint needs as much host memory as disk space. Use more, or set train.save_every to 0.",
                ):
                    kept[name] = _host_copy(name, value, into)
            except OutOfMemory as error:
                failure = error
                for copies in filter(None, (kept, into)):
                    copies.clear()
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

        def result() -> dict[str, Any]:
            if failure is not None:
                raise failure
            return kept

        return result

    def _save_folder(self, path: Path, write: Callable[[Path], None], markers: Collection[str]) -> None:
        def work() -> None:
            if self.rank == 0:
                replace_folder(path, write, markers=markers)

        self.run_on_all(work, f"save to {path}")


def _host_copy(name: str, value: Any, into: dict[str, Tensor] | None) -> Any:
    if into is None or not isinstance(value, Tensor):
        return value.cpu() if isinstance(value, Tensor) else value
    if name not in into:
        into[name] = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
    return into[name].copy_(value, non_blocking=True)
