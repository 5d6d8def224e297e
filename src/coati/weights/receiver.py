"""Takes weight updates: stages what comes, verifies the whole, and offers it to the models that serve.

Chunks are staged beside the models while the old weights serve. When the manifest comes, names, shapes, dtypes, count
and checksums must fit; anything wrong rejects the whole update. Each sender has a stage of its own, for one update, so
two cannot interleave into one. A sender that begins again replaces its unfinished update. One that dies in the middle
locks nothing: its stage is discarded when the trainers that replace it begin theirs, or at the next update of any
sender after ten minutes without a call. Trainers that were replaced are refused, and the first update of those that
replace them must hold all weights.
"""

import dataclasses
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coati import faults
from coati.errors import AcceleratorFailed, OutOfMemory, WeightUpdateError
from coati.models.lora import LayerLoRA, LoRAConstructor, as_layer_lora, has_adapters
from coati.models.memory import state_tensors, tied_names
from coati.weights.message import Chunk, ChunkInfo, UpdateHeader, WeightManifest, WeightMessage
from coati.weights.served import ServedModels, VerifiedUpdate
from coati.weights.transports import ChunkReader

logger = logging.getLogger(__name__)

# A stage without a call for so long belongs to a sender that died.
MAX_IDLE_SECONDS = 600.0
# No run counts this far: a version of one a second for 60 years.
MAX_VERSION = 2**31
_KEPT = "Update rejected; the maker keeps its current weights."
_OTHER_MODEL = "Update rejected; use the same model on both sides."


