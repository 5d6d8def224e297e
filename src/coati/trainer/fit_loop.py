"""The shape of training: episodes of fresh batches, epochs over them, and an update of the makers after each.

The detached trainer and the synchronous loop run this same code; each says in its `FitSteps` where a batch comes from
and where weights go.
"""

import logging
from abc import ABC, abstractmethod
from typing import Any

from coati.errors import ConfigError
from coati.experience import Experience
from coati.gpu import device_errors_explained
from coati.randomness import STREAM_EPOCHS, keyed_generator

logger = logging.getLogger(__name__)


class FitSteps(ABC):
    """What a `FitLoop` calls. It waits only inside `next_batch`, `publish`, `agree` and `finish`."""

    @abstractmethod
    def next_batch(self) -> Experience | None:
        """Return a fresh batch; None when no more data will come, or a stop came."""

    def give_back(self, batch: Experience) -> None:  # noqa: B027
        """Note that a batch is not trained on after all."""

    @abstractmethod
    def train_on(self, batch: Experience) -> dict[str, Any]:
        """Take a training step and return its metrics."""

    @abstractmethod
    def publish(self) -> None:
        """Send the weights of a new version to the makers."""

    def checkpoint(self, num_fresh: int, *, was_stopped: bool = False) -> None:  # noqa: B027
        """Save where training stands, if it is due: after so many fresh batches, between two versions.

        A stop may have ended the last version early.
        """

    def finish(self) -> None:  # noqa: B027
        """Do what remains after the last episode."""

    def notify(self, hook: str, *args: Any) -> None:  # noqa: B027
        """Run a hook of the callbacks."""

    def agree(self, has_data: bool, is_stopped: bool) -> bool:
        """Whether to take another step. The ranks of a group decide together, so that none waits alone for the others:
        as long as some rank has data and none was stopped. A rank without data then trains on an empty batch."""
        return has_data and not is_stopped

    def should_stop(self) -> bool:
        """Whether to end before the next batch."""
        return False


class FitLoop:
    """Takes batches, trains on them and publishes weights, through the methods of `steps`."""

    def __init__(self, steps: FitSteps, *, seed: int = 0) -> None:
        self._steps = steps
        self._seed = seed
        self.num_episodes = 0

    def run(self, total_steps: int, update_steps: int, train_epochs: int = 1, *, num_done: int = 0) -> int:
        """Train on `total_steps` fresh batches, `update_steps` in an episode, the last with the remainder.

        The first `num_done` of them were trained on before. Returns how many have been trained on at the end: fewer
        than asked for if data ran out or a stop came.
        """
        for name, value in (
            ("total_steps", total_steps),
            ("update_steps", update_steps),
            ("train_epochs", train_epochs),
        ):
            if value < 1:
                raise ConfigError(f"fit's {name} must be 1 or more, got {value}.")
        remedy = "Give the trainer more of the GPU (topology.gpus_per_trainer), or shard it (train.strategy)."
        with device_errors_explained("the trainer's work between passes", remedy):
            return self._run(total_steps, update_steps, train_epochs, num_done)

    def _run(self, total_steps: int, update_steps: int, train_epochs: int, num_done: int) -> int:
        self._steps.notify("on_fit_start")
        self.num_episodes += num_done // update_steps
        while num_done < total_steps and self._steps.agree(True, self._steps.should_stop()):
            wanted = min(update_steps, total_steps - num_done)
            num_fresh = self._episode(self.num_episodes, wanted, train_epochs)
            num_done += num_fresh
            if num_fresh == wanted:
                self._steps.checkpoint(num_done)
            else:
                reason = "it was stopped" if self._steps.should_stop() else "no more data came"
                logger.warning("training ends after %d of %d batches: %s", num_done, total_steps, reason)
                break
        if 0 < num_done < total_steps:
            self._steps.checkpoint(num_done, was_stopped=True)
        self._steps.finish()
        self._steps.notify("on_fit_end")
        return num_done

    def _episode(self, episode: int, num_batches: int, train_epochs: int) -> int:
        self._steps.notify("on_episode_start", episode)
        num_fresh, batches = self._first_epoch(num_batches, keeps=train_epochs > 1)
        for epoch in range(1, train_epochs):
            if batches:
                self._steps.notify("on_epoch_start", epoch)
                order = keyed_generator(self._seed, episode * train_epochs + epoch, stream=STREAM_EPOCHS)
                for index in order.permutation(len(batches)):
                    self._train_on(batches[index])
                self._steps.notify("on_epoch_end", epoch)
        if num_fresh:
            self._steps.notify("on_update_start")
            self._steps.publish()
            self._steps.notify("on_update_end")
        self._steps.notify("on_episode_end", episode)
        self.num_episodes += 1
        return num_fresh

    def _first_epoch(self, num_batches: int, *, keeps: bool) -> tuple[int, list[Experience]]:
        """Train on fresh batches as they come; returns how many, and the batches if later epochs need them."""
        self._steps.notify("on_epoch_start", 0)
        num_fresh, batches = 0, []
        for _ in range(num_batches):
            batch = self._steps.next_batch()
            if not self._steps.agree(batch is not None, batch is None and self._steps.should_stop()):
                if batch is not None:
                    logger.warning("dropped a batch of %d samples: another rank was stopped", batch.num_samples)
                    self._steps.give_back(batch)
                break
            if batch is None:
                batch = Experience.empty()
            self._train_on(batch)
            num_fresh += 1
            if keeps:
                batches.append(batch)
        self._steps.notify("on_epoch_end", 0)
        return num_fresh, batches

    def _train_on(self, batch: Experience) -> None:
        self._steps.notify("on_batch_start")
        metrics = self._steps.train_on(batch)
        self._steps.notify("on_batch_end", metrics, batch)
