"""The makers that a sender updates: who is there, who joined, who failed; and the calls of one update to them."""

import dataclasses
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from coati.config import Deadlines
from coati.errors import DeadlineExceeded, PeerDied, PeerUnavailable, RemoteError, WeightUpdateError
from coati.peers import Peer, Peers, PendingCall, remote_error, wait_any
from coati.weights.message import Chunk, UpdateHeader, WeightMessage

logger = logging.getLogger(__name__)

# Newcomers have this share of the time that an update may take. The rest is for the others, who wait for them.
NEWCOMER_TIME_SHARE = 0.5


@dataclasses.dataclass
class _Recipient:
    name: str
    is_synced: bool  # has had all weights
    is_on_trial: bool = False  # has joined, and has no work yet
    is_lost: bool = False  # has died
    is_late: bool = False  # a newcomer that did not answer in time
    fault: str | None = None  # why a newcomer did not take the last update

    @property
    def is_newcomer(self) -> bool:
        return not self.is_synced or self.is_on_trial

    @property
    def is_updated(self) -> bool:
        return not self.is_lost and not (self.is_newcomer and self.is_late)


class Recipients:
    """Makers by name.

    Newcomers are makers that joined later and that the run does not depend on yet. If one does not take an update,
    `faults` says why, and the others are updated as if it were not on the list. One that died or was late is sent
    nothing more; any other gets the next update, which has all weights if it never had them.
    """

    def __init__(self, peers: Peers, names: Sequence[str], deadlines: Deadlines) -> None:
        self.peers = peers
        self.update_seconds = deadlines.update_seconds
        self._start_seconds = deadlines.start_seconds
        self._all = {name: _Recipient(name, is_synced=True) for name in names}

    @property
    def has_newcomers(self) -> bool:
        """Whether makers have joined that had no full update yet: the next one must be full."""
        return any(not one.is_synced and one.is_updated for one in self._all.values())

    @property
    def faults(self) -> dict[str, str]:
        """Why newcomers did not take the last update that they were meant to have.

        Kept until they take one, or are off the list.
        """
        return {one.name: one.fault for one in self._all.values() if one.fault is not None}

    def change(self, names: Sequence[str], *, newcomers: Collection[str] = ()) -> None:
        """Take another list, from the next update on; must not be called during one.

        A maker that was not on it is a newcomer until it has taken a full update, and for as long as it is named
        in `newcomers`.
        """
        for name in self._all.keys() - set(names):
            self.peers.forget(name)
        self._all = {name: self._all.get(name) or _Recipient(name, is_synced=False) for name in names}
        for one in self._all.values():
            one.is_on_trial = one.name in newcomers

    def attempt(self, header: UpdateHeader) -> "Attempt":
        """The calls of one update, to all makers that can be called now."""
        newcomers = {one.name for one in self._all.values() if one.is_newcomer}
        return Attempt(header, self._found(), newcomers=newcomers, seconds=self.update_seconds)

    def all_can_open(self, probe: Chunk) -> bool:
        """Whether every maker can read the sender's memory; False without makers. Logs which cannot, and why.

        A newcomer that fails decides nothing.
        """
        answers = [self._can_open(self._all[name], peer, probe) for name, peer in self._found().items()]
        return any(answers) and False not in answers

    def note(self, attempt: "Attempt") -> None:
        """Keep what came of an update.

        A maker that died is left out from now on; one that could not be reached is sent the next update. Raises
        WeightUpdateError if a maker rejected it, PeerDied if none is left.
        """
        rejected, version = [], attempt.header.version
        has_old = any(not one.is_newcomer for one in self._all.values())
        for one in (self._all[name] for name in attempt.peers):
            error = attempt.failed.get(one.name)
            if error is None:
                one.fault, one.is_late = None, False
                one.is_synced = True  # a sender that has newcomers sends all weights
                continue
            reason = _reason(error)
            one.is_lost, one.is_late = isinstance(error, PeerDied), isinstance(error, DeadlineExceeded)
            if one.is_newcomer:
                one.fault = reason
            elif isinstance(error, RemoteError):
                rejected.append(f"maker {one.name}: {reason}")
                continue
            outcome = "died and is sent no more weights" if one.is_lost else f"missed the weights of version {version}"
            logger.error("maker %s %s: %s", one.name, outcome, reason)
        if rejected:
            raise WeightUpdateError(f"weights of version {version} were rejected. {'; '.join(rejected)}")
        if has_old and all(one.is_lost for one in self._all.values()):
            raise PeerDied(f"every maker ({', '.join(self._all)}) is gone; none takes the weights.")

    def _found(self) -> dict[str, Peer]:
        """Makers to call: newcomers that are there, and all others, or ActorNotFound."""
        found: dict[str, Peer] = {}
        for one in self._all.values():
            if one.is_updated and not one.is_newcomer:
                found[one.name] = self.peers.find(one.name, role="maker", timeout=self._start_seconds)
            elif one.is_updated and (peer := self.peers.find_now(one.name)) is not None:
                found[one.name] = peer
            elif one.is_updated:
                one.fault = "no actor has this name"
        return found

    def _can_open(self, one: _Recipient, peer: Peer, probe: Chunk) -> bool | None:
        """None: a newcomer that failed."""
        try:
            if not peer.has("sharing_fault"):
                fault = "it has no method sharing_fault"
            else:
                share = NEWCOMER_TIME_SHARE if one.is_newcomer else 1.0
                fault = peer.call("sharing_fault", probe).result(self.update_seconds * share)
        except (DeadlineExceeded, PeerDied, PeerUnavailable, RemoteError) as error:
            if one.is_newcomer:
                one.fault = str(error)
                one.is_lost, one.is_late = isinstance(error, PeerDied), isinstance(error, DeadlineExceeded)
                return None
            if isinstance(error, DeadlineExceeded):
                raise
            fault = f"it could not be asked: {error}"
        if fault is not None:
            logger.warning("sending weights by value, because of maker %s: %s", one.name, fault)
        return fault is None


