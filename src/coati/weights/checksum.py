"""A fingerprint of tensors on their way."""

import zlib
from collections.abc import Mapping

import numpy as np

from coati.wire import WireTensor


def checksum(tensors: Mapping[str, WireTensor]) -> int:
    """CRC-32 over names, dtypes, shapes and bytes, in the order given: any flipped bit changes it."""
    crc = 0
    for name, wire in tensors.items():
        crc = zlib.crc32(f"{name}:{wire.dtype}:{wire.array.shape}".encode(), crc)
        flat = np.ascontiguousarray(wire.array).reshape(-1)
        crc = zlib.crc32(flat.view(np.uint8).data, crc)
    return crc
