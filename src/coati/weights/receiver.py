"""Takes weight updates: stages what comes, verifies the whole, and offers it to the models that serve.

Chunks are staged beside the models while the old weights serve. When the manifest comes, names, shapes, dtypes, count
and checksums must fit; anything wrong rejects the whole update. Stages are keyed by update id, so two senders cannot
interleave into one, and a sender that dies in the middle locks nothing: its stage is evicted at the next update of any
sender after ten minutes without a call. A sender that lives and begins again replaces its own unfinished update.
"""

import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from coati.errors import WeightUpdateError
from coati.models.lora import LayerLoRA, LoRAConstructor, as_layer_lora, has_adapters
from coati.models.memory import state_tensors, tied_names
from coati.weights.card_memory import CardHandle, CardReader, card_fault
from coati.weights.host_memory import MemoryHandle, MemoryReader, memory_fault
from coati.weights.message import Chunk, MemoryProbe, UpdateHeader, WeightManifest, WeightMessage
from coati.weights.served import ServedModels, VerifiedUpdate
from coati.weights.transports import ReadChunk, read_value
from coati.wire import WireTensor, decode

logger = logging.getLogger(__name__)

# A stage without a call for so long belongs to a sender that died.
MAX_IDLE_SECONDS = 600.0
# No run counts this far: a version of one a second for 60 years.
MAX_VERSION = 2**31
_PLAIN_SOURCE = "a plain call"
_KEPT = "Update rejected; the maker keeps its current weights."
_OTHER_MODEL = "Update rejected; use the same model on both sides."


