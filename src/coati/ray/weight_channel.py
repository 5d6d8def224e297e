"""Weights over Ray: each chunk is put into the object store once, and all makers get the reference.

Where every maker can open the sender's memory, the card's or the host's, the bytes stay there and only handles travel.
"""

import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayTaskError

from coati.config import Deadlines
from coati.errors import DeadlineExceeded, PeerDied, WeightUpdateError
from coati.ray.peers import NamedPeers, death_reason, original_error
from coati.weights import LentChunk, ShareProbe, Snapshots, UpdateHeader, WeightChunk, WeightManifest

logger = logging.getLogger(__name__)

# Chunks that may be on their way at once; with 64 MiB chunks a quarter of a GiB of the object store.
MAX_CHUNKS_IN_FLIGHT = 4
# Lent chunks are a few hundred bytes each, and a call costs sender and maker about a millisecond of processor time, as
# much as copying 16 MiB. So some travel together; not all, because makers check them while the sender copies on.
LENT_BYTES_PER_CALL = 256 * 2**20
# Newcomers have this share of the time that an update may take. The rest is for the others, who wait for them.
NEWCOMER_TIME_SHARE = 0.5


class WeightChannel:
    """Sends one update to every maker of a list and reports what each of them said.

    Newcomers are makers that joined later and that nobody counts on yet. What goes wrong with one of them is its own
    affair: it misses the update, `faults` says why, and the others are updated as if it were not on the list.
    """

    def __init__(self, maker_names: Sequence[str], *, deadlines: Deadlines) -> None:
        self._peers = NamedPeers(maker_names, role="maker", deadlines=deadlines)
        self._deadlines = deadlines
        self._lost: set[str] = set()
        self._late: set[str] = set()  # newcomers that are sent nothing while they are newcomers
        self._unsynced: set[str] = set()  # joined, and had no full update yet
        self._on_trial: set[str] = set()  # joined, and have no work yet
        self._faults: dict[str, str] = {}

    @property
    def has_newcomers(self) -> bool:
        """Whether makers have joined that had no full update yet: the next one must be full."""
        return bool(self._unsynced - self._lost - self._late)

    @property
    def faults(self) -> dict[str, str]:
        """Why newcomers did not take the last update. Stays until they take one, or are off the list."""
        return dict(self._faults)

    def change_makers(self, maker_names: Sequence[str], *, newcomers: Collection[str] = ()) -> None:
        """Another list, from the next update on; must not be called during one.

        A maker that was not on it is a newcomer until it has taken a full update, and for as long as it is named
        in `newcomers`.
        """
        names = set(maker_names)
        self._unsynced = {name for name in names if name in self._unsynced or name not in self._peers.names}
        self._on_trial = names.intersection(newcomers)
        self._lost &= names
        self._late &= self._on_trial  # whoever has work needs weights to end it, late or not
        self._faults = {name: reason for name, reason in self._faults.items() if name in names}
        self._peers = self._peers.changed_to(maker_names)

    def all_can_open(self, probe: ShareProbe, *, instead: str) -> bool:
        """Whether every maker can read the sender's memory; False without makers.

        Says which cannot, why, and which way weights go `instead`. A newcomer that does not answer is not asked twice.
        """
        asked = {name: self._why_not_shared(name, handle, probe) for name, handle in self._targets().items()}
        reasons = {name: reason for name, reason in asked.items() if reason is not None}
        for name, reason in reasons.items():
            if reason:
                logger.warning("weights go %s, because of maker %s: %s", instead, name, reason)
        return bool(reasons) and not any(reasons.values())

    def _why_not_shared(self, name: str, handle: Any, probe: ShareProbe) -> str | None:
        """Empty if it can; None if it is a newcomer that cannot be asked."""
        ask = getattr(handle, "why_not_shared", None)
        if ask is None:
            return "it takes plain updates only"
        is_newcomer = name in self._newcomers
        seconds = self._deadlines.update_seconds * (NEWCOMER_TIME_SHARE if is_newcomer else 1.0)
        try:
            return str(ray.get(ask.remote(probe), timeout=seconds))
        except GetTimeoutError:
            what = "did not say in time whether it can open the trainer's memory"
            if not is_newcomer:
                raise DeadlineExceeded(f"maker {name} {what}.") from None
            self._late.add(name)
            self._faults[name] = f"it {what} ({seconds:g} s)"
            return None
        except (RayTaskError, RayActorError) as error:
            if is_newcomer and isinstance(error, RayActorError):
                return None  # the update itself will show what it is
            return f"it could not be asked: {death_reason(error)}"

    def send(
        self,
        header: UpdateHeader,
        messages: Iterable[WeightChunk | LentChunk | WeightManifest],
        *,
        fully_update: bool,
        snapshots: Snapshots | None = None,
    ) -> int:
        """Send header, chunks and manifest; returns the bytes when every maker has verified the update.

        The same as `start`, and at once what that returns.
        """
        return self.start(header, messages, fully_update=fully_update, snapshots=snapshots)()

    def start(
        self,
        header: UpdateHeader,
        messages: Iterable[WeightChunk | LentChunk | WeightManifest],
        *,
        fully_update: bool,
        snapshots: Snapshots | None = None,
    ) -> Callable[[], int]:
        """Draw all messages, and send header and chunks; then the weights may change. Returns what does the rest.

        That waits until every maker has verified the update, and returns its bytes. It may be called in another thread;
        until it is done, nothing else may be asked of this channel.

        A maker that died is reported and left out from then on; one that cannot be reached now misses this
        update and is sent the next. An update that any living maker rejects, or that no maker is left to
        take, is an error. A newcomer that is not there, or rejects it, misses it and is sent the next; one that is
        late is left out from then on. With no makers the messages are still drawn, because ranks gather their
        weights together.

        `snapshots` are what the messages are lent from. No chunk is drawn before every maker has said that it looks
        no more at what the first one overwrites, or has failed to.
        """
        targets = self._targets()
        attempt = _Attempt(targets, newcomers=self._newcomers, seconds=self._deadlines.update_seconds)
        attempt.call(update=header, fully_update=fully_update, chunk_start=True)
        if snapshots is not None:
            attempt.wait(until_in_flight=0)
            snapshots.lend_to(attempt.standing)
        checks = _SharedChecks(attempt, is_enough=snapshots is not None and snapshots.is_one_check_enough)
        num_bytes = 0
        lent: list[LentChunk] = []
        manifest: WeightManifest | None = None
        for message in messages:
            if not targets:
                continue
            if isinstance(message, WeightManifest):
                manifest = message
                continue
            num_bytes += message.nbytes
            if isinstance(message, WeightChunk):
                # Put once, so that Ray resolves it in each maker and the sender never copies it again.
                attempt.call(chunk=ray.put(message))
            else:
                lent.append(message)
                if sum(chunk.nbytes for chunk in lent) >= LENT_BYTES_PER_CALL:
                    checks.call(lent)
                    lent = []
            attempt.wait(until_in_flight=MAX_CHUNKS_IN_FLIGHT * len(targets))

        def finish() -> int:
            if manifest is not None:
                rest = checks.settle(lent)
                end = {"manifest": manifest, "fully_update": fully_update, "chunk_end": True}
                attempt.call(chunks=rest, checked=checks.passed(), **end)
            attempt.wait(until_in_flight=0)
            if snapshots is not None and (attempt.unreachable or attempt.late):
                snapshots.retire()  # whoever did not answer may still come to read; the dead do not
            self._judge(header, attempt)
            if fully_update:
                self._unsynced -= set(attempt.standing)
            return num_bytes

        return finish

    @property
    def _newcomers(self) -> set[str]:
        return self._unsynced | self._on_trial

    def _targets(self) -> dict[str, Any]:
        """Handles of the makers to talk to: of newcomers those that are there, of the others all, or ActorNotFound."""
        found = {}
        for name in self._peers.names:
            if name in self._lost or name in self._late:
                continue
            if name not in self._newcomers:
                found[name] = self._peers.handle(name)
            elif (handle := self._peers.handle_if_there(name)) is not None:
                found[name] = handle
            else:
                self._faults[name] = "no actor has this name"
        return found

    def _judge(self, header: UpdateHeader, attempt: "_Attempt") -> None:
        newcomers = self._newcomers
        self._lost |= attempt.dead.keys()
        self._late |= attempt.late.keys()
        for name, reason in attempt.dead.items():
            logger.error("maker %s is gone and gets no more weights: %s", name, reason)
        missed = {name: reason for name, reason in attempt.rejected.items() if name in newcomers}
        for name, reason in {**attempt.unreachable, **attempt.late, **missed}.items():
            logger.error("maker %s missed the weights of version %d: %s", name, header.version, reason)
        failed = {**attempt.dead, **attempt.unreachable, **attempt.late, **missed}
        faults = {name: reason for name, reason in self._faults.items() if name not in attempt.standing}
        self._faults = faults | {name: reason for name, reason in failed.items() if name in newcomers}
        rejected = [f"maker {name}: {why}" for name, why in attempt.rejected.items() if name not in missed]
        if rejected:
            raise WeightUpdateError(f"weights of version {header.version} were rejected. {'; '.join(rejected)}")
        has_counted_on_some = any(name not in newcomers for name in self._peers.names)
        if has_counted_on_some and self._lost.issuperset(self._peers.names):
            raise PeerDied(f"every maker ({', '.join(self._peers.names)}) is gone; nobody takes the weights.")


