"""What a maker does with its prompts, batch after batch, with the rewards of one computed while the next is generated.

    models    │ generate 1, score │ generate 2 ·········, score │ generate 3 …
    rewards               │ functions of 1 ·│            │ functions of 2 …
    delivery                                │ 1

A batch whose reward functions still run when the models are done with it is pending, and the next one is begun. The
pending one is finished and delivered between two tokens of the next, as soon as its scores have come and trainers have
room. On a GPU, batches without slow rewards are delivered there too: the host is idle between tokens. At most one batch
is pending while another is generated, and batches are delivered in the order of their prompts. While the loop waits for
anything else (weights, prompts), it still finishes the pending batch, because that wait may depend on it. Prompts are
drawn in the background, always on the same thread, one batch ahead.

With a staleness bound of 0 nothing is ever pending: see `ExperiencePipeline.may_defer`.
"""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from typing import Any, Final

from coati.background import BackgroundThread
from coati.config import Deadlines
from coati.errors import DeadlineExceeded
from coati.experience import Experience, split_experience_batch
from coati.experience_maker.base import MakerBatch, PromptBatch
from coati.experience_maker.delivery import ItemSender
from coati.experience_maker.pipeline import ExperiencePipeline
from coati.ledger.admission import AdmissionGate
from coati.monitor.records import RecordLog
from coati.peers import wait_in_slices

# Between two checks for the scores of a pending batch, while the loop waits for something else.
_POLL_SECONDS: Final = 0.02
# Between two checks for a stop, while the loop waits for prompts and nothing is pending.
_SLICE_SECONDS: Final = 0.5
_END: Final = object()


