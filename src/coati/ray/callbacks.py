"""Hooks into the loops of makers and trainers, and two callbacks that measure performance.

Subclass `MakerCallback` or `TrainerCallback` and override the hooks you need. Callbacks are pickled into the Ray actors
and run there, in the thread of the loop: what they collect stays in the actor. The hooks always come in this order,
even where a maker begins a batch before the last one is delivered::

    maker    on_loop_start
               on_batch_start
                 on_make_experience_start, on_make_experience_end(experience)
                 on_send_start, on_send_end
               on_batch_end                                          … for every batch of prompts
             on_loop_end

    trainer  on_fit_start
               on_episode_start(episode)
                 on_epoch_start(epoch)
                   on_batch_start, on_batch_end(metrics, experience)  … for every batch, once it has arrived
                 on_epoch_end(epoch)                                  … for every epoch
                 on_update_start, on_update_end
               on_episode_end(episode)                                … for every episode
             on_fit_end
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

from coati.monitor.performance import WorkMeter
from coati.monitor.timeline import Timeline

if TYPE_CHECKING:
    from coati.experience import Experience

logger = logging.getLogger(__name__)

_MAKER_PHASES: Final = {
    "make experience": ("generate", "score", "wait_rewards"),
    "send": ("send", "wait_room"),
    "wait for weights": ("wait_weights",),
}
_TRAINER_PHASES: Final = {
    "learn": ("train",),
    "update": ("publish", "wait_delivery"),
    "wait for data": ("wait_data",),
}


class _Callback:
    timeline: Timeline | None = None
    """The account of the actor's time, which the actor sets before its loop starts."""


class MakerCallback(_Callback):
    """Hooks into the working loop of an experience maker. Each does nothing unless overridden."""

    def on_loop_start(self) -> None:
        """Run before the first batch of prompts."""

    def on_loop_end(self) -> None:
        """Run after the last batch of prompts."""

    def on_make_experience_start(self) -> None:
        """Run before an experience is generated and scored."""

    def on_make_experience_end(self, experience: Experience) -> None:
        """Run after an experience was generated and scored."""

    def on_send_start(self) -> None:
        """Run before the items of an experience go to the trainers."""

    def on_send_end(self) -> None:
        """Run after the items of an experience went to the trainers."""

    def on_batch_start(self) -> None:
        """Run before a batch of prompts is worked on."""

    def on_batch_end(self) -> None:
        """Run after a batch of prompts was worked on."""


class TrainerCallback(_Callback):
    """Hooks into the fit loop of a trainer. Each does nothing unless overridden."""

    def on_fit_start(self) -> None:
        """Run before the first episode."""

    def on_fit_end(self) -> None:
        """Run after the last episode, when the makers have verified its weights."""

    def on_episode_start(self, episode: int) -> None:
        """Run before an episode: some batches, trained on for one or more epochs, then a weight update."""

    def on_episode_end(self, episode: int) -> None:
        """Run after an episode."""

    def on_epoch_start(self, epoch: int) -> None:
        """Run before each pass over the batches of an episode."""

    def on_epoch_end(self, epoch: int) -> None:
        """Run after each pass over the batches of an episode."""

    def on_batch_start(self) -> None:
        """Run before a batch is trained on; the batch has arrived."""

    def on_batch_end(self, metrics: dict[str, float], experience: Experience) -> None:
        """Run after a batch was trained on, with what the training step returned.

        The batch is empty in a trainer that has no data left, while others of its group have some.
        """

    def on_update_start(self) -> None:
        """Run before new weights go to the makers."""

    def on_update_end(self) -> None:
        """Run when new weights have been read for the makers. Makers verify them while training continues."""


def connect(callbacks: Iterable[MakerCallback | TrainerCallback], timeline: Timeline) -> None:
    """Give the callbacks of an actor the account of its time."""
    for callback in callbacks:
        callback.timeline = timeline


def dispatch(callbacks: Iterable[MakerCallback | TrainerCallback], hook_name: str, *args: object) -> None:
    """Run one hook on each callback, in order.

    An exception propagates at once; a note on it names the callback and the hook.

    >>> dispatch([MakerCallback()], "on_loop_start")
    """
    for callback in callbacks:
        try:
            getattr(callback, hook_name)(*args)
        except Exception as error:
            error.add_note(f"raised in the callback {type(callback).__qualname__}, hook {hook_name}")
            raise


