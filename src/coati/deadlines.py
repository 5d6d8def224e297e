"""How long anybody waits for anything. Every wait of the system takes its deadline from here."""

import dataclasses
from typing import Any

from coati.errors import ConfigError, DeadlineExceeded


@dataclasses.dataclass(frozen=True, kw_only=True)
class Deadlines:
    """Seconds. A wait that runs past its deadline raises an error that says what it waited for."""

    start: float = 300.0
    """For an actor with a given name to exist, and for the first full update of a maker."""

    batch: float = 1800.0
    """For a batch of experience, for room in a buffer, or for new weights, without any progress."""

    update: float = 600.0
    """For all makers to take a weight update."""

    grace: float = 5.0
    """How long all makers must have been finished before the last, partial batch is trained on."""

    message_every: float = 30.0
    """While waiting, say so this often."""

    @property
    def silence(self) -> float:
        """How long a leader may say nothing to its followers: it may wait for prompts, weights and room, one by one."""
        return self.start + 3 * self.batch + self.update

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not value > 0:
                raise ConfigError(f"deadlines.{field.name} must be above 0 seconds, got {value}.")


class TimedLock:
    """A lock taken with a deadline: `with TimedLock(lock, 10.0, "the weights"): …`."""

    def __init__(self, lock: Any, timeout_seconds: float, what: str) -> None:
        self._lock = lock
        self._timeout_seconds = timeout_seconds
        self._what = what

    def __enter__(self) -> None:
        if not self._lock.acquire(timeout=self._timeout_seconds):
            raise DeadlineExceeded(f"waited {self._timeout_seconds:g} s for {self._what}.")

    def __exit__(self, *exc_info: object) -> None:
        self._lock.release()