@dataclasses.dataclass
class _Stage:
    header: UpdateHeader
    last_seen: float
    chunks: dict[int, tuple[ChunkInfo, dict[str, Tensor]]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class _PlainStage:
    tensors: dict[str, dict[str, Tensor]] = dataclasses.field(default_factory=dict)
    lora: dict[str, dict[str, LayerLoRA]] = dataclasses.field(default_factory=dict)


class WeightReceiver:
    """Receives updates for the modules of a `ServedModels`. Calls must come one at a time."""

    def __init__(
        self,
        served: ServedModels,
        *,
        allow_partial_plain: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`allow_partial_plain`: plain calls may send adapters only."""
        self._served = served
        self._targets = {label: _Target(label, served) for label in served.modules}
        devices = (tensor.device for module in served.modules.values() for tensor in module.parameters())
        self.device = next(devices, torch.device("cpu"))
        self._reader = ChunkReader(self.device)
        self._allow_partial_plain = allow_partial_plain
        self._clock = clock
        self._open: dict[str, _Stage] = {}  # by source, which sends one update at a time; others may just be slow
        self._plain: _PlainStage | None = None
        self._is_plain_open = False  # between the start and the end of a plain update, rejected or not

    def sharing_fault(self, probe: Chunk) -> str | None:
        """Why this receiver cannot read chunks in the sender's memory; None if it can."""
        try:
            ChunkReader(self.device).read(probe)
        except (OSError, RuntimeError, ValueError, MemoryError) as error:  # another host, container, user or card
            return f"it cannot read memory of the sender's process: {error}"
        return None

    def receive(self, message: WeightMessage) -> None:
        """Take part of an update, or all of it; commits it when it is whole. WeightUpdateError rejects the update.

        OutOfMemory and AcceleratorFailed do so too, for reasons of this maker's. The same chunk may come twice, and
        chunks in any order.
        """
        header = message.header
        if header.incarnation < self._served.newest_incarnation:
            raise WeightUpdateError(f"{header} is of trainers that others have replaced. {_KEPT}")
        if message.is_start:
            self._begin(header)
        stage = self._open.get(header.source)
        if stage is None or stage.header != header:
            raise WeightUpdateError(
                f"{header} is not open here: it never began, was rejected, or was discarded for a newer one. Send it "
                "again from its start."
            )
        stage.last_seen = self._clock()
        try:
            for chunk in message.chunks:
                faults.reach("receiver.before_chunk", chunk.index)
                self._add(stage, chunk)
            if message.manifest is None:
                return
            verified = self._finish(stage, message.manifest)
        except BaseException:
            del self._open[header.source]
            raise
        del self._open[header.source]
        self._served.offer(verified)

    def receive_plain(
        self,
        state_dicts: Mapping[str, Mapping[str, Any] | None],
        lora: Mapping[str, Mapping[str, Any] | None],
        *,
        fully_update: bool = False,
        chunk_start: bool | None = None,
        chunk_end: bool | None = None,
    ) -> None:
        """Take a call of the plain kind: a start, state dicts and an end, in one call or several, without ids.

        There is one such update at a time: a new start discards what an earlier one had staged. A call without flags
        outside of an update is an update by itself. After a rejection the rest of the update is rejected too.
        """
        is_whole = not chunk_start and not chunk_end and not self._is_plain_open
        self._is_plain_open = bool(chunk_start or self._is_plain_open) and not chunk_end
        if chunk_start or is_whole:
            self._plain = _PlainStage()
        stage, self._plain = self._plain, None
        if stage is None:
            raise WeightUpdateError(
                "this plain update is not open here: it never began, or was rejected. Send it again with chunk_start."
            )
        for label, state_dict in state_dicts.items():
            if state_dict:
                stage.tensors.setdefault(label, {}).update({name: _tensor(v) for name, v in state_dict.items()})
        for label, settings in lora.items():
            layers = {name: as_layer_lora(value) for name, value in (settings or {}).items()}
            stage.lora.setdefault(label, {}).update(layers)
        if not (chunk_end or is_whole):
            self._plain = stage
            return
        is_full = fully_update or not (self._allow_partial_plain or any(stage.lora.values()))
        update = self._verified("a plain call", stage.tensors, stage.lora, is_full=is_full)
        # What the sender calls a full update is one, even if the maker holds more modules.
        self._served.offer(dataclasses.replace(update, is_full=update.is_full or fully_update))

    def _begin(self, header: UpdateHeader) -> None:
        """Open a stage."""
        self._check_version(header)
        now = self._clock()
        for source, old in list(self._open.items()):
            is_replaced = source == header.source or old.header.incarnation < header.incarnation
            if is_replaced or now - old.last_seen > MAX_IDLE_SECONDS:
                logger.warning("%s was never finished; discarded", self._open.pop(source).header)
        self._open[header.source] = _Stage(header, last_seen=now)

    def _check_version(self, header: UpdateHeader) -> None:
        """Refuse a version that no sender counts to, because it would make every later update look too old.

        A sender counts one by one, however many of its versions this receiver missed; only a sync may start anywhere.
        """
        before = self._served.newest_version if header.follows is None else header.follows
        limit = MAX_VERSION if header.is_sync else min(before + 1, MAX_VERSION)
        if not 0 <= header.version <= limit:
            raise WeightUpdateError(
                f"{header} has an implausible version: its sender was at {before}, so at most {limit} can follow. "
                f"{_KEPT} Call sync_models_to_remote_makers to start at another version."
            )

    def _add(self, stage: _Stage, chunk: Chunk) -> None:
        try:
            stage.chunks[chunk.index] = (chunk.info, self._reader.read(chunk))
        except (OutOfMemory, AcceleratorFailed) as error:
            raise type(error)(f"chunk {chunk.index} of {stage.header} could not be staged: {error} {_KEPT}") from error
        except Exception as error:
            raise WeightUpdateError(f"chunk {chunk.index} of {stage.header} is unreadable: {error}. {_KEPT}") from error

    def _finish(self, stage: _Stage, manifest: WeightManifest) -> VerifiedUpdate:
        """Verify an update against its manifest."""
        header, listed = stage.header, dict(enumerate(manifest.chunks))
        if missing := listed.keys() - stage.chunks.keys():
            raise WeightUpdateError(
                f"{header} is missing {len(missing)} of {len(listed)} chunks (first: {min(missing)}). {_KEPT}"
            )
        tensors: dict[str, dict[str, Tensor]] = {}
        for index, (info, chunk) in stage.chunks.items():
            if info != listed.get(index):
                raise WeightUpdateError(f"{header}: chunk {index} is not one that the manifest lists. {_KEPT}")
            module = tensors.setdefault(info.module, {})
            if twice := module.keys() & chunk.keys():
                raise WeightUpdateError(f"{header} has the {info.module} weight {min(twice)!r} twice. {_KEPT}")
            module.update(chunk)
        self._reader.end_update()
        update = self._verified(header.source, tensors, manifest.lora, is_full=manifest.is_full)
        if header.incarnation > self._served.newest_incarnation and not update.is_full:
            raise WeightUpdateError(
                f"{header} holds only part of the weights, but it is the first of trainers that were started again. "
                f"{_KEPT} Call sync_models_to_remote_makers first."
            )
        return dataclasses.replace(
            update, version=header.version, incarnation=header.incarnation, canary=manifest.canary
        )

    def _verified(
        self,
        source: str,
        tensors: Mapping[str, Mapping[str, Tensor]],
        lora: Mapping[str, Mapping[str, LayerLoRA]],
        *,
        is_full: bool,
    ) -> VerifiedUpdate:
        """Map all weights onto the receiver's own. `is_full`: every module that was sent must be complete."""
        if not any(tensors.values()):
            raise WeightUpdateError(f"{source} sent an update that holds no tensors. {_KEPT}")
        if unknown := tensors.keys() - self._targets.keys():
            raise WeightUpdateError(
                f"{source} sent weights of a module {min(unknown)!r}; here are {', '.join(self._targets)}. {_KEPT}"
            )
        resolved = {
            label: self._targets[label].resolve(sent, lora.get(label, {}), source) for label, sent in tensors.items()
        }
        missing = {label: target.missing(resolved.get(label, {})) for label, target in self._targets.items()}
        for label in resolved:
            if is_full and missing[label]:
                raise WeightUpdateError(
                    f"{source} sent only part of the {label}, which lacks {len(missing[label])} weights (first: "
                    f"{missing[label][0]!r}). Update rejected; send all weights, or use update_lora_weights for "
                    "adapters only."
                )

        def adopt() -> None:
            for label in resolved:
                self._targets[label].constructor.adopt()

        flat = {(label, name): tensor for label, weights in resolved.items() for name, tensor in weights.items()}
        return VerifiedUpdate(None, source, flat, not any(missing.values()), adopt=adopt)


def _tensor(value: Any) -> Tensor:
    """A weight of a plain call as a CPU tensor; the caller's own memory may change before the commit, Ray's cannot."""
    return value.detach().cpu() if isinstance(value, Tensor) else torch.from_numpy(np.asarray(value))


class _Target:
    """A module of the receiver, under its label ("actor" or "critic")."""

    def __init__(self, label: str, served: ServedModels) -> None:
        self._label = label
        self._served = served
        tensors = state_tensors(served.modules[label])
        self._specs = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
        tied = tied_names(served.modules[label])  # tied weights travel once, under any of their names
        self._first_name = {name: tied.get(name, name) for name in tensors}
        self._has_adapters = has_adapters(tensors)
        self._base_weights: dict[str, Tensor] = {}  # the constructor copies from it, when a layer's first adapter comes
        self.constructor = LoRAConstructor(self._base_weights)

    def resolve(self, sent: Mapping[str, Tensor], lora: Mapping[str, LayerLoRA], source: str) -> dict[str, Tensor]:
        """The sent weights under this module's own names, checked.

        Adapters for a module that has none become weights of it: W₀ + scale·B·A, from the same W₀ each time.
        """
        if not self._has_adapters:
            newest = self._served.newest_weights(self._label) if has_adapters(sent) else {}
            names = [(alias, name) for name in newest for alias in _aliases(name)]
            self._base_weights |= {alias: newest[name] for alias, name in reversed(names)}  # the first name wins
            try:
                sent = self.constructor.reconstruct(sent, lora)
            finally:
                self._base_weights.clear()
        resolved: dict[str, Tensor] = {}
        for name, tensor in sent.items():
            own = next((alias for alias in _aliases(name) if alias in self._specs), name)
            if fault := self._fault(own, tensor):
                raise WeightUpdateError(f"{source} sent {self._label} weight {name!r}{fault}. {_OTHER_MODEL}")
            if own in resolved:
                raise WeightUpdateError(
                    f"{source} sent the {self._label} weight {own!r} twice, the second time as {name!r}. "
                    "Update rejected; send each weight once."
                )
            resolved[own] = tensor
        return resolved

    def missing(self, names: Iterable[str]) -> list[str]:
        """Weights that were not sent, and no weight that is tied to them either."""
        sent = {self._first_name[name] for name in names}
        return [name for name, first_name in self._first_name.items() if first_name not in sent]

    def _fault(self, name: str, tensor: Tensor) -> str | None:
        """Why a tensor cannot be this weight."""
        if name not in self._specs:
            return (
                f", which this maker's {self._label} does not have (it has e.g. {next(iter(self._specs), 'nothing')!r})"
            )
        shape, dtype = self._specs[name]
        if tensor.shape != shape:
            return f" with shape {list(tensor.shape)}, but it is {list(shape)} here"
        # A float may be rounded to the width that the receiver computes in. Integers must be exact.
        if tensor.dtype != dtype and not (tensor.dtype.is_floating_point and dtype.is_floating_point):
            return f" as {tensor.dtype}, but it is {dtype} here"
        return None


def _aliases(name: str) -> tuple[str, ...]:
    """Names that a weight may have on the other side, which may or may not have wrapped its model."""
    return (name, f"model.{name}", name.removeprefix("model."), name.removeprefix("module."))
