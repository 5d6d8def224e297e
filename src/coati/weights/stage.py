"""Where a weight update waits until it is whole.

Chunks are staged off to the side while the old weights go on serving. `finish` checks names, shapes, dtypes,
count and checksums, and hands out a `VerifiedUpdate`, or raises and forgets the update: a receiver never
holds half of one. Stages are keyed by update id, so two senders cannot interleave into one, and a sender that
dies in the middle leaves nothing locked: its stage is evicted when it begins anew, or after ten minutes without a call.
"""

import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from coati.errors import WeightUpdateError
from coati.models.lora import LayerLoRA, LoRAConstructor, has_adapters
from coati.models.tied_weights import tied_names
from coati.weights.canary import Canary
from coati.weights.checksum import checksum
from coati.weights.lent import LentChunk, TakenChunk
from coati.weights.manifest import UpdateHeader, WeightChunk, WeightManifest
from coati.weights.reader import LentReader
from coati.weights.shared_memory import taken_checksum
from coati.wire import WireTensor, decode, encode

logger = logging.getLogger(__name__)

# A stage that nobody has touched for so long belongs to a sender that died.
MAX_IDLE_SECONDS = 600.0
# The seed's plain calls carry no id; they share this one, and a new start discards what came before it.
PLAIN_UPDATE = "plain"


