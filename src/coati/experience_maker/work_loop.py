"""A maker's main loop: keep the engine full, and deliver groups once they are scored.

    prompts     │ leases for free slots ·│ leases …
    models      │ token, token, score, token, token, token, score …
    rewards              │ functions ·│              │ functions …
    delivery                          │ some groups

Complete groups are scored in passes. They are delivered between tokens, in the order in which they were scored, when
their rewards are ready and trainers have room. Makers that only have `make_experience`, and data loaders, work on whole
batches, one at a time.

Prompts are requested on a background thread, and only when they can start: a faster maker could use an idle lease. The
request for free slots comes before the scoring of complete groups, so that its prompts start together with those that
wait already. While more than twice `source.capacity` samples wait for others of their group or for scores, no more are
requested.
"""

import dataclasses
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, Final

from coati import faults
from coati.background import BackgroundThread
from coati.batching import split_experience_batch
from coati.config import Deadlines
from coati.experience import Experience
from coati.experience_maker.base import MakerBatch
from coati.experience_maker.delivery import ItemSender
from coati.experience_maker.pipeline import ExperiencePipeline
from coati.experience_maker.work_source import WorkSource
from coati.peers import wait_in_slices

_POLL_SECONDS: Final = 0.02  # polling interval for rewards while the loop waits for something else
_SLICE_SECONDS: Final = 0.5  # polling interval for a stop while the loop waits for prompts and nothing is pending
# Fraction of all slots that must be free before the loop requests prompts. Small requests and prefills are inefficient.
_MIN_FREE_FRACTION: Final = 1 / 8