class _SharedChecks:
    """Which maker checks which chunk, where all of them look at the same bytes: each chunk once, in turn."""

    def __init__(self, attempt: "_Attempt", *, is_enough: bool) -> None:
        self._attempt = attempt
        self._is_enough = is_enough
        self._checker: dict[int, str] = {}

    @property
    def _is_shared(self) -> bool:
        return self._is_enough and len(self._attempt.standing) > 1

    def call(self, chunks: Sequence[LentChunk]) -> None:
        """Send chunks to every maker, and tell each which of them others check."""
        makers = self._attempt.standing
        if not self._is_shared:
            self._attempt.call(chunks=chunks)
            return
        checkers = {chunk.index: makers[chunk.index % len(makers)] for chunk in chunks}
        self._checker |= checkers
        for name in makers:
            others = frozenset(index for index, checker in checkers.items() if checker != name)
            self._attempt.call_one(name, chunks=chunks, others_check=others)

    def settle(self, chunks: Sequence[LentChunk]) -> list[LentChunk]:
        """Before the manifest: have all chunks checked. Returns those that may go with it."""
        if not self._is_shared:
            return list(chunks)
        if chunks:
            self.call(chunks)
        self._attempt.wait(until_in_flight=0)
        return []

    def passed(self) -> frozenset[int]:
        """Chunks that somebody has found right; a maker that failed has answered for none."""
        standing = self._attempt.standing
        return frozenset(index for index, checker in self._checker.items() if checker in standing)


