"""The buffer that collects samples for a trainer and returns them as whole batches.

In a run, makers lease groups of samples from a trainer's buffer and deliver them to it, and its ledger decides which
are trained on next (`LeasedBuffer`). Trainers without leases use `coati.ray.detached_replay_buffer`.
"""

import contextlib
import dataclasses
import itertools
import logging
import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from coati.batching import check_items, pad_items
from coati.errors import ConfigError, DataError, DeadlineExceeded, StorageError
from coati.experience import BufferItem, Experience, join_items, separate_items
from coati.ledger.journal import Journal, redistribute
from coati.ledger.leases import Ledger
from coati.ledger.rules import Lease, LeaseRequest, LedgerRules

logger = logging.getLogger(__name__)

DEFAULT_WAIT_SECONDS = 1800.0
# Producers and consumers notify each other. This interval is a fallback, and how often a consumer checks for a stop.
SLICE_SECONDS = 0.5


class SampleBuffer(ABC):
    """Thread-safe source of batches of `sample_batch_size` samples. Subclasses decide which samples form a batch."""

    def __init__(self, sample_batch_size: int) -> None:
        self.sample_batch_size = sample_batch_size
        self.last_progress = (
            0.0  # monotonic time from which the deadline of a batch counts: a maker was busy with other work
        )
        self.num_sampled = 0  # samples returned in batches
        self.num_made = 0  # leased samples delivered and accepted
        # Guards all state. Never held while waiting for room or for a batch.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)

    @abstractmethod
    def extend(self, items: Sequence[BufferItem]) -> None:
        """Add items. If any of them is malformed, add none and raise DataError."""

    @abstractmethod
    def get_length(self) -> int:
        """Return the number of whole batches waiting."""

    @property
    @abstractmethod
    def num_items_waiting(self) -> int:
        """Number of samples that are in no batch yet."""

    @abstractmethod
    def close(self) -> None:
        """Release resources outside of this process's memory."""

    @abstractmethod
    def _next_batch(self) -> Sequence[BufferItem] | None:
        """Remove and return the items of the next batch; None if it is not complete. Called with the lock held."""

    # Calls of the trainer

    def lease(self, request: LeaseRequest) -> list[Lease]:  # noqa: ARG002
        """Grant leases to a maker."""
        raise ConfigError(
            "this trainer has no leases to grant. Set options.rules for the trainer, or for none of its makers."
        )

    def release(self, maker: str, reason: str) -> list[int]:  # noqa: ARG002
        """Return the open leases of a maker that is gone to the ledger. Return their numbers."""
        return []

    def mark_trained(self, version: int) -> None:  # noqa: B027
        """Record that the weights of `version` were trained on all batches sampled so far."""

    def give_back(self, batch: Experience) -> None:  # noqa: B027
        """Record that a sampled batch will not be trained on."""

    def begin_fit(self) -> None:  # noqa: B027
        """Record that a `fit` begins."""

    def describe_wait(self) -> str:
        """Describe which makers the trainer waits for, for messages."""
        return "unknown"

    def last_batch(self) -> "tuple[Experience | None] | None":
        """Return the last partial batch once no more samples can come, (None,) if it is empty; None before that."""
        return None

    # Batches

    def sample(
        self, worker_rank: int = 0, to_device: Any = "cpu", *, timeout_seconds: float = DEFAULT_WAIT_SECONDS
    ) -> Experience:
        """Return the next whole batch. Raise DeadlineExceeded if none is complete within `timeout_seconds`."""
        experience = self.try_sample(timeout_seconds)
        if experience is None:
            raise DeadlineExceeded(
                f"worker {worker_rank} waited {timeout_seconds:g} s for a batch of {self.sample_batch_size} "
                f"samples in the replay buffer; {self.num_items_waiting} samples of the next one are there. "
                "Check that makers are running and deliver."
            )
        experience.to_device(to_device)
        return experience

    def try_sample(self, timeout_seconds: float) -> Experience | None:
        """Return the next whole batch, or None if none is complete within `timeout_seconds`."""
        deadline = time.monotonic() + timeout_seconds
        with self._lock:
            while (items := self._next_batch()) is None:
                if (seconds := deadline - time.monotonic()) <= 0:
                    return None
                self._changed.wait(min(SLICE_SECONDS, seconds))
            self.num_sampled += len(items)
            self._changed.notify_all()  # producers may be waiting for room
        return pad_items(items)


