"""What a maker does with its prompts, batch after batch, with the rewards of one computed while the next is generated.

    models    │ generate 1, score │ generate 2 ·········, score │ generate 3 …
    rewards               │ functions of 1 ·│            │ functions of 2 …
    delivery                                │ 1

A batch whose reward functions still run when the models are done with it is pending, and the next one is begun. The
pending one is finished and delivered between two tokens of the next, as soon as its scores have come and trainers have
room. On a GPU, batches without slow rewards are delivered there too: the host is idle between tokens. At most one batch
is pending while another is generated, and batches are delivered in the order of their prompts. While the loop waits for
prompts (in a run: for leases, which may need new weights), it still finishes the pending batch, because that wait may
depend on it. Prompts are drawn in the background, always on the same thread: from a data loader one batch ahead. Leases
are asked for when the maker can begin them. One that it held meanwhile could not go to a quicker maker, and would count
as made ahead of the trainer without being there.

On-policy nothing is ever pending: see `ExperiencePipeline.may_defer`.
"""

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from typing import Any, Final

from coati import faults
from coati.background import BackgroundThread
from coati.config import Deadlines
from coati.errors import DataError, DeadlineExceeded
from coati.experience import BufferItem, Experience, split_experience_batch
from coati.experience_maker.base import MakerBatch, PromptBatch
from coati.experience_maker.delivery import ItemSender
from coati.experience_maker.pipeline import ExperiencePipeline
from coati.monitor.records import RecordLog

# Between two checks for the scores of a pending batch, while the loop waits for something else.
_POLL_SECONDS: Final = 0.02
# Between two checks for a stop, while the loop waits for prompts and nothing is pending.
_SLICE_SECONDS: Final = 0.5
_END: Final = object()


class WorkLoop:
    """Makes experience from batches of prompts, and sends it to trainers.

    `notify(hook, *args)` calls the hooks of callbacks (see `coati.ray.callbacks`). Hooks keep their order: those of a
    batch that is begun while another is pending come when that one is delivered. `skipped` counts prompts that were
    skipped; `settle` decides what of a finished batch is delivered.
    """

    def __init__(
        self,
        pipeline: ExperiencePipeline,
        sender: ItemSender,
        *,
        deadlines: Deadlines | None = None,
        stop: threading.Event | None = None,
        notify: Callable[..., None] = lambda *_: None,
        records: RecordLog[dict[str, Any]] | None = None,
        samples_kept: int = 0,
        offload_to_cpu: bool = True,
        skipped: Callable[[], int] = lambda: 0,
        settle: Callable[[MakerBatch, list[BufferItem]], list[BufferItem]] = lambda _, items: items,
    ) -> None:
        self._pipeline = pipeline
        self._sender = sender
        self._deadlines = deadlines or Deadlines()
        self._stop = stop or threading.Event()
        self._notify = notify
        self._records = records
        self._samples_kept = samples_kept
        self._offload_to_cpu = offload_to_cpu
        self._skipped = skipped
        self._settle = settle
        self._timeline = pipeline.timeline
        self._wait_name = "wait_weights" if pipeline.is_leased else "wait_prompts"  # leases come with new weights
        self._pending: MakerBatch | None = None
        self._late_hooks: list[str] = []

    def run(self, batches: Iterator[Any]) -> None:
        """Work on the batches until they end, the run's samples are made, or a stop comes; deliver all that is made."""
        prompts_thread = BackgroundThread(name="prompts")

        def draw() -> "Future[Any]":
            return prompts_thread.run(lambda: next(batches, _END))

        draws_ahead = not self._pipeline.is_leased
        coming = draw()
        try:
            while (batch := self._await_prompts(coming)) is not _END and not self._stop.is_set():
                if draws_ahead:
                    coming = draw()
                self._hook("on_batch_start")
                self._make(batch if isinstance(batch, PromptBatch) else PromptBatch.parse(batch))
                self._hook("on_batch_end")
                if not draws_ahead:
                    coming = draw()
            self._finish_pending()
        finally:
            prompts_thread.close()

    def _make(self, batch: PromptBatch) -> None:
        self._hook("on_make_experience_start")
        try:
            begun = self._pipeline.begin(batch, meanwhile=self._finish_between_tokens if self._pending else None)
        finally:
            self._finish_pending()  # it was made before an error of the next one
        self._pending = begun
        is_due = begun.is_ready and not self._pipeline.has_time_between_tokens
        if is_due or not self._pipeline.may_defer:
            self._finish_pending()

    def _await_prompts(self, prompts: "Future[Any]") -> Any:
        """The prompts that are being drawn, or the end if a stop comes first."""
        with self._timeline.span(self._wait_name):
            since = time.monotonic()
            while not prompts.done():
                if self._stop.is_set():
                    return _END
                wait([prompts], timeout=_POLL_SECONDS if self._pending else _SLICE_SECONDS)
                self._sender.collect()  # there may be no leases before what was sent has come
                if self._pending:
                    if not prompts.done():  # else the models work first
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
        try:
            experience = self._pipeline.finish(batch)
        finally:
            if self._records is not None:
                for sample in batch.quarantined:
                    self._records.append({"quarantined": sample, "version": batch.version})
        if experience is None:
            self._settle(batch, [])
        else:
            self._deliver(batch, experience)
        late, self._late_hooks = self._late_hooks, []
        for name in late:
            self._notify(name)

    def _deliver(self, batch: MakerBatch, experience: Experience) -> None:
        self._notify("on_make_experience_end", experience)
        if self._offload_to_cpu:
            experience.to_device("cpu")
        if self._records is not None:
            record = self._pipeline.record(batch, samples_kept=self._samples_kept, num_skipped=self._skipped())
            self._records.append(record)
        faults.reach("maker.before_deliver")
        self._notify("on_send_start")
        with self._timeline.span("send"):
            self._sender.send(self._settle(batch, split_experience_batch(experience)))
        self._notify("on_send_end")

    def _hook(self, name: str) -> None:
        if self._pending is None:
            self._notify(name)
        else:
            self._late_hooks.append(name)


def loader_batches(
    loader_fn: Callable[[], Iterable[Any]], num_epochs: int = 1, num_steps: int = 0, *, name: str = "this maker"
) -> Iterator[Any]:
    """Yield `num_steps` batches of as many passes as it takes, or else `num_epochs` passes over `loader_fn()`.

    >>> list(loader_batches(lambda: [1, 2], num_steps=3))
    [1, 2, 1]
    """
    passes = itertools.count() if num_steps > 0 else range(num_epochs)
    batches = (batch for _ in passes for batch in _one_pass(loader_fn, name))
    return itertools.islice(batches, num_steps) if num_steps > 0 else batches


def _one_pass(loader_fn: Callable[[], Iterable[Any]], name: str) -> Iterator[Any]:
    is_empty = True
    for batch in loader_fn():
        is_empty = False
        yield batch
    if is_empty:
        raise DataError(
            f"dataloader_fn() of maker {name} gave no batch. Is the dataset empty, or smaller than one batch with "
            "drop_last=True?"
        )