@dataclasses.dataclass(frozen=True)
class VerifiedUpdate:
    """A whole update, ready to be committed: (module, name) to tensor, under the receiver's own names."""

    update_id: str
    version: int | None  # None: a plain call, which carries no version
    source: str
    tensors: Mapping[tuple[str, str], Tensor]
    is_full: bool  # every weight of every module of the receiver
    adopt: Callable[[], None] = lambda: None  # called on acceptance: base weights in it are W₀ of later adapters
    canary: Canary | None = None  # what the actor must compute afterwards
    lender: str | None = None  # whose memory some of the tensors are in; None: our own

    @property
    def nbytes(self) -> int:
        """Payload in bytes."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())


@dataclasses.dataclass
class _OpenStage:
    version: int | None
    source: str
    last_seen: float
    lender: str | None = None
    chunks: dict[int, WeightChunk | TakenChunk] = dataclasses.field(default_factory=dict)
    unchecked: dict[int, TakenChunk] = dataclasses.field(default_factory=dict)  # left to other receivers
    plain: dict[tuple[str, str], WireTensor] = dataclasses.field(default_factory=dict)


class WeightStage:
    """Collects the chunks of updates for the modules it is given, e.g. {"actor": actor, "critic": critic}."""

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        *,
        newest_weight: Callable[[str, str], Tensor] | None = None,
        let_go: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`newest_weight(module, name)` gives a copy of a weight as it is after all accepted updates.

        It is asked for the base of a LoRA adapter; `ServedModels.newest_weight` answers it safely while others work.
        `let_go(lender)` returns when nobody looks at that lender's memory any more (`ServedModels.let_go`); without
        it, what a sender lends is copied when it comes.
        """
        self._targets = {
            label: _Target(label, module, None if newest_weight is None else functools.partial(newest_weight, label))
            for label, module in modules.items()
        }
        self.device = device_of(modules)
        self._reader = LentReader(self.device)
        self._let_go = let_go
        self._clock = clock
        self._open: dict[str, _OpenStage] = {}

    @property
    def open_updates(self) -> tuple[str, ...]:
        """Ids of the updates that have begun and not ended."""
        return tuple(self._open)

    @property
    def num_mapped(self) -> int:
        """Buffers of senders' memory that are mapped here."""
        return self._reader.num_mapped

    def begin(self, update_id: str, *, version: int | None, source: str, lender: str | None = None) -> None:
        """Open a stage; an unfinished one with the same id is discarded.

        When this returns, nothing here looks at the memory of `lender` any more.
        """
        if self._open.pop(update_id, None) is not None:
            logger.warning("weight update %s from %s began again; what it had staged is discarded", update_id, source)
        now = self._clock()
        for old_id, old in list(self._open.items()):
            # A sender sends one update at a time, so its unfinished one is dead; others may just be slow.
            is_same_memory = lender is not None and old.lender == lender
            if old.source == source or is_same_memory or now - old.last_seen > MAX_IDLE_SECONDS:
                del self._open[old_id]
                logger.warning("weight update %s from %s was never finished; evicted", old_id, old.source)
        if self._let_go is None:
            lender = None
        elif lender is not None:
            self._let_go(lender)
        self._open[update_id] = _OpenStage(version, source, last_seen=now, lender=lender)

    def add_chunk(self, chunk: WeightChunk | LentChunk, *, may_trust: bool = False) -> None:
        """Stage one chunk after checking its bytes. The same chunk twice is the same chunk.

        A chunk without a checksum (verify_updates = "off") is taken as it is, if its manifest lists none either.
        With `may_trust` another receiver that looks at the same memory checks it; `finish` is told whether it did.
        """
        stage = self._stage(chunk.header.update_id, f"chunk {chunk.index} from {chunk.header.source}")
        staged, found = self._taken_in(chunk, stage, may_trust=may_trust)
        stage.unchecked.pop(chunk.index, None)
        if found is not None:
            self._check_bytes(chunk.header, chunk.index, found, chunk.checksum)
        elif chunk.checksum is not None:
            assert isinstance(staged, TakenChunk), "only lent bytes are the same for others"
            stage.unchecked[chunk.index] = staged
        stage.chunks[chunk.index] = staged

    def _check_bytes(self, header: UpdateHeader, index: int, found: int, sent: int | None) -> None:
        if found != sent:
            self.abort(header.update_id)
            raise WeightUpdateError(
                f"chunk {index} of {_described(header)} is corrupt: checksum {found:#018x}, "
                f"sent as {sent or 0:#018x}. Rejected whole; the old weights go on serving."
            )

    def _taken_in(
        self, chunk: WeightChunk | LentChunk, stage: _OpenStage, *, may_trust: bool
    ) -> tuple[WeightChunk | TakenChunk, int | None]:
        """What to stage, and the checksum of the bytes that arrived (None if they came without, or others check)."""
        if isinstance(chunk, WeightChunk):
            return chunk, None if chunk.checksum is None else checksum(chunk.tensors)
        try:
            may_look = stage.lender is not None and chunk.header.lender == stage.lender
            return self._reader.take(chunk, may_look=may_look, may_trust=may_trust)
        except Exception as error:
            self.abort(chunk.header.update_id)
            raise WeightUpdateError(
                f"chunk {chunk.index} of {_described(chunk.header)} could not be read in the sender's memory: {error}. "
                "Rejected whole; the old weights go on serving."
            ) from error

    def add_plain(self, module: str, state_dict: Mapping[str, Any]) -> None:
        """Stage a plain state dict (tensors or arrays), as the seed's calls send it."""
        stage = self._stage(PLAIN_UPDATE, f"a state dict for the {module}")
        for name, value in state_dict.items():
            stage.plain[module, name] = _as_wire(value)

    def finish_plain(
        self, *, allow_partial: bool, lora: Mapping[str, Mapping[str, LayerLoRA]] | None = None
    ) -> VerifiedUpdate:
        """Verify a plain update: it has no manifest, so it must cover the modules it touches."""
        stage = self._stage(PLAIN_UPDATE, "the end of a plain update")
        self.abort(PLAIN_UPDATE)
        tensors = [(module, name, decode(wire)) for (module, name), wire in stage.plain.items()]
        return self._verified(PLAIN_UPDATE, stage, tensors, lora or {}, allow_partial=allow_partial)

    def finish(self, manifest: WeightManifest, *, checked: Collection[int] = ()) -> VerifiedUpdate:
        """Verify an update against its manifest. `checked` chunks were found right by others in the same memory."""
        header = manifest.header
        stage = self._stage(header.update_id, f"the manifest from {header.source}")
        self.abort(header.update_id)
        where = _described(header)
        if header.version != stage.version:
            raise WeightUpdateError(f"{where} began as version {stage.version}. Rejected whole.")
        expected = set(range(len(manifest.chunk_checksums)))
        if missing := expected - stage.chunks.keys():
            raise WeightUpdateError(
                f"{where} is missing {len(missing)} of {len(expected)} chunks (first: {min(missing)}). Rejected whole."
            )
        if extra := stage.chunks.keys() - expected:
            raise WeightUpdateError(f"{where} has {len(extra)} chunks that its manifest does not list. Rejected whole.")
        for index, sent in enumerate(manifest.chunk_checksums):
            if stage.chunks[index].checksum != sent:
                raise WeightUpdateError(f"{where}: chunk {index} is not the one the manifest lists. Rejected whole.")
        for index in stage.unchecked.keys() - set(checked):  # whoever was to check it did not answer for it
            chunk = stage.unchecked[index]
            self._check_bytes(header, index, taken_checksum(chunk), chunk.checksum)
        chunks = [stage.chunks[index] for index in sorted(expected)]
        found = [spec for chunk in chunks for spec in chunk.specs]
        if tuple(found) != manifest.tensors:
            raise WeightUpdateError(f"{where}: its chunks do not hold the tensors its manifest lists. Rejected whole.")
        self._reader.end_update()
        tensors = [(chunk.module, name, tensor) for chunk in chunks for name, tensor in chunk.decoded().items()]
        update = self._verified(header.update_id, stage, tensors, manifest.lora, allow_partial=manifest.is_partial)
        return dataclasses.replace(update, canary=manifest.canary)

    def abort(self, update_id: str) -> None:
        """Forget an update."""
        self._open.pop(update_id, None)

    def _stage(self, update_id: str, what: str) -> _OpenStage:
        stage = self._open.get(update_id)
        if stage is None:
            raise WeightUpdateError(
                f"{what} belongs to weight update {update_id}, which is not open here. It never began, was "
                "rejected, or was evicted by newer updates. Send the update again from its start."
            )
        stage.last_seen = self._clock()
        return stage

    def _verified(
        self,
        update_id: str,
        stage: _OpenStage,
        tensors: Iterable[tuple[str, str, Tensor]],  # module, name as sent, value
        lora: Mapping[str, Mapping[str, LayerLoRA]],
        *,
        allow_partial: bool,
    ) -> VerifiedUpdate:
        resolved: dict[tuple[str, str], Tensor] = {}
        for module, name, tensor in self._without_foreign_adapters(update_id, stage, tensors, lora):
            target = self._targets[module]
            key = (module, target.own_name(name, tensor, stage.source))
            if key in resolved:
                raise WeightUpdateError(
                    f"{stage.source} sent the {module} weight {key[1]!r} twice, the second time as {name!r}. "
                    "Rejected whole; send each weight once."
                )
            resolved[key] = tensor
        if not resolved:
            raise WeightUpdateError(f"weight update {update_id} from {stage.source} holds no tensors. Rejected.")
        missing = {
            module: target.missing([name for owner, name in resolved if owner == module])
            for module, target in self._targets.items()
        }
        if not allow_partial:
            for module in sorted({module for module, _ in resolved}):
                self._targets[module].check_complete(missing[module], stage.source)
        constructors = [self._targets[module].constructor for module in {module for module, _ in resolved}]

        def adopt() -> None:
            for constructor in constructors:
                constructor.adopt()

        is_full = not any(missing.values())
        return VerifiedUpdate(
            update_id, stage.version, stage.source, resolved, is_full=is_full, adopt=adopt, lender=stage.lender
        )

    def _without_foreign_adapters(
        self,
        update_id: str,
        stage: _OpenStage,
        tensors: Iterable[tuple[str, str, Tensor]],
        lora: Mapping[str, Mapping[str, LayerLoRA]],
    ) -> Iterator[tuple[str, str, Tensor]]:
        """Adapters for a module that has none become weights of it: W₀ + scale·B·A, from the same W₀ each time."""
        by_module: dict[str, dict[str, Tensor]] = {}
        for module, name, tensor in tensors:
            if module not in self._targets:
                raise WeightUpdateError(
                    f"weight update {update_id} from {stage.source} is for a module {module!r}; "
                    f"this maker has {', '.join(self._targets)}. Rejected whole."
                )
            sent = by_module.setdefault(module, {})
            if name in sent:
                raise WeightUpdateError(
                    f"{stage.source} sent the {module} weight {name!r} twice. Rejected whole; send each weight once."
                )
            sent[name] = tensor
        for module, sent in by_module.items():
            target = self._targets[module]
            if not target.has_adapters:
                sent = target.constructor.reconstruct(sent, lora.get(module, {}))
            for name, tensor in sent.items():
                yield module, name, tensor


