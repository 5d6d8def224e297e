"""Records that an actor keeps until the driver fetches them, and what becomes of warnings."""

import contextlib
import copy
import logging
import threading
from collections import Counter, deque
from pathlib import Path
from typing import Any, Final, Generic, NamedTuple, Self, TypeVar

T = TypeVar("T")

READ_KEPT: Final = 256
"""Records that a log still has after they were read: what the reader has may not be on disk yet."""
_NUM_SHOWN: Final = 3  # warnings of one kind


class RecordPage(NamedTuple, Generic[T]):
    """Records from some point on, and the cursor to ask with next time."""

    records: list[T]
    cursor: int


class RecordLog(Generic[T]):
    """A bounded log read by cursor, so that a fetch that was lost can be repeated.

    Who asks for what came after a cursor has the records before it; all but the newest of those are forgotten.
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
            while first_kept < cursor - READ_KEPT:
                self._records.popleft()
                first_kept += 1
            skip = max(0, cursor - first_kept)
            return RecordPage(list(self._records)[skip:], self._num_ever)


class WarningRecorder(logging.Handler):
    """Adds the warnings of this process to its records, for the driver to show."""

    def __init__(self, records: RecordLog[dict[str, Any]]) -> None:
        super().__init__(logging.WARNING)
        self._records = records

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the message, and the place in the code that it comes from."""
        self._records.append({"warning": record.getMessage(), "kind": _kind(record)})


class WarningsFile(logging.Handler):
    """Writes the warnings of a run to a file while it is entered, and shows not all of them.

    Of those that come from one place in the code, the first three are shown, then the 10th, the 100th and so on.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        self._counts: Counter[str] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        """Write a warning down; pass it on to where messages are shown."""
        note = ""
        if record.levelno >= logging.WARNING:
            # Losing a log must not lose a run.
            with contextlib.suppress(OSError), self._path.open("a", encoding="utf-8") as file:
                file.write(self.format(record) + "\n")
            self._counts[_kind(record)] += 1
            count = self._counts[_kind(record)]
            is_due = count <= _NUM_SHOWN or str(count).rstrip("0") == "1"
            if record.levelno == logging.WARNING and not is_due:
                return
            note = f" ({count:,} of this kind so far; {self._path} has all)" if count >= _NUM_SHOWN else ""
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