class _Attempt:
    """The calls of one update, and what became of them."""

    def __init__(self, targets: dict[str, Any], *, newcomers: Collection[str], seconds: float) -> None:
        self._targets = targets
        self._newcomers = newcomers
        self._newcomer_seconds = seconds * NEWCOMER_TIME_SHARE
        self._deadline = time.monotonic() + seconds
        self._in_flight: dict[Any, str] = {}
        self._since: dict[str, float] = {}  # of makers with open calls: when they were last free, or answered
        self.rejected: dict[str, str] = {}
        self.dead: dict[str, str] = {}
        self.unreachable: dict[str, str] = {}
        self.late: dict[str, str] = {}  # newcomers only: if anyone else is late, the update fails

    @property
    def standing(self) -> list[str]:
        """Makers that have not failed so far."""
        failed = self.rejected.keys() | self.dead.keys() | self.unreachable.keys() | self.late.keys()
        return [name for name in self._targets if name not in failed]

    def call(self, **arguments: Any) -> None:
        """Call every maker that has taken all so far; an update that lacks a part is worth nothing."""
        for name in self.standing:
            self.call_one(name, **arguments)

    def call_one(self, name: str, **arguments: Any) -> None:
        """Call one maker."""
        if name not in self._in_flight.values():
            self._since[name] = time.monotonic()
        self._in_flight[self._targets[name].update_experience_maker.remote(**arguments)] = name

    def wait(self, *, until_in_flight: int) -> None:
        """Wait for answers until at most so many calls are open; late newcomers are not waited for any longer."""
        while len(self._in_flight) > until_in_flight:
            now, open_calls = time.monotonic(), set(self._in_flight.values())
            # A newcomer's time counts from its own last answer: an update may be long for reasons that are not its.
            ends = [self._since[name] + self._newcomer_seconds for name in open_calls if name in self._newcomers]
            remaining = min([self._deadline, *ends]) - now
            wanted = len(self._in_flight) - until_in_flight
            done, _ = ray.wait(list(self._in_flight), num_returns=wanted, timeout=max(0.0, remaining))
            for answer in done:
                name = self._in_flight.pop(answer)
                self._since[name] = time.monotonic()
                self._note(name, answer)
            if not done:
                self._note_late(time.monotonic())

    def _note_late(self, now: float) -> None:
        late = sorted(set(self._in_flight.values()))
        newcomers = [
            name
            for name in late
            if name in self._newcomers and now >= min(self._deadline, self._since[name] + self._newcomer_seconds)
        ]
        if not newcomers and now < self._deadline:
            return
        if not newcomers:
            raise DeadlineExceeded(f"makers {', '.join(late)} did not take a weight update in time.")
        reason = (
            f"it did not take a weight update within {self._newcomer_seconds:g} s, which is what a newcomer has of "
            "deadlines.update_seconds. Is its machine slower, or further away?"
        )
        self.late |= dict.fromkeys(newcomers, reason)
        self._in_flight = {answer: name for answer, name in self._in_flight.items() if name not in newcomers}

    def _note(self, name: str, answer: Any) -> None:
        try:
            ray.get(answer)
        except RayTaskError as error:
            self.rejected.setdefault(name, str(original_error(error)).strip())
        except ActorUnavailableError as error:
            self.unreachable.setdefault(name, death_reason(error))
        except RayActorError as error:
            self.dead.setdefault(name, death_reason(error))