class _Target:
    """Names, shapes and dtypes that a receiving module has."""

    def __init__(self, label: str, module: nn.Module, newest_weight: Callable[[str], Tensor] | None) -> None:
        self._label = label
        state = module.state_dict(keep_vars=True)
        tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
        self._specs = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
        tied = tied_names(module)  # tied weights travel once, under any of their names
        self._first_name = {name: tied.get(name, name) for name in tensors}
        self.has_adapters = has_adapters(tensors)
        self.constructor = LoRAConstructor(_BaseWeights(tensors, newest_weight))

    def own_name(self, name: str, tensor: Tensor, source: str) -> str:
        """The receiver's name for a sent tensor: the same, or with `model.` more or less in front."""
        for candidate in _aliases(name):
            if candidate in self._specs:
                self._check_spec(candidate, tensor, source)
                return candidate
        raise WeightUpdateError(
            f"{source} sent {self._label} weight {name!r}, which this maker's {self._label} does not have "
            f"(it has e.g. {next(iter(self._specs), 'nothing')!r}). Rejected whole; use the same model on "
            "both sides."
        )

    def _check_spec(self, name: str, tensor: Tensor, source: str) -> None:
        shape, dtype = self._specs[name]
        if tensor.shape != shape:
            raise WeightUpdateError(
                f"{source} sent {self._label} weight {name!r} with shape {list(tensor.shape)}, but it is "
                f"{list(shape)} here. Rejected whole; use the same model on both sides."
            )
        # A float may be rounded to the width that the receiver computes in. Integers mean what they say.
        are_floats = tensor.dtype.is_floating_point and dtype.is_floating_point
        if tensor.dtype != dtype and not are_floats:
            raise WeightUpdateError(
                f"{source} sent {self._label} weight {name!r} as {tensor.dtype}, but it is {dtype} here. "
                "Rejected whole; use the same model on both sides."
            )

    def missing(self, names: Iterable[str]) -> list[str]:
        """Weights that were not sent, and no weight that is tied to them either."""
        sent = {self._first_name[name] for name in names}
        return [name for name, first_name in self._first_name.items() if first_name not in sent]

    def check_complete(self, missing: Sequence[str], source: str) -> None:
        """Raise WeightUpdateError if any weight is missing."""
        if missing:
            raise WeightUpdateError(
                f"{source} sent only part of the {self._label}, which lacks {len(missing)} of "
                f"{len(self._specs)} weights (first: {missing[0]!r}). Rejected whole, because half a "
                "model is a wrong model; send all weights, or use update_lora_weights for adapters only."
            )


