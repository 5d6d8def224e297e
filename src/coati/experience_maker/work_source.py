"""Where a maker's work comes from: leases from trainers, and the prompts that these stand for, or a data loader."""

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

# Between two requests, if no new weights come first.
_POLL_SECONDS = 0.05
_REASON_CHARACTERS = 200


class OtherWork(Protocol):
    """What a maker does now and then besides making experience: an evaluation."""

    def run(self, pipeline: Any, tell: Callable[[], None] = lambda: None) -> None:
        """Do it, and call `tell` now and then: trainers wait for a maker as long as they hear that it works."""


class WorkSource(ABC):
    """Gives a maker its work, and takes account of what came of it. Its attributes default to a data loader's."""

    wait_name = "wait_prompts"  # the activity of a maker that waits for prompts
    capacity = 0
    """Samples that a maker works on at a time, with others coming as some have ended; 0 for whole batches."""
    least = 1  # fewest samples that come at once
    num_skipped = 0  # prompts that were skipped so far
    awaited = "the next batch of prompts. Check what the data loader waits for"
    """What a maker waits for when it waits for prompts, for messages."""
    last_answer = 0.0  # when whoever gives out work last said that there is none yet, by the monotonic clock

    @abstractmethod
    def draw(self, room: int) -> list[Sample] | OtherWork | None:
        """Wait for prompts for up to `room` samples, or for other work that comes first; None at the end."""

    def poll(self, room: int) -> list[Sample] | OtherWork | None:
        """Return what may be begun now; None if that is nothing. A data loader only waits."""
        return self.draw(room)

    def settle(self) -> None:  # noqa: B027  (without leases there is nothing to tell)
        """Tell trainers what became of their leases, and that the maker is at other work."""

    def attach_leases(self, batch: MakerBatch, items: list[BufferItem]) -> list[BufferItem]:  # noqa: ARG002
        """Account for what was made of a batch; returns what is to be delivered."""
        return items


class LoaderPrompts(WorkSource):
    """`num_steps` batches of as many passes over `loader_fn()` as it takes, or else `num_epochs` passes."""

    def __init__(
        self,
        loader_fn: Callable[[], Iterable[Any]],
        num_epochs: int = 1,
        num_steps: int = 0,
        *,
        maker: str = "this maker",
    ) -> None:
        self._loader_fn, self._maker = loader_fn, maker
        passes = itertools.count() if num_steps > 0 else range(num_epochs)
        batches = (batch for _ in passes for batch in self._one_pass())
        self._batches = itertools.islice(batches, num_steps if num_steps > 0 else None)

    def draw(self, room: int) -> list[Sample] | None:  # noqa: ARG002  (the loader decides)
        """Return the loader's next batch."""
        batch = next(self._batches, None)
        return None if batch is None else parse_prompts(batch)

    def _one_pass(self) -> Iterator[Any]:
        is_empty = True
        for batch in self._loader_fn():
            is_empty = False
            yield batch
        if is_empty:
            raise DataError(
                f"dataloader_fn() of maker {self._maker} gave no batch. Is the dataset empty, or smaller than one "
                "batch with drop_last=True?"
            )


