"""What the driver knows of one actor of a run; how often actors that died are started again, and when."""

import dataclasses
import time
from collections import Counter, deque
from concurrent.futures import Future
from typing import Any

from coati.counting import counted
from coati.errors import DeadlineExceeded, PeerDied, RemoteError
from coati.peers import Peer

_FIRST_BACKOFF_SECONDS = 0.5
_MAX_BACKOFF_SECONDS = 30.0
_RECOVERED_SECONDS = 60.0  # after which an actor has recovered from its last death
_WINDOW_SECONDS = 3600.0  # restarts before that do not count: machines fail now and then in a run of weeks


@dataclasses.dataclass(eq=False)
class RunActor:
    """A row of the table: an actor, what it does, and what it was asked and told."""

    name: str
    peer: Peer
    state: str = "loading"
    since: float = dataclasses.field(default_factory=lambda: time.monotonic())  # when it came into its state
    job: "Future[Any] | None" = None  # what it was asked to do last: a maker its loop, a trainer to sync, fit or save
    failure: BaseException | None = None  # that it is gone, or what was raised when it was asked for a report
    has_weights: bool = False  # whether a maker has its first ones
    num_made: int = 0  # samples that a trainer has taken in
    question: "Future[Any] | None" = None  # that for a report, until it is answered
    asked_at: float = 0.0
    cursors: tuple[int, int] = 0, 0  # up to which its records and spans were read
    is_stalled: bool = False
    _job_call: tuple[str, tuple[Any, ...]] = "", ()
    # What it was told without waiting for it, by method and the maker that it is about.
    _orders: "dict[tuple[str, str], tuple[Future[Any], tuple[Any, ...]]]" = dataclasses.field(default_factory=dict)

    def begin(self, state: str, method: str, *args: Any) -> None:
        """Start a job, which brings the actor into a state."""
        self.state, self.since = state, time.monotonic()
        self._job_call = method, args
        self.repeat_job()

    def repeat_job(self) -> None:
        """Start the last job again, whose connection broke."""
        method, args = self._job_call
        self.job = self.peer.call(method, *args)

    def order(self, method: str, *args: Any, about: str = "") -> None:
        """Call a method that may be repeated, and do not wait for it. A later order `about` the same replaces it."""
        self._orders[method, about] = self.peer.call(method, *args), args

    def repeat_lost_orders(self) -> None:
        """Give orders again whose connection broke, or that ran past a deadline: that of a step it waited for."""
        for (method, about), (call, args) in list(self._orders.items()):
            if not call.done():
                continue
            del self._orders[method, about]
            error = call.exception()
            if isinstance(error, RemoteError) and not isinstance(error.cause, DeadlineExceeded):
                error.cause.add_note(f"raised in {self.name} by {method}")
                raise error.cause from None
            if error is not None and not isinstance(error, PeerDied):
                self.order(method, *args, about=about)


class Restarts:
    """The budget of a run: deaths of one actor in a row are followed by longer waits, too many in an hour end it."""

    def __init__(self, limit: int, *, remedy: str = "") -> None:
        """`remedy` ends the message of the death that is one too many."""
        self._limit = limit
        self._remedy = remedy
        self._last: dict[str, tuple[float, float]] = {}  # when it was to be started again, after how long
        self._recent: deque[float] = deque()
        self.counts: Counter[str] = Counter(makers=0, trainers=0)

    def take(self, kind: str, name: str, error: BaseException) -> float:
        """Count a death of the "makers" or "trainers"; return how long to wait, PeerDied if there were too many."""
        now = time.monotonic()
        while self._recent and now - self._recent[0] > _WINDOW_SECONDS:
            self._recent.popleft()
        if len(self._recent) >= self._limit:
            raise PeerDied(
                f"{name} died: {error} Actors were started again {counted(self._limit, 'time')} "
                f"(topology.max_restarts) within an hour. {self._remedy}"
            )
        self._recent.append(now)
        self.counts[kind] += 1
        key = name if kind == "makers" else kind  # trainers are started again together
        started, waited = self._last.get(key, (float("-inf"), 0.0))
        has_recovered = now - started > _RECOVERED_SECONDS
        seconds = _FIRST_BACKOFF_SECONDS if has_recovered else min(_MAX_BACKOFF_SECONDS, 2 * waited)
        self._last[key] = now + seconds, seconds
        return seconds
