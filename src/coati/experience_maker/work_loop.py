"""What a maker does with its prompts, one batch after the other, with the rewards of one beside the next.

    models    │ generate 1, score │ generate 2 ·········, score │ generate 3 …
    rewards               │ functions of 1 ·│            │ functions of 2 …
    delivery                                │ 1

A batch whose reward functions still run when the models are done with it is pending, and the next one is begun. It is
finished and delivered between two tokens of that one, as soon as its scores are there, so that trainers hardly get it
later than they would have without. On a GPU so is every other batch: the host would only wait between tokens, and the
GPU for the host before them. At most one batch is pending while another is generated, and batches are delivered in
the order of their prompts. Whatever else the loop waits for (weights, prompts) may depend on the pending one, so it
looks after that one meanwhile. Prompts are drawn on a thread of their own, always the same one, and one batch ahead.

With a staleness bound of 0 nothing is ever pending: see `ExperiencePipeline.may_defer`.
"""

import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from typing import Any, Final

from coati.beside import OneThread
from coati.errors import DeadlineExceeded
from coati.experience_maker.pipeline import ExperiencePipeline, MadeBatch, PendingBatch
from coati.experience_maker.prompt_batch import PromptBatch

logger = logging.getLogger(__name__)

# Between two looks at whether the scores of a pending batch are there, while something else is waited for.
_LOOK_SECONDS: Final = 0.02
# Between two looks at whether a stop came, while prompts are waited for and nothing is pending.
_SLICE_SECONDS: Final = 0.5
_END: Final = object()


class WorkLoop:
    """Makes experience of batches of prompts, in as many parts as admission asks for.

    `await_admission(wanted)` waits until samples may be issued and issues them (0: something came between), `deliver`
    takes what is made, and `notify` is told the names of the hooks around it (see `coati.ray.callbacks`). Hooks keep
    their order: those of a batch that is begun while another is pending come when that one is delivered. A batch of
    prompts that takes longer than `prompts_seconds` ends the loop with an error.
    """

    def __init__(
        self,
        pipeline: ExperiencePipeline,
        *,
        await_admission: Callable[[int], int],
        deliver: Callable[[MadeBatch], None],
        should_stop: Callable[[], bool] = lambda: False,
        notify: Callable[[str], None] = lambda _: None,
        prompts_seconds: float = float("inf"),
    ) -> None:
        self._pipeline = pipeline
        self._timeline = pipeline.timeline
        self._await_admission = await_admission
        self._deliver = deliver
        self._should_stop = should_stop
        self._notify = notify
        self._prompts_seconds = prompts_seconds
        self._pending: PendingBatch | None = None
        self._late_hooks: list[str] = []

    def run(self, batches: Iterator[Any]) -> None:
        """Work on the batches until they end, the run's samples are made, or a stop comes; deliver all that is made."""
        prompts_thread = OneThread(name="prompts")

        def draw() -> "Future[Any]":
            return prompts_thread.run(lambda: next(batches, _END))

        coming = draw()
        try:
            while (batch := self._waited_for(coming)) is not _END and not self._is_over():
                coming = draw()
                self._hook("on_batch_start")
                self._work_on(PromptBatch.parse(batch))
                self._hook("on_batch_end")
            self._finish_pending()
        except BaseException:
            self._save_pending()
            raise
        finally:
            prompts_thread.close()

    def _work_on(self, batch: PromptBatch) -> None:
        start = 0
        while start < len(batch) and not self._is_over():
            num_rows = self._admitted(len(batch) - start)
            if num_rows == 0:  # a stop, or work is being dealt anew
                continue
            self._make(batch.rows(start, start + num_rows))
            start += num_rows

    def _make(self, part: PromptBatch) -> None:
        self._hook("on_make_experience_start")
        begun = self._pipeline.begin(part, meanwhile=self._finish_if_ready if self._pending else None)
        self._finish_pending()
        self._pending = begun
        is_due = begun.is_ready and not self._pipeline.has_time_between_tokens
        if is_due or not self._pipeline.may_defer:
            self._finish_pending()

    def _is_over(self) -> bool:
        """Whether nothing is left to begin. A pending batch may yet give samples back, so it is finished first."""
        if self._pipeline.is_done:
            self._finish_pending()
        return self._should_stop() or self._pipeline.is_done

    def _waited_for(self, prompts: "Future[Any]") -> Any:
        """Prompts that are being drawn; the end if a stop comes first.

        They may come from somebody who waits for what is pending.
        """
        with self._timeline.span("wait_prompts"):
            since = time.monotonic()
            while not prompts.done():
                if self._should_stop():
                    return _END
                wait([prompts], timeout=_LOOK_SECONDS if self._pending else _SLICE_SECONDS)
                if self._pending:
                    self._finish_if_ready()
                    since = time.monotonic()
                elif time.monotonic() - since >= self._prompts_seconds and not prompts.done():
                    raise DeadlineExceeded(
                        f"waited {self._prompts_seconds:g} s for the next batch of prompts (deadlines.batch_seconds). "
                        "Look at what the data loader waits for, or raise it."
                    )
        if prompts.exception() is not None:
            self._finish_pending()  # it was made before the error
        return prompts.result()

    def _admitted(self, wanted: int) -> int:
        """Issue samples, as soon as that may be, and say how many; 0 if something came between."""
        if (pending := self._pending) is not None:
            if (num_rows := self._pipeline.admit(wanted)) > 0:
                return num_rows
            with self._timeline.span("wait_rewards"):
                while not pending.is_ready and not self._should_stop():
                    pending.wait(_LOOK_SECONDS)
                    if (num_rows := self._pipeline.admit(wanted)) > 0:  # the weights came first
                        return num_rows
            self._finish_if_ready()
        return self._await_admission(wanted)

    def _finish_if_ready(self) -> None:
        if self._pending is not None and self._pending.is_ready:
            self._finish_pending()

    def _finish_pending(self) -> None:
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        made = self._pipeline.finish(pending)
        if made is not None:
            self._deliver(made)
        late, self._late_hooks = self._late_hooks, []
        for name in late:
            self._notify(name)

    def _save_pending(self) -> None:
        """Something else has failed: deliver what is ready all the same, if that goes well."""
        try:
            self._finish_if_ready()
        except Exception as error:
            logger.warning("a batch that was made is lost: %s", error)

    def _hook(self, name: str) -> None:
        if self._pending is None:
            self._notify(name)
        else:
            self._late_hooks.append(name)
