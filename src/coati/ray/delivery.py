"""Delivery of items from a maker to its trainers: round-robin, acknowledged, bounded, idempotent."""

import dataclasses
import logging
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayTaskError

from coati.config import Deadlines
from coati.errors import DeadlineExceeded, PeerDied
from coati.experience import BufferItem, ItemBundle
from coati.ledger import UNBOUNDED, WorkShare
from coati.monitor.timeline import Timeline
from coati.ray.peers import NamedPeers, death_reason, is_alive, original_error, wait_in_slices

logger = logging.getLogger(__name__)

_RETRY_SECONDS = 0.5
_SLICE_SECONDS = 0.5


@dataclasses.dataclass
class _InFlight:
    ref: Any
    trainer: str
    items: list[BufferItem]
    since: float  # when it was sent for the first time


class _GivenUp(Exception):
    """A stop came and the trainer does not take the items."""


class ItemSender:
    """Sends single items to trainers in turn, continuing across batches.

    At most `max_in_flight` sends wait for their acknowledgement at each trainer: a trainer whose buffer is
    full holds its makers back instead of filling memory. A trainer that died is skipped from then on, and
    what it had not acknowledged goes to the others. A retry carries the same delivery ids, so it cannot be
    trained on twice. With a `share`, items carry their round, so that trainers consume them in the run's
    order. After a stop, trainers have the time of grace to acknowledge what is on its way; the
    rest is counted and left.
    """

    def __init__(
        self,
        trainer_names: Sequence[str],
        *,
        sender: str,
        deadlines: Deadlines,
        share: WorkShare | None = None,
        max_in_flight: int = 2,
        should_stop: Callable[[], bool] = lambda: False,
        timeline: Timeline | None = None,
    ) -> None:
        self._peers = NamedPeers(trainer_names, role="trainer", deadlines=deadlines)
        self._sender = sender
        # Numbers start at 0 for every incarnation, so a maker made anew under an old name is another sender.
        self._stream = f"{sender}#{uuid.uuid4().hex[:8]}"
        self._deadlines = deadlines
        self._max_in_flight = max_in_flight
        self._should_stop = should_stop
        self._timeline = timeline or Timeline()
        self._alive = list(trainer_names)
        self._share = share
        self._turn = 0 if share is None else share.maker_index or 0
        self._next_number = dict.fromkeys(trainer_names, 0)
        self._in_flight: deque[_InFlight] = deque()
        self.num_delivered = 0
        self.num_redirected = 0
        self.num_unacknowledged = 0
        self._stopped_at: float | None = None

    def take_share(self, share: WorkShare) -> None:
        """Another share, which gives the items sent so far the rounds that they have."""
        self._share = share

    def send(self, items: Sequence[BufferItem]) -> None:
        """Hand each item to the next trainer; waits while too many sends are unacknowledged."""
        by_trainer: dict[str, list[BufferItem]] = {}
        for item in items:
            by_trainer.setdefault(self._next_trainer(), []).append(item)
        for trainer, part in by_trainer.items():
            self._dispatch(trainer, part)

    def flush(self) -> None:
        """Wait until everything sent is acknowledged."""
        while self._in_flight:
            self._await_oldest()

    def check_trainers(self) -> None:
        """Raise PeerDied if no trainer is left."""
        self._peers.require_some_alive("the maker waits for new weights")

    def _next_trainer(self) -> str:
        if not self._alive:
            raise PeerDied(
                f"maker {self._sender} has nobody to send experience to: every trainer "
                f"({', '.join(self._peers.names) or 'of an empty detached_trainer_name_list'}) is gone."
            )
        name = self._alive[self._turn % len(self._alive)]
        self._turn += 1
        return name

    def _dispatch(self, trainer: str, items: list[BufferItem]) -> None:
        while sum(flight.trainer == trainer for flight in self._in_flight) >= self._max_in_flight:
            self._await_oldest()
        if trainer not in self._alive:  # it died while we waited
            self.send(items)
            return
        for item in items:
            number = self._next_number[trainer]
            item.delivery_id = (f"{self._stream}>{trainer}", number)
            item.round_index = self._round_of(number)
            self._next_number[trainer] += 1
        self._call(trainer, items, time.monotonic())

    def _round_of(self, number: int) -> int | None:
        """The round of an item. Without a bound there is none to keep, and nobody waits for a slower maker."""
        if self._share is None or self._share.max_staleness == UNBOUNDED:
            return None
        return self._share.round_of(number)

    def _call(self, trainer: str, items: list[BufferItem], since: float) -> None:
        ref = self._peers.handle(trainer).buffer_extend.remote(ItemBundle(items))
        self._in_flight.append(_InFlight(ref, trainer, items, since))

    def _await_oldest(self) -> None:
        """Wait for the oldest acknowledgement, and deal with what came instead of it."""
        flight = self._in_flight.popleft()
        try:
            with self._timeline.span("wait_room"):
                self._wait_for(flight)
        except ActorUnavailableError as error:
            self._retry(flight, error)
        except RayTaskError as error:
            cause = original_error(error)
            cause.add_note(f"raised in trainer {flight.trainer}, which maker {self._sender} sends to")
            raise cause from None
        except RayActorError as error:
            logger.warning("trainer %s is gone: %s", flight.trainer, death_reason(error))
            self._redirect(flight)
        except _GivenUp:
            self.num_unacknowledged += len(flight.items)
            logger.warning(
                "maker %s stops; trainer %s has not taken %d items",
                self._sender,
                flight.trainer,
                len(flight.items),
            )
        else:
            self.num_delivered += len(flight.items)

    def _wait_for(self, flight: _InFlight) -> None:
        def is_acknowledged(seconds: float) -> bool:
            try:
                ray.get(flight.ref, timeout=seconds)
            except GetTimeoutError:
                return False
            return True

        wait_in_slices(
            is_acknowledged,
            deadline_seconds=self._deadlines.batch_seconds,
            what=lambda: (
                f"trainer {flight.trainer} to take {len(flight.items)} items of maker {self._sender} "
                "(its buffer is full: is fit running?)"
            ),
            slice_seconds=_SLICE_SECONDS,
            message_every=self._deadlines.message_seconds,
            between=self._give_up_after_stop,
        )

    def _give_up_after_stop(self) -> None:
        if self._should_stop():
            now = time.monotonic()
            self._stopped_at = now if self._stopped_at is None else self._stopped_at
            if now - self._stopped_at >= self._deadlines.grace_seconds:
                raise _GivenUp

    def _retry(self, flight: _InFlight, error: ActorUnavailableError) -> None:
        """Send again: the call may or may not have been executed, and the same ids make that safe."""
        waited = time.monotonic() - flight.since
        if waited >= self._deadlines.batch_seconds:
            raise DeadlineExceeded(
                f"maker {self._sender} tried for {waited:.0f} s to reach trainer {flight.trainer}, which is "
                f"there but does not answer: {death_reason(error)}"
            ) from None
        time.sleep(_RETRY_SECONDS)
        if is_alive(flight.trainer):
            self._call(flight.trainer, flight.items, flight.since)
        else:
            self._redirect(flight)

    def _redirect(self, flight: _InFlight) -> None:
        if flight.trainer in self._alive:
            self._alive.remove(flight.trainer)
        self.num_redirected += len(flight.items)
        self.send(flight.items)
