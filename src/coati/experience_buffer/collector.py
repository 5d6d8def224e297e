"""Collects single samples into training batches, in the order they came."""

from collections import deque
from collections.abc import Sequence

from coati.errors import ConfigError, DataError
from coati.experience import BufferItem


class BatchCollector:
    """Groups items into batches of `batch_size`; what is left over waits for more, or for `flush`.

    Items are validated before any of them is taken, so a bad one is refused and harms nothing.
    """

    def __init__(self, batch_size: int) -> None:
        if batch_size < 1:
            raise ConfigError(
                f"sample_batch_size must be 1 or more, got {batch_size}. It counts the samples of a batch."
            )
        self.batch_size = batch_size
        self._waiting: deque[BufferItem] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, items: Sequence[BufferItem]) -> list[list[BufferItem]]:
        """Take the items and return the batches that are now full."""
        for item in items:
            if not isinstance(item, BufferItem):
                raise DataError(f"a buffer takes BufferItems, got {type(item).__name__}. Use split_experience_batch.")
            item.validate()
        self._waiting.extend(items)
        full = []
        while len(self._waiting) >= self.batch_size:
            full.append([self._waiting.popleft() for _ in range(self.batch_size)])
        return full

    def flush(self) -> list[BufferItem]:
        """Hand out the items that do not fill a batch: at the end of a run they are trained on, not lost."""
        rest = list(self._waiting)
        self._waiting.clear()
        return rest

    def clear(self) -> int:
        """Drop what is waiting and say how many items that were."""
        return len(self.flush())
