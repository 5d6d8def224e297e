"""Turns a trainer's weights into messages: header, chunks of bounded size, manifest.

The publisher knows nothing of Ray: it is an iterator, and whoever consumes it sends. It must be consumed
while nobody changes the weights, because a chunk shares memory with the parameters until it is sent.
"""

import dataclasses
import uuid
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

from torch import Tensor

from coati.models.lora import LayerLoRA
from coati.weights.canary import Canary
from coati.weights.checksum import checksum
from coati.weights.device import DeviceChunk, DeviceSnapshots
from coati.weights.manifest import (
    TensorSpec,
    UpdateHeader,
    WeightChunk,
    WeightManifest,
)
from coati.wire import encode


def new_header(*, version: int, source: str, max_staleness: int | None = None) -> UpdateHeader:
    """A header for one update, with an id that no other update has."""
    return UpdateHeader(update_id=uuid.uuid4().hex, version=version, source=source, max_staleness=max_staleness)


def weight_messages(
    header: UpdateHeader,
    shards: Iterable[tuple[str, Mapping[str, Tensor]]],
    *,
    is_partial: bool = False,
    lora: Mapping[str, Mapping[str, LayerLoRA]] | None = None,
    has_checksums: bool = True,
    canary: Canary | None = None,
    snapshots: DeviceSnapshots | None = None,
) -> Iterator[WeightChunk | DeviceChunk | WeightManifest]:
    """Chunks in order, then the manifest. `shards` are (module, state-dict chunk) pairs.

    With `snapshots` the bytes stay on the sender's card, for receivers on the same one.
    """
    specs: list[TensorSpec] = []
    checksums: list[int | None] = []
    chunks: Iterator[WeightChunk | DeviceChunk]
    if snapshots is not None:
        chunks = snapshots.chunks(header, shards, has_checksums=has_checksums)
    elif has_checksums:
        chunks = _hashed_ahead(_host_chunks(header, shards))
    else:
        chunks = _host_chunks(header, shards)
    for chunk in chunks:
        specs.extend(chunk.specs)
        checksums.append(chunk.checksum)
        yield chunk
    yield WeightManifest(
        header=header,
        tensors=tuple(specs),
        chunk_checksums=tuple(checksums),
        is_partial=is_partial,
        lora=lora or {},
        canary=canary,
    )


def _host_chunks(header: UpdateHeader, shards: Iterable[tuple[str, Mapping[str, Tensor]]]) -> Iterator[WeightChunk]:
    """Chunks without checksums."""
    filled = ((module, tensors) for module, tensors in shards if tensors)
    for index, (module, tensors) in enumerate(filled):
        wires = {name: encode(tensor) for name, tensor in tensors.items()}
        yield WeightChunk(header=header, index=index, module=module, tensors=wires, checksum=None)


def _hashed_ahead(chunks: Iterable[WeightChunk]) -> Iterator[WeightChunk]:
    """The chunks with checksums; each is hashed in a thread while whoever consumes this sends the one before it.

    Hashing takes as long as a copy, and neither it nor the copy into the object store holds the interpreter's lock.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="coati-checksum") as hasher:
        waiting: tuple[WeightChunk, Future[int]] | None = None
        for chunk in chunks:
            hashing = hasher.submit(checksum, chunk.tensors)
            if waiting is not None:
                yield _with_checksum(*waiting)
            waiting = (chunk, hashing)
        if waiting is not None:
            yield _with_checksum(*waiting)


def _with_checksum(chunk: WeightChunk, hashing: Future[int]) -> WeightChunk:
    return dataclasses.replace(chunk, checksum=hashing.result())
