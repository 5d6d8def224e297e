"""Delivery of items from a maker to its trainers: acknowledged, bounded, idempotent."""

import dataclasses
import logging
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any

from coati.config import Deadlines
from coati.errors import DeadlineExceeded, PeerDied, PeerUnavailable, RemoteError
from coati.experience import BufferItem, ItemBundle
from coati.monitor.timeline import Timeline
from coati.peers import Peers, wait_in_slices

logger = logging.getLogger(__name__)

_SLICE_SECONDS = 0.5


@dataclasses.dataclass(eq=False)
class _InFlight:
    call: "Future[Any]"
    trainer: str
    items: list[BufferItem]
    first_sent: float


@dataclasses.dataclass(eq=False)
class ItemSender:
    """Sends items to the trainers that they were leased from; those without a lease to all in turn, across batches.

    At most `max_in_flight` sends per trainer are unacknowledged. What a trainer that died has not acknowledged is
    dropped if it was leased, because its successor grants it again; else it goes to the others. A retry is
    recognised by its lease, or else by its delivery id. After a stop, trainers have the grace time to acknowledge.
    """

    trainers: Sequence[str]
    _: dataclasses.KW_ONLY
    peers: Peers
    sender: str
    deadlines: Deadlines
    max_in_flight: int = 2
    should_stop: Callable[[], bool] = lambda: False
    timeline: Timeline = dataclasses.field(default_factory=Timeline)
    retry_seconds: float = 0.5
    num_delivered: int = 0

    def __post_init__(self) -> None:
        self._alive = list(self.trainers)
        self._turn = 0
        self._in_flight: list[_InFlight] = []  # the oldest first
        self._stopped_at: float | None = None

    def send(self, items: Sequence[BufferItem]) -> None:
        """Send each item to its trainer; waits while too many sends are unacknowledged."""
        by_trainer: dict[str, list[BufferItem]] = {}
        for item in items:
            by_trainer.setdefault(self._trainer_of(item), []).append(item)
        for trainer, part in by_trainer.items():
            while sum(flight.trainer == trainer for flight in self._in_flight) >= self.max_in_flight:
                self._await_acknowledgement(self._in_flight[0])
            delivery_id = uuid.uuid4().hex
            for item in part:
                item.delivery_id = delivery_id
            self._call(trainer, part, time.monotonic())

    def has_room(self) -> bool:
        """Return whether all that was sent has been answered, so that `send` does not wait."""
        return all(flight.call.done() for flight in self._in_flight)

    def collect(self) -> None:
        """Note answers that have come, and send again what was lost: trainers may wait for it. Waits for no answer."""
        for flight in [flight for flight in self._in_flight if flight.call.done()]:
            if flight in self._in_flight:  # sending again what another lost may have settled it
                self._await_acknowledgement(flight)

    def flush(self) -> None:
        """Wait until everything sent is acknowledged."""
        while self._in_flight:
            self._await_acknowledgement(self._in_flight[0])

    def _trainer_of(self, item: BufferItem) -> str:
        if item.lease is not None:
            return self.trainers[item.lease[0] % len(self.trainers)]
        if not self._alive:
            raise PeerDied(
                f"maker {self.sender} has no trainer to send experience to: all died. See their logs for the cause."
            )
        self._turn += 1
        return self._alive[(self._turn - 1) % len(self._alive)]

    def _call(self, trainer: str, items: list[BufferItem], first_sent: float) -> None:
        peer = self.peers.find(trainer, role="trainer", timeout=self.deadlines.start_seconds)
        self._in_flight.append(_InFlight(peer.call("buffer_extend", ItemBundle(items)), trainer, items, first_sent))

    def _await_acknowledgement(self, flight: _InFlight) -> None:
        """Wait for an acknowledgement; retry, redirect or give up if it does not come."""
        self._in_flight.remove(flight)
        trainer, items = flight.trainer, flight.items
        try:
            with self.timeline.span("wait_room"):
                wait_in_slices(
                    lambda seconds: bool(wait([flight.call], seconds).done) or self._gives_up(),
                    deadline_seconds=self.deadlines.batch_seconds,
                    what=lambda: (
                        f"trainer {trainer} to accept {len(items)} items of maker {self.sender} (its buffer is full: "
                        "is fit running?)"
                    ),
                    slice_seconds=_SLICE_SECONDS,
                )
            if flight.call.done():
                flight.call.result(0)
                self.num_delivered += len(items)
            else:
                logger.warning("maker %s stops; trainer %s has not accepted %d items", self.sender, trainer, len(items))
        except PeerUnavailable as error:
            # The call may or may not have been executed, and the same id makes another safe.
            waited = time.monotonic() - flight.first_sent
            if waited >= self.deadlines.batch_seconds:
                raise DeadlineExceeded(
                    f"maker {self.sender} tried for {waited:.0f} s to reach trainer {trainer}, which is alive but "
                    f"does not answer: {error}"
                ) from None
            time.sleep(self.retry_seconds)
            self._call(trainer, items, flight.first_sent)
        except PeerDied as error:
            logger.warning("trainer %s died: %s", trainer, error)
            if items[0].lease is None:
                self._alive = [name for name in self._alive if name != trainer]
                self.send(items)
            else:
                self.peers.forget(trainer)  # its successor may take its name
        except RemoteError as error:
            error.cause.add_note(f"raised in trainer {trainer}, which maker {self.sender} sends to")
            raise error.cause from None

    def _gives_up(self) -> bool:
        """Whether a stop came longer ago than the grace time."""
        if not self.should_stop():
            return False
        now = time.monotonic()
        self._stopped_at = now if self._stopped_at is None else self._stopped_at
        return now - self._stopped_at >= self.deadlines.grace_seconds
