"""Where samples wait for a trainer, until whole batches of them come out.

In a run makers lease groups of samples from a trainer's buffer and deliver them to it, and its ledger decides which are
trained on next (`LeasedBuffer`). `coati.ray.detached_replay_buffer` is for trainers without leases.
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
# Producers and consumers notify each other, so this is only a fallback, and how often a consumer looks whether to stop.
SLICE_SECONDS = 0.5


class SampleBuffer(ABC):
    """Batches of `sample_batch_size`. A subclass says where they come from."""

    def __init__(self, sample_batch_size: int) -> None:
        self.sample_batch_size = sample_batch_size
        self.last_progress = 0.0
        """When a maker last said that it is at work on something else, by the monotonic clock."""
        self.num_sampled = 0  # samples that have come out in batches
        self.num_made = 0  # samples that makers have made for their leases: delivered, and taken in
        # Guards everything; never held while waiting for room or for a batch.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)

    @abstractmethod
    def extend(self, items: Sequence[BufferItem]) -> None:
        """Take items in. If any of them is bad, none is taken."""

    @abstractmethod
    def get_length(self) -> int:
        """Whole batches waiting."""

    @property
    @abstractmethod
    def num_items_waiting(self) -> int:
        """Samples that wait for their batch to fill."""

    @abstractmethod
    def close(self) -> None:
        """Release what it holds outside of this process's memory."""

    @abstractmethod
    def _next_batch(self) -> Sequence[BufferItem] | None:
        """Take the items of the next batch out, under the lock; None if it is not there."""

    # What a trainer tells its buffer and asks it.

    def lease(self, request: LeaseRequest) -> list[Lease]:  # noqa: ARG002
        """Grant a maker what it may make now."""
        raise ConfigError("this trainer has no leases to grant. Give it options.rules, or its makers none.")

    def release(self, maker: str, reason: str) -> list[int]:  # noqa: ARG002
        """Grant the leases of a maker that is gone to others; returns their numbers."""
        return []

    def mark_trained(self, version: int) -> None:  # noqa: B027
        """Note that the batches sampled so far made weights of this version."""

    def give_back(self, batch: Experience) -> None:  # noqa: B027
        """Note that a batch that was sampled is not trained on."""

    def begin_fit(self) -> None:  # noqa: B027
        """Note that a `fit` begins."""

    def describe_wait(self) -> str:
        """Say what the makers do that a trainer waits for."""
        return "unknown"

    def last_batch(self) -> "tuple[Experience | None] | None":
        """Return what is left if no more samples can come, (None,) if nothing is; None while more may come."""
        return None

    # Batches.

    def sample(
        self, worker_rank: int = 0, to_device: Any = "cpu", *, timeout_seconds: float = DEFAULT_WAIT_SECONDS
    ) -> Experience:
        """Return the next whole batch; blocks until there is one, at most `timeout_seconds`."""
        experience = self.try_sample(timeout_seconds)
        if experience is None:
            raise DeadlineExceeded(
                f"worker {worker_rank} waited {timeout_seconds:g} s for a batch of {self.sample_batch_size} "
                f"samples in the replay buffer; {self.num_items_waiting} samples of the next one are there. "
                "Do makers deliver?"
            )
        experience.to_device(to_device)
        return experience

    def try_sample(self, timeout_seconds: float) -> Experience | None:
        """Return the next whole batch, or None if none comes in time."""
        deadline = time.monotonic() + timeout_seconds
        with self._lock:
            while (items := self._next_batch()) is None:
                if (seconds := deadline - time.monotonic()) <= 0:
                    return None
                self._changed.wait(min(SLICE_SECONDS, seconds))
            self.num_sampled += len(items)
            self._changed.notify_all()  # there is room again
        return pad_items(items)


