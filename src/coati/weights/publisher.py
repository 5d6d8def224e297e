"""Turns a trainer's weights into messages: header, chunks of bounded size, manifest.

The publisher knows nothing of Ray: it is an iterator, and whoever consumes it sends. It must be consumed
while nobody changes the weights, because a chunk shares memory with the parameters until it is sent.
"""

import dataclasses
import functools
import uuid
from collections.abc import Iterable, Iterator, Mapping

from torch import Tensor

from coati.models.lora import LayerLoRA
from coati.weights.canary import Canary
from coati.weights.checksum import checksum, hashed_ahead
from coati.weights.lent import LentChunk, Snapshots
from coati.weights.manifest import (
    TensorSpec,
    UpdateHeader,
    WeightChunk,
    WeightManifest,
)
from coati.wire import encode


def new_header(
    *, version: int, source: str, max_staleness: int | None = None, snapshots: Snapshots | None = None
) -> UpdateHeader:
    """A header for one update, with an id that no other update has; `snapshots` if its bytes are lent."""
    return UpdateHeader(
        update_id=uuid.uuid4().hex,
        version=version,
        source=source,
        max_staleness=max_staleness,
        lender=None if snapshots is None else snapshots.next_lender(),
    )


def weight_messages(
    header: UpdateHeader,
    shards: Iterable[tuple[str, Mapping[str, Tensor]]],
    *,
    is_partial: bool = False,
    lora: Mapping[str, Mapping[str, LayerLoRA]] | None = None,
    has_checksums: bool = True,
    canary: Canary | None = None,
    snapshots: Snapshots | None = None,
) -> Iterator[WeightChunk | LentChunk | WeightManifest]:
    """Chunks in order, then the manifest. `shards` are (module, state-dict chunk) pairs.

    With `snapshots` the bytes stay in the sender's memory, for receivers that can open it.
    """
    specs: list[TensorSpec] = []
    checksums: list[int | None] = []
    chunks: Iterator[WeightChunk | LentChunk]
    if snapshots is not None:
        chunks = snapshots.chunks(header, shards, has_checksums=has_checksums)
    elif has_checksums:
        unhashed = _host_chunks(header, shards)
        pairs = hashed_ahead((chunk, functools.partial(checksum, chunk.tensors)) for chunk in unhashed)
        chunks = (dataclasses.replace(chunk, checksum=digest) for chunk, digest in pairs)
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
