"""Records that an actor keeps until the driver fetches them."""

import logging
import threading
from collections import deque
from typing import Any, Generic, NamedTuple, TypeVar

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
        """Return everything appended after `cursor` that is still kept; all of it if the log was restarted."""
        with self._lock:
            if cursor > self._num_ever:
                cursor = 0
            first_kept = self._num_ever - len(self._records)
            skip = max(0, cursor - first_kept)
            return RecordPage(list(self._records)[skip:], self._num_ever)


class WarningRecorder(logging.Handler):
    """Adds the warnings of this process to its records, as `{"warning": text}`, for the driver to show."""

    def __init__(self, records: RecordLog[dict[str, Any]]) -> None:
        super().__init__(logging.WARNING)
        self._records = records

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the message."""
        self._records.append({"warning": record.getMessage()})