@dataclasses.dataclass
class _Stage:
    header: UpdateHeader
    last_seen: float
    chunks: dict[int, ReadChunk] = dataclasses.field(default_factory=dict)


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
        self._targets = {
            label: _Target(label, module, served.newest_weight) for label, module in served.modules.items()
        }
        parameters = (tensor for module in served.modules.values() for tensor in module.parameters())
        self.device = next((tensor.device for tensor in parameters), torch.device("cpu"))
        self._in_memory = MemoryReader()
        self._on_card = CardReader(self.device)
        self._allow_partial_plain = allow_partial_plain
        self._clock = clock
        self._open: dict[str, _Stage] = {}
        self._plain: _PlainStage | None = None
        self._is_plain_open = False  # between the start and the end of a plain update, rejected or not

    @property
    def open_updates(self) -> tuple[str, ...]:
        """Ids of the updates that have begun and not ended."""
        return tuple(self._open)

    @property
    def num_mapped(self) -> int:
        """Buffers of senders on this host that are mapped here."""
        return self._in_memory.num_open

    def sharing_fault(self, probe: MemoryProbe) -> str | None:
        """Why this receiver cannot read chunks in the sender's memory; None if it can."""
        return memory_fault(probe) if isinstance(probe.handle, MemoryHandle) else card_fault(probe, self.device)

    def receive(self, message: WeightMessage) -> None:
        """Take part of an update, or all of it; commits it when it is whole. WeightUpdateError rejects the update.

        The same chunk may come twice, and chunks in any order.
        """
        header = message.header
        if message.is_start:
            self._begin(header)
        stage = self._open.get(header.update_id)
        if stage is None:
            raise WeightUpdateError(
                f"{header} is not open here: it never began, was rejected, or was evicted by newer updates. Send it "
                "again from its start."
            )
        stage.last_seen = self._clock()
        try:
            if header != stage.header:
                raise WeightUpdateError(f"{header} began as {stage.header}, with other settings. {_KEPT}")
            for chunk in message.chunks:
                self._add(stage, chunk)
            if message.manifest is None:
                return
            verified = self._finish(stage, message.manifest)
        except BaseException:
            self._open.pop(header.update_id, None)
            raise
        del self._open[header.update_id]
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
        is_partial = (self._allow_partial_plain or any(stage.lora.values())) and not fully_update
        update = self._verified("plain", _PLAIN_SOURCE, None, stage.tensors, stage.lora, is_partial=is_partial)
        # What the sender calls a full update is one, even if the maker holds more modules.
        self._served.offer(dataclasses.replace(update, is_full=update.is_full or fully_update))

    def _begin(self, header: UpdateHeader) -> None:
        """Open a stage. When this returns, nothing here reads the memory of `header.lender` any more."""
        self._check_version(header)
        now = self._clock()
        for old_id, old in list(self._open.items()):
            # A sender sends one update at a time, so its unfinished one is dead; other senders may just be slow.
            is_same_memory = header.lender is not None and old.header.lender == header.lender
            is_idle = now - old.last_seen > MAX_IDLE_SECONDS
            if old_id == header.update_id or old.header.source == header.source or is_same_memory or is_idle:
                del self._open[old_id]
                logger.warning("%s was never finished; discarded", old.header)
        if header.lender is not None:
            self._served.release(header.lender)
        self._open[header.update_id] = _Stage(header, last_seen=now)

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
            read = self._read(chunk)
        except Exception as error:
            raise WeightUpdateError(f"chunk {chunk.index} of {stage.header} is unreadable: {error}. {_KEPT}") from error
        if (sent := chunk.info.checksum) is not None and (found := read.checksum()) != sent:
            raise WeightUpdateError(
                f"chunk {chunk.index} of {stage.header} is corrupt: checksum {found:#x}, sent as {sent:#x}. {_KEPT}"
            )
        stage.chunks[chunk.index] = read

    def _read(self, chunk: Chunk) -> ReadChunk:
        if isinstance(chunk.handle, MemoryHandle):
            return self._in_memory.read(chunk)
        return self._on_card.read(chunk) if isinstance(chunk.handle, CardHandle) else read_value(chunk)

    def _finish(self, stage: _Stage, manifest: WeightManifest) -> VerifiedUpdate:
        """Verify an update against its manifest."""
        header, num_listed = stage.header, len(manifest.chunks)
        expected = set(range(num_listed))
        if missing := expected - stage.chunks.keys():
            raise WeightUpdateError(
                f"{header} is missing {len(missing)} of {num_listed} chunks (first: {min(missing)}). {_KEPT}"
            )
        if extra := stage.chunks.keys() - expected:
            raise WeightUpdateError(f"{header} has {len(extra)} chunks that its manifest does not list. {_KEPT}")
        tensors: dict[str, dict[str, Tensor]] = {}
        for index, listed in enumerate(manifest.chunks):
            chunk = stage.chunks[index]
            if chunk.info != listed:
                raise WeightUpdateError(f"{header}: chunk {index} is not the one the manifest lists. {_KEPT}")
            module = tensors.setdefault(listed.module, {})
            if twice := module.keys() & chunk.tensors.keys():
                raise WeightUpdateError(f"{header} has the {listed.module} weight {min(twice)!r} twice. {_KEPT}")
            module.update(chunk.tensors)
        self._in_memory.end_update()
        self._on_card.end_update()
        update = self._verified(
            header.update_id, header.source, header.version, tensors, manifest.lora, is_partial=manifest.is_partial
        )
        return dataclasses.replace(update, canary=manifest.canary, lender=header.lender)

    def _verified(
        self,
        update_id: str,
        source: str,
        version: int | None,
        tensors: Mapping[str, Mapping[str, Tensor]],
        lora: Mapping[str, Mapping[str, LayerLoRA]],
        *,
        is_partial: bool,
    ) -> VerifiedUpdate:
        """Map all weights onto the receiver's own."""
        if not any(tensors.values()):
            raise WeightUpdateError(f"weight update {update_id} from {source} holds no tensors. {_KEPT}")
        if unknown := tensors.keys() - self._targets.keys():
            raise WeightUpdateError(
                f"weight update {update_id} from {source} is for a module {min(unknown)!r}; this maker has "
                f"{', '.join(self._targets)}. {_KEPT}"
            )
        resolved = {
            label: self._targets[label].resolve(sent, lora.get(label, {}), source) for label, sent in tensors.items()
        }
        if not is_partial:
            for label, weights in resolved.items():
                self._targets[label].check_complete(weights, source)
        is_full = not any(target.missing(resolved.get(label, {})) for label, target in self._targets.items())

        def adopt() -> None:
            for label in resolved:
                self._targets[label].constructor.adopt()

        flat = {(label, name): tensor for label, weights in resolved.items() for name, tensor in weights.items()}
        return VerifiedUpdate(update_id, version, source, flat, is_full, adopt=adopt)


def _tensor(value: Any) -> Tensor:
    """A weight of a plain call as a CPU tensor; the caller's own memory may change before the commit, Ray's cannot."""
    if isinstance(value, WireTensor):
        return decode(value)
    return value.detach().cpu() if isinstance(value, Tensor) else torch.from_numpy(np.asarray(value))


