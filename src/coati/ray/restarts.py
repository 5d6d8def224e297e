"""How often actors that died are started again, and when."""

import time
from collections import Counter
from collections.abc import Callable

from coati.counting import counted
from coati.errors import PeerDied

_FIRST_BACKOFF_SECONDS = 0.5
_MAX_BACKOFF_SECONDS = 30.0
# An actor that lives longer than this after its restart has recovered.
_RECOVERED_SECONDS = 60.0


class Restarts:
    """The budget of a run: deaths of one actor in a row are followed by longer and longer waits, and after the last
    restart that is allowed a death ends the run."""

    def __init__(self, limit: int, *, remedy: str = "", clock: Callable[[], float] = time.monotonic) -> None:
        """`remedy` ends the message of the death that is one too many."""
        self._limit = limit
        self._remedy = remedy
        self._clock = clock
        self._last: dict[str, tuple[float, float]] = {}  # by name: when it was to be started again, after how long
        self.counts: Counter[str] = Counter(makers=0, trainers=0)

    def take(self, kind: str, name: str, error: Exception) -> float:
        """Count a death of one of the "makers" or "trainers"; return how many seconds to wait before the restart.

        Raises PeerDied if there were too many.
        """
        if self.counts.total() >= self._limit:
            before = f"Actors were started again {counted(self._limit, 'time')} (topology.max_restarts) before."
            raise PeerDied(" ".join(part for part in (f"{name} died: {error}", before, self._remedy) if part))
        self.counts[kind] += 1
        now = self._clock()
        started, waited = self._last.get(name, (float("-inf"), 0.0))
        has_recovered = now - started > _RECOVERED_SECONDS
        seconds = _FIRST_BACKOFF_SECONDS if has_recovered else min(_MAX_BACKOFF_SECONDS, 2 * waited)
        self._last[name] = now + seconds, seconds
        return seconds