@dataclasses.dataclass(eq=False)
class LeasedPrompts(WorkSource):
    """Batches of prompts for which this maker holds leases: each request asks all trainers for equal parts."""

    wait_name = "wait_weights"  # leases come with new weights

    stream: PromptStream
    trainers: Sequence[str]
    rules: LedgerRules
    served: ServedModels
    _: dataclasses.KW_ONLY
    peers: Peers
    maker: str
    incarnation: int = 0
    deadlines: Deadlines = dataclasses.field(default_factory=Deadlines)
    should_stop: Callable[[], bool] = lambda: False
    other_work: Callable[[], OtherWork | None] = lambda: None  # is asked first, and comes before leases

    def __post_init__(self) -> None:
        self.awaited = f"leases for maker {self.maker}"
        self.capacity = self.stream.samples_per_batch
        self.least = self.rules.group_size * len(self.trainers)
        self._num_requests = 0
        # What trainers have not been told. Leases are asked for in another thread, but each change of a list is whole.
        self._endings: dict[str, list[Ending]] = {name: [] for name in self.trainers}

    def draw(self, room: int) -> list[Sample] | OtherWork | None:
        """Wait for leases as long as trainers answer; None after a stop."""
        while not self.should_stop():
            if (found := self.poll(room)) is not None:
                return found
            self.served.wait_for_version(self.served.version + 1, deadline_seconds=_POLL_SECONDS)
        return None

    def poll(self, room: int) -> list[Sample] | OtherWork | None:
        """Ask once; None if nothing may be made now."""
        if (work := self.other_work()) is not None:
            return work
        size = self.rules.group_size
        wanted = max(size, room // len(self.trainers) // size * size)
        epochs = dict(sorted(self._request(wanted)))
        samples, unusable = self.stream.batch(list(epochs), group_size=size)
        for number, reason in unusable.items():
            self._end(Lease(number, epochs[number]), f"prompt skipped, {reason}")
        for sample in samples:
            sample.lease = (sample.id // size, epochs[sample.id // size])
        return samples or None

    @property
    def num_skipped(self) -> int:  # type: ignore[override]
        """Prompts that were skipped so far."""
        return self.stream.skipped.total()

    def attach_leases(self, batch: MakerBatch, items: list[BufferItem]) -> list[BufferItem]:
        """Put leases on the items of a batch, and end those of dropped ones; returns the items of complete groups."""
        leases = {sample.id: sample.lease for sample in batch.samples}
        made: dict[tuple[int, int] | None, list[BufferItem]] = {lease: [] for lease in leases.values()}
        for item in items:
            assert item.sample_ids is not None
            made[leases[int(item.sample_ids)]].append(item)
        for lease, group in made.items():
            assert lease is not None
            if len(group) < self.rules.group_size:
                self._end(Lease(*lease), *_why_it_ends([one for one in batch.samples if one.lease == lease], batch))
                group.clear()
            for item in group:
                item.lease, item.scored_by = lease, batch.version
        return [item for group in made.values() for item in group]

    def settle(self) -> None:
        """Tell trainers which leases came to nothing, without asking for others: the maker is at other work."""
        self._request(0)

    def _end(self, lease: Lease, reason: str, fate: str = "drop") -> None:
        self._endings[self.trainers[lease.number % len(self.trainers)]].append(Ending(lease, reason, fate))

    def _request(self, wanted: int) -> list[Lease]:
        """Ask each trainer for so many samples; returns the leases that were granted."""
        trainer_incarnation = self.served.incarnation  # read first, so that the version is theirs or a later one's
        version = self.served.version
        self._num_requests += 1
        common = {"incarnation": self.incarnation, "trainer_incarnation": trainer_incarnation}
        granted: list[Lease] = []
        for name in self.trainers:
            request = LeaseRequest(
                self.maker, self._num_requests, version, wanted, tuple(self._endings[name]), **common
            )
            leases = self.peers.ask(
                name,
                "lease",
                request,
                what=f"leases of maker {self.maker} (deadlines.update_seconds)",
                seconds=self.deadlines.update_seconds,
                should_stop=self.should_stop,
            )
            if leases is not None:
                self.last_answer = time.monotonic()
                del self._endings[name][: len(request.endings)]
                granted += [Lease(*lease) for lease in leases]
        return granted


def _why_it_ends(samples: list[Sample], batch: MakerBatch) -> tuple[str, str]:
    """Why samples of a lease came to nothing, with the ids of those to blame, and its fate."""
    fate = "quarantine" if any(sample.is_quarantined for sample in samples) else "drop"
    if lost := [sample for sample in samples if sample.lost]:
        reason = lost[0].lost.partition(". ")[0][:_REASON_CHARACTERS]
        return f"{reason} (samples {', '.join(str(sample.id) for sample in lost)})", fate
    return "dropped by the maker" if batch.dropped is None else str(batch.dropped), fate
