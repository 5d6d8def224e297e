"""Weight senders and receivers in one process, and hand-made updates.

maker = Maker(models)
sender = make_sender(models, ThreadPeers(maker=maker), ["maker"])
deliver(messages_of(models), maker)
"""

import dataclasses
import uuid
from typing import NamedTuple

import torch
from thread_peers import ThreadPeers

from coati.config import Deadlines, TopologySettings
from coati.models.lora import LoRAConstructor
from coati.models.memory import iter_state_chunks
from coati.monitor.timeline import Timeline
from coati.weights.message import Chunk, UpdateHeader, WeightManifest, WeightMessage, checksum_of
from coati.weights.message import value_chunk as made_by_value
from coati.weights.receiver import WeightReceiver
from coati.weights.sender import Recipients, WeightSender
from coati.weights.served import ServedModels


class Maker:
    """The part of a maker that a weight sender calls."""

    def __init__(self, models, *, name="this maker", **options):
        self.models = models
        self.served = ServedModels(models, name=name)
        self.receiver = WeightReceiver(self.served, **options)

    @property
    def open_updates(self):
        """Ids of the updates in progress."""
        return tuple(stage.header.update_id for stage in self.receiver._stages.values())

    def update_experience_maker(self, *, message):
        self.receiver.receive(message)

    def sharing_fault(self, probe):
        return self.receiver.sharing_fault(probe)


class PlainStrategy:
    """A single CPU rank with whole models."""

    world_size, device, compute_dtype = 1, torch.device("cpu"), None

    def unwrap_model(self, model):
        return model

    def any_rank(self, condition):
        return condition

    def get_model_state_dict_shard(self, model, *, shard_size=64, dtype=None, names=None):
        for chunk in iter_state_chunks(model, max_bytes=int(shard_size * 2**20), names=names):
            yield {name: t.to(dtype) if dtype and t.is_floating_point() else t for name, t in chunk.items()}


def make_sender(models, peers, names, *, strategy=None, seconds=60.0, timeline=None, chunk_mib=64 / 2**20, **options):
    """Create a sender, by default with chunks of 64 bytes."""
    recipients = Recipients(peers, names, Deadlines(start_seconds=seconds, update_seconds=seconds))
    settings = TopologySettings(chunk_mib=chunk_mib)
    timeline = timeline or Timeline()
    return WeightSender(models, strategy or PlainStrategy(), recipients, settings, timeline=timeline, **options)


class Sent(NamedTuple):
    """All messages of one update."""

    header: UpdateHeader
    chunks: list[Chunk]
    manifest: WeightManifest

    def start(self):
        return WeightMessage(header=self.header, is_start=True)

    def part(self, *chunks, **options):
        return WeightMessage(header=self.header, chunks=chunks, **options)

    def end(self, **options):
        return WeightMessage(header=self.header, manifest=self.manifest, **options)

    @property
    def nbytes(self):
        return sum(chunk.info.nbytes for chunk in self.chunks)

    def listing(self, *chunks):
        """Return the update with other chunks, numbered and hashed correctly, and a matching manifest."""
        numbered = [hashed(dataclasses.replace(chunk, index=index)) for index, chunk in enumerate(chunks)]
        manifest = dataclasses.replace(self.manifest, chunks=tuple(chunk.info for chunk in numbered))
        return self._replace(chunks=numbered, manifest=manifest)


def header_of(version=1, source="trainer 0", **options):
    """Create a header with a unique id."""
    return UpdateHeader(**{"update_id": uuid.uuid4().hex, "version": version, "source": source} | options)


def hashed(chunk):
    """Return a chunk by value with the checksum of its bytes."""
    info = dataclasses.replace(chunk.info, checksum=checksum_of(chunk.info, torch.from_numpy(chunk.data.copy())))
    return dataclasses.replace(chunk, info=info)


def value_chunk(module, tensors, index=0):
    """Create a chunk by value, with its checksum."""
    return made_by_value(index, module, tensors)


def trainable(model):
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def state_of(models, *, max_bytes=64, is_full=True):
    """Yield copies of the weights in chunks; without `is_full`, only of the trainable ones."""
    for label, model in models.items():
        for tensors in iter_state_chunks(model, max_bytes=max_bytes, names=None if is_full else trainable(model)):
            yield label, {name: tensor.clone() for name, tensor in tensors.items()}


def messages_of(models, *, memory=None, header=None, is_full=True, max_bytes=64):
    """Create all messages of an update, as a sender does."""
    header, make = header or header_of(), made_by_value if memory is None else memory.make_chunk
    states = state_of(models, max_bytes=max_bytes, is_full=is_full)
    chunks = [make(index, *state) for index, state in enumerate(states)]
    manifest = WeightManifest(
        chunks=tuple(chunk.info for chunk in chunks),
        is_full=is_full,
        lora={label: LoRAConstructor.extract_lora_config(model) for label, model in models.items()},
    )
    return Sent(header, chunks, manifest)


def deliver(sent, *makers):
    """Send an update to makers, message by message."""
    for maker in makers:
        for message in (sent.start(), *map(sent.part, sent.chunks), sent.end()):
            maker.update_experience_maker(message=message)


class Noting:
    """A maker that accepts all updates and records their versions."""

    def __init__(self):
        self.updates = []
        self.error = None

    def update_experience_maker(self, *, message):
        if message.is_start:
            self.updates.append(message.header.version)
        if message.manifest is not None and self.error is not None:
            raise self.error


def connect(trainer, **makers):
    """Make a trainer in this process send its weights to these objects; return the peers."""
    peers = ThreadPeers(**makers)
    trainer._sender.recipients = Recipients(peers, list(makers), Deadlines(start_seconds=60.0, update_seconds=60.0))
    return peers
