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
class _Send:
    call: "Future[Any]"
    trainer: str
    items: list[BufferItem]
    first_sent: float


@dataclasses.dataclass(eq=False)
class ItemSender:
    """Sends items to the trainers that leased them, and items without a lease round-robin, continuing across batches.

    At most `max_unacknowledged` sends per trainer are unacknowledged. If a trainer dies, its unacknowledged items are
    dropped if they were leased, because its successor grants their leases again; otherwise they go to the other
    trainers. A trainer recognizes a retry by its lease, or without one by its delivery id. After a stop, trainers have
    `deadlines.grace_seconds` to acknowledge.
    """

    trainers: Sequence[str]
    _: dataclasses.KW_ONLY
    peers: Peers
    maker_name: str
    deadlines: Deadlines
    max_unacknowledged: int = 2
    should_stop: Callable[[], bool] = lambda: False
    timeline: Timeline = dataclasses.field(default_factory=Timeline)
    retry_seconds: float = 0.5
    num_delivered: int = 0

    def __post_init__(self) -> None:
        self._alive = list(self.trainers)
        self._turn = 0
        self._unacknowledged: list[_Send] = []  # oldest first
        self._stopped_at: float | None = None

    def send(self, items: Sequence[BufferItem]) -> None:
        """Send each item to its trainer. Block while that trainer has too many unacknowledged sends."""
        by_trainer: dict[str, list[BufferItem]] = {}
        for item in items:
            by_trainer.setdefault(self._trainer_of(item), []).append(item)
        for trainer, part in by_trainer.items():
            while sum(send.trainer == trainer for send in self._unacknowledged) >= self.max_unacknowledged:
                self._await_acknowledgement(self._unacknowledged[0])
            delivery_id = uuid.uuid4().hex
            for item in part:
                item.delivery_id = delivery_id
            self._call(trainer, part, time.monotonic())

    def has_room(self) -> bool:
        """Return whether every send has been answered, so `send` does not block."""
        return all(send.call.done() for send in self._unacknowledged)

    def collect(self) -> None:
        """Process answers that have arrived and retry failed sends, without waiting for further answers."""
        for send in [send for send in self._unacknowledged if send.call.done()]:
            if send in self._unacknowledged:  # a resend may have processed it already
                self._await_acknowledgement(send)

    def flush(self) -> None:
        """Wait until every send is acknowledged."""
        while self._unacknowledged:
            self._await_acknowledgement(self._unacknowledged[0])

    def _trainer_of(self, item: BufferItem) -> str:
        if item.lease is not None:
            return self.trainers[item.lease[0] % len(self.trainers)]
        if not self._alive:
            raise PeerDied(
                f"maker {self.maker_name} has no trainer left to send experience to: all died. See their logs for why."
            )
        self._turn += 1
        return self._alive[(self._turn - 1) % len(self._alive)]

    def _call(self, trainer: str, items: list[BufferItem], first_sent: float) -> None:
        peer = self.peers.find(trainer, role="trainer", timeout=self.deadlines.start_seconds)
        self._unacknowledged.append(_Send(peer.call("buffer_extend", ItemBundle(items)), trainer, items, first_sent))

    def _await_acknowledgement(self, send: _Send) -> None:
        """Wait for the acknowledgement of a send. If it fails, retry, redirect or drop the items."""
        self._unacknowledged.remove(send)
        trainer, items = send.trainer, send.items
        try:
            with self.timeline.span("wait_room"):
                wait_in_slices(
                    lambda seconds: bool(wait([send.call], seconds).done) or self._gives_up(),
                    deadline_seconds=self.deadlines.batch_seconds,
                    what=lambda: (
                        f"trainer {trainer} to accept {len(items)} items of maker {self.maker_name} (its buffer may be "
                        "full; check that fit is running)"
                    ),
                    slice_seconds=_SLICE_SECONDS,
                )
            if send.call.done():
                send.call.result(0)
                self.num_delivered += len(items)
            else:
                logger.warning(
                    "maker %s is stopping; trainer %s has not accepted %d items", self.maker_name, trainer, len(items)
                )
        except PeerUnavailable as error:
            # The call may have run. Retrying is safe: the trainer recognizes the lease or the delivery id.
            waited = time.monotonic() - send.first_sent
            if waited >= self.deadlines.batch_seconds:
                raise DeadlineExceeded(
                    f"maker {self.maker_name} could not reach trainer {trainer} for {waited:.0f} s. It is alive but "
                    f"does not answer: {error}"
                ) from None
            time.sleep(self.retry_seconds)
            self._call(trainer, items, send.first_sent)
        except PeerDied as error:
            logger.warning("trainer %s died: %s", trainer, error)
            if items[0].lease is None:
                self._alive = [name for name in self._alive if name != trainer]
                self.send(items)
            else:
                self.peers.forget(trainer)  # its successor may reuse its name
        except RemoteError as error:
            error.cause.add_note(f"raised in trainer {trainer}, while maker {self.maker_name} was sending to it")
            raise error.cause from None

    def _gives_up(self) -> bool:
        """Whether a stop was requested more than `grace_seconds` ago."""
        if not self.should_stop():
            return False
        now = time.monotonic()
        self._stopped_at = now if self._stopped_at is None else self._stopped_at
        return now - self._stopped_at >= self.deadlines.grace_seconds