class WorkLoop:
    """Makes experience from batches of prompts, in as many parts as admission asks for, and sends it to trainers.

    `notify(hook, *args)` calls the hooks of callbacks (see `coati.ray.callbacks`). Hooks keep their order: those of a
    batch that is begun while another is pending come when that one is delivered. `prompts` may count what it skipped.
    """

    def __init__(
        self,
        pipeline: ExperiencePipeline,
        sender: ItemSender,
        *,
        name: str = "this maker",
        deadlines: Deadlines | None = None,
        stop: threading.Event | None = None,
        notify: Callable[..., None] = lambda *_: None,
        records: RecordLog[dict[str, Any]] | None = None,
        samples_kept: int = 0,
        offload_to_cpu: bool = True,
        prompts: Any = None,
    ) -> None:
        self._pipeline = pipeline
        self._sender = sender
        self._name = name
        self._deadlines = deadlines or Deadlines()
        self._stop = stop or threading.Event()
        self._notify = notify
        self._records = records
        self._samples_kept = samples_kept
        self._offload_to_cpu = offload_to_cpu
        self._prompts = prompts
        self._timeline = pipeline.timeline
        self._pending: MakerBatch | None = None
        self._late_hooks: list[str] = []

    def run(self, batches: Iterator[Any]) -> None:
        """Work on the batches until they end, the run's samples are made, or a stop comes; deliver all that is made."""
        prompts_thread = BackgroundThread(name="prompts")

        def draw() -> "Future[Any]":
            return prompts_thread.run(lambda: next(batches, _END))

        coming = draw()
        try:
            while (batch := self._await_prompts(coming)) is not _END and not self._is_over():
                coming = draw()
                self._hook("on_batch_start")
                self._work_on(PromptBatch.parse(batch))
                self._hook("on_batch_end")
            self._finish_pending()
        finally:
            prompts_thread.close()

    def _work_on(self, batch: PromptBatch) -> None:
        start = 0
        while start < len(batch) and not self._is_over():
            num_rows = self._admit(len(batch) - start)
            if num_rows == 0:  # a stop, or work is being reassigned
                continue
            self._make(batch.select(slice(start, start + num_rows)))
            start += num_rows

    def _make(self, part: PromptBatch) -> None:
        self._hook("on_make_experience_start")
        try:
            begun = self._pipeline.begin(part, meanwhile=self._finish_between_tokens if self._pending else None)
        finally:
            self._finish_pending()  # it was made before an error of the next one
        self._pending = begun
        is_due = begun.is_ready and not self._pipeline.has_time_between_tokens
        if is_due or not self._pipeline.may_defer:
            self._finish_pending()

    def _is_over(self) -> bool:
        """Whether nothing is left to begin. A pending batch may yet give samples back, so it is finished first."""
        if self._pipeline.is_done:
            self._finish_pending()
        return self._stop.is_set() or self._pipeline.is_done

    def _await_prompts(self, prompts: "Future[Any]") -> Any:
        """The prompts that are being drawn, or the end if a stop comes first."""
        with self._timeline.span("wait_prompts"):
            since = time.monotonic()
            while not prompts.done():
                if self._stop.is_set():
                    return _END
                wait([prompts], timeout=_POLL_SECONDS if self._pending else _SLICE_SECONDS)
                if self._pending:
                    self._finish_if_ready()
                    since = time.monotonic()
                elif time.monotonic() - since >= self._deadlines.batch_seconds and not prompts.done():
                    raise DeadlineExceeded(
                        f"waited {self._deadlines.batch_seconds:g} s for the next batch of prompts "
                        "(deadlines.batch_seconds). Check what the data loader waits for, or raise it."
                    )
        if prompts.exception() is not None:
            self._finish_pending()  # it was made before the error
        return prompts.result()

    def _admit(self, wanted: int) -> int:
        """Issue samples as soon as the gate admits them, and return how many; 0 after a stop or a reassignment."""
        if (pending := self._pending) is not None:
            if (num_rows := self._pipeline.admit(wanted)) > 0:
                return num_rows
            with self._timeline.span("wait_rewards"):
                while not pending.is_ready and not self._stop.is_set():
                    pending.wait(_POLL_SECONDS)
                    if (num_rows := self._pipeline.admit(wanted)) > 0:  # the weights came first
                        return num_rows
            self._finish_if_ready()
        if (gate := self._pipeline.gate) is not None:
            self._await_admission(gate)
        return 0 if self._stop.is_set() else self._pipeline.admit(wanted)

    def _await_admission(self, gate: AdmissionGate) -> None:
        pipeline = self._pipeline
        with self._timeline.span("wait_weights"):
            wait_in_slices(
                lambda seconds: pipeline.wait_for_admission(seconds) or self._stop.is_set(),
                deadline_seconds=self._deadlines.batch_seconds,
                what=lambda: (
                    f"weights of version {gate.version_needed()} at maker {self._name} "
                    f"(it has {pipeline.served.version})"
                ),
                message_every=self._deadlines.message_seconds,
                between=self._sender.check_trainers,
            )

    def _finish_between_tokens(self) -> None:
        """Finish the pending batch if nothing has to be waited for: the models are in use and cannot be updated."""
        if self._pending is not None and self._pending.is_ready and self._sender.has_room():
            self._finish_pending()

    def _finish_if_ready(self) -> None:
        if self._pending is not None and self._pending.is_ready:
            self._finish_pending()

    def _finish_pending(self) -> None:
        if self._pending is None:
            return
        batch, self._pending = self._pending, None
        experience = self._pipeline.finish(batch)
        if experience is not None:
            self._deliver(batch, experience)
        late, self._late_hooks = self._late_hooks, []
        for name in late:
            self._notify(name)

    def _deliver(self, batch: MakerBatch, experience: Experience) -> None:
        self._notify("on_make_experience_end", experience)
        if self._offload_to_cpu:
            experience.to_device("cpu")
        if self._records is not None:
            record = self._pipeline.record(batch, samples_kept=self._samples_kept, prompts=self._prompts)
            self._records.append(record)
        self._notify("on_send_start")
        with self._timeline.span("send"):
            self._sender.send(split_experience_batch(experience))
        self._notify("on_send_end")

    def _hook(self, name: str) -> None:
        if self._pending is None:
            self._notify(name)
        else:
            self._late_hooks.append(name)