class _BaseWeights(Mapping[str, Tensor]):
    """The receiver's weights under all names that a sender may call them by, copied when asked for."""

    def __init__(self, tensors: Mapping[str, Tensor], newest_weight: Callable[[str], Tensor] | None) -> None:
        self._tensors = tensors
        self._newest_weight = newest_weight
        self._own_name = {alias: name for name in reversed(list(tensors)) for alias in reversed(_aliases(name))}

    def __getitem__(self, name: str) -> Tensor:
        own = self._own_name[name]
        return self._tensors[own].detach().clone() if self._newest_weight is None else self._newest_weight(own)

    def __contains__(self, name: object) -> bool:
        return name in self._own_name

    def __iter__(self) -> Iterator[str]:
        return iter(self._own_name)

    def __len__(self) -> int:
        return len(self._own_name)


def device_of(modules: Mapping[str, nn.Module]) -> torch.device:
    """Where the modules compute."""
    tensors = (tensor for module in modules.values() for tensor in module.parameters())
    return next((tensor.device for tensor in tensors), torch.device("cpu"))


def _aliases(name: str) -> tuple[str, ...]:
    """Names that a weight may have on the other side, which may or may not have wrapped its model."""
    return (name, f"model.{name}", name.removeprefix("model."), name.removeprefix("module."))


def _described(header: UpdateHeader) -> str:
    return f"weight update {header.update_id} (version {header.version}) from {header.source}"


def _as_wire(value: Any) -> WireTensor:
    if isinstance(value, WireTensor):
        return value
    if isinstance(value, Tensor):
        return encode(value)
    return encode(torch.from_numpy(np.asarray(value)))
