"""The driver's record of one actor of a run, and the budget and backoff for restarting actors that died."""

import dataclasses
import time
from collections import Counter, deque
from concurrent.futures import Future
from typing import Any

from coati.errors import DeadlineExceeded, PeerDied, RemoteError, counted
from coati.peers import Peer

_FIRST_BACKOFF_SECONDS = 0.5
_MAX_BACKOFF_SECONDS = 30.0
_RECOVERED_SECONDS = 60.0  # the backoff of an actor that lived this long starts over
_WINDOW_SECONDS = 3600.0  # older restarts do not count, because in a run of weeks machines fail occasionally


@dataclasses.dataclass(eq=False)
class RunActor:
    """The driver's record of one actor: its state, its current job, and the calls in flight to it."""

    name: str
    peer: Peer
    state: str = "loading"
    since: float = dataclasses.field(default_factory=lambda: time.monotonic())  # when `state` last changed
    job: "Future[Any] | None" = None  # its running job: a maker's loop, or a trainer's sync, fit or save
    failure: BaseException | None = None  # the error with which its last report failed, such as PeerDied
    has_weights: bool = False  # whether a maker has received its first weights
    num_made: int = 0  # samples that a trainer has received
    report_call: "Future[Any] | None" = None  # the report call in flight
    report_called_at: float = 0.0  # when that call was made
    cursors: tuple[int, int] = 0, 0  # positions up to which its records and spans were read
    is_stalled: bool = False
    _job_call: tuple[Any, ...] = ()  # its method and arguments
    # Calls that the driver does not wait for, by method and by the maker that they are about.
    _commands: "dict[tuple[str, str], tuple[Future[Any], tuple[Any, ...]]]" = dataclasses.field(default_factory=dict)

    def start_job(self, state: str, method: str, *args: Any) -> None:
        """Start a job and enter `state`."""
        self.state, self.since = state, time.monotonic()
        self._job_call = method, *args
        self.restart_job()

    def restart_job(self) -> None:
        """Start the last job again after its connection broke."""
        self.job = self.peer.call(*self._job_call)

    def send_command(self, method: str, *args: Any, about: str = "") -> None:
        """Call an idempotent method without waiting for it; a later call `about` the same subject supersedes it."""
        self._commands[method, about] = self.peer.call(method, *args), args

    def retry_lost_commands(self) -> None:
        """Retry commands whose connection broke, or that a training step kept waiting; raise other exceptions."""
        for (method, about), (call, args) in list(self._commands.items()):
            if not call.done():
                continue
            del self._commands[method, about]
            error = call.exception()
            if isinstance(error, RemoteError) and not isinstance(error.cause, DeadlineExceeded):
                error.cause.add_note(f"raised in {self.name} by {method}")
                raise error.cause from None
            if error is not None and not isinstance(error, PeerDied):
                self.send_command(method, *args, about=about)


class Restarts:
    """The restart budget of a run, `limit` restarts per hour, with exponential backoff for each actor."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._last: dict[str, tuple[float, float]] = {}  # time of the last restart, and the backoff before it
        self._recent: deque[float] = deque()
        self.counts: Counter[str] = Counter(makers=0, trainers=0)

    def count_death(self, kind: str, name: str, error: BaseException) -> float:
        """Count a death of "makers" or "trainers"; return the seconds until the restart. PeerDied if none is left."""
        now = time.monotonic()
        while self._recent and now - self._recent[0] > _WINDOW_SECONDS:
            self._recent.popleft()
        if len(self._recent) >= self._limit:
            raise PeerDied(
                f"{name} died: {error} No restarts left: topology.max_restarts allows "
                f"{counted(self._limit, 'restart')} within an hour. Find the cause in the actors' logs."
            )
        self._recent.append(now)
        self.counts[kind] += 1
        key = name if kind == "makers" else kind  # trainers restart together
        started, waited = self._last.get(key, (float("-inf"), 0.0))
        has_recovered = now - started > _RECOVERED_SECONDS
        seconds = _FIRST_BACKOFF_SECONDS if has_recovered else min(_MAX_BACKOFF_SECONDS, 2 * waited)
        self._last[key] = now + seconds, seconds
        return seconds
