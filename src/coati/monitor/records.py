"""Records that an actor keeps until the driver fetches them, and logging handlers for warnings."""

import contextlib
import copy
import logging
import threading
from collections import Counter, deque
from pathlib import Path
from typing import Any, Final, Generic, NamedTuple, Self, TypeVar

T = TypeVar("T")

READ_KEPT: Final = 256
"""Number of records that a log keeps after they were read: the reader may not have written them to disk yet."""
_NUM_SHOWN: Final = 3  # first warnings of each kind


class RecordPage(NamedTuple, Generic[T]):
    """Records after a cursor, and the cursor for the next call."""

    records: list[T]
    cursor: int


class RecordLog(Generic[T]):
    """A bounded log that is read by cursor, so that a lost reply can be fetched again. Thread-safe.

    A call with a cursor acknowledges the records before it: all but the newest `READ_KEPT` of them are dropped.
    """

    def __init__(self, capacity: int = 10_000) -> None:
        self._records: deque[T] = deque(maxlen=capacity)
        self._num_appended = 0
        self._lock = threading.Lock()

    def append(self, record: T) -> None:
        """Add a record. A full log drops its oldest one."""
        with self._lock:
            self._records.append(record)
            self._num_appended += 1

    def since(self, cursor: int) -> RecordPage[T]:
        """Return the records after `cursor` that are still kept; all of them if the log was restarted."""
        with self._lock:
            if cursor > self._num_appended:
                cursor = 0
            first_kept = self._num_appended - len(self._records)
            while first_kept < cursor - READ_KEPT:
                self._records.popleft()
                first_kept += 1
            skip = max(0, cursor - first_kept)
            return RecordPage(list(self._records)[skip:], self._num_appended)


class WarningRecorder(logging.Handler):
    """Logging handler that adds this process's warnings to its records, for the driver to show."""

    def __init__(self, records: RecordLog[dict[str, Any]]) -> None:
        super().__init__(logging.WARNING)
        self._records = records

    def emit(self, record: logging.LogRecord) -> None:
        """Record the message, and the place in the code that it comes from."""
        self._records.append({"warning": record.getMessage(), "kind": _kind(record)})


class WarningsFile(logging.Handler):
    """Logging handler and context manager that writes a run's warnings to a file, and limits how many are shown.

    Of the warnings from one place in the code, the first three are shown, then the 10th, the 100th …; errors always.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        self._counts: Counter[str] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        """Write a warning to the file, and show the message if it is due."""
        note = ""
        if record.levelno >= logging.WARNING:
            # Losing a log must not end a run.
            with contextlib.suppress(OSError), self._path.open("a", encoding="utf-8") as file:
                file.write(self.format(record) + "\n")
            self._counts[_kind(record)] += 1
            count = self._counts[_kind(record)]
            is_due = count <= _NUM_SHOWN or str(count).rstrip("0") == "1"
            if record.levelno == logging.WARNING and not is_due:
                return
            note = f" ({count:,} of this kind so far; all are in {self._path})" if count >= _NUM_SHOWN else ""
        shown = copy.copy(record)
        shown.msg, shown.args = record.getMessage() + note, None
        logging.getLogger().callHandlers(shown)

    def __enter__(self) -> Self:
        logger = logging.getLogger("coati")
        logger.addHandler(self)
        logger.propagate = False
        return self

    def __exit__(self, *exc_info: object) -> None:
        logger = logging.getLogger("coati")
        logger.removeHandler(self)
        logger.propagate = True


def _kind(record: logging.LogRecord) -> str:
    return getattr(record, "kind", f"{record.name}:{record.lineno}")
