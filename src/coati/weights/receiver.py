"""Receives weight updates: stages the chunks, verifies the complete update, and offers it to the served models.

Chunks are staged next to the models while the current weights serve. When the manifest arrives, names, shapes, dtypes,
count and checksums must match; any mismatch rejects the whole update. Each sender has its own stage, which is discarded
by the sender's next update, or by a sender that takes over its name. Updates from trainers that were replaced are
rejected, and the first update of their replacements must hold all weights.
"""

import dataclasses
import logging
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coati import faults
from coati.errors import AcceleratorFailed, OutOfMemory, WeightUpdateError
from coati.models.lora import LayerLoRA, LoRAConstructor, as_layer_lora, has_adapters
from coati.models.memory import state_tensors, tied_names
from coati.weights.message import Chunk, ChunkInfo, ChunkReader, UpdateHeader, WeightManifest, WeightMessage
from coati.weights.served import ServedModels, VerifiedUpdate

logger = logging.getLogger(__name__)

_KEPT = "Update rejected; the maker keeps its current weights."
_OTHER_MODEL = "Update rejected; use the same model on both sides."
_PLAIN = UpdateHeader(update_id="without an id", version=0, source="plain calls")


@dataclasses.dataclass
class _Stage:
    """The part of an update that has arrived so far."""

    header: UpdateHeader
    infos: dict[int, ChunkInfo] = dataclasses.field(default_factory=dict)
    tensors: dict[str, dict[str, Tensor]] = dataclasses.field(default_factory=dict)
    lora: dict[str, dict[str, LayerLoRA]] = dataclasses.field(default_factory=dict)


