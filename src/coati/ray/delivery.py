"""Delivery of items from a maker to its trainers: round-robin, acknowledged, bounded, idempotent."""

import dataclasses
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayTaskError

from coati.deadlines import Deadlines
from coati.errors import DeadlineExceeded, PeerDied
from coati.experience_buffer.utils import BufferItem
from coati.ray.peers import NamedPeers

logger = logging.getLogger(__name__)

_RETRY_SECONDS = 0.5


@dataclasses.dataclass
class _InFlight:
    ref: Any
    trainer: str
    items: list[BufferItem]


class ItemSender:
    """Sends single items to trainers in turn, continuing across batches.

    At most `max_in_flight` sends wait for their acknowledgement at each trainer: a trainer whose buffer is full
    holds its makers back instead of filling memory. A trainer that died is skipped from then on, and what it had
    not acknowledged goes to the others. A retry carries the same delivery ids, so it cannot be trained on twice.
    """

    def __init__(
        self,
        trainer_names: Sequence[str],
        *,
        sender: str,
        deadlines: Deadlines,
        first_trainer: int = 0,
        max_in_flight: int = 2,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self._peers = NamedPeers(trainer_names, role="trainer", deadlines=deadlines)
        self._sender = sender
        self._deadlines = deadlines
        self._max_in_flight = max_in_flight
        self._should_stop = should_stop
        self._alive = list(trainer_names)
        self._turn = first_trainer
        self._next_number = dict.fromkeys(trainer_names, 0)
        self._in_flight: deque[_InFlight] = deque()
        self.num_delivered = 0
        self.num_redirected = 0

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
            item.delivery_id = (f"{self._sender}>{trainer}", self._next_number[trainer])
            self._next_number[trainer] += 1
        self._call(trainer, items)

    def _call(self, trainer: str, items: list[BufferItem]) -> None:
        ref = self._peers.handle(trainer).buffer_extend.remote(items)
        self._in_flight.append(_InFlight(ref, trainer, items))

    def _await_oldest(self) -> None:
        """Wait for the oldest acknowledgement, and deal with what came instead of it."""
        flight = self._in_flight.popleft()
        try:
            self._wait_for(flight)
        except ActorUnavailableError:
            # The connection broke; the call may or may not have been executed. Same ids, so trying again is safe.
            time.sleep(_RETRY_SECONDS)
            if flight.trainer in self._peers.missing():
                self._redirect(flight)
            else:
                self._call(flight.trainer, flight.items)
        except RayTaskError as error:
            raise error.as_instanceof_cause() from None
        except RayActorError as error:
            logger.warning("trainer %s is gone: %s", flight.trainer, _first_line(error))
            self._redirect(flight)
        else:
            self.num_delivered += len(flight.items)

    def _wait_for(self, flight: _InFlight) -> None:
        started = time.monotonic()
        while True:
            try:
                ray.get(flight.ref, timeout=min(self._deadlines.message_every, self._deadlines.batch))
                return
            except GetTimeoutError:
                waited = time.monotonic() - started
                what = f"trainer {flight.trainer} to take {len(flight.items)} items (is its buffer full?)"
                if waited >= self._deadlines.batch:
                    raise DeadlineExceeded(f"maker {self._sender} waited {waited:.0f} s for {what}.") from None
                logger.info("maker %s waits for %s, %.0f s so far", self._sender, what, waited)
                if self._should_stop():
                    raise

    def _redirect(self, flight: _InFlight) -> None:
        if flight.trainer in self._alive:
            self._alive.remove(flight.trainer)
        self.num_redirected += len(flight.items)
        self.send(flight.items)


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
