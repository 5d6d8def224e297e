"""Weights over Ray: each chunk is put into the object store once, and all makers get the reference.

Where every maker can open the sender's memory, the card's or the host's, the bytes stay there and only handles travel.
"""

import logging
import time
from collections.abc import Iterable, Sequence
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayTaskError

from coati.deadlines import Deadlines
from coati.errors import DeadlineExceeded, PeerDied, WeightUpdateError
from coati.ray.peers import NamedPeers, death_reason, original_error
from coati.weights import LentChunk, ShareProbe, Snapshots, UpdateHeader, WeightChunk, WeightManifest

logger = logging.getLogger(__name__)

# Chunks that may be on their way at once; with 64 MiB chunks a quarter of a GiB of the object store.
MAX_CHUNKS_IN_FLIGHT = 4
# Lent chunks are a few hundred bytes each, and a call costs sender and maker about a millisecond of processor time, as
# much as copying 16 MiB. So some travel together; not all, because makers check them while the sender copies on.
LENT_BYTES_PER_CALL = 256 * 2**20


class WeightChannel:
    """Sends one update to every maker of a list and reports what each of them said."""

    def __init__(self, maker_names: Sequence[str], *, deadlines: Deadlines) -> None:
        self._peers = NamedPeers(maker_names, role="maker", deadlines=deadlines)
        self._deadlines = deadlines
        self._lost: set[str] = set()
        self._newcomers: set[str] = set()

    @property
    def has_newcomers(self) -> bool:
        """Whether makers have joined that had no full update yet: the next one must be full."""
        return bool(self._newcomers)

    def change_makers(self, maker_names: Sequence[str]) -> None:
        """Another list, from the next update on; must not be called during one."""
        self._newcomers = {name for name in maker_names if name in self._newcomers or name not in self._peers.names}
        self._lost &= set(maker_names)
        self._peers = NamedPeers(maker_names, role="maker", deadlines=self._deadlines)

    def all_can_open(self, probe: ShareProbe, *, instead: str) -> bool:
        """Whether every maker can read the sender's memory; False without makers.

        Says which cannot, why, and which way weights go `instead`.
        """
        reasons = {name: self._why_not_shared(name, probe) for name in self._peers.names if name not in self._lost}
        for name, reason in reasons.items():
            if reason:
                logger.warning("weights go %s, because of maker %s: %s", instead, name, reason)
        return bool(reasons) and not any(reasons.values())

    def _why_not_shared(self, name: str, probe: ShareProbe) -> str:
        ask = getattr(self._peers.handle(name), "why_not_shared", None)
        if ask is None:
            return "it takes plain updates only"
        try:
            return str(ray.get(ask.remote(probe), timeout=self._deadlines.update))
        except GetTimeoutError:
            raise DeadlineExceeded(
                f"maker {name} did not say in time whether it can open the trainer's memory."
            ) from None
        except (RayTaskError, RayActorError) as error:
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

        A maker that died is reported and left out from then on; one that cannot be reached now misses this
        update and is sent the next. An update that any living maker rejects, or that no maker is left to
        take, is an error. With no makers the messages are still drawn, because ranks gather their weights
        together.

        `snapshots` are what the messages are lent from. No chunk is drawn before every maker has said that it looks
        no more at what the first one overwrites, or has failed to.
        """
        targets = {name: self._peers.handle(name) for name in self._peers.names if name not in self._lost}
        attempt = _Attempt(targets, deadline=time.monotonic() + self._deadlines.update)
        attempt.call(update=header, fully_update=fully_update, chunk_start=True)
        if snapshots is not None:
            attempt.wait(until_in_flight=0)
            snapshots.lend_to(attempt.standing)
        checks = _SharedChecks(attempt, is_enough=snapshots is not None and snapshots.is_one_check_enough)
        num_bytes = 0
        lent: list[LentChunk] = []
        for message in messages:
            if not targets:
                continue
            if isinstance(message, WeightManifest):
                lent = checks.settle(lent)
                end = {"manifest": message, "fully_update": fully_update, "chunk_end": True}
                attempt.call(chunks=lent, checked=checks.passed(), **end)
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
        attempt.wait(until_in_flight=0)
        if snapshots is not None and (attempt.unreachable or attempt.dead):
            snapshots.retire()  # whoever did not answer may still come to read
        self._judge(header, attempt)
        if fully_update:
            self._newcomers &= attempt.unreachable.keys()
        return num_bytes

    def _judge(self, header: UpdateHeader, attempt: "_Attempt") -> None:
        for name, reason in attempt.dead.items():
            self._lost.add(name)
            logger.error("maker %s is gone and gets no more weights: %s", name, reason)
        for name, reason in attempt.unreachable.items():
            logger.error("maker %s missed the weights of version %d: %s", name, header.version, reason)
        if attempt.rejected:
            details = "; ".join(f"maker {name}: {reason}" for name, reason in attempt.rejected.items())
            raise WeightUpdateError(f"weights of version {header.version} were rejected. {details}")
        if self._peers.names and len(self._lost) == len(self._peers.names):
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

    def __init__(self, targets: dict[str, Any], *, deadline: float) -> None:
        self._targets = targets
        self._deadline = deadline
        self._in_flight: dict[Any, str] = {}
        self.rejected: dict[str, str] = {}
        self.dead: dict[str, str] = {}
        self.unreachable: dict[str, str] = {}

    @property
    def standing(self) -> list[str]:
        """Makers that have not failed so far."""
        failed = self.rejected.keys() | self.dead.keys() | self.unreachable.keys()
        return [name for name in self._targets if name not in failed]

    def call(self, **arguments: Any) -> None:
        """Call every maker that has taken all so far; an update that lacks a part is worth nothing."""
        for name in self.standing:
            self.call_one(name, **arguments)

    def call_one(self, name: str, **arguments: Any) -> None:
        """Call one maker."""
        self._in_flight[self._targets[name].update_experience_maker.remote(**arguments)] = name

    def wait(self, *, until_in_flight: int) -> None:
        """Wait for answers until at most so many calls are open."""
        while len(self._in_flight) > until_in_flight:
            remaining = self._deadline - time.monotonic()
            wanted = len(self._in_flight) - until_in_flight
            done, _ = ray.wait(list(self._in_flight), num_returns=wanted, timeout=max(0.0, remaining))
            if not done:
                late = sorted(set(self._in_flight.values()))
                raise DeadlineExceeded(f"makers {', '.join(late)} did not take a weight update in time.")
            for answer in done:
                self._note(self._in_flight.pop(answer), answer)

    def _note(self, name: str, answer: Any) -> None:
        try:
            ray.get(answer)
        except RayTaskError as error:
            self.rejected.setdefault(name, str(original_error(error)).strip())
        except ActorUnavailableError as error:
            self.unreachable.setdefault(name, death_reason(error))
        except RayActorError as error:
            self.dead.setdefault(name, death_reason(error))
