"""The makers that a sender updates, and the calls of one update to them."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from coati.config import Deadlines
from coati.errors import DeadlineExceeded, PeerDied, PeerUnavailable, RemoteError, WeightUpdateError
from coati.peers import Peer, Peers, PendingCall, remote_error, wait_all, wait_any
from coati.weights.message import Chunk, UpdateHeader, WeightMessage

logger = logging.getLogger(__name__)

_SLICE_SECONDS = 0.5


class Recipients:
    """Makers by name.

    An update does not depend on any single maker: one that died, is late or cannot be reached misses it, and gets all
    weights with the next one that it can take. So does a maker that joins. A late one is not called again before it has
    answered: each further update would wait for it too.
    """

    def __init__(self, peers: Peers, names: Sequence[str], deadlines: Deadlines) -> None:
        self.peers = peers
        self.update_seconds = deadlines.update_seconds
        self._start_seconds = deadlines.start_seconds
        self._names = tuple(names)
        self._awaited = set(names)  # makers that a run begins with, and that may not have started yet
        self._behind: dict[str, str] = {}  # makers that need all weights, and why
        self._abandoned: set[str] = set()  # makers that did not respond when they were called last
        self._unanswered: dict[str, PendingCall] = {}  # the last calls of makers that were late

    @property
    def need_all(self) -> bool:
        """Whether makers that can be called now need all weights."""
        return any(self._find(name) is not None for name in list(self._behind))  # another thread may change it

    def change(self, names: Sequence[str]) -> None:
        """Take another list, from the next update on; must not be called during one."""
        for name in set(self._names) - set(names):
            self.peers.forget(name)
            self._behind.pop(name, None)
            self._unanswered.pop(name, None)
            self._awaited.discard(name)
            self._abandoned.discard(name)
        self._behind |= {name: "it joined" for name in names if name not in self._names}
        self._names = tuple(names)

    def abandon(self, name: str) -> None:
        """Wait no longer for a maker, in the update that is under way or in the next, until it has answered a call."""
        self._abandoned.add(name)

    def attempt(self, header: UpdateHeader, *, only_behind: bool = False) -> "Attempt":
        """The calls of one update, to all makers that can be called now, or to those that need all weights."""
        peers = self._found(self._behind if only_behind else self._names)
        return Attempt(header, peers, seconds=self.update_seconds, abandoned=self._abandoned)

    def all_can_open(self, probe: Chunk) -> bool:
        """Whether every maker can read the sender's memory; False without makers. Logs which cannot, and why."""
        calls = {}
        for name, peer in self._found(self._names).items():
            if not peer.has("sharing_fault"):
                logger.warning("sending weights by value: maker %s has no method sharing_fault", name)
                return False
            calls[name] = peer.call("sharing_fault", probe)
        answers = []
        self._await(calls)
        for name, call in calls.items():
            try:
                fault = call.result(0.0)
            except (DeadlineExceeded, PeerDied, PeerUnavailable) as error:
                logger.warning("maker %s could not be asked whether it can share memory: %s", name, error)
                if isinstance(error, DeadlineExceeded):
                    self._unanswered[name] = call
                continue  # it will miss the update too
            except RemoteError as error:
                fault = f"it could not be asked: {error}"
            if fault is not None:
                logger.warning("sending weights by value, because of maker %s: %s", name, fault)
            answers.append(fault is None)
        return any(answers) and all(answers)

    def note(self, attempt: "Attempt", *, is_full: bool) -> None:
        """Keep what came of an update.

        Raises WeightUpdateError if a maker that had all weights rejected it.
        """
        rejected, version = [], attempt.header.version
        for name in attempt.peers:
            error = attempt.failed.get(name)
            if error is None:
                if is_full:
                    self._behind.pop(name, None)
                if name in attempt.abandoned_before:
                    self._abandoned.discard(name)
                continue
            reason = _reason(error)
            if isinstance(error, PeerDied):
                self.peers.forget(name)  # another may take its name
            if isinstance(error, RemoteError) and name not in self._behind:
                rejected.append(f"maker {name}: {reason}")
            else:
                logger.error("maker %s missed the weights of version %d: %s", name, version, reason)
            self._behind[name] = reason
        self._unanswered |= attempt.unanswered
        if rejected:
            raise WeightUpdateError(f"weights of version {version} were rejected. {'; '.join(rejected)}")

    def _await(self, calls: Mapping[str, PendingCall]) -> None:
        """Wait for answers; not for makers that are late or abandoned."""
        end = time.monotonic() + self.update_seconds
        while (left := end - time.monotonic()) > 0:
            waiting = [call for name, call in calls.items() if name not in self._abandoned and not call.done()]
            if not waiting:
                return
            wait_all(waiting, min(_SLICE_SECONDS, left))

    def _find(self, name: str) -> Peer | None:
        """A maker that can be called now: it exists, and has answered everything."""
        if (call := self._unanswered.get(name)) is not None:
            if not call.done():
                return None
            self._unanswered.pop(name, None)
            self._abandoned.discard(name)
        return self.peers.find_now(name)

    def _found(self, names: Sequence[str] | Mapping[str, str]) -> dict[str, Peer]:
        """Makers to call. Those that a run begins with are waited for once, or ActorNotFound."""
        found: dict[str, Peer] = {}
        for name in names:
            if name in self._awaited:
                found[name] = self.peers.find(name, role="maker", timeout=self._start_seconds)
                self._awaited.discard(name)
            elif (peer := self._find(name)) is not None:
                found[name] = peer
            else:
                self._behind.setdefault(name, "it could not be called")
        return found


