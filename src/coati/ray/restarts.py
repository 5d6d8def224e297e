"""How often actors that died are started again, and when."""

import time
from collections import Counter, deque
from collections.abc import Callable

from coati.counting import counted
from coati.errors import PeerDied

_FIRST_BACKOFF_SECONDS = 0.5
_MAX_BACKOFF_SECONDS = 30.0
# An actor that lives longer than this after its restart has recovered.
_RECOVERED_SECONDS = 60.0
# Restarts that were longer ago do not count towards the limit: machines fail now and then in a run of weeks.
_WINDOW_SECONDS = 3600.0


class TrainerDied(PeerDied):
    """A trainer is gone, and not by its own fault."""

    def __init__(self, name: str, reason: Exception) -> None:
        super().__init__(f"{name} died: {reason}")
        self.name = name
        self.reason = reason


class Restarts:
    """The budget of a run: deaths of one actor in a row are followed by longer and longer waits, and after the last
    restart that is allowed within an hour a death ends the run."""

    def __init__(self, limit: int, *, remedy: str = "", clock: Callable[[], float] = time.monotonic) -> None:
        """`remedy` ends the message of the death that is one too many."""
        self._limit = limit
        self._remedy = remedy
        self._clock = clock
        self._last: dict[str, tuple[float, float]] = {}  # when it was to be started again, after how long
        self._recent: deque[float] = deque()
        self.counts: Counter[str] = Counter(makers=0, trainers=0)

    def take(self, kind: str, name: str, error: Exception) -> float:
        """Count a death of one of the "makers" or "trainers"; return how many seconds to wait before the restart.

        Raises PeerDied if there were too many.
        """
        now = self._clock()
        while self._recent and now - self._recent[0] > _WINDOW_SECONDS:
            self._recent.popleft()
        if len(self._recent) >= self._limit:
            before = f"Actors were started again {counted(self._limit, 'time')} (topology.max_restarts) within an hour."
            raise PeerDied(" ".join(part for part in (f"{name} died: {error}", before, self._remedy) if part))
        self._recent.append(now)
        self.counts[kind] += 1
        key = name if kind == "makers" else kind  # trainers are started again together
        started, waited = self._last.get(key, (float("-inf"), 0.0))
        has_recovered = now - started > _RECOVERED_SECONDS
        seconds = _FIRST_BACKOFF_SECONDS if has_recovered else min(_MAX_BACKOFF_SECONDS, 2 * waited)
        self._last[key] = now + seconds, seconds
        return seconds
