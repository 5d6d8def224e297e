"""Whether more experience can still come: what a trainer without leases asks its makers, which have data loaders of
their own. `coati train` uses leases instead: the ledger knows what is still to come."""

import contextlib
import time
from collections.abc import Callable, Sequence

from coati.config import Deadlines
from coati.errors import ActorNotFound, DeadlineExceeded, PeerDied, PeerUnavailable, RemoteError
from coati.peers import Peers, PendingCall, wait_all

_POLL_SECONDS = 2.0
# A maker in one of these states makes nothing more, unless its loop is started again.
_ENDED = frozenset({"finished", "failed", "gone", "not found"})


class MakerWatch:
    """Polls the makers every two seconds while a trainer without leases waits.

    One watch lasts for one `fit`, so that a maker that vanished is told from one that has not started yet. A maker's
    state is the one it reports, or "busy" (no answer yet), "unknown" (it cannot be asked), "gone", "missing" (never
    seen) or, if no batch has come for longer than actors may take to start, "not found".
    """

    def __init__(
        self, names: Sequence[str], deadlines: Deadlines, *, peers: Peers, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._names = tuple(names)
        self._deadlines = deadlines
        self._peers = peers
        self._clock = clock
        self._seen = {name for name in self._names if peers.find_now(name) is not None}
        self._states: dict[str, str] = {}
        self._last_poll = float("-inf")
        self._ended_since: float | None = None
        self.note_batch()

    def note_batch(self) -> None:
        """Note that a batch has come: makers that have not appeared get as long to start as at the beginning."""
        self._waiting_since = self._clock()

    def all_finished(self) -> bool:
        """Whether every maker has ended for the grace time.

        Raises PeerDied if none of them finished, ActorNotFound if one never appeared.
        """
        now = self._clock()
        if now - self._last_poll >= _POLL_SECONDS:
            self._last_poll = now
            self._states = self._poll(now)
            if not self._states or not _ENDED.issuperset(self._states.values()):
                self._ended_since = None
            elif self._ended_since is None:
                self._ended_since = now
        if self._ended_since is None:
            return False
        states = set(self._states.values())
        if "not found" in states:
            raise ActorNotFound(
                f"a maker did not appear within {self._deadlines.start_seconds:g} s, and no other works "
                f"({self.describe()}). Create it with .options(name=…) in the same Ray namespace, or correct "
                "experience_maker_holder_name_list."
            )
        is_over = states == {"gone"} or now - self._ended_since >= self._deadlines.grace_seconds
        if is_over and "finished" not in states:
            raise PeerDied(f"no maker is left ({self.describe()}), so no experience will come. See their logs.")
        return is_over

    def describe(self) -> str:
        """List each maker's state, for messages."""
        return ", ".join(f"{name} is {state}" for name, state in self._states.items()) or "none are named"

    def _poll(self, now: float) -> dict[str, str]:
        """Ask all makers at once; return their states in the order of their names."""
        is_late = now - self._waiting_since >= self._deadlines.start_seconds
        states = dict.fromkeys(self._names, "unknown")
        calls: dict[str, PendingCall] = {}
        for name in self._names:
            peer = self._peers.find_now(name)
            if peer is None:  # a dead actor loses its name; one that was never seen may still be created
                states[name] = "gone" if name in self._seen else "not found" if is_late else "missing"
                continue
            self._seen.add(name)
            with contextlib.suppress(AttributeError):  # a maker that users write may not tell
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
                pass
        return states
