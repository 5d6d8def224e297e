"""Whether more experience can still come: what a trainer asks its makers while it waits for a batch."""

import logging
import time
from collections.abc import Callable, Sequence

from coati.config import Deadlines
from coati.errors import ActorNotFound, DeadlineExceeded, PeerDied, PeerUnavailable, RemoteError
from coati.peers import Peers, PendingCall, wait_all

logger = logging.getLogger(__name__)

_POLL_SECONDS = 2.0
# A maker in one of these states makes nothing more, unless its loop is started again.
_ENDED = frozenset({"finished", "failed", "gone"})


class MakerWatch:
    """Polls the makers every two seconds while a trainer waits.

    One watch lasts for one `fit`, so that a maker that vanished is told from one that has not started yet. A maker's
    state is the one it reports, or "busy" (no answer yet), "unknown" (it cannot be asked), "missing" (never seen) or
    "gone".
    """

    def __init__(
        self,
        names: Sequence[str],
        deadlines: Deadlines,
        *,
        peers: Peers,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._names = tuple(names)
        self._deadlines = deadlines
        self._peers = peers
        self._clock = clock
        self._seen = {name for name in self._names if peers.exists(name)}
        self._states: dict[str, str] = {}
        self._last_poll = float("-inf")
        self._ended_since: float | None = None
        self.begin_wait()

    def begin_wait(self) -> None:
        """Begin a new wait for a batch; earlier waits do not count against the start deadline."""
        self._incomplete_since: float | None = None
        self._next_message = self._deadlines.message_seconds

    def all_finished(self) -> bool:
        """Whether every maker has been finished for the grace time.

        Raises PeerDied if all died or failed; ActorNotFound if none works and some never appeared.
        """
        now = self._clock()
        if now - self._last_poll >= _POLL_SECONDS:
            self._last_poll = now
            self._update(now)
        if self._ended_since is None or now - self._ended_since < self._deadlines.grace_seconds:
            return False
        if "finished" not in self._states.values():
            raise PeerDied(f"no maker is left ({self.describe()}), so no experience will come. See their logs.")
        return True

    def describe(self) -> str:
        """List each maker's state, for messages."""
        return ", ".join(f"{name} is {state}" for name, state in self._states.items()) or "none are named"

    def log_wait(self, waited: float) -> None:
        """Log every `message_seconds` what is waited for."""
        if waited >= self._next_message:
            self._next_message += self._deadlines.message_seconds
            logger.info("fit waits for experience, %.0f s so far; makers: %s", waited, self.describe())

    def _update(self, now: float) -> None:
        self._states = self._poll()
        self._seen |= {name for name, state in self._states.items() if state != "missing"}
        states = set(self._states.values())
        if states == {"gone"}:
            raise PeerDied(f"every maker died ({self.describe()}), so no experience will come. See their logs.")
        has_ended = bool(states) and states <= _ENDED
        self._ended_since = _since(self._ended_since, now) if has_ended else None
        is_incomplete = "missing" in states and states <= _ENDED | {"missing"}
        self._incomplete_since = _since(self._incomplete_since, now) if is_incomplete else None
        if self._incomplete_since is not None and now - self._incomplete_since >= self._deadlines.start_seconds:
            late = [name for name, state in self._states.items() if state == "missing"]
            raise ActorNotFound(
                f"no maker actor named {' or '.join(map(repr, late))} appeared within "
                f"{self._deadlines.start_seconds:g} s ({self.describe()}). Create it with .options(name=…) in the "
                "same Ray namespace, or correct experience_maker_holder_name_list."
            )

    def _poll(self) -> dict[str, str]:
        """Ask all makers at once; return their states in the order of their names."""
        states = dict.fromkeys(self._names, "unknown")
        calls: dict[str, PendingCall] = {}
        for name in self._names:
            peer = self._peers.find_now(name)
            if peer is None:  # a dead actor loses its name; one that was never seen may still be created
                states[name] = "gone" if name in self._seen else "missing"
            elif peer.has("progress"):  # a maker that users write may not tell
                calls[name] = peer.call("progress")
        wait_all(calls.values(), _POLL_SECONDS)
        for name, call in calls.items():
            try:
                states[name] = str(call.result(0).state)
            except (DeadlineExceeded, PeerUnavailable):
                states[name] = "busy"  # it loads its models, or its connection is broken for now
            except PeerDied:
                states[name] = "gone"
                self._peers.forget(name)  # another may take its name
            except (RemoteError, AttributeError):
                states[name] = "unknown"
        return states


def _since(earlier: float | None, now: float) -> float:
    return now if earlier is None else earlier
