"""The makers that a sender updates, and the calls of one update to them.

Two questions are answered for each maker: does the next update have to bring it all weights (`_Maker.behind`), and may
the sender go on without its answer (`_Maker.late`, `_Maker.is_abandoned`)?
"""

import dataclasses
import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

from coati.config import Deadlines
from coati.errors import DeadlineExceeded, PeerDied, PeerUnavailable, RemoteError, WeightUpdateError
from coati.peers import Peer, Peers, remote_error
from coati.weights.message import Chunk

logger = logging.getLogger(__name__)

_SLICE_SECONDS = 0.5


@dataclasses.dataclass(eq=False)
class _Maker:
    """What a sender knows of a maker."""

    behind: str | None = None
    """Why it needs all weights; None if it has them."""
    late: "Future[Any] | None" = None
    """A call that was waited for in vain. It is not called again before it has answered this one."""
    is_abandoned: bool = False
    """It is not waited for, in the calls that are under way or in the next ones."""


class Recipients:
    """Makers by name.

    An update does not depend on any single maker: one that died, is late or cannot be reached misses it, and gets all
    weights with the next one that it can take. So does a maker that joins.
    """

    def __init__(self, peers: Peers, names: Sequence[str], deadlines: Deadlines) -> None:
        self.peers = peers
        self.update_seconds = deadlines.update_seconds
        self._start_seconds = deadlines.start_seconds  # how long makers may take to appear; 0 when all have
        self._makers = {name: _Maker() for name in names}

    @property
    def need_all(self) -> bool:
        """Whether makers that can be called now need all weights."""
        makers = list(self._makers.items())  # another thread may change it
        return any(maker.behind is not None and self._find(name, maker) is not None for name, maker in makers)

    def change(self, names: Sequence[str]) -> None:
        """Take another list, from the next update on; must not be called during one."""
        before = self._makers
        for name in before.keys() - set(names):
            self.peers.forget(name)
        self._makers = {name: before.get(name) or _Maker(behind="it joined") for name in names}

    def abandon(self, name: str) -> None:
        """Do not wait for a maker that does not respond, in the update that is under way or in the next."""
        if (maker := self._makers.get(name)) is not None:
            maker.is_abandoned = True

    def calls(self, *, only_behind: bool = False) -> "UpdateCalls":
        """Calls to all makers that can be called now, or to those of them that need all weights.

        Those that a run begins with are waited for once, or ActorNotFound.
        """
        found: dict[str, Peer] = {}
        for name, maker in self._makers.items():
            if only_behind and maker.behind is None:
                continue
            if self._start_seconds and maker.behind is None:
                found[name] = self.peers.find(name, role="maker", timeout=self._start_seconds)
            elif (peer := self._find(name, maker)) is not None:
                found[name] = peer
            else:
                maker.behind = maker.behind or "it could not be called"
        if not only_behind:
            self._start_seconds = 0.0
        return UpdateCalls(found, self._makers, seconds=self.update_seconds)

    def all_can_open(self, probe: Chunk) -> bool:
        """Whether all makers that answer can read the sender's memory; False without any. Logs why one cannot."""
        calls = self.calls()
        calls.send("sharing_fault", probe)
        calls.wait()
        faults = dict(calls.answers)
        for name, error in calls.failed.items():
            if isinstance(error, RemoteError):
                faults[name] = str(error)
            else:  # it will miss the update too
                logger.warning("maker %s could not be asked whether it can share memory: %s", name, error)
        for name, fault in faults.items():
            if fault is not None:
                logger.warning("sending weights by value, because of maker %s: %s", name, fault)
        return bool(faults) and all(fault is None for fault in faults.values())

    def note(self, calls: "UpdateCalls", version: int, *, is_full: bool) -> None:
        """Keep what came of an update.

        Raises WeightUpdateError if a maker that had all weights rejected it.
        """
        rejected = []
        for name in calls.peers:
            maker, error = self._makers[name], calls.failed.get(name)
            if error is None:
                maker.behind = None if is_full else maker.behind
                continue
            reason = str(error.cause if isinstance(error, RemoteError) else error).strip()
            if isinstance(error, PeerDied):
                self.peers.forget(name)  # another may take its name
            if isinstance(error, RemoteError) and maker.behind is None:
                rejected.append(f"maker {name}: {reason}")
            else:
                logger.error("maker %s missed the weights of version %d: %s", name, version, reason)
            maker.behind = reason
        if rejected:
            raise WeightUpdateError(f"weights of version {version} were rejected. {'; '.join(rejected)}")

    def _find(self, name: str, maker: _Maker) -> Peer | None:
        """A maker that can be called now: it exists, and has answered everything."""
        is_late = (call := maker.late) is not None and not call.done()  # another thread may set it
        return None if is_late else self.peers.find_now(name)


class UpdateCalls:
    """The calls of one update to its makers, and what became of them."""

    def __init__(self, peers: Mapping[str, Peer], makers: Mapping[str, _Maker], *, seconds: float) -> None:
        self.peers = dict(peers)
        self.answers: dict[str, Any] = {}
        """The last answers of those that answered."""
        self.failed: dict[str, PeerDied | PeerUnavailable | RemoteError | DeadlineExceeded] = {}
        self._makers = makers
        self._abandoned = {name for name in peers if self._is_abandoned(name)}
        self._seconds = seconds
        self._end = time.monotonic() + seconds
        self._calls: dict[Future[Any], str] = {}

    @property
    def healthy(self) -> list[str]:
        """Makers that have not failed so far; the others cannot complete the update."""
        return [name for name in self.peers if name not in self.failed]

    def send(self, method: str, *args: Any, **kwargs: Any) -> None:
        """Call a method of all healthy makers."""
        for name in self.healthy:
            try:
                self._calls[self.peers[name].call(method, *args, **kwargs)] = name
            except (AttributeError, TypeError) as error:  # Ray compares the call with the actor's class
                self.failed[name] = remote_error(name, error)

    def wait(self, *, until_in_flight: int = 0) -> None:
        """Wait for answers until at most so many calls are open. Makers that are late or abandoned are left out."""
        while len(self._calls) > until_in_flight:
            left = self._end - time.monotonic()
            done = wait(self._calls, max(0.0, min(_SLICE_SECONDS, left)), FIRST_COMPLETED).done
            for call in [call for call in self._calls if call in done]:  # the first error of a maker counts
                name = self._calls.pop(call)
                try:
                    self.answers[name] = call.result(0.0)
                except RemoteError as error:
                    self.failed.setdefault(name, error)
                except (PeerDied, PeerUnavailable) as error:
                    self.failed[name] = error  # even if it has rejected the update: it may lack what was lost
            self._abandoned |= {name for name in self._calls.values() if self._is_abandoned(name)}
            for call, name in list(self._calls.items()):
                if left <= 0 or name in self._abandoned:
                    reason = f"it did not answer within {self._seconds:g} s" if left <= 0 else "it does not respond"
                    self.failed.setdefault(name, DeadlineExceeded(reason))
                    self._makers[name].late = call
                    del self._calls[call]

    def _is_abandoned(self, name: str) -> bool:
        """Whether a maker was abandoned; it is left out here, and has another chance in the next update."""
        if not self._makers[name].is_abandoned:
            return False
        self._makers[name].is_abandoned = False
        return True
