"""Takes weight updates: stages what comes, verifies the whole, and offers it to the models that serve.

Chunks are staged beside the models while the old weights serve. When the manifest comes, names, shapes, dtypes, count
and checksums must fit; anything wrong rejects the whole update. Stages are keyed by update id, so two senders cannot
interleave into one, and a sender that dies in the middle locks nothing: its stage is evicted when it begins its next
update, or after ten minutes without a call.
"""

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coati.errors import WeightUpdateError
from coati.models.lora import LayerLoRA, as_layer_lora
from coati.weights.card_memory import CardHandle, CardReader, card_fault
from coati.weights.host_memory import MemoryHandle, MemoryReader, memory_fault
from coati.weights.message import Chunk, MemoryProbe, UpdateHeader, WeightManifest, WeightMessage
from coati.weights.served import ServedModels, VerifiedUpdate
from coati.weights.targets import Target
from coati.weights.transports import ReadChunk, read_value
from coati.wire import WireTensor, decode

logger = logging.getLogger(__name__)

# A stage without a call for so long belongs to a sender that died.
MAX_IDLE_SECONDS = 600.0
# No run counts this far: a version of one a second for 60 years.
MAX_VERSION = 2**31
_PLAIN_SOURCE = "a plain call"
_KEPT = "Update rejected; the maker keeps its current weights."


@dataclasses.dataclass
class _Stage:
    header: UpdateHeader
    last_seen: float
    chunks: dict[int, ReadChunk] = dataclasses.field(default_factory=dict)
    unchecked: set[int] = dataclasses.field(default_factory=set)  # chunks that other receivers check


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
        self._targets = {label: Target(label, module, served.newest_weight) for label, module in served.modules.items()}
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
                self._add(stage, chunk, is_checked_elsewhere=chunk.index in message.checked_elsewhere)
            if message.manifest is None:
                return
            verified = self._finish(stage, message.manifest, must_check_all=message.must_check_all)
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

    def _add(self, stage: _Stage, chunk: Chunk, *, is_checked_elsewhere: bool) -> None:
        try:
            read = self._read(chunk)
        except Exception as error:
            raise WeightUpdateError(f"chunk {chunk.index} of {stage.header} is unreadable: {error}. {_KEPT}") from error
        stage.unchecked.discard(chunk.index)
        if chunk.info.checksum is not None and is_checked_elsewhere:
            stage.unchecked.add(chunk.index)
        elif chunk.info.checksum is not None:
            _check_bytes(stage, chunk.index, read)
        stage.chunks[chunk.index] = read

    def _read(self, chunk: Chunk) -> ReadChunk:
        if isinstance(chunk.handle, MemoryHandle):
            return self._in_memory.read(chunk)
        return self._on_card.read(chunk) if isinstance(chunk.handle, CardHandle) else read_value(chunk)

    def _finish(self, stage: _Stage, manifest: WeightManifest, *, must_check_all: bool) -> VerifiedUpdate:
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
            if must_check_all and index in stage.unchecked:
                _check_bytes(stage, index, chunk)
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


def _check_bytes(stage: _Stage, index: int, chunk: ReadChunk) -> None:
    if (found := chunk.checksum()) != chunk.info.checksum:
        raise WeightUpdateError(
            f"chunk {index} of {stage.header} is corrupt: checksum {found:#018x}, sent as "
            f"{chunk.info.checksum or 0:#018x}. {_KEPT}"
        )


def _tensor(value: Any) -> Tensor:
    """A weight of a plain call as a CPU tensor; the caller's own memory may change before the commit, Ray's cannot."""
    if isinstance(value, WireTensor):
        return decode(value)
    return value.detach().cpu() if isinstance(value, Tensor) else torch.from_numpy(np.asarray(value))
