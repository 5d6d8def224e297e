"""Where a maker's work comes from in a run: leases from the trainers, and the prompts that these stand for."""

import dataclasses
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from coati.config import Deadlines
from coati.errors import DeadlineExceeded, PeerDied, PeerUnavailable, RemoteError
from coati.experience import BufferItem
from coati.experience_maker.base import MakerBatch, OtherWork, PromptBatch, WorkSource
from coati.ledger.rules import Ending, Lease, LeaseRequest, LedgerRules
from coati.peers import Peers
from coati.prompts.stream import PromptStream
from coati.weights.served import ServedModels

# Between two requests, if no new weights come first.
_POLL_SECONDS = 0.05
_REASON_CHARACTERS = 200


class LeasedPrompts(WorkSource):
    """Batches of prompts for which this maker holds leases.

    Trainer t of T has every T-th lease of the run, and each request asks all of them for equal parts, for the version
    that the models serve. `incarnation` is the maker's own.
    """

    wait_name = "wait_weights"  # leases come with new weights

    def __init__(
        self,
        stream: PromptStream,
        trainer_names: Sequence[str],
        rules: LedgerRules,
        served: ServedModels,
        *,
        peers: Peers,
        maker: str,
        incarnation: int = 0,
        deadlines: Deadlines | None = None,
        should_stop: Callable[[], bool] = lambda: False,
        other_work: Callable[[], OtherWork | None] = lambda: None,
    ) -> None:
        """`other_work` is asked first, each time; what it returns comes before leases."""
        self._stream = stream
        self._trainers = tuple(trainer_names)
        self._rules = rules
        self._peers = peers
        self._maker = maker
        self._served = served
        self._incarnation = incarnation
        self._deadlines = deadlines or Deadlines()
        self._should_stop = should_stop
        self._other_work = other_work
        self.capacity = stream.samples_per_batch
        self.least = rules.group_size * len(self._trainers)
        self._num_requests = 0
        self._endings: dict[str, deque[Ending]] = {name: deque() for name in self._trainers}
        self._endings_lock = threading.Lock()  # leases are asked for in another thread

    def __iter__(self) -> Iterator[PromptBatch | OtherWork]:
        """Yield batches until a stop; waits for leases in between, as long as trainers answer."""
        while not self._should_stop():
            if (found := self.poll()) is not None:
                yield found
            else:
                self._wait(_POLL_SECONDS)

    @property
    def awaited(self) -> str:  # type: ignore[override]
        """What its maker waits for."""
        return f"leases for maker {self._maker}, which serves version {self._served.version}"

    def poll(self) -> PromptBatch | OtherWork | None:
        """Ask once; None if nothing may be made now."""
        if (work := self._other_work()) is not None:
            return work
        epochs, size = dict(sorted(self._request())), self._rules.group_size
        raw, unusable = self._stream.batch(list(epochs), group_size=size) if epochs else (None, {})
        for number, reason in unusable.items():
            self._end(Lease(number, epochs[number]), f"prompt skipped, {reason}")
        if raw is None:
            return None
        prompts = PromptBatch.parse(raw)
        assert prompts.sample_ids is not None
        mine = [epochs[one // size] for one in prompts.sample_ids.tolist()]
        return dataclasses.replace(prompts, lease_epochs=torch.tensor(mine))

    @property
    def num_skipped(self) -> int:  # type: ignore[override]
        """Prompts that were skipped so far."""
        return self._stream.skipped.total()

    def attach_leases(self, batch: MakerBatch, items: list[BufferItem]) -> list[BufferItem]:
        """Put leases on the items that were made of a batch, and end the leases of those that were dropped.

        Returns what is to be delivered: an incomplete group is dropped whole.
        """
        prompts, size = batch.prompts, self._rules.group_size
        assert prompts.sample_ids is not None
        assert prompts.lease_epochs is not None
        pairs = zip(prompts.sample_ids.tolist(), prompts.lease_epochs.tolist(), strict=True)
        made: dict[Lease, list[BufferItem]] = {Lease(one // size, epoch): [] for one, epoch in pairs}
        by_number = {lease.number: group for lease, group in made.items()}
        for item in items:
            assert item.sample_ids is not None
            by_number[int(item.sample_ids) // size].append(item)
        for lease, group in made.items():
            if len(group) < size:
                self._end(lease, *_why_it_ends(batch, range(lease.number * size, (lease.number + 1) * size)))
                group.clear()
            for item in group:
                item.lease, item.scored_by = (lease.number, lease.epoch), batch.version
        return [item for group in made.values() for item in group]

    def settle(self) -> None:
        """Tell trainers which leases came to nothing, without asking for others: the maker is at other work."""
        self._request(wanted=0)

    def _end(self, lease: Lease, reason: str, fate: str = "drop") -> None:
        with self._endings_lock:
            self._endings[self._trainers[lease.number % len(self._trainers)]].append(Ending(lease, reason, fate))

    def _request(self, wanted: int | None = None) -> list[Lease]:
        """Ask all trainers at once for as many samples as there is room for; returns the leases that were granted."""
        trainer_incarnation = self._served.incarnation  # before the version, which must not be from before them
        size, version = self._rules.group_size, self._served.version
        room = self._stream.samples_per_batch if self.room is None else self.room
        if wanted is None:
            wanted = max(size, room // len(self._trainers) // size * size)
        self._num_requests += 1
        calls: dict[str, tuple[LeaseRequest, Future[Any]]] = {}
        for name in self._trainers:
            if (peer := self._peers.find_now(name)) is not None:
                with self._endings_lock:
                    endings = tuple(self._endings[name])
                number = self._num_requests
                request = LeaseRequest(
                    self._maker, number, version, wanted, endings, self._incarnation, trainer_incarnation
                )
                calls[name] = request, peer.call("lease", request)
        return [lease for name, (request, call) in calls.items() for lease in self._answer(name, request, call)]

    def _wait(self, seconds: float) -> None:
        """Wait until new weights serve, or for so many seconds."""
        self._served.wait_for_version(self._served.version + 1, deadline_seconds=seconds)

    def _answer(self, name: str, request: LeaseRequest, call: "Future[Any]") -> list[Lease]:
        """The trainer's answer; the same request is repeated if it was lost, and nothing comes of a dead trainer."""
        while True:
            try:
                leases: list[Lease] = call.result(self._deadlines.update_seconds)
                self.last_answer = time.monotonic()
                for _ in request.endings:
                    self._endings[name].popleft()
                return [Lease(*lease) for lease in leases]
            except PeerUnavailable:
                if self._should_stop() or (peer := self._peers.find_now(name)) is None:
                    return []
                self._wait(_POLL_SECONDS)
                call = peer.call("lease", request)
            except PeerDied:
                self._peers.forget(name)  # its successor may take its name
                return []
            except TimeoutError:
                raise DeadlineExceeded(
                    f"maker {self._maker} waited {self._deadlines.update_seconds:g} s (deadlines.update_seconds) for "
                    f"trainer {name} to answer a request for leases."
                ) from None
            except RemoteError as error:
                error.cause.add_note(f"raised in trainer {name}, which maker {self._maker} asked for leases")
                raise error.cause from None


def _why_it_ends(batch: MakerBatch, sample_ids: Sequence[int]) -> tuple[str, str]:
    """Why a group came to nothing, with the ids of the samples to blame, and its fate."""
    fate = "drop" if batch.quarantined_ids.isdisjoint(sample_ids) else "quarantine"
    if ids := [one for one in sample_ids if one in batch.losses]:
        reason = batch.losses[ids[0]].partition(". ")[0][:_REASON_CHARACTERS]
        return f"{reason} (samples {', '.join(map(str, ids))})", fate
    return "dropped by the maker" if batch.dropped is None else str(batch.dropped), fate