class LeasedBuffer(SampleBuffer):
    """What makers have delivered to one trainer, and its ledger. Nothing waits for room: leases bound what comes."""

    def __init__(
        self,
        rules: LedgerRules,
        sample_batch_size: int,
        *,
        open_journal: Callable[[], Journal] | None = None,
        incarnation: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`open_journal` is called before the first change is written: a run's folder is ready only after its
        actors. `incarnation` counts how often the trainer was started again."""
        super().__init__(sample_batch_size)
        self._ledger = Ledger(rules)
        self._incarnation = incarnation
        self._open_journal = open_journal
        self._journal: Journal | None = None
        self._clock = clock
        self._failure: StorageError | None = None  # why events wait for room on the disk
        self._delivered: dict[int, list[BufferItem]] = {}  # by the number of their lease
        self._picked: deque[BufferItem] = deque()  # in no batch
        self._in_training: dict[int, list[BufferItem]] = {}  # picked and not trained on

    @property
    def rules(self) -> LedgerRules:
        """The rules of its ledger."""
        return self._ledger.rules

    def lease(self, request: LeaseRequest) -> list[Lease]:
        """Grant what may be made now: nothing to a maker whose weights come from before this trainer's start."""
        if request.trainer_incarnation != self._incarnation:
            return []
        with self._changing():
            if not request.wanted:
                self.last_progress = self._clock()
            return self._ledger.lease(request, now=self._clock())

    def release(self, maker: str, reason: str) -> list[int]:
        """Grant the leases of a maker that is gone to others; returns their numbers."""
        with self._changing():
            return self._ledger.release(maker, reason)

    def extend(self, items: Sequence[BufferItem]) -> None:
        """Take items in, whole groups of them. What is not wanted any more is left out and counted."""
        check_items(items)
        groups: dict[Lease, list[BufferItem]] = {}
        for item in items:
            if item.lease is None:
                raise DataError(
                    "this trainer takes only samples that were leased from it, but one came without a lease. Start its "
                    "makers with options.rules, or the trainer without."
                )
            groups.setdefault(Lease(*item.lease), []).append(item)
        size = self.rules.group_size
        if torn := [lease.number for lease, group in groups.items() if len(group) != size]:
            raise DataError(f"a lease is delivered as a whole, {size} samples, got others for {torn}.")
        with self._changing():
            fresh = self._ledger.deliver(groups, now=self._clock())
            if fresh and self._open_journal is not None:
                made = [item for lease in fresh for item in groups[lease]]
                scored_by = [groups[lease][0].scored_by for lease in fresh]
                self._ledger.events[-1] |= {"written_by": [*map(written_by, made)], "scored_by": scored_by}
            for lease in fresh:
                self._delivered[lease.number] = groups[lease]
            self.num_made += len(fresh) * size

    def mark_trained(self, version: int) -> None:
        """The batches sampled so far made weights of this version."""
        with self._changing():
            self._ledger.mark_trained(version, self.num_sampled)
            self._in_training = {number: self._in_training[number] for number in self._ledger.picked}

    def give_back(self, batch: Experience) -> None:
        """Count a batch as waiting: it is not trained on after all."""
        with self._lock:
            self.num_sampled -= batch.num_samples

    def note_weights(self, version: int, digests: Mapping[str, Mapping[str, str]], makers: Sequence[str] = ()) -> None:
        """Write down what weights makers get as a version: all of them, or those that are named, which came late."""
        weights = {label: "".join(of_model.values()) for label, of_model in digests.items()}
        event = {"publish": version, "samples": self.num_sampled, "weights": weights}
        with self._lock:
            self._ledger.events.append(event | ({"makers": list(makers)} if makers else {}))
            if self._journal is not None:  # else the run's folder may not be ready for it
                self._write_down()

    def get_length(self) -> int:
        """Whole batches that are there."""
        with self._lock:
            return self.num_items_waiting // self.sample_batch_size

    @property
    def num_items_waiting(self) -> int:
        """Samples that are delivered and in no batch."""
        with self._lock:
            return len(self._picked) + len(self._delivered) * self.rules.group_size

    def describe_wait(self) -> str:
        """Who holds what the next batch needs."""
        with self._lock:
            blocking = self._ledger.blocked_by().items()
        held = [f"{maker or 'no maker'} has {count} that it cannot do without" for maker, count in blocking]
        return "; ".join(held) or f"makers {', '.join(self._ledger.makers) or 'have not asked for work'}"

    def _next_batch(self) -> list[BufferItem] | None:
        with self._changing(is_news=False):
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
    def _changing(self, *, is_news: bool = True) -> Iterator[None]:
        """Hold the lock while the ledger changes; write down what changed, and wake who waits for a batch."""
        with self._lock:
            yield
            self._write_down()
            if is_news:
                self._changed.notify_all()

    def _write_down(self) -> None:
        """Append what has changed to the journal; on a full disk it is kept, and written when there is room again."""
        if self._open_journal is None:
            self._ledger.events.clear()
            return
        try:
            if self._journal is None:
                self._journal = self._open_journal()
            self._journal.write(self._ledger.events)
        except StorageError as error:
            if self._failure is None:
                logger.error("the journal is behind, and training continues: %s", error)
            self._failure = error
            return
        self._ledger.events.clear()
        self._failure = None

    # Saved and restored

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """What a checkpoint between two versions holds: the ledger as JSON, and the samples not trained on.

        Raises StorageError while the journal is behind: it could end before the events that led to the checkpoint.
        """
        with self._lock:
            self._write_down()
            if self._failure is not None:
                raise StorageError(str(self._failure))
            num_events = 0
            if self._journal is not None:
                self._journal.sync()
                num_events = self._journal.num_events
            groups = [*self._in_training.values(), *self._delivered.values()]
            items = [item for group in groups for item in group]
            return {"ledger": self._ledger.state(), "events": num_events}, _pack(items)

    def restore(self, state: Mapping[str, Any], tensors: Mapping[str, Tensor], *, is_other: bool = False) -> None:
        """Continue from a `state` (`is_other`: that the journal does not lead to). Open leases are granted again."""
        # A maker may have lived on with leases granted after the checkpoint, whose numbers will be granted again. So
        # epochs begin above all of the checkpoint, at another distance than those of any other start from it.
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
            other = {"state": state["ledger"]} if is_other else {}
            self._ledger.events = [resume | {"rules": dataclasses.asdict(self.rules)} | other]

    def take_over(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Continue from the `state`s of another number of trainers; what was not trained on is made again."""
        stream = self.rules.stream
        ledger = redistribute(self.rules, [state["ledger"] for state in states])
        events = states[stream]["events"] if stream < len(states) else None
        self.restore({"ledger": ledger, "events": events}, _pack([]), is_other=True)

    def start_over(self) -> None:
        """Begin the run again: what the journal holds is void, and what makers hold is refused."""
        self.restore({"ledger": Ledger(self.rules).state(), "events": 0}, _pack([]))

    def close(self) -> None:
        """End its journal."""
        if self._journal is not None:
            with self._lock:
                self._write_down()  # what a full disk did not take
            self._journal.close()


def written_by(item: BufferItem) -> list[int]:
    """Which weights wrote a sample: the version of its first token; then before which token it changed, and to what.

    Versions 3, 3 and 4 of its tokens are [3, 2, 4].
    """
    versions = [] if item.policy_versions is None else item.policy_versions.tolist()
    pairs = enumerate(itertools.pairwise(versions), start=1)
    return [*versions[:1], *(number for token, (a, b) in pairs if a != b for number in (token, b))]


def _pack(items: Sequence[BufferItem]) -> dict[str, Tensor]:
    """Items and their leases as tensors for a file."""
    return {"lease": torch.tensor([item.lease for item in items], dtype=torch.long), **join_items(items)}


def _unpack(packed: Mapping[str, Tensor]) -> list[BufferItem]:
    items = separate_items(packed)
    for item, lease in zip(items, packed["lease"].tolist(), strict=True):
        item.lease = tuple(lease)
    return items
