"""What a maker does with its work: keep the engine full, deliver groups as they are scored.

    prompts     │ leases for the free places ·│ leases …
    models      │ write, write, score, write, write, write, score …
    rewards              │ functions ·│              │ functions …
    delivery                          │ some groups

Complete groups are scored in passes, and delivered between two tokens when their rewards have come and trainers have
room, in the order in which they were scored. No more waits for rewards than is worked on at a time. Makers that only
have `make_experience`, and data loaders, work by whole batches: the next is begun when the last one is scored.

Prompts are drawn when they can be begun, on one background thread: a lease held meanwhile could not go to a quicker
maker.
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

# Between two checks for rewards, while the loop waits for something else.
_POLL_SECONDS: Final = 0.02
# Between two checks for a stop, while the loop waits for prompts and nothing is pending.
_SLICE_SECONDS: Final = 0.5
# The part of all places that is free before prompts are asked for: many small requests and prefills would cost more.
_ASKED_SHARE: Final = 1 / 8


@dataclasses.dataclass(eq=False)
class WorkLoop:
    """Makes experience from the prompts of a source, and sends it to trainers."""

    pipeline: ExperiencePipeline
    source: WorkSource
    sender: ItemSender
    _: dataclasses.KW_ONLY
    deadlines: Deadlines = dataclasses.field(default_factory=Deadlines)
    stop: threading.Event = dataclasses.field(default_factory=threading.Event)
    notify: Callable[..., None] = lambda *_: None
    """Calls hooks of callbacks, those of one batch after those of the batch before."""
    record: Callable[[dict[str, Any]], None] = lambda _: None  # takes what each batch reports
    samples_kept: int = 0
    offload_to_cpu: bool = True

    def __post_init__(self) -> None:
        # The maker, where samples are begun while others are being written.
        self._writer = self.pipeline.writer if self.source.capacity > 0 else None
        self._pending: deque[MakerBatch] = deque()  # scored, the oldest first
        self._has_started = False  # whether the hooks of a batch have been called
        self._drawn: Future[Any] | None = None  # the next work
        self._has_more = True  # whether the source may have some

    def run(self) -> None:
        """Work on what the source has until it ends or a stop comes; deliver all that is made."""
        thread = BackgroundThread(name="prompts")
        try:
            while self._begin_stretch(thread):
                with self.pipeline.timeline.span("generate"):
                    while self.pipeline.num_in_work:
                        self._advance()
                        self._ask(thread)
                        self._take_drawn()
        except Exception as error:
            try:
                self._finish_pending()  # it was made before what went wrong
            except Exception as later:
                error.add_note(f"Then what was made before could not be delivered: {type(later).__name__}: {later}")
            raise
        else:
            self._finish_pending()
        finally:
            thread.close()

    def take_turn(self) -> bool:
        """Do the next work alone, and deliver it, while the trainer waits; False if there is none now."""
        work = self.source.poll(self.source.capacity)
        if isinstance(work, list):
            self._start_hooks()
            with self.pipeline.timeline.span("generate"):
                self._pending.append(self.pipeline.begin(work))
            self._finish_pending()
            self.sender.flush()
        elif work is not None:
            work.run(self.pipeline)
        return work is not None

    def _begin_stretch(self, thread: BackgroundThread) -> bool:
        """Wait until something is in work; False at the end."""
        while not self.pipeline.num_in_work:
            while self._pending and self._pending[0].is_ready:
                self._finish(self._pending.popleft())
            self._ask(thread)
            if not self._has_more:
                return False
            if self._drawn is None:  # too much is pending
                self._finish(self._pending.popleft())
            elif self._await_drawn(self._drawn):
                self._take_drawn()
        return True

    def _ask(self, thread: BackgroundThread) -> None:
        """Have the next work drawn if there is room for it; nothing more after a stop."""
        if self.stop.is_set():
            self._has_more = False
        elif self._drawn is None and self._has_more and (room := self._room()) is not None:
            self._drawn = thread.run(lambda: self.source.draw(room))

    def _room(self) -> int | None:
        """Samples that there is room for; None if there is too little to ask for more work."""
        source, pipeline = self.source, self.pipeline
        num_in_work, num_pending = pipeline.num_in_work, sum(len(batch.samples) for batch in self._pending)
        if self._writer is None:
            return source.capacity if not num_in_work and len(self._pending) < 2 else None
        room = min(source.capacity - num_in_work, self._writer.room)
        is_enough = room >= max(source.least, _ASKED_SHARE * (num_in_work + room)) or not num_in_work
        return room if is_enough and num_pending <= source.capacity and pipeline.takes_more else None

    def _await_drawn(self, drawn: "Future[Any]") -> bool:
        """Wait for work that is being drawn; False if a stop comes first."""
        last_delivery = 0.0

        def attempt(seconds: float) -> bool:
            nonlocal last_delivery
            wait([drawn], timeout=min(seconds, _POLL_SECONDS if self._pending else _SLICE_SECONDS))
            self.sender.collect()  # there may be no leases before what was sent has come
            if self._pending:
                if self._pending[0].is_ready and not drawn.done():  # else the models work first
                    self._finish(self._pending.popleft())
                last_delivery = time.monotonic()
            return drawn.done() or self.stop.is_set()

        with self.pipeline.timeline.span(self.source.wait_name):
            wait_in_slices(
                attempt,
                deadline_seconds=self.deadlines.batch_seconds,
                what=lambda: f"{self.source.awaited} (deadlines.batch_seconds)",
                last_progress=lambda: max(last_delivery, self.source.last_answer),
            )
        return drawn.done()

    def _take_drawn(self) -> None:
        """Begin what was drawn, if it is there."""
        if self._drawn is None or not self._drawn.done() or self.stop.is_set():
            return
        drawn, self._drawn = self._drawn, None
        work = drawn.result()
        if work is None:
            self._has_more = False
        elif isinstance(work, list):
            if not self._pending and not self.pipeline.num_in_work:
                self._start_hooks()
            self.pipeline.submit(work)
        else:
            while self.pipeline.num_in_work:
                self._advance()
            self._finish_pending()
            # This may take long, and others may wait for what became of these leases.
            self.sender.flush()
            self.source.settle()
            work.run(self.pipeline, self.source.settle)

    def _advance(self) -> None:
        """Write on, and deliver what is ready if nothing has to be waited for: the models are in use."""
        if (batch := self.pipeline.advance(in_batches=self._writer is None)) is not None:
            self._pending.append(batch)
        self.sender.collect()
        while self._pending and self._pending[0].is_ready and self.sender.has_room():
            self._finish(self._pending.popleft())

    def _finish_pending(self) -> None:
        while self._pending:
            self._finish(self._pending.popleft())

    def _finish(self, batch: MakerBatch) -> None:
        """Wait for the rewards of a batch, and deliver it."""
        try:
            experience = self.pipeline.finish(batch)
        finally:
            for sample in batch.quarantined:
                self.record({"quarantined": sample, "version": batch.version})
        self._start_hooks()
        if experience is None:
            self.source.attach_leases(batch, [])
        else:
            self._deliver(batch, experience)
        self.notify("on_batch_end")
        self._has_started = False

    def _deliver(self, batch: MakerBatch, experience: Experience) -> None:
        self.notify("on_make_experience_end", experience)
        if self.offload_to_cpu:
            experience.to_device("cpu")
        num_skipped = self.source.num_skipped
        self.record(self.pipeline.record(batch, samples_kept=self.samples_kept, num_skipped=num_skipped))
        faults.reach("maker.before_deliver")
        self.notify("on_send_start")
        with self.pipeline.timeline.span("send"):
            self.sender.send(self.source.attach_leases(batch, split_experience_batch(experience)))
        self.notify("on_send_end")

    def _start_hooks(self) -> None:
        """Call the first hooks of a batch, unless that was done."""
        if not self._has_started:
            self._has_started = True
            self.notify("on_batch_start")
            self.notify("on_make_experience_start")
