"""The items of one delivery, packed for the way: field by field, and not a dozen small tensors for each sample."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coati.experience_buffer.utils import BufferItem
from coati.experience_maker.base import EXPERIENCE_FIELDS, PER_SAMPLE_FIELDS, PER_TOKEN_FIELDS
from coati.wire import WireTensor, decode, encode


class _Packed(NamedTuple):
    fields: dict[str, WireTensor]  # all samples of one field, one after the other
    num_tokens: list[int]
    num_actions: list[int]
    delivery_ids: list[tuple[str, int] | None]
    round_indexes: list[int | None]


class ItemParcel(list[BufferItem]):
    """A list of items that pickles quickly. Whoever receives it gets a plain list of items.

    Items that differ in what they say of a sample, or that do not fit together, are pickled one by one: the receiver
    checks them and names what is wrong.

    >>> import pickle
    >>> pickle.loads(pickle.dumps(ItemParcel()))
    []
    """

    def __reduce__(self) -> tuple[Callable[..., list[BufferItem]], tuple[Any, ...]]:
        packed = _pack(self)
        return (list, (list(self),)) if packed is None else (_unpack, (packed,))


def _pack(items: Sequence[BufferItem]) -> _Packed | None:
    """All items as a few arrays; None if they are not alike."""
    if not items or not all(isinstance(item, BufferItem) for item in items):
        return None
    if not all(_is_sample(item) for item in items):
        return None
    num_tokens = [item.sequences.shape[0] for item in items]
    num_actions = [item.num_actions for item in items]
    fields = {}
    for name in EXPERIENCE_FIELDS:
        parts = [getattr(item, name) for item in items]
        if all(part is None for part in parts):
            continue
        sizes = None
        if name not in PER_SAMPLE_FIELDS:
            sizes = num_tokens if name in PER_TOKEN_FIELDS else num_actions
        if not _are_alike(parts, sizes):
            return None
        fields[name] = encode(torch.stack(parts) if sizes is None else torch.cat(parts))
    ids = [item.delivery_id for item in items]
    return _Packed(fields, num_tokens, num_actions, ids, [item.round_index for item in items])


def _is_sample(item: BufferItem) -> bool:
    """Whether it says how long its prompt and its response are."""
    return all(isinstance(part, Tensor) and part.ndim == 1 for part in (item.sequences, item.action_log_probs))


def _are_alike(parts: list[Any], sizes: list[int] | None) -> bool:
    """Whether these can be joined and taken apart again: of one dtype and device, and as long as they should be."""
    if not all(isinstance(part, Tensor) for part in parts):
        return False
    if len({(part.dtype, part.device) for part in parts}) > 1:
        return False
    if sizes is None:
        return all(part.ndim == 0 for part in parts)
    return all(part.ndim == 1 and part.shape[0] == size for part, size in zip(parts, sizes, strict=True))


def _unpack(packed: _Packed) -> list[BufferItem]:
    """The items again; those of one parcel share memory, each its own part of it."""
    fields: dict[str, Sequence[Any]] = {}
    count = len(packed.num_tokens)
    for name in EXPERIENCE_FIELDS:
        if name not in packed.fields:
            fields[name] = [None] * count
            continue
        joined = decode(packed.fields[name], copy=True)  # arrays from the object store are read-only
        if name in PER_SAMPLE_FIELDS:
            fields[name] = joined.unbind(0)
        else:
            sizes = packed.num_tokens if name in PER_TOKEN_FIELDS else packed.num_actions
            fields[name] = joined.split_with_sizes(sizes)
    columns = [fields[name] for name in EXPERIENCE_FIELDS]
    items = []
    for *values, delivery_id, round_index in zip(*columns, packed.delivery_ids, packed.round_indexes, strict=True):
        said: dict[str, Any] = dict(zip(EXPERIENCE_FIELDS, values, strict=True))
        items.append(BufferItem(**said, delivery_id=delivery_id, round_index=round_index))
    return items