@dataclasses.dataclass(eq=False)
class WorkLoop:
    """Makes experience from the prompts of a source and sends it to the trainers."""

    pipeline: ExperiencePipeline
    source: WorkSource
    sender: ItemSender
    _: dataclasses.KW_ONLY
    deadlines: Deadlines = dataclasses.field(default_factory=Deadlines)
    stop: threading.Event = dataclasses.field(default_factory=threading.Event)
    notify: Callable[..., None] = lambda *_: None
    """Calls a hook of the callbacks. The hooks of two batches never interleave."""
    record: Callable[[dict[str, Any]], None] = lambda _: None  # receives the report of each batch
    samples_kept: int = 0
    offload_to_cpu: bool = True

    def __post_init__(self) -> None:
        # The maker if it batches continuously, None if it works on whole batches.
        self._continuous_maker = self.pipeline.continuous_maker if self.source.capacity > 0 else None
        self._pending: deque[MakerBatch] = deque()  # scored batches, oldest first
        self._hooks_started = False  # whether the start hooks of the current batch have been called
        self._requested: Future[Any] | None = None  # the next work
        self._has_more = True  # whether the source may have more work

    def run(self) -> None:
        """Work until the source ends or a stop is requested, and deliver everything that was made."""
        thread = BackgroundThread(name="prompts")
        try:
            while self._wait_until_busy(thread):
                with self.pipeline.timeline.span("generate"):
                    while self.pipeline.num_in_progress:
                        self._generate_and_deliver()
                        self._request_work(thread)
                        self._start_work()
        except Exception as error:
            try:
                self._finish_pending()  # these batches were scored before the error
            except Exception as later:
                error.add_note(f"Delivering the batches scored before it also failed: {type(later).__name__}: {later}")
            raise
        else:
            self._finish_pending()
        finally:
            thread.close()

    def take_turn(self) -> bool:
        """Do the next work from start to delivery while the trainer waits. Return False if there is none now."""
        work = self.source.poll(self.source.capacity)
        if isinstance(work, list):
            self._start_hooks()
            with self.pipeline.timeline.span("generate"):
                self._pending.append(self.pipeline.make_batch(work))
            self._finish_pending()
            self.sender.flush()
        elif work is not None:
            work.run(self.pipeline)
        return work is not None

    def _wait_until_busy(self, thread: BackgroundThread) -> bool:
        """Wait until samples are in progress. Return False at the end of the source or after a stop."""
        while not self.pipeline.num_in_progress:
            while self._pending and self._pending[0].is_ready:
                self._finish(self._pending.popleft())
            self._request_work(thread)
            if not self._has_more:
                return False
            if self._requested is None:  # too many batches are pending
                self._finish(self._pending.popleft())
            elif self._await_work(self._requested):
                self._start_work()
        return True

    def _request_work(self, thread: BackgroundThread) -> None:
        """Request the next work if there is room for it. After a stop, request no more."""
        if self.stop.is_set():
            self._has_more = False
        elif self._has_more and (room := self._room()) is not None:
            if self._requested is None:
                self._requested = thread.run(lambda: self.source.wait_for_work(room))
            else:
                self.source.room = room  # more than when the request began to wait

    def _room(self) -> int | None:
        """Return the room for samples; None if it is too small, or while an update waits for those in progress."""
        source, pipeline, maker = self.source, self.pipeline, self._continuous_maker
        if maker is None:
            return source.capacity if not pipeline.num_in_progress and len(self._pending) < 2 else None
        num_generating = maker.num_generating
        num_pending = maker.num_in_progress - num_generating + sum(len(batch.samples) for batch in self._pending)
        room = min(source.capacity - num_generating, maker.room)
        min_room = max(source.min_samples, _MIN_FREE_FRACTION * (num_generating + room))
        is_enough = room >= min_room or not num_generating
        is_open = pipeline.commit_between_tokens or not (pipeline.num_in_progress and pipeline.served.has_pending)
        return room if is_enough and num_pending <= 2 * source.capacity and is_open else None

    def _await_work(self, requested: "Future[Any]") -> bool:
        """Wait for requested work, and finish batches meanwhile. Return False if a stop comes first."""
        last_delivery = 0.0

        def attempt(seconds: float) -> bool:
            nonlocal last_delivery
            wait([requested], timeout=min(seconds, _POLL_SECONDS if self._pending else _SLICE_SECONDS))
            self.sender.collect()  # trainers may grant no leases before lost sends are retried
            if self._pending:
                if self._pending[0].is_ready and not requested.done():  # otherwise start the new work first
                    self._finish(self._pending.popleft())
                last_delivery = time.monotonic()
            return requested.done() or self.stop.is_set()

        with self.pipeline.timeline.span(self.source.wait_name):
            wait_in_slices(
                attempt,
                deadline_seconds=self.deadlines.batch_seconds,
                what=lambda: f"{self.source.awaited} (deadlines.batch_seconds)",
                last_progress=lambda: max(last_delivery, self.source.last_answer),
            )
        return requested.done()

    def _start_work(self) -> None:
        """Start the requested work if it has arrived."""
        if self._requested is None or not self._requested.done() or self.stop.is_set():
            return
        requested, self._requested = self._requested, None
        work = requested.result()
        if work is None:
            self._has_more = False
        elif isinstance(work, list):
            if not self._pending and not self.pipeline.num_in_progress:
                self._start_hooks()
            self.pipeline.add_samples(work)
        else:
            while self.pipeline.num_in_progress:
                self._generate_and_deliver()
            self._finish_pending()
            # This work may take long, and trainers may be waiting for the items and for the leases that ended.
            self.sender.flush()
            self.source.report_endings()
            work.run(self.pipeline, self.source.report_endings)

    def _generate_and_deliver(self) -> None:
        """Generate the next tokens, and deliver ready batches as long as that does not block."""
        if (batch := self.pipeline.generate_and_score(in_batches=self._continuous_maker is None)) is not None:
            self._pending.append(batch)
        self.sender.collect()
        while self._pending and self._pending[0].is_ready and self.sender.has_room():
            self._finish(self._pending.popleft())

    def _finish_pending(self) -> None:
        while self._pending:
            self._finish(self._pending.popleft())

    def _finish(self, batch: MakerBatch) -> None:
        """Wait for the rewards of a batch and deliver it."""
        try:
            experience = self.pipeline.finish_batch(batch)
        finally:
            for sample in batch.quarantined:
                self.record({"quarantined": sample, "version": batch.version})
        self._start_hooks()
        if experience is None:
            self.source.close_leases(batch, [])
        else:
            self._deliver(batch, experience)
        self.notify("on_batch_end")
        self._hooks_started = False

    def _deliver(self, batch: MakerBatch, experience: Experience) -> None:
        self.notify("on_make_experience_end", experience)
        if self.offload_to_cpu:
            experience.to_device("cpu")
        num_skipped = self.source.num_skipped
        self.record(self.pipeline.record(batch, samples_kept=self.samples_kept, num_skipped=num_skipped))
        faults.reach("maker.before_deliver")
        self.notify("on_send_start")
        with self.pipeline.timeline.span("send"):
            self.sender.send(self.source.close_leases(batch, split_experience_batch(experience)))
        self.notify("on_send_end")

    def _start_hooks(self) -> None:
        """Call the start hooks of a batch, unless they have been called."""
        if not self._hooks_started:
            self._hooks_started = True
            self.notify("on_batch_start")
            self.notify("on_make_experience_start")