class _Target:
    """A module of the receiver, under its label ("actor" or "critic")."""

    def __init__(self, label: str, module: nn.Module, newest_weight: Callable[[str, str], Tensor]) -> None:
        """`newest_weight(label, name)` gives a copy of a weight as it is after all accepted updates."""
        self._label = label
        tensors = state_tensors(module)
        self._specs = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
        tied = tied_names(module)  # tied weights travel once, under any of their names
        self._first_name = {name: tied.get(name, name) for name in tensors}
        self._has_adapters = has_adapters(tensors)
        self.constructor = LoRAConstructor(_BaseWeights(tensors, lambda name: newest_weight(label, name)))

    def resolve(self, sent: Mapping[str, Tensor], lora: Mapping[str, LayerLoRA], source: str) -> dict[str, Tensor]:
        """The sent weights under this module's own names, checked.

        Adapters for a module that has none become weights of it: W₀ + scale·B·A, from the same W₀ each time.
        """
        if not self._has_adapters:
            sent = self.constructor.reconstruct(sent, lora)
        resolved: dict[str, Tensor] = {}
        for name, tensor in sent.items():
            own = self._own_name(name, source)
            self._check_spec(own, tensor, source)
            if own in resolved:
                raise WeightUpdateError(
                    f"{source} sent the {self._label} weight {own!r} twice, the second time as {name!r}. "
                    "Update rejected; send each weight once."
                )
            resolved[own] = tensor
        return resolved

    def missing(self, names: Mapping[str, Tensor]) -> list[str]:
        """Weights that were not sent, and no weight that is tied to them either."""
        sent = {self._first_name[name] for name in names}
        return [name for name, first_name in self._first_name.items() if first_name not in sent]

    def check_complete(self, names: Mapping[str, Tensor], source: str) -> None:
        """Raise WeightUpdateError if any weight is missing."""
        if missing := self.missing(names):
            raise WeightUpdateError(
                f"{source} sent only part of the {self._label}, which lacks {len(missing)} of {len(self._specs)} "
                f"weights (first: {missing[0]!r}). Update rejected; send all weights, or use update_lora_weights for "
                "adapters only."
            )

    def _own_name(self, name: str, source: str) -> str:
        for candidate in _aliases(name):
            if candidate in self._specs:
                return candidate
        raise WeightUpdateError(
            f"{source} sent {self._label} weight {name!r}, which this maker's {self._label} does not have "
            f"(it has e.g. {next(iter(self._specs), 'nothing')!r}). {_OTHER_MODEL}"
        )

    def _check_spec(self, name: str, tensor: Tensor, source: str) -> None:
        shape, dtype = self._specs[name]
        if tensor.shape != shape:
            raise WeightUpdateError(
                f"{source} sent {self._label} weight {name!r} with shape {list(tensor.shape)}, but it is "
                f"{list(shape)} here. {_OTHER_MODEL}"
            )
        # A float may be rounded to the width that the receiver computes in. Integers must be exact.
        are_floats = tensor.dtype.is_floating_point and dtype.is_floating_point
        if tensor.dtype != dtype and not are_floats:
            raise WeightUpdateError(
                f"{source} sent {self._label} weight {name!r} as {tensor.dtype}, but it is {dtype} here. {_OTHER_MODEL}"
            )


class _BaseWeights(Mapping[str, Tensor]):
    """The receiver's weights under all names that a sender may call them by, copied when asked for."""

    def __init__(self, names: Mapping[str, Tensor], newest_weight: Callable[[str], Tensor]) -> None:
        self._newest_weight = newest_weight
        self._own_name = {alias: name for name in reversed(list(names)) for alias in reversed(_aliases(name))}

    def __getitem__(self, name: str) -> Tensor:
        return self._newest_weight(self._own_name[name])

    def __contains__(self, name: object) -> bool:
        return name in self._own_name

    def __iter__(self) -> Iterator[str]:
        return iter(self._own_name)

    def __len__(self) -> int:
        return len(self._own_name)


def _aliases(name: str) -> tuple[str, ...]:
    """Names that a weight may have on the other side, which may or may not have wrapped its model."""
    return (name, f"model.{name}", name.removeprefix("model."), name.removeprefix("module."))