class WeightReceiver:
    """Receives updates for the modules of a `ServedModels`. Calls that receive must not overlap."""

    def __init__(self, served: ServedModels, *, allow_partial_plain: bool = False) -> None:
        """`allow_partial_plain`: whether plain calls may send only adapters."""
        self._served = served
        self._targets = {label: _Target(label, served) for label in served.modules}
        devices = (tensor.device for module in served.modules.values() for tensor in module.parameters())
        self.device = next(devices, torch.device("cpu"))
        self._reader = ChunkReader(self.device)
        self._allow_partial_plain = allow_partial_plain
        self._stages: dict[str, _Stage] = {}  # by source; each sends one update at a time
        self._plain: _Stage | None = None
        self._is_plain_open = False  # between the start and the end of a plain update, even if it was rejected

    def sharing_fault(self, probe: Chunk) -> str | None:
        """Return why this receiver cannot read chunks in the sender's memory; None if it can."""
        try:
            ChunkReader(self.device).read(probe)
        except (OSError, RuntimeError, ValueError, MemoryError) as error:  # another host, container, user or GPU
            return f"it cannot read memory of the sender's process: {error}"
        return None

    def receive(self, message: WeightMessage) -> None:
        """Receive part of an update, or all of it; offer the update when it is complete. An error rejects it.

        Chunks may arrive in any order and more than once.
        """
        header = message.header
        newest_incarnation, _ = self._served.newest
        begun = (stage.header.incarnation for stage in self._stages.values())
        if header.incarnation < max(newest_incarnation, *begun, 0):
            raise WeightUpdateError(f"{header} comes from trainers that have been replaced. {_KEPT}")
        if message.is_start:
            self._begin(header)
        stage = self._stages.get(header.source)
        if stage is None or stage.header != header:
            raise WeightUpdateError(
                f"{header} is not open here: it never began, was rejected, or discarded for a newer one. Send it again."
            )
        del self._stages[header.source]  # so that any exception rejects the update
        for chunk in message.chunks:
            faults.reach("receiver.before_chunk", chunk.index)
            stage.tensors.setdefault(chunk.info.module, {}).update(self._read(chunk, header))
            stage.infos[chunk.index] = chunk.info
        if message.manifest is None:
            self._stages[header.source] = stage
            return
        self._check_chunks(stage, message.manifest)
        update = self._verified(header, stage.tensors, message.manifest)
        if header.incarnation > newest_incarnation and not update.is_full:
            raise WeightUpdateError(
                f"{header} holds only part of the weights, but the first update of restarted trainers must hold all. "
                f"{_KEPT} Call sync_models_to_remote_makers first."
            )
        self._offer(update)

    def receive_plain(
        self,
        state_dicts: Mapping[str, Mapping[str, Any] | None],
        lora: Mapping[str, Mapping[str, Any] | None],
        *,
        fully_update: bool = False,
        chunk_start: bool | None = None,
        chunk_end: bool | None = None,
    ) -> None:
        """Receive a plain update, which has no ids: a start, state dicts and an end, in one or several calls.

        There is one plain update at a time: a new start discards an earlier one. A call without flags is a complete
        update if none is open. After a rejection, the rest is rejected too. An accepted update is the next version.
        """
        is_whole = not chunk_start and not chunk_end and not self._is_plain_open
        self._is_plain_open = bool(chunk_start or self._is_plain_open) and not chunk_end
        if chunk_start or is_whole:
            self._plain = _Stage(_PLAIN)
        stage, self._plain = self._plain, None
        if stage is None:
            raise WeightUpdateError(
                "this plain update is not open here: it never began or was rejected. Send it with chunk_start=True."
            )
        for label, state_dict in state_dicts.items():
            weights = {name: _tensor(value) for name, value in (state_dict or {}).items()}
            stage.tensors.setdefault(label, {}).update(weights)
        for label, settings in lora.items():
            layers = {name: as_layer_lora(value) for name, value in (settings or {}).items()}
            stage.lora.setdefault(label, {}).update(layers)
        if not (chunk_end or is_whole):
            self._plain = stage
            return
        incarnation, version = self._served.newest
        header = dataclasses.replace(_PLAIN, version=version + 1, incarnation=incarnation)
        is_full = fully_update or not (self._allow_partial_plain or any(stage.lora.values()))
        update = self._verified(header, stage.tensors, WeightManifest(chunks=(), is_full=is_full, lora=stage.lora))
        # The sender decides whether the update is full, even if this maker has more modules.
        self._offer(dataclasses.replace(update, is_full=update.is_full or fully_update))

    def _begin(self, header: UpdateHeader) -> None:
        for source, old in list(self._stages.items()):
            if source == header.source or old.header.incarnation < header.incarnation:
                logger.warning("discarded %s, which was never completed", self._stages.pop(source).header)
        self._stages[header.source] = _Stage(header)

    def _read(self, chunk: Chunk, header: UpdateHeader) -> dict[str, Tensor]:
        try:
            return self._reader.read(chunk)
        except (OutOfMemory, AcceleratorFailed) as error:
            raise type(error)(f"chunk {chunk.index} of {header} could not be staged: {error} {_KEPT}") from error
        except Exception as error:
            raise WeightUpdateError(f"chunk {chunk.index} of {header} is unreadable: {error}. {_KEPT}") from error

    def _check_chunks(self, stage: _Stage, manifest: WeightManifest) -> None:
        listed = dict(enumerate(manifest.chunks))
        if missing := listed.keys() - stage.infos.keys():
            raise WeightUpdateError(
                f"{stage.header} is missing {len(missing)} of {len(listed)} chunks (first: {min(missing)}). {_KEPT}"
            )
        for index, info in stage.infos.items():
            if info != listed.get(index):
                raise WeightUpdateError(f"{stage.header}: chunk {index} does not match the manifest. {_KEPT}")
        if sum(len(info.tensors) for info in manifest.chunks) != sum(map(len, stage.tensors.values())):
            raise WeightUpdateError(f"{stage.header} holds a weight twice. {_KEPT}")

    def _verified(
        self, header: UpdateHeader, tensors: Mapping[str, Mapping[str, Tensor]], manifest: WeightManifest
    ) -> VerifiedUpdate:
        """Match all weights to the receiver's own. In a full update, every module that was sent must be complete."""
        sent = {label: weights for label, weights in tensors.items() if weights}
        if not sent:
            raise WeightUpdateError(f"{header} holds no tensors. {_KEPT}")
        if unknown := sent.keys() - self._targets.keys():
            raise WeightUpdateError(
                f"{header} holds weights of the module {min(unknown)!r}, but this maker has "
                f"{', '.join(self._targets)}. {_KEPT}"
            )
        flat: dict[tuple[str, str], Tensor] = {}
        is_complete = sent.keys() == self._targets.keys()
        for label, weights in sent.items():
            target = self._targets[label]
            resolved = target.resolve(weights, manifest.lora.get(label, {}), header)
            missing = target.missing(resolved)
            is_complete = is_complete and not missing
            if missing and manifest.is_full:
                raise WeightUpdateError(
                    f"{header} lacks {len(missing)} weights of the {label} (first: {missing[0]!r}). Update rejected; "
                    "send all weights, or set update_lora_weights to send only adapters."
                )
            flat |= {(label, name): tensor for name, tensor in resolved.items()}
        version, incarnation = header.version, header.incarnation
        return VerifiedUpdate(version=version, incarnation=incarnation, tensors=flat, is_full=is_complete)

    def _offer(self, update: VerifiedUpdate) -> None:
        if not self._served.offer(update):
            logger.warning("dropped weights of version %d: version %d is newer", update.version, self._served.newest[1])
            return
        for label in {label for label, _ in update.tensors}:
            self._targets[label].constructor.adopt()


