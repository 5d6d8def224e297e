"""What every strategy does: place models, run backward over all ranks, step, save and stream weights.

A strategy hides how many ranks train together and what each of them holds. The learner above it writes one
loop; the gradient it gets is the gradient of all ranks' batches joined.
"""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from coati.errors import CheckpointError, ConfigError, DeadlineExceeded
from coati.models.deferred import weights_come_later, with_weights
from coati.trainer.strategies.folders import copy_to_other_nodes, replace_folder
from coati.trainer.strategies.model_files import (
    MODEL_MARKERS,
    check_model_files,
    load_model_files,
    saves_adapters,
    write_model,
    write_model_in_parts,
)
from coati.trainer.strategies.optimizer_files import (
    OPTIMIZER_MARKERS,
    StateEntry,
    iter_whole_state,
    read_optimizer,
    write_optimizer,
)
from coati.trainer.strategies.process_group import RankInfo, choose_device, join_process_group, seed_everything
from coati.trainer.strategies.state_chunks import iter_state_chunks

_DEFAULT_SHARD_MIB = 64
_PathLike = str | os.PathLike[str]


class Strategy(ABC):
    """How models, gradients and optimizer state are laid out over the ranks of one training job.

    Making a strategy reads `RANK`, `LOCAL_RANK`, `WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT`, seeds Python,
    numpy and torch with `seed` (the same on every rank) and joins the process group. Every method that talks
    to other ranks (all but `unwrap_model` and `model_init_context`) must be called by all of them in the same
    order.

    Args:
        seed: for Python's, numpy's and torch's global generators.
        device: where models live; by default this rank's GPU, else the CPU.
        backend: torch.distributed backend; by default nccl (with gloo for host tensors) on GPUs, gloo on
            CPUs.
        timeout_seconds: how long any wait for the other ranks may last.
        compute_dtype: bfloat16 to compute in it while weights, gradients and optimizer state stay in the model's own
            format (load the model in float32); by default all of it is in the model's format. A model of your own has
            to compute in the format of its weights.
    """

    optimizer_class: type[Optimizer] = torch.optim.Adam
    """What a learner should build its optimizers from."""

    _always_needs_group = False  # whether even a single rank needs a process group
    _shards_parameters = False

    def __init__(
        self,
        seed: int = 42,
        *,
        device: str | torch.device | None = None,
        backend: str | None = None,
        timeout_seconds: float = 600,
        compute_dtype: torch.dtype | None = None,
    ) -> None:
        if compute_dtype not in (None, torch.bfloat16):
            raise ConfigError(
                f"compute_dtype must be torch.bfloat16 or None, got {compute_dtype}. Others lose small gradients."
            )
        self.compute_dtype = compute_dtype
        if not timeout_seconds > 0 or math.isinf(timeout_seconds):
            raise ConfigError(f"timeout_seconds must be positive and finite, got {timeout_seconds}.")
        self._ranks = RankInfo.from_env()
        self._device = choose_device(device, self._ranks.local_rank)
        self._timeout_seconds = timeout_seconds
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        self._made_group = False
        if self._ranks.world_size > 1 or self._always_needs_group:
            self._made_group = join_process_group(
                self._ranks, self._device, backend=backend, timeout_seconds=timeout_seconds
            )
        seed_everything(seed)

    @property
    def world_size(self) -> int:
        """How many ranks train together."""
        return self._ranks.world_size

    @property
    def rank(self) -> int:
        """Number of this rank, from 0."""
        return self._ranks.rank

    @property
    def local_rank(self) -> int:
        """Number of this rank on its machine, from 0."""
        return self._ranks.local_rank

    @property
    def shards_parameters(self) -> bool:
        """Whether no rank holds a whole model."""
        return self._shards_parameters

    @property
    def device(self) -> torch.device:
        """Where models live and batches belong."""
        return self._device

    # Placing models

    def model_init_context(self) -> AbstractContextManager[None]:
        """Build models inside this context.

        Models are built on the CPU, and `prepare` moves them. Strategies that shard parameters build `Actor` and
        `Critic` without weights, on the meta device: `prepare` reads those block by block, so that no rank ever holds
        a whole model.
        """
        return weights_come_later() if self._shards_parameters else nullcontext()

    def prepare(self, *models_or_pairs: nn.Module | tuple[nn.Module, Optimizer]) -> Any:
        """Place models and optimizers; returns what came, in the same structure, ready to use.

        A `(model, optimizer)` pair is trained: its parameters start as rank 0's, and its gradients are
        shared. Use the returned model and optimizer from here on. A lone model is for inference: it is moved
        to the device and left as it is. One argument gives one result, several give a tuple.
        """
        if not models_or_pairs:
            raise ConfigError("prepare needs at least one model or (model, optimizer) pair, got none.")
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
            raise ConfigError("prepare got a model that was prepared before. Prepare each model once.")
        if optimizer is None:
            return with_weights(model).to(self.device)
        return self._prepare_trained(model, optimizer)

    @abstractmethod
    def _prepare_trained(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        """Place a model that is trained, and make its optimizer fit."""

    def unwrap_model(self, model: nn.Module) -> nn.Module:
        """The module that went into `prepare`, with its own attributes and state-dict names."""
        return model.module if isinstance(model, DistributedDataParallel) else model

    # Training

    def backward(self, loss: Tensor, model: nn.Module, optimizer: Optimizer) -> None:  # noqa: ARG002
        """Add this loss's gradients to the model's.

        After all ranks' calls each gradient is the SUM over the ranks of the gradients of their losses. So a
        loss divided by the token count of *all* ranks gives exactly the gradient of the joined batch, however
        unevenly the tokens are spread. (Data parallelism averages over ranks; the factor below undoes that.)

        Several calls before one `optimizer_step` accumulate; wrap forward and backward of all but the last in
        `no_sync(model)` to exchange whole gradients only once.
        """
        (loss * self.world_size if self.world_size > 1 else loss).backward()  # type: ignore[no-untyped-call]

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Keep whole gradients on this rank: for forward and backward of all but the last micro-batch.

        Sharded gradients are exchanged every time: to keep them would mean to hold them whole, which is what sharding
        is there to avoid.
        """
        if isinstance(model, DistributedDataParallel):
            with model.no_sync():
                yield
        else:
            yield

    def clip_grad_norm(self, model: nn.Module, max_norm: float) -> Tensor:
        """Clip to the global 2-norm over ranks and shards; returns the norm before clipping, a scalar.

        `max_norm` 0 or infinity only measures. A norm that is not finite scales nothing: check what is returned.
        """
        if not max_norm >= 0:
            raise ConfigError(f"max_grad_norm must be 0 or more, got {max_norm}. Use 0 to measure without clipping.")
        parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
        norm = nn.utils.get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        norm = norm.to(self.device)
        # Scaling by NaN would destroy the evidence: whether to skip the step is the caller's decision.
        if max_norm > 0 and bool(norm.isfinite()):
            nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        return norm

    def optimizer_step(self, optimizer: Optimizer) -> None:
        """Step the optimizer. Gradients stay; call `optimizer.zero_grad()` before the next `backward`."""
        optimizer.step()

    # Talking to the other ranks

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """The sum of the tensor over all ranks, as a new tensor on the same device (itself, for one rank)."""
        if self.world_size == 1:
            return tensor
        total = tensor.detach().to(self.device, copy=True)
        dist.all_reduce(total)
        return total.to(tensor.device)

    def all_gather(self, vector: Tensor) -> Tensor:
        """Every rank's vector, [W, n] from [n], in the order of ranks; all pass the same length and dtype."""
        if self.world_size == 1:
            return vector.detach().unsqueeze(0)
        mine = vector.detach().to(self.device).contiguous()
        rows = [torch.empty_like(mine) for _ in range(self.world_size)]
        dist.all_gather(rows, mine)
        return torch.stack(rows).to(vector.device)

    def barrier(self, deadline_seconds: float) -> None:
        """Wait until all ranks are here; after `deadline_seconds` raise `DeadlineExceeded`."""
        if self.world_size == 1:
            return
        timeout = timedelta(seconds=deadline_seconds)
        try:
            if dist.get_backend() == "gloo":
                dist.monitored_barrier(timeout=timeout, wait_all_ranks=True)  # names the ranks that are missing
            else:
                dist.barrier(async_op=True).wait(timeout)
        except RuntimeError as error:
            raise DeadlineExceeded(
                f"rank {self.rank} of {self.world_size} waited {deadline_seconds:g} s at a barrier for the "
                f"other ranks; one is dead or far behind. torch said: {str(error).strip()}"
            ) from error

    def close(self) -> None:
        """Leave the process group, if this strategy made it. The strategy is of no use afterwards."""
        if self._made_group and dist.is_initialized():
            dist.destroy_process_group()
        self._made_group = False

    # Weights out and in

    def get_model_state_dict_shard(self, model: nn.Module, **config: Any) -> Iterator[dict[str, Tensor]]:
        """Stream the unwrapped model's state dict, buffers included, in chunks of bounded size.

        Config: `shard_size`, the bound in MiB (default 64); a tensor larger than that is its own chunk. `dtype`, the
        format of floating-point tensors (default None: each its own). `names`, which tensors (default None: all);
        others are not even gathered. Tied weights come once, under their first name. Tensors are detached, whole, on
        their device, and may share memory with the model: copy what must outlive the next step. Sharded ones are
        gathered one at a time. All ranks must iterate in step.
        """
        shard_size = config.pop("shard_size", _DEFAULT_SHARD_MIB)
        dtype, names = config.pop("dtype", None), config.pop("names", None)
        if config:
            raise ConfigError(
                "get_model_state_dict_shard knows the options shard_size, dtype and names, got "
                f"{', '.join(sorted(config))}."
            )
        if not shard_size > 0:
            raise ConfigError(f"shard_size must be a positive number of MiB, got {shard_size}.")
        chunks = iter_state_chunks(self.unwrap_model(model), max_bytes=int(shard_size * 2**20), names=names)
        if dtype is None:
            return chunks
        return (
            {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in chunk.items()}
            for chunk in chunks
        )

    def save_model(self, model: nn.Module, path: _PathLike, only_rank0: bool = False, *, sharded: bool = False) -> None:
        """Write the model to the folder `path`, by its own `save_pretrained` if it has one.

        The folder appears whole or not at all; a model folder that is there already is replaced, with all
        that is in it. Rank 0 writes. Unless `only_rank0`, nodes that do not see rank 0's folder get a copy of
        it. `sharded` writes several files of bounded size with an index, as transformers does for large models, and
        needs no more memory than one of them; else rank 0 holds all weights for a moment. With LoRA only the adapters
        are written, and gathered.
        """
        module = self.unwrap_model(model)
        chunks = self._chunks_to_save(module)

        def write(folder: Path) -> None:
            if sharded and not saves_adapters(module):
                write_model_in_parts(module, chunks, folder)
            else:
                write_model(module, {name: tensor for chunk in chunks for name, tensor in chunk.items()}, folder)

        self._save_folder(Path(path), write, MODEL_MARKERS, only_rank0, drain=chunks)

    def _chunks_to_save(self, module: nn.Module) -> Iterator[dict[str, Tensor]]:
        """What has to be on disk, on the CPU; all ranks take part in the gathering, and rank 0 gets the tensors."""
        kept: set[str] | None = None
        broken: list[str] = []
        if saves_adapters(module):
            kept = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
        for chunk in iter_state_chunks(module, max_bytes=_DEFAULT_SHARD_MIB * 2**20, names=kept):
            chunk = {name: tensor.cpu() for name, tensor in chunk.items()} if self.rank == 0 else {}
            broken += [name for name, t in chunk.items() if t.is_floating_point() and not bool(t.isfinite().all())]
            yield chunk
            chunk.clear()  # whoever took it has made use of it, and the next is about to be gathered
        if broken:  # only now: the other ranks take part in the gathering to its end
            raise CheckpointError(
                f"a model must have finite weights to be saved, got NaN or infinity in {broken[0]!r}. Training has "
                "diverged; use an earlier checkpoint."
            )

    def load_model(self, model: nn.Module, path: _PathLike) -> None:
        """Load what any strategy saved; names and shapes must match on every rank, or nothing is loaded on any."""
        module = self.unwrap_model(model)
        self._all_or_none(lambda: check_model_files(module, Path(path)), f"load {path}")
        self._all_or_none(lambda: load_model_files(module, Path(path)), f"load all of {path}")

    def save_optimizer(
        self, optimizer: Optimizer, path: _PathLike, only_rank0: bool = False, *, sharded: bool = False
    ) -> None:
        """Write the optimizer's whole state to the folder `path`: safetensors and JSON, atomically.

        State is keyed by the parameter's number in the groups, so any strategy with any number of ranks loads
        it. `sharded` writes several files of bounded size, and needs no more memory than one of them.
        """
        entries = self._iter_optimizer_state(optimizer)
        part_bytes = _DEFAULT_SHARD_MIB * 2**20 if sharded else None
        self._save_folder(
            Path(path),
            lambda folder: write_optimizer(optimizer, entries, folder, part_bytes=part_bytes),
            OPTIMIZER_MARKERS,
            only_rank0,
            drain=entries,
        )

    def load_optimizer(self, optimizer: Optimizer, path: _PathLike) -> None:
        """Load what `save_optimizer` wrote: moments, step counts, and settings such as the learning rate.

        Names, shapes, formats and checksums are checked first; if one is wrong on any rank, no rank loads anything.
        """
        state: dict[str, Any] = {}

        def read() -> None:
            wanted = partial(self._holds_state_of, optimizer)
            state.update(read_optimizer(optimizer, Path(path), wanted=wanted))

        self._all_or_none(read, f"load {path}")
        self._all_or_none(lambda: self._load_optimizer_state(optimizer, state), f"load all of {path}")

    def _load_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        optimizer.load_state_dict(state)

    def _iter_optimizer_state(self, optimizer: Optimizer) -> Iterator[StateEntry]:
        """The whole state, the same on every rank."""
        return iter_whole_state(optimizer)

    def _holds_state_of(self, optimizer: Optimizer, index: int) -> bool:  # noqa: ARG002
        """Whether this rank keeps (its part of) the state of parameter `index`."""
        return True

    def _save_folder(
        self,
        path: Path,
        write: Callable[[Path], None],
        markers: Iterable[str],
        only_rank0: bool,
        *,
        drain: Iterator[Any],
    ) -> None:
        """Let rank 0 write a folder from what `drain` gathers, which all ranks iterate over to its end."""
        markers = frozenset(markers)

        def write_on_rank0() -> None:
            try:
                if self.rank == 0:
                    replace_folder(path, write, markers=markers)
            finally:
                # Also after a failure: the other ranks wait in the next gathering.
                for _ in drain:
                    pass

        self._all_or_none(write_on_rank0, f"save to {path}")
        if not only_rank0 and self.world_size > 1:
            self._all_or_none(
                lambda: copy_to_other_nodes(path, rank=self.rank, device=self.device, markers=markers),
                f"save to {path}",
            )

    def _all_or_none(self, work: Callable[[], None], what: str) -> None:
        """Run `work` on every rank; if one fails, raise on all, so that none waits for a rank that left."""
        failure: Exception | None = None
        try:
            work()
        except Exception as error:
            failure = error
        num_failed = self.all_reduce_sum(torch.tensor(int(failure is not None)))
        if failure is not None:
            raise failure
        if num_failed > 0:
            raise CheckpointError(f"another rank could not {what}; its own message says why.")