class Attempt:
    """The calls of one update, and what became of them."""

    def __init__(
        self, header: UpdateHeader, peers: Mapping[str, Peer], *, seconds: float, abandoned: set[str] | None = None
    ) -> None:
        self.header = header
        self.peers = dict(peers)
        self.failed: dict[str, PeerDied | PeerUnavailable | RemoteError | DeadlineExceeded] = {}
        self.unanswered: dict[str, PendingCall] = {}
        """The last calls of makers that were left out because they did not answer."""
        self._abandoned = set() if abandoned is None else abandoned
        self.abandoned_before = frozenset(self._abandoned)
        self._seconds = seconds
        self._end = time.monotonic() + seconds
        self._calls: dict[PendingCall, str] = {}

    @property
    def healthy(self) -> list[str]:
        """Makers that have not failed so far; the others cannot complete the update."""
        return [name for name in self.peers if name not in self.failed]

    @property
    def ended(self) -> list[str]:
        """Makers that do nothing more for this update once all was waited for: they have answered it, or died."""
        late = (PeerUnavailable, DeadlineExceeded)
        return [name for name in self.peers if not isinstance(self.failed.get(name), late)]

    def send(self, *, share: Callable[[Any], Any] = lambda message: message, **fields: Any) -> None:
        """Send a `WeightMessage` with these fields to all healthy makers; `share` stores it once for all of them."""
        if makers := self.healthy:
            message = share(WeightMessage(header=self.header, **fields))
            for name in makers:
                self._call(name, message)

    def wait(self, *, until_in_flight: int = 0) -> None:
        """Wait for answers until at most so many calls are open. Makers that are late or abandoned are left out."""
        while len(self._calls) > until_in_flight:
            left = self._end - time.monotonic()
            for call in wait_any(self._calls, min(_SLICE_SECONDS, left)):
                name = self._calls.pop(call)
                try:
                    call.result(0.0)
                except RemoteError as error:
                    self.failed.setdefault(name, error)
                except (PeerDied, PeerUnavailable) as error:
                    self.failed[name] = error  # even if it has rejected the update: it may lack what was lost
            if left <= 0:
                self._leave_out(set(self._calls.values()), f"it did not answer within {self._seconds:g} s")
            elif gone := self._abandoned.intersection(self._calls.values()):
                self._leave_out(gone, "it does not respond")

    def _call(self, name: str, message: Any) -> None:
        try:
            self._calls[self.peers[name].call("update_experience_maker", message=message)] = name
        except TypeError as error:  # Ray compares the arguments with the actor's class
            self.failed[name] = remote_error(name, error)

    def _leave_out(self, names: set[str], reason: str) -> None:
        for name in names:
            self.failed.setdefault(name, DeadlineExceeded(reason))
        self.unanswered |= {name: call for call, name in self._calls.items() if name in names}
        self._calls = {call: name for call, name in self._calls.items() if name not in names}


def _reason(error: Exception) -> str:
    """Why a maker did not take an update, in its own words where it has some."""
    cause = error.cause if isinstance(error, RemoteError) else error
    if isinstance(cause, TypeError) and "'message'" in str(cause):
        return f"its update_experience_maker must accept message=, a coati.weights.message.WeightMessage ({cause})"
    return str(cause).strip()
