"""Sources of a maker's work: prompts leased from trainers, or a data loader."""

import dataclasses
import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

from coati.config import Deadlines
from coati.errors import DataError
from coati.experience import BufferItem, Sample
from coati.experience_maker.base import MakerBatch
from coati.ledger.rules import Ending, Lease, LeaseRequest, LedgerRules
from coati.peers import Peers
from coati.prompts.batch import parse_prompts
from coati.prompts.stream import PromptStream
from coati.weights.served import ServedModels

# Interval between two requests for leases, unless new weights arrive first.
_POLL_SECONDS = 0.05
_REASON_CHARACTERS = 200


class OtherWork(Protocol):
    """Occasional work of a maker besides making experience, such as an evaluation."""

    def run(self, pipeline: Any, heartbeat: Callable[[], None] = lambda: None, /) -> None:
        """Do the work. Call `heartbeat` regularly, so that trainers keep waiting for this maker."""


class WorkSource(ABC):
    """Gives a maker its work and accounts for the outcome. The attributes default to those of a data loader."""

    wait_name = "wait_prompts"  # the timeline's name for waiting for prompts
    capacity = 0  # number of samples generated at once with continuous batching; 0 for whole batches
    min_samples = 1  # smallest number of samples that a request returns
    num_skipped = 0  # number of prompts skipped so far
    room = 0  # number of samples to request; the loop raises it when slots become free while a request waits
    awaited = "the next batch of prompts. Check what the data loader waits for"
    """What the maker is waiting for, in error messages."""
    last_answer = 0.0  # monotonic time of the last answer of a trainer, even if it granted nothing

    @abstractmethod
    def wait_for_work(self, room: int) -> list[Sample] | OtherWork | None:
        """Wait for prompts for up to `room` samples, or for other work if that comes first. Return None at the end."""

    def poll(self, room: int) -> list[Sample] | OtherWork | None:
        """Return the work that may start now; None if there is none. A data loader blocks as in `wait_for_work`."""
        return self.wait_for_work(room)

    def report_endings(self) -> None:  # noqa: B027  (nothing to report without leases)
        """Report ended leases to their trainers, and that this maker is busy with other work."""

    def close_leases(self, batch: MakerBatch, items: list[BufferItem]) -> list[BufferItem]:  # noqa: ARG002
        """Account for the items made from a batch, and return those to deliver."""
        return items


class LoaderPrompts(WorkSource):
    """Batches of a data loader: `num_steps` batches if above 0, else `num_epochs` passes over `loader_fn()`."""

    def __init__(
        self,
        loader_fn: Callable[[], Iterable[Any]],
        num_epochs: int = 1,
        num_steps: int = 0,
        *,
        maker_name: str = "this maker",
    ) -> None:
        self._loader_fn, self._maker_name = loader_fn, maker_name
        passes = itertools.count() if num_steps > 0 else range(num_epochs)
        batches = (batch for _ in passes for batch in self._one_pass())
        self._batches = itertools.islice(batches, num_steps if num_steps > 0 else None)

    def wait_for_work(self, room: int) -> list[Sample] | None:  # noqa: ARG002  (the loader decides)
        """Return the loader's next batch; None after the last one."""
        batch = next(self._batches, None)
        return None if batch is None else parse_prompts(batch)

    def _one_pass(self) -> Iterator[Any]:
        is_empty = True
        for batch in self._loader_fn():
            is_empty = False
            yield batch
        if is_empty:
            raise DataError(
                f"dataloader_fn() of maker {self._maker_name} returned a loader without batches. Check that the "
                "dataset is not empty, and with drop_last=True not smaller than one batch."
            )


