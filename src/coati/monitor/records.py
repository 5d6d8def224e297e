"""Records that an actor keeps until somebody fetches them."""

import threading
from collections import deque
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class RecordPage(NamedTuple, Generic[T]):
    """Records from some point on, and the cursor to ask with next time."""

    records: list[T]
    cursor: int


class RecordLog(Generic[T]):
    """A bounded log read by cursor: fetching is idempotent, so a fetch that was lost can be repeated.

    >>> log = RecordLog()
    >>> log.append({"step": 1})
    >>> log.since(0)
    RecordPage(records=[{'step': 1}], cursor=1)
    """

    def __init__(self, capacity: int = 10_000) -> None:
        self._records: deque[T] = deque(maxlen=capacity)
        self._num_ever = 0
        self._lock = threading.Lock()

    def append(self, record: T) -> None:
        """Keep a record; the oldest goes when the log is full."""
        with self._lock:
            self._records.append(record)
            self._num_ever += 1

    def since(self, cursor: int) -> RecordPage[T]:
        """Everything appended after `cursor` that is still there; all of it if the log began anew."""
        with self._lock:
            if cursor > self._num_ever:  # whoever kept the log was restarted
                cursor = 0
            first_kept = self._num_ever - len(self._records)
            skip = max(0, cursor - first_kept)
            return RecordPage(list(self._records)[skip:], self._num_ever)