class LeasedBuffer(SampleBuffer):
    """The samples delivered to one trainer, and its ledger. `extend` never waits for room: leases bound the items."""

    def __init__(
        self,
        rules: LedgerRules,
        sample_batch_size: int,
        *,
        open_journal: Callable[[], Journal] | None = None,
        incarnation: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`open_journal` is called when the first event is written, because actors start before the run's folder is
        ready. `incarnation` is the number of times the trainer was restarted."""
        super().__init__(sample_batch_size)
        self.rules = rules
        self._ledger = Ledger(rules)
        self._incarnation = incarnation
        self._open_journal = open_journal
        self._journal: Journal | None = None
        self._clock = clock
        self._journal_error: StorageError | None = None  # why the journal is behind
        self._delivered: dict[int, list[BufferItem]] = {}  # by lease number
        self._picked: deque[BufferItem] = deque()  # picked and not yet in a batch
        self._in_training: dict[int, list[BufferItem]] = {}  # picked and not yet trained on, by lease number

    def lease(self, request: LeaseRequest) -> list[Lease]:
        """Grant leases to a maker; none if its weights come from another incarnation of the trainers."""
        if request.trainer_incarnation != self._incarnation:
            return []
        with self._changing_ledger():
            if not request.wanted:
                self.last_progress = self._clock()
            return self._ledger.lease(request, now=self._clock())

    def release(self, maker: str, reason: str) -> list[int]:
        """Return the open leases of a maker that is gone to the ledger. Return their numbers."""
        with self._changing_ledger():
            return self._ledger.release(maker, reason)

    def extend(self, items: Sequence[BufferItem]) -> None:
        """Add items, in whole groups. Groups of stale leases are refused and counted."""
        check_items(items)
        groups: dict[Lease, list[BufferItem]] = {}
        for item in items:
            if item.lease is None:
                raise DataError(
                    "this trainer accepts only samples that were leased from it, but got one without a lease. Set "
                    "options.rules for its makers too, or for neither."
                )
            groups.setdefault(Lease(*item.lease), []).append(item)
        size = self.rules.group_size
        if torn := [lease.number for lease, group in groups.items() if len(group) != size]:
            raise DataError(
                f"a lease must be delivered as a whole group of {size} samples, got parts of leases {torn}."
            )
        with self._changing_ledger():
            fresh = self._ledger.deliver(groups, now=self._clock())
            if fresh and self._open_journal is not None:
                made = [item for lease in fresh for item in groups[lease]]
                scored_by = [groups[lease][0].scored_by for lease in fresh]
                self._ledger.events[-1] |= {"written_by": [*map(written_by, made)], "scored_by": scored_by}
            for lease in fresh:
                self._delivered[lease.number] = groups[lease]
            self.num_made += len(fresh) * size

    def mark_trained(self, version: int) -> None:
        """Record that the weights of `version` were trained on all batches sampled so far."""
        with self._changing_ledger():
            self._ledger.mark_trained(version, self.num_sampled)
            self._in_training = {number: self._in_training[number] for number in self._ledger.picked}

    def give_back(self, batch: Experience) -> None:
        """Record that a sampled batch will not be trained on, so it does not count as sampled."""
        with self._lock:
            self.num_sampled -= batch.num_samples

    def note_weights(self, version: int, digests: Mapping[str, Mapping[str, str]], makers: Sequence[str] = ()) -> None:
        """Record the digests of the weights published as `version`, to all makers or only to the late ones named."""
        weights = {label: "".join(of_model.values()) for label, of_model in digests.items()}
        event = {"publish": version, "samples": self.num_sampled, "weights": weights}
        with self._lock:
            self._ledger.events.append(event | ({"makers": list(makers)} if makers else {}))
            if self._journal is not None:  # otherwise the run's folder may not be ready
                self._write_events()

    def get_length(self) -> int:
        """Return the number of whole batches waiting."""
        with self._lock:
            return self.num_items_waiting // self.sample_batch_size

    @property
    def num_items_waiting(self) -> int:
        """Number of delivered samples that are in no batch yet."""
        with self._lock:
            return len(self._picked) + len(self._delivered) * self.rules.group_size

    def describe_wait(self) -> str:
        """Describe which makers hold leases that the next batch needs."""
        with self._lock:
            blocking, makers = self._ledger.blocked_by(), list(self._ledger.paces)
        parts = [
            f"{maker} holds {count} of the groups that the next batch needs" if maker else f"{count} wait for a maker"
            for maker, count in blocking.items()
        ]
        return "; ".join(parts) or ", ".join(makers) or "none has requested leases"

    def _next_batch(self) -> list[BufferItem] | None:
        with self._changing_ledger(wakes_waiters=False):
            while len(self._picked) < self.sample_batch_size:
                number = self._ledger.pick()
                if number is None:
                    self._ledger.take_back(now=self._clock())
                    return None
                self._in_training[number] = self._delivered.pop(number)
                self._picked += self._in_training[number]
            batch = [self._picked.popleft() for _ in range(self.sample_batch_size)]
            return sorted(batch, key=lambda item: item.lease or ())

    @contextlib.contextmanager
    def _changing_ledger(self, *, wakes_waiters: bool = True) -> Iterator[None]:
        """Hold the lock while the ledger changes, then write its events to the journal and wake waiting consumers."""
        with self._lock:
            yield
            self._write_events()
            if wakes_waiters:
                self._changed.notify_all()

    def _write_events(self) -> None:
        """Append the ledger's events to the journal. If that fails, keep them for the next attempt."""
        if self._open_journal is None:
            self._ledger.events.clear()
            return
        try:
            if self._journal is None:
                self._journal = self._open_journal()
            self._journal.write(self._ledger.events)
        except StorageError as error:
            if self._journal_error is None:
                logger.error("the journal is behind; training continues: %s", error)
            self._journal_error = error
            return
        self._ledger.events.clear()
        self._journal_error = None

    # Checkpoints

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return the state for a checkpoint between two versions: the ledger as JSON, and the samples not trained on.

        Raises StorageError while the journal lacks events, because a run could not be resumed from such a checkpoint.
        """
        with self._lock:
            self._write_events()
            if self._journal_error is not None:
                raise StorageError(str(self._journal_error))
            num_events = 0
            if self._journal is not None:
                self._journal.sync()
                num_events = self._journal.num_events
            groups = [*self._in_training.values(), *self._delivered.values()]
            items = [item for group in groups for item in group]
            return {"ledger": self._ledger.state(), "events": num_events}, _pack(items)

    def restore(
        self, state: Mapping[str, Any], tensors: Mapping[str, Tensor], *, is_redistributed: bool = False
    ) -> None:
        """Continue from a `state`, with open leases returned. `is_redistributed`: from another number of trainers."""
        # A maker may still hold leases granted after the checkpoint, whose numbers will be granted again. So epochs
        # start above those of the checkpoint, by a random distance that differs between two restarts from it.
        known = max((work["epoch"] for work in state["ledger"]["works"]), default=0)
        first_epoch = known + (1 + secrets.randbits(30) << 20)
        with self._lock:
            self._ledger = Ledger.restored(self.rules, state["ledger"], first_epoch=first_epoch)
            self.num_sampled = state["ledger"]["num_trained"]
            for item in _unpack(tensors):
                self._delivered.setdefault(Lease(*item.lease or ()).number, []).append(item)
            self._in_training = {number: self._delivered.pop(number) for number in self._ledger.picked}
            self._picked.extend(item for group in self._in_training.values() for item in group)
            self.num_made = self.num_sampled + self.num_items_waiting
            resume = {"resume": self._ledger.version, "events": state["events"], "first_epoch": first_epoch}
            other = {"state": state["ledger"]} if is_redistributed else {}
            self._ledger.events = [resume | {"rules": dataclasses.asdict(self.rules)} | other]

    def take_over(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Continue from the `state`s of a different number of trainers. Groups not trained on are made again."""
        stream = self.rules.stream
        ledger = redistribute(self.rules, [state["ledger"] for state in states])
        events = states[stream]["events"] if stream < len(states) else None
        self.restore({"ledger": ledger, "events": events}, _pack([]), is_redistributed=True)

    def start_over(self) -> None:
        """Restart the run: the journal's events become void, and deliveries for older leases are refused."""
        self.restore({"ledger": Ledger(self.rules).state(), "events": 0}, _pack([]))

    def close(self) -> None:
        """Write the remaining events and close the journal."""
        if self._journal is not None:
            with self._lock:
                self._write_events()  # events left after a failed write
            self._journal.close()


def written_by(item: BufferItem) -> list[int]:
    """Return the versions of a sample's tokens, run-length encoded.

    That is the version of the first token, then index and version of each change: 3, 3, 4 give [3, 2, 4].
    """
    versions = [] if item.policy_versions is None else item.policy_versions.tolist()
    pairs = enumerate(itertools.pairwise(versions), start=1)
    return [*versions[:1], *(number for token, (a, b) in pairs if a != b for number in (token, b))]


def _pack(items: Sequence[BufferItem]) -> dict[str, Tensor]:
    """Return items and their leases as tensors for a file."""
    return {"lease": torch.tensor([item.lease for item in items], dtype=torch.long), **join_items(items)}


def _unpack(packed: Mapping[str, Tensor]) -> list[BufferItem]:
    items = separate_items(packed)
    for item, lease in zip(items, packed["lease"].tolist(), strict=True):
        item.lease = tuple(lease)
    return items