@dataclasses.dataclass(eq=False)
class LeasedPrompts(WorkSource):
    """Prompts for which this maker holds leases. Each request asks all trainers for equal shares."""

    wait_name = "wait_weights"  # new leases become available with new weights

    prompts: PromptStream
    trainers: Sequence[str]
    rules: LedgerRules
    served: ServedModels
    _: dataclasses.KW_ONLY
    peers: Peers
    maker_name: str
    incarnation: int = 0
    deadlines: Deadlines = dataclasses.field(default_factory=Deadlines)
    should_stop: Callable[[], bool] = lambda: False
    other_work: Callable[[], OtherWork | None] = lambda: None  # polled first, and takes precedence over leases

    def __post_init__(self) -> None:
        self.awaited = f"leases for maker {self.maker_name}"
        self.capacity = self.prompts.samples_per_batch
        self.min_samples = self.rules.group_size * len(self.trainers)
        self._num_requests = 0
        # Ended leases not yet reported, by trainer. Requests run on another thread, but list operations are atomic.
        self._endings: dict[str, list[Ending]] = {name: [] for name in self.trainers}

    def wait_for_work(self, room: int) -> list[Sample] | OtherWork | None:
        """Wait for leases or other work. Return None after a stop."""
        self.room = room
        while not self.should_stop():
            version = self.served.version  # read first, so that a commit during the request ends the wait
            if (found := self.poll(self.room)) is not None:
                return found
            self.served.wait_for_version(version + 1, deadline_seconds=_POLL_SECONDS)
        return None

    def poll(self, room: int) -> list[Sample] | OtherWork | None:
        """Request work once. Return None if there is none now."""
        if (work := self.other_work()) is not None:
            return work
        size = self.rules.group_size
        wanted = max(size, room // len(self.trainers) // size * size)
        epochs = dict(sorted(self._request(wanted)))
        samples, unusable = self.prompts.batch(list(epochs), group_size=size)
        for number, reason in unusable.items():
            self._end(Lease(number, epochs[number]), f"prompt skipped, {reason}")
        for sample in samples:
            sample.lease = (sample.id // size, epochs[sample.id // size])
        return samples or None

    @property
    def num_skipped(self) -> int:  # type: ignore[override]
        """Number of prompts skipped so far."""
        return self.prompts.skipped.total()

    def close_leases(self, batch: MakerBatch, items: list[BufferItem]) -> list[BufferItem]:
        """Attach leases to the items of a batch and return the items of complete groups. End leases of other groups."""
        leases = {sample.id: sample.lease for sample in batch.samples}
        made: dict[tuple[int, int] | None, list[BufferItem]] = {lease: [] for lease in leases.values()}
        for item in items:
            assert item.sample_ids is not None
            made[leases[int(item.sample_ids)]].append(item)
        for lease, group in made.items():
            assert lease is not None
            if len(group) < self.rules.group_size:
                self._end(Lease(*lease), *_ending_reason([one for one in batch.samples if one.lease == lease], batch))
                group.clear()
            for item in group:
                item.lease, item.scored_by = lease, batch.version
        return [item for group in made.values() for item in group]

    def report_endings(self) -> None:
        """Report ended leases to the trainers without requesting new ones: the maker is busy with other work."""
        self._request(0)

    def _end(self, lease: Lease, reason: str, fate: str = "drop") -> None:
        self._endings[self.trainers[lease.number % len(self.trainers)]].append(Ending(lease, reason, fate))

    def _request(self, wanted: int) -> list[Lease]:
        """Request `wanted` samples from each trainer and return the leases granted."""
        trainer_incarnation = self.served.incarnation  # read before the version, which may then only be newer
        version = self.served.version
        self._num_requests += 1
        common = {"incarnation": self.incarnation, "trainer_incarnation": trainer_incarnation}
        granted: list[Lease] = []
        for name in self.trainers:
            request = LeaseRequest(
                self.maker_name, self._num_requests, version, wanted, tuple(self._endings[name]), **common
            )
            leases = self.peers.ask(
                name,
                "lease",
                request,
                what=f"leases of maker {self.maker_name} (deadlines.update_seconds)",
                seconds=self.deadlines.update_seconds,
                should_stop=self.should_stop,
            )
            if leases is not None:
                self.last_answer = time.monotonic()
                del self._endings[name][: len(request.endings)]
                granted += [Lease(*lease) for lease in leases]
        return granted


def _ending_reason(samples: list[Sample], batch: MakerBatch) -> tuple[str, str]:
    """Return why no group is delivered for a lease, with the ids of the samples at fault, and the lease's fate."""
    fate = "quarantine" if any(sample.is_quarantined for sample in samples) else "drop"
    if lost := [sample for sample in samples if sample.drop_reason]:
        reason = lost[0].drop_reason.partition(". ")[0][:_REASON_CHARACTERS]
        return f"{reason} (samples {', '.join(str(sample.id) for sample in lost)})", fate
    return "dropped by the maker" if batch.drop_error is None else str(batch.drop_error), fate
