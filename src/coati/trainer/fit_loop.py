"""The shape of training: episodes of fresh batches, epochs over them, and an update of the makers after each.

The detached trainer and the synchronous loop run this same code; they differ in where a batch comes from
(`next_batch`) and where weights go (`publish`).
"""

import logging
from collections.abc import Callable
from typing import Any

from coati.errors import ConfigError
from coati.experience import Experience
from coati.randomness import STREAM_EPOCHS, keyed_generator

logger = logging.getLogger(__name__)


def _no_hook(hook: str, *args: Any) -> None:
    """Ignore a hook."""


def _alone(has_data: bool, is_stopped: bool) -> bool:
    """Decide for the only rank."""
    return has_data and not is_stopped


class FitLoop:
    """Consumes batches, trains on them, publishes weights; waits only inside `next_batch`, `publish` and `finish`.

    `next_batch` returns None when no more data will come. `agree(has_data, is_stopped)` lets the ranks of a group
    decide together whether all of them take another step, so that none waits alone in a collective operation: as long
    as some rank has data and none was stopped. A rank without data takes part with an empty batch, so that whatever
    reached any rank is trained on. `look_ahead` is called before a batch is trained on if another fresh one will be
    asked for, so that it can be fetched meanwhile.
    """

    def __init__(
        self,
        *,
        next_batch: Callable[[], Experience | None],
        train: Callable[[Experience], dict[str, Any]],
        publish: Callable[[], None],
        finish: Callable[[], None] = lambda: None,
        notify: Callable[..., None] = _no_hook,
        agree: Callable[[bool, bool], bool] = _alone,
        look_ahead: Callable[[], None] = lambda: None,
        should_stop: Callable[[], bool] = lambda: False,
        seed: int = 0,
    ) -> None:
        self._next_batch = next_batch
        self._train = train
        self._publish = publish
        self._finish = finish
        self._notify = notify
        self._agree = agree
        self._look_ahead = look_ahead
        self._num_wanted = 0
        self._should_stop = should_stop
        self._seed = seed
        self.num_episodes = 0

    def run(self, total_steps: int, update_steps: int, train_epochs: int = 1) -> int:
        """Train on `total_steps` fresh batches, `update_steps` in an episode, the last with the remainder.

        Returns how many fresh batches were trained on: fewer than asked for if data ran out or a stop came.
        """
        for name, value in (
            ("total_steps", total_steps),
            ("update_steps", update_steps),
            ("train_epochs", train_epochs),
        ):
            if value < 1:
                raise ConfigError(f"fit's {name} must be 1 or more, got {value}.")
        self._notify("on_fit_start")
        num_done = 0
        self._num_wanted = total_steps
        while num_done < total_steps and self._agree(True, self._should_stop()):
            wanted = min(update_steps, total_steps - num_done)
            num_fresh = self._episode(self.num_episodes, wanted, train_epochs)
            num_done += num_fresh
            if num_fresh < wanted:
                reason = "it was stopped" if self._should_stop() else "no more data came"
                logger.warning("training ends after %d of %d batches: %s", num_done, total_steps, reason)
                break
        self._finish()
        self._notify("on_fit_end")
        return num_done

    def _episode(self, episode: int, num_batches: int, train_epochs: int) -> int:
        self._notify("on_episode_start", episode)
        num_fresh, batches = self._first_epoch(num_batches, keeps=train_epochs > 1)
        for epoch in range(1, train_epochs):
            if batches:
                self._notify("on_epoch_start", epoch)
                order = keyed_generator(self._seed, episode * train_epochs + epoch, stream=STREAM_EPOCHS)
                for index in order.permutation(len(batches)):
                    self._train_on(batches[index])
                self._notify("on_epoch_end", epoch)
        if num_fresh:
            self._notify("on_update_start")
            self._publish()
            self._notify("on_update_end")
        self._notify("on_episode_end", episode)
        self.num_episodes += 1
        return num_fresh

    def _first_epoch(self, num_batches: int, *, keeps: bool) -> tuple[int, list[Experience]]:
        """Train on fresh batches as they come; returns how many, and the batches if later epochs need them."""
        self._notify("on_epoch_start", 0)
        num_fresh, batches = 0, []
        for _ in range(num_batches):
            batch = self._next_batch()
            if not self._agree(batch is not None, batch is None and self._should_stop()):
                if batch is not None:
                    logger.warning("dropped a batch of %d samples: another rank was stopped", batch.num_samples)
                break
            if batch is None:
                batch = Experience.empty()
            self._num_wanted -= 1
            if self._num_wanted > 0 and not self._should_stop():
                self._look_ahead()
            self._train_on(batch)
            num_fresh += 1
            if keeps:
                batches.append(batch)
        self._notify("on_epoch_end", 0)
        return num_fresh, batches

    def _train_on(self, batch: Experience) -> None:
        self._notify("on_batch_start")
        metrics = self._train(batch)
        self._notify("on_batch_end", metrics, batch)