class ExperienceMakerPerformanceEvaluator(MakerCallback):
    """Measures a maker: throughput, time per sample by phase, achieved FLOP/s. Logs its `summary` at the end.

    With B samples of N tokens in all, prompt and response without padding, and a key-value cache, an experience takes::

        2·P_actor·(N − B)                            generation: all tokens but each sample's last
        2·(P_actor + P_critic + P_initial_model + P_reward_model)·N    one forward of each to score

    A model that is absent has 0 parameters. What is computed once (a prompt of several samples, a body of several
    models) counts each time.
    """

    def __init__(
        self,
        actor_num_params: int,
        critic_num_params: int,
        initial_model_num_params: int,
        reward_model_num_params: int,
    ) -> None:
        scored = actor_num_params + critic_num_params + initial_model_num_params + reward_model_num_params
        self._flops_per_token = 2.0 * (actor_num_params + scored)
        self._flops_per_sample = -2.0 * actor_num_params
        self.summary: WorkMeter | None = None

    def on_loop_start(self) -> None:
        """Start to measure; an earlier loop is forgotten."""
        self.summary = WorkMeter("Experience maker", self.timeline or Timeline(), _MAKER_PHASES)

    def on_make_experience_end(self, experience: Experience) -> None:
        """Count the experience."""
        assert self.summary is not None, "the loop has started"
        self.summary.add(experience, flops_per_token=self._flops_per_token, flops_per_sample=self._flops_per_sample)

    def on_loop_end(self) -> None:
        """Log the summary."""
        assert self.summary is not None, "the loop has started"
        self.summary.mark()
        logger.info("%s", self.summary.render())


class TrainerPerformanceEvaluator(TrainerCallback):
    """Measures a trainer: throughput, time per sample by phase, achieved FLOP/s. Logs its `summary` at the end.

    A batch of N tokens, prompt and response without padding, takes 6·(P_actor + P_critic)·N FLOPs (forward 2, backward
    4), and 8·(P_actor + P_critic)·N with gradient checkpointing, which runs the forward once more. Prompts that samples
    share count each time, and a sample counts once for each epoch. The first `ignore_first_episodes` episodes warm up
    caches and kernels; they are left out if a later one trains on anything.
    """

    def __init__(
        self,
        actor_num_params: int,
        critic_num_params: int,
        enable_grad_checkpoint: bool = False,
        ignore_first_episodes: int = 1,
    ) -> None:
        self._flops = (8.0 if enable_grad_checkpoint else 6.0) * (actor_num_params + critic_num_params)
        self._num_warmup = ignore_first_episodes
        self._num_episodes = 0
        self._fresh: WorkMeter | None = None  # for what comes after the warm-up
        self.summary: WorkMeter | None = None

    def on_fit_start(self) -> None:
        """Start to measure; an earlier fit is forgotten."""
        self._num_episodes, self.summary = 0, self._new_meter()

    def on_episode_start(self, episode: int) -> None:  # noqa: ARG002
        """Count the episode, and note when the warm-up is over."""
        # Counted here, not read off `episode`: a resumed run starts at a later number, as cold as any other.
        self._num_episodes += 1
        self._fresh = self._new_meter() if self._num_episodes == self._num_warmup + 1 else None

    def on_batch_end(self, metrics: dict[str, float], experience: Experience) -> None:  # noqa: ARG002
        """Count the batch; the first one after the warm-up begins a new count."""
        if self._fresh is not None:
            self.summary, self._fresh = self._fresh, None
        assert self.summary is not None, "fit has started"
        self.summary.add(experience, flops_per_token=self._flops)

    def on_episode_end(self, episode: int) -> None:  # noqa: ARG002
        """Extend the measured period to the end of the episode."""
        if self.summary is not None and self._fresh is None:
            self.summary.mark()

    def on_fit_end(self) -> None:
        """Log the summary."""
        assert self.summary is not None, "fit has started"
        logger.info("%s", self.summary.render())

    def _new_meter(self) -> WorkMeter:
        return WorkMeter("Trainer", self.timeline or Timeline(), _TRAINER_PHASES)


def num_parameters(model: Any) -> int:
    """Return the number of weights of a model; 0 for what is not a model, such as a reward function."""
    parameters = getattr(model, "parameters", None)
    return sum(parameter.numel() for parameter in parameters()) if callable(parameters) else 0