def _tensor(value: Any) -> Tensor:
    """Convert a weight of a plain call to a CPU tensor; an in-process caller must not change it before the commit."""
    return value.detach().cpu() if isinstance(value, Tensor) else torch.from_numpy(np.asarray(value))


class _Target:
    """One of the receiver's modules, with its label ("actor" or "critic")."""

    def __init__(self, label: str, served: ServedModels) -> None:
        self._label = label
        self._served = served
        tensors = state_tensors(served.modules[label])
        self._specs = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
        tied = tied_names(served.modules[label])  # tied weights are sent once, under any of their names
        self._first_name = {name: tied.get(name, name) for name in tensors}
        self._has_adapters = has_adapters(tensors)
        self.constructor = LoRAConstructor()

    def resolve(
        self, sent: Mapping[str, Tensor], lora: Mapping[str, LayerLoRA], header: UpdateHeader
    ) -> dict[str, Tensor]:
        """Return the sent weights under this module's names, checked; merge adapters if the module has none."""
        if not self._has_adapters:
            newest = self._served.newest_weights(self._label) if has_adapters(sent) else {}
            sent = self.constructor.reconstruct(sent, lora, lambda name: newest.get(self._own_name(name)))
        resolved: dict[str, Tensor] = {}
        for name, tensor in sent.items():
            own = self._own_name(name)
            if fault := self._fault(own, tensor):
                raise WeightUpdateError(f"{header} holds the {self._label} weight {name!r}{fault}. {_OTHER_MODEL}")
            if own in resolved:
                raise WeightUpdateError(
                    f"{header} holds the {self._label} weight {own!r} twice, the second time as {name!r}. "
                    "Update rejected; send each weight once."
                )
            resolved[own] = tensor
        return resolved

    def _own_name(self, name: str) -> str:
        """Return this module's name of a sent weight; the sender's model may be wrapped differently."""
        aliases = (name, f"model.{name}", name.removeprefix("model."), name.removeprefix("module."))
        return next((alias for alias in aliases if alias in self._specs), name)

    def missing(self, names: Iterable[str]) -> list[str]:
        """Return the weights that were sent neither themselves nor under a tied name."""
        sent = {self._first_name[name] for name in names}
        return [name for name, first_name in self._first_name.items() if first_name not in sent]

    def _fault(self, name: str, tensor: Tensor) -> str | None:
        """Return why a tensor does not fit this weight; None if it does."""
        if name not in self._specs:
            return (
                f", which this maker's {self._label} does not have (it has e.g. {next(iter(self._specs), 'nothing')!r})"
            )
        shape, dtype = self._specs[name]
        if tensor.shape != shape:
            return f" with shape {list(tensor.shape)}, but the maker's has shape {list(shape)}"
        # Floats may be rounded to the receiver's dtype; integers must be exact.
        if tensor.dtype != dtype and not (tensor.dtype.is_floating_point and dtype.is_floating_point):
            return f" as {tensor.dtype}, but the maker's is {dtype}"
        return None
