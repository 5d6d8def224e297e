"""What a maker does with its prompts, batch after batch, with the rewards of one computed while the next is generated.

    models    │ generate 1, score │ generate 2 ·········, score │ generate 3 …
    rewards               │ functions of 1 ·│            │ functions of 2 …
    delivery                                │ 1

A batch whose reward functions still run when the models are done with it is pending, and the next one is begun. The
pending one is finished and delivered between two tokens of the next, as soon as its scores have come and trainers have
room. On a GPU, batches without slow rewards are delivered there too: the host is idle between tokens. At most one batch
is pending while another is generated, and batches are delivered in the order of their prompts. While the loop waits for
prompts (in a run: for leases, which may need new weights), it still finishes the pending batch, because that wait may
depend on it. Prompts are drawn when they can be begun, always on the same background thread. A lease that a maker held
meanwhile could not go to a quicker maker, and would count as made ahead of the trainer without being there.

On-policy nothing is ever pending: see `WorkSource.may_defer`.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, Final

from coati import faults
from coati.background import BackgroundThread
from coati.config import Deadlines
from coati.errors import DeadlineExceeded
from coati.experience import Experience, split_experience_batch
from coati.experience_maker.base import MakerBatch, OtherWork, PromptBatch, WorkSource
from coati.experience_maker.delivery import ItemSender
from coati.experience_maker.pipeline import ExperiencePipeline

# Between two checks for the scores of a pending batch, while the loop waits for something else.
_POLL_SECONDS: Final = 0.02
# Between two checks for a stop, while the loop waits for prompts and nothing is pending.
_SLICE_SECONDS: Final = 0.5


class WorkLoop:
    """Makes experience from the prompts of a source, and sends it to trainers.

    `notify(hook, *args)` calls the hooks of callbacks (see `coati.ray.callbacks`). Hooks keep their order: those of a
    batch that is begun while another is pending come when that one is delivered. `record` takes what each batch
    reports.
    """

    def __init__(
        self,
        pipeline: ExperiencePipeline,
        source: WorkSource,
        sender: ItemSender,
        *,
        deadlines: Deadlines | None = None,
        stop: threading.Event | None = None,
        notify: Callable[..., None] = lambda *_: None,
        record: Callable[[dict[str, Any]], None] = lambda _: None,
        samples_kept: int = 0,
        offload_to_cpu: bool = True,
    ) -> None:
        self._pipeline = pipeline
        self._source = source
        self._sender = sender
        self._deadlines = deadlines or Deadlines()
        self._stop = stop or threading.Event()
        self._notify = notify
        self._record = record
        self._samples_kept = samples_kept
        self._offload_to_cpu = offload_to_cpu
        self._timeline = pipeline.timeline
        self._pending: MakerBatch | None = None
        self._late_hooks: list[str] = []

    def run(self) -> None:
        """Work on the source's batches until they end or a stop comes; deliver all that is made."""
        prompts_thread = BackgroundThread(name="prompts")
        batches = iter(self._source)

        def draw() -> "Future[PromptBatch | OtherWork | None]":
            return prompts_thread.run(lambda: next(batches, None))

        try:
            while (batch := self._await_prompts(draw())) is not None and not self._stop.is_set():
                if isinstance(batch, PromptBatch):
                    self._hook("on_batch_start")
                    self.make(batch)
                    self._hook("on_batch_end")
                else:
                    self._finish_pending()  # trainers need not wait for it
                    batch.run(self._pipeline)
            self._finish_pending()
        finally:
            prompts_thread.close()

    def make(self, batch: PromptBatch) -> None:
        """Make experience from a batch of prompts, and deliver it unless it may be pending while the next is made."""
        self._hook("on_make_experience_start")
        try:
            begun = self._pipeline.begin(batch, meanwhile=self._finish_between_tokens if self._pending else None)
        finally:
            self._finish_pending()  # it was made before an error of the next one
        self._pending = begun
        # Where a send may wait for room, it waits now: what is written meanwhile would grow old.
        has_time = self._source.always_has_room and self._pipeline.maker.has_time_between_tokens
        if (begun.is_ready and not has_time) or not self._source.may_defer:
            self._finish_pending()

    def _await_prompts(self, prompts: "Future[PromptBatch | OtherWork | None]") -> PromptBatch | OtherWork | None:
        """The prompts that are being drawn, or other work; None at their end, or if a stop comes first."""
        with self._timeline.span(self._source.wait_name):
            since = time.monotonic()
            while not prompts.done():
                if self._stop.is_set():
                    return None
                wait([prompts], timeout=_POLL_SECONDS if self._pending else _SLICE_SECONDS)
                self._sender.collect()  # there may be no leases before what was sent has come
                if self._pending:
                    if self._pending.is_ready and not prompts.done():  # else the models work first
                        self._finish_pending()
                    since = time.monotonic()
                elif time.monotonic() - since >= self._deadlines.batch_seconds and not prompts.done():
                    raise DeadlineExceeded(
                        f"waited {self._deadlines.batch_seconds:g} s for the next batch of prompts "
                        "(deadlines.batch_seconds). Check what the data loader waits for, or raise it."
                    )
        if prompts.exception() is not None:
            self._finish_pending()  # it was made before the error
        return prompts.result()

    def _finish_between_tokens(self) -> None:
        """Finish the pending batch if nothing has to be waited for: the models are in use and cannot be updated."""
        if self._pending is not None and self._pending.is_ready and self._sender.has_room():
            self._finish_pending()

    def _finish_pending(self) -> None:
        if self._pending is None:
            return
        batch, self._pending = self._pending, None
        try:
            experience = self._pipeline.finish(batch)
        finally:
            for sample in batch.quarantined:
                self._record({"quarantined": sample, "version": batch.version})
        if experience is None:
            self._source.attach_leases(batch, [])
        else:
            self._deliver(batch, experience)
        late, self._late_hooks = self._late_hooks, []
        for name in late:
            self._notify(name)

    def _deliver(self, batch: MakerBatch, experience: Experience) -> None:
        self._notify("on_make_experience_end", experience)
        if self._offload_to_cpu:
            experience.to_device("cpu")
        num_skipped = self._source.num_skipped
        self._record(self._pipeline.record(batch, samples_kept=self._samples_kept, num_skipped=num_skipped))
        faults.reach("maker.before_deliver")
        self._notify("on_send_start")
        with self._timeline.span("send"):
            self._sender.send(self._source.attach_leases(batch, split_experience_batch(experience)))
        self._notify("on_send_end")

    def _hook(self, name: str) -> None:
        if self._pending is None:
            self._notify(name)
        else:
            self._late_hooks.append(name)
