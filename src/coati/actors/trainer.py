"""A trainer: a replay buffer that makers fill, and a loop that trains on it.

makers ── buffer_extend ──►  replay buffer ── whole batches ──►  fit: training_step
   ▲                                                                  │ after each episode
   └───────────────── _update_remote_makers ──────────────────────────┘
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from logging import INFO, WARNING
from typing import Any

from coati import faults
from coati.actors.callbacks import TrainerCallback
from coati.actors.host import Host, Progress, Worker
from coati.batching import split_experience_batch
from coati.config import Deadlines
from coati.devices import device_errors_explained
from coati.errors import ConfigError
from coati.experience import BufferItem, Experience
from coati.experience_buffer.buffer import SampleBuffer
from coati.ledger import Lease, LeaseRequest
from coati.peers import wait_in_slices
from coati.randomness import STREAM_EPOCHS, keyed_generator

logger = logging.getLogger(__name__)

_SLICE_SECONDS = 1.0
_MEMORY_REMEDY = "Give the trainer more of the GPU (topology.gpus_per_trainer), or shard it (train.strategy)."


class Trainer(Worker, ABC):
    """Trains on experience that makers push into its buffer."""

    has_reference = False
    """Whether makers are known to measure the KL to a reference model, so that a KL of 0 is a metric, too."""

    def __init__(
        self,
        experience_maker_holder_name_list: Sequence[str],
        train_batch_size: int = 8,
        buffer_limit: int = 0,
        dataloader_pin_memory: bool = True,
        callbacks: Sequence[TrainerCallback] = (),
        debug: bool = False,
        *,
        deadlines: Deadlines | None = None,
        seed: int = 0,
        buffer: SampleBuffer | None = None,
        host: Host | None = None,
    ) -> None:
        """`buffer` replaces the one that `train_batch_size` and `buffer_limit` would create."""
        super().__init__(host, callbacks, debug=debug)
        self.version = 0
        self.deadlines = deadlines or Deadlines()
        self.dataloader_pin_memory = dataloader_pin_memory
        self._seed = seed
        self.maker_names = tuple(experience_maker_holder_name_list)
        self._buffer = buffer or self.host.make_buffer(
            train_batch_size, buffer_limit, maker_names=self.maker_names, deadlines=self.deadlines
        )
        self._is_exhausted = False  # whether no more data will come in this `fit`
        self._found: tuple[Experience | None] | None = None  # this rank's next batch, while other ranks wait for theirs
        self._num_batches = 0
        self._num_samples = 0
        self._num_done = 0  # fresh batches done before the checkpoint that `fit` resumes from

    # Defined by subclasses.

    @abstractmethod
    def _update_remote_makers(self, fully_update: bool = False, **kwargs: Any) -> None:
        """Send the weights to the makers as version `self.version`; a sync passes `fully_update=True`."""

    @abstractmethod
    def training_step(self, experience: Experience) -> dict[str, Any]:
        """Train on one batch and return its metrics."""

    # The loop.

    def fit(self, total_steps: int, update_steps: int, train_epochs: int = 1) -> None:
        """Train on `total_steps` fresh batches, and send the makers new weights after every `update_steps`.

        The first epoch of an episode trains on batches as they arrive; further epochs repeat them in shuffled order.
        If all makers finish early, `fit` trains on the remaining samples. After `stop()` it ends before the next batch.
        """
        numbers = {"total_steps": total_steps, "update_steps": update_steps, "train_epochs": train_epochs}
        for name, value in numbers.items():
            if value < 1:
                raise ConfigError(f"fit's {name} must be 1 or more, got {value}.")
        self._state, self._is_exhausted, self._found = "working", False, None
        self._timeline.lap()  # the metrics of this fit exclude earlier time
        self._buffer.begin_fit()
        try:
            with device_errors_explained("the trainer's work between passes", _MEMORY_REMEDY):
                self.run_episodes(total_steps, update_steps, train_epochs)
        except BaseException:
            self._state = "failed"
            raise
        self._state = "finished"

    def run_episodes(self, total_steps: int, update_steps: int, train_epochs: int = 1) -> None:
        """Run the loop of `fit`: episodes of `update_steps` fresh batches; the last one takes the remainder."""
        num_done, self._num_done = self._num_done, 0
        self.notify("on_fit_start")
        while num_done < total_steps:
            wanted = min(update_steps, total_steps - num_done)
            num_fresh = self._episode(num_done // update_steps, wanted, train_epochs)
            num_done += num_fresh
            if num_fresh == wanted:
                self.checkpoint(num_done)
            else:
                level, why = (INFO, "it was stopped") if self.should_stop() else (WARNING, "no more data came")
                logger.log(level, "training ends after %d of %d batches: %s", num_done, total_steps, why)
                break
        if 0 < num_done < total_steps:
            self.checkpoint(num_done, was_stopped=True)
        self.finish()
        self.notify("on_fit_end")

    def _episode(self, episode: int, num_batches: int, train_epochs: int) -> int:
        """Train on fresh batches and publish the new weights; return the number of batches that arrived."""
        self.notify("on_episode_start", episode)
        num_fresh, batches = self._first_epoch(num_batches, keeps=train_epochs > 1)
        for epoch in range(1, train_epochs):
            if batches:
                self.notify("on_epoch_start", epoch)
                order = keyed_generator(self._seed, episode * train_epochs + epoch, stream=STREAM_EPOCHS)
                for index in order.permutation(len(batches)):
                    self.train_on(batches[index])
                self.notify("on_epoch_end", epoch)
        if num_fresh:
            self.notify("on_update_start")
            self.publish()
            self.notify("on_update_end")
        self.notify("on_episode_end", episode)
        return num_fresh

    def _first_epoch(self, num_batches: int, *, keeps: bool) -> tuple[int, list[Experience]]:
        """Train on fresh batches as they arrive; return their number, and with `keeps` the batches themselves."""
        self.notify("on_epoch_start", 0)
        num_fresh, batches = 0, []
        for _ in range(num_batches):
            if (batch := self.next_batch()) is None:
                break
            self.train_on(batch)
            num_fresh += 1
            if keeps:
                batches.append(batch)
        self.notify("on_epoch_end", 0)
        return num_fresh, batches

    def train_on(self, batch: Experience) -> None:
        """Take a training step; record its time and metrics."""
        self.notify("on_batch_start")
        with self._timeline.span("train"):
            metrics_of_samples = batch.sample_metrics(has_reference=self.has_reference)
            metrics = self.training_step(batch)
        self._num_batches += 1
        self._num_samples += batch.num_samples
        numbers = {**metrics_of_samples, **(metrics or {})}
        self._records.append({"batch": self._num_batches, "version": self.version, "metrics": numbers})
        self.notify("on_batch_end", metrics, batch)

    def sync_models_to_remote_makers(self, **kwargs: Any) -> None:
        """Send all weights to the makers now; a maker with `sync_models_from_trainers` starts after this."""
        self._timeline.version = self.version
        self._update_remote_makers(fully_update=True, **kwargs)

    # Called by makers and by the driver.

    def buffer_get_length(self) -> int:
        """Return the number of whole batches waiting."""
        return self._buffer.get_length()

    def buffer_append(self, experience: Experience) -> None:
        """Add a batch, split into samples; without leases, blocks while the buffer is full."""
        self.buffer_extend(split_experience_batch(experience))

    def buffer_extend(self, items: list[BufferItem]) -> None:
        """Add items from an experience maker; returning acknowledges them. Without leases, blocks while it is full."""
        self._buffer.extend(items)
        faults.reach("trainer.after_delivery")

    def lease(self, request: LeaseRequest) -> list[Lease]:
        """Grant a maker leases: the work it may do now."""
        return self._buffer.lease(LeaseRequest(*request))

    def release_maker(self, maker: str, reason: str) -> None:
        """Release the leases of a maker that is gone, so that they can be granted to others."""
        if numbers := self._buffer.release(maker, reason):
            logger.info("%d leases of %s are reassigned: %s", len(numbers), maker, reason)

    def _buffer_sample(self) -> Experience:
        """Return the next whole batch, for external callers; blocks up to `deadlines.batch_seconds`."""
        return self._buffer.sample(timeout_seconds=self.deadlines.batch_seconds)

    def progress(self) -> Progress:
        """Return this trainer's progress."""
        counts = self._num_samples, self._num_batches, self._buffer.get_length()
        return Progress(self._state, self.version, *counts, num_made=self._buffer.num_made)

    # Called by the loop, which waits only in `next_batch`, `publish` and `finish`.

    def should_stop(self) -> bool:
        """Whether `stop` was called."""
        return self.host.stop.is_set()

    def checkpoint(self, num_fresh: int, *, was_stopped: bool = False) -> None:
        """Save a checkpoint if one is due; `was_stopped`: training ends here, perhaps in the middle of an episode."""

    def finish(self) -> None:
        """Complete pending work after the last episode."""

    def publish(self) -> None:
        """Send the weights to the makers as the next version."""
        self.version += 1
        self._timeline.version = self.version
        self._buffer.mark_trained(self.version)
        with self._timeline.span("publish"):
            self._update_remote_makers()

    def _update_late_makers(self) -> None:
        """Send weights to makers that missed the last update; called repeatedly while `fit` waits for a batch."""

    def next_batch(self) -> Experience | None:
        """Wait for a batch; None if training was stopped, or all makers have finished and no samples are left."""
        with self._timeline.span("wait_data"):
            (batch,) = wait_in_slices(
                self._try_batch,
                deadline_seconds=self.deadlines.batch_seconds,
                what=lambda: (
                    f"a batch of {self._buffer.sample_batch_size} samples; {self._buffer.num_items_waiting} are there. "
                    f"Makers: {self._buffer.describe_wait()}"
                ),
                slice_seconds=_SLICE_SECONDS,
                last_progress=lambda: self._buffer.last_progress,
            )
        return batch

    def _try_batch(self, seconds: float) -> "tuple[Experience | None] | None":
        """Return a batch in a tuple, or `(None,)` if no more will come; None if there is none yet."""
        if self._is_exhausted or self.should_stop():
            return (None,)
        batch = self._buffer.try_sample(seconds)
        if batch is not None:
            return (batch.pin_memory() if self.dataloader_pin_memory else batch,)
        self._update_late_makers()
        last = self._buffer.last_batch()
        self._is_exhausted = last is not None and last[0] is None
        return last
