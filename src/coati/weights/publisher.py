"""Turns a trainer's weights into messages: header, chunks of bounded size, manifest.

The publisher knows nothing of Ray: it is an iterator, and whoever consumes it sends. It must be consumed
while nobody changes the weights, because a chunk shares memory with the parameters until it is sent.
"""

import uuid
from collections.abc import Iterable, Iterator, Mapping

from torch import Tensor

from coati.models.lora import LayerLoRA
from coati.weights.manifest import (
    TensorSpec,
    UpdateHeader,
    WeightChunk,
    WeightManifest,
    make_chunk,
    specs_of,
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
) -> Iterator[WeightChunk | WeightManifest]:
    """Chunks in order, then the manifest. `shards` are (module, state-dict chunk) pairs."""
    specs: list[TensorSpec] = []
    checksums: list[int] = []
    for module, tensors in shards:
        if not tensors:
            continue
        chunk = make_chunk(header, len(checksums), module, {name: encode(tensor) for name, tensor in tensors.items()})
        specs.extend(specs_of(module, chunk.tensors))
        checksums.append(chunk.checksum)
        yield chunk
    yield WeightManifest(
        header=header,
        tensors=tuple(specs),
        chunk_checksums=tuple(checksums),
        is_partial=is_partial,
        lora=lora or {},
    )