class Attempt:
    """The calls of one update, and what became of them."""

    def __init__(
        self, header: UpdateHeader, peers: Mapping[str, Peer], *, newcomers: Collection[str], seconds: float
    ) -> None:
        self.header = header
        self.peers = dict(peers)
        self.failed: dict[str, PeerDied | PeerUnavailable | RemoteError | DeadlineExceeded] = {}
        now = time.monotonic()
        self._ends = {name: now + seconds * (NEWCOMER_TIME_SHARE if name in newcomers else 1.0) for name in peers}
        self._newcomers = newcomers
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
        """Wait for answers until at most so many calls are open. Late newcomers are left out.

        Raises DeadlineExceeded if any other maker is late.
        """
        while len(self._calls) > until_in_flight:
            end = min(self._ends[name] for name in self._calls.values())
            done = wait_any(self._calls, end - time.monotonic())
            for call in done:
                name = self._calls.pop(call)
                try:
                    call.result(0.0)
                except (PeerDied, PeerUnavailable, RemoteError) as error:
                    self.failed.setdefault(name, error)
            if not done:
                self._leave_out_late()

    def _call(self, name: str, message: Any) -> None:
        try:
            self._calls[self.peers[name].call("update_experience_maker", message=message)] = name
        except TypeError as error:  # Ray compares the arguments with the actor's class
            self.failed[name] = remote_error(name, error)

    def _leave_out_late(self) -> None:
        now = time.monotonic()
        late = {name for name in self._calls.values() if now >= self._ends[name]}
        if others := sorted(late.difference(self._newcomers)):
            raise DeadlineExceeded(f"makers {', '.join(others)} did not take a weight update in time.")
        for name in late:
            self.failed[name] = DeadlineExceeded(
                f"it did not take a weight update within {NEWCOMER_TIME_SHARE:.0%} of deadlines.update_seconds, which "
                "newcomers have. Is its machine slower, or further away?"
            )
        self._calls = {call: name for call, name in self._calls.items() if name not in late}


def _reason(error: Exception) -> str:
    """Why a maker did not take an update, in its own words where it has some."""
    cause = error.cause if isinstance(error, RemoteError) else error
    if isinstance(cause, TypeError) and "'message'" in str(cause):
        return f"its update_experience_maker must accept message=, a coati.weights.message.WeightMessage ({cause})"
    return str(cause).strip()
