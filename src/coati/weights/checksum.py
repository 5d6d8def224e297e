"""A fingerprint of tensors on their way."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import xxhash
from torch import Tensor

from coati.wire import WireTensor

T = TypeVar("T")


def checksum(tensors: Mapping[str, WireTensor]) -> int:
    """XXH3 over names, dtypes, shapes and bytes, in the order given: any flipped bit changes it.

    It runs at the speed of memory, six times faster than CRC-32 on our machine, and an update is hashed on both
    sides; it is no protection against a sender with bad intentions.
    """
    digest = xxhash.xxh3_64()
    for name, wire in tensors.items():
        digest.update(f"{name}:{wire.dtype}:{wire.array.shape}".encode())
        flat = np.ascontiguousarray(wire.array).reshape(-1)
        digest.update(flat.view(np.uint8).data)
    return digest.intdigest()


def bytes_checksum(data: Tensor) -> int:
    """XXH3 over a flat uint8 tensor on the CPU."""
    return xxhash.xxh3_64_intdigest(data.numpy().data)


def hashed_ahead(items: Iterable[tuple[T, Callable[[], int]]]) -> Iterator[tuple[T, int]]:
    """Each item with its checksum, which a thread computes while whoever consumes this works on the item before it.

    Hashing takes as long as a copy, and neither it nor a copy holds the interpreter's lock.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="coati-checksum") as hasher:
        waiting: tuple[T, Future[int]] | None = None
        for item, hash_it in items:
            hashing = hasher.submit(hash_it)
            if waiting is not None:
                yield waiting[0], waiting[1].result()
            waiting = (item, hashing)
        if waiting is not None:
            yield waiting[0], waiting[1].result()
