"""Samples on their way from makers to trainers: single items, and the collector that makes batches of them."""

from collections import deque
from collections.abc import Sequence

from coati.errors import ConfigError
from coati.experience import (
    BufferItem,
    Experience,
    check_items,
    make_experience_batch,
    pad_items,
    split_experience_batch,
)

__all__ = ["BatchCollector", "BufferItem", "make_experience_batch", "split_experience_batch"]


class BatchCollector:
    """Groups items into batches of `batch_size`; the rest waits for more items, or for `flush`."""

    def __init__(self, batch_size: int) -> None:
        if batch_size < 1:
            raise ConfigError(
                f"sample_batch_size must be 1 or more, got {batch_size}. It counts the samples of a batch."
            )
        self.batch_size = batch_size
        self._waiting: deque[BufferItem] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, items: Sequence[BufferItem], *, checked: bool = False) -> list[Experience]:
        """Take the items and return the batches that are now full.

        Unless they are `checked`, a malformed item is refused, with all others of the call, before any is taken.
        """
        if not checked:
            check_items(items)
        self._waiting.extend(items)
        full = []
        while len(self._waiting) >= self.batch_size:
            full.append(pad_items([self._waiting.popleft() for _ in range(self.batch_size)]))
        return full

    def flush(self) -> Experience | None:
        """Return the items that do not fill a batch: at the end of a run they are trained on, not lost."""
        rest = list(self._waiting)
        self._waiting.clear()
        return pad_items(rest) if rest else None

    def clear(self) -> None:
        """Drop the items that do not fill a batch."""
        self._waiting.clear()
