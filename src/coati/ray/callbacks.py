"""Hooks into the loops of makers and trainers, and two callbacks that measure performance.

Subclass `MakerCallback` or `TrainerCallback` and override the hooks you need; the others do nothing.
Callbacks are pickled into the Ray actors when these are made and run there, in the thread of the loop: what
they collect stays in the actor. Nothing in this module needs Ray.

The order of the hooks. A maker may begin a batch before the last one is delivered (reward functions still score it, or
a GPU would wait for the host meanwhile); the hooks of the second then come when the first is delivered, so the order is
always this one::

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
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

from coati.errors import ConfigError
from coati.monitor.performance import (
    Clock,
    PerformanceSummary,
    WorkMeter,
    generation_flops,
    transformer_flops,
)

if TYPE_CHECKING:
    from coati.experience import Experience

logger = logging.getLogger(__name__)

_MAKE: Final = "make experience"
_SEND: Final = "send"
_LEARN: Final = "learn"
_UPDATE: Final = "update"


class MakerCallback:
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


class TrainerCallback:
    """Hooks into the fit loop of a trainer. Each does nothing unless overridden."""

    def on_fit_start(self) -> None:
        """Run before the first episode."""

    def on_fit_end(self) -> None:
        """Run after the last episode, when the makers have verified its weights."""

    def on_episode_start(self, episode: int) -> None:
        """Run before an episode: some batches, learnt from for one or more epochs, then a weight update."""

    def on_episode_end(self, episode: int) -> None:
        """Run after an episode."""

    def on_epoch_start(self, epoch: int) -> None:
        """Run before each pass over the batches of an episode."""

    def on_epoch_end(self, epoch: int) -> None:
        """Run after each pass over the batches of an episode."""

    def on_batch_start(self) -> None:
        """Run before a batch is learnt from; the batch has arrived."""

    def on_batch_end(self, metrics: dict[str, float], experience: Experience) -> None:
        """Run after a batch was learnt from, with what the training step returned.

        The batch is empty in a trainer that has no data left, while others of its group have some.
        """

    def on_update_start(self) -> None:
        """Run before new weights go to the makers."""

    def on_update_end(self) -> None:
        """Run when new weights have been read for the makers. They verify them while training goes on."""


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
    """Measures a maker: throughput, time per sample by phase, achieved FLOP/s. Logs a summary at the end.

    Phases: *make experience* (generate and score), *send*, and *other* (all the rest of the loop: reading
    prompts, waiting for weights). With B samples of N tokens in all, prompt and response without padding, and
    a key-value cache, one experience takes::

        2·P_actor·(N − B)                            generation: all tokens but each sample's last
        2·(P_actor + P_critic + P_initial_model + P_reward_model)·N    one forward of each to score

    FLOP/s is the sum over the time of *make experience*. A model that is absent has 0 parameters. What is computed once
    (a prompt of several samples, a body of several models) counts each time. Numbers are those of this process.
    """

    def __init__(
        self,
        actor_num_params: int,
        critic_num_params: int,
        initial_model_num_params: int,
        reward_model_num_params: int,
        *,
        clock: Clock = time.perf_counter,
    ) -> None:
        _check_counts(
            actor_num_params=actor_num_params,
            critic_num_params=critic_num_params,
            initial_model_num_params=initial_model_num_params,
            reward_model_num_params=reward_model_num_params,
        )
        self._actor_num_params = actor_num_params
        self._scoring_num_params = (
            actor_num_params + critic_num_params + initial_model_num_params + reward_model_num_params
        )
        self._work = WorkMeter(clock)

    @property
    def summary(self) -> PerformanceSummary:
        """What has been measured since the loop started, up to the latest hook."""
        return self._work.summary("Experience maker", phases=(_MAKE, _SEND), compute_phase=_MAKE, rest="other")

    def on_loop_start(self) -> None:
        """Begin to measure; what an earlier loop left is forgotten."""
        self._work = WorkMeter(self._work.clock)
        self._work.mark()

    def on_loop_end(self) -> None:
        """Log the summary."""
        self._work.mark()
        logger.info("%s", self.summary.render())

    def on_make_experience_start(self) -> None:
        """Start the clock of *make experience*."""
        self._work.start(_MAKE)

    def on_make_experience_end(self, experience: Experience) -> None:
        """Count the experience and stop the clock."""
        # Counting reads a tensor, which waits for a GPU to finish; only then is the time the real one.
        samples, tokens, response_tokens = _count(experience)
        flops = generation_flops(
            self._actor_num_params,
            prompt_tokens=max(tokens - response_tokens, 0),
            response_tokens=response_tokens,
            num_sequences=samples,
        ) + transformer_flops(self._scoring_num_params, tokens, backward=False)
        self._work.stop(_MAKE)
        self._work.add(samples=samples, tokens=tokens, response_tokens=response_tokens, flops=flops)

    def on_send_start(self) -> None:
        """Start the clock of *send*."""
        self._work.start(_SEND)

    def on_send_end(self) -> None:
        """Stop the clock of *send*."""
        self._work.stop(_SEND)


class TrainerPerformanceEvaluator(TrainerCallback):
    """Measures a trainer: throughput, time per sample by phase, achieved FLOP/s. Logs a summary at the end.

    Phases: *learn* (from `on_batch_start` to `on_batch_end`), *update* (reading new weights for the makers), and
    *wait for data* (all the rest: what the trainer does between batches is wait for the next). One batch of N
    tokens, prompt and response without padding, takes::

        6·(P_actor + P_critic)·N     forward 2, backward 4
        8·(P_actor + P_critic)·N     with gradient checkpointing, which runs the forward once more

    That is the work that the batch asks for: prompts that samples have in common count each time, though they are
    computed once. FLOP/s is the sum over the time of *learn*. A sample that is learnt from in two epochs counts
    twice. The first `ignore_first_episodes` episodes warm up caches and kernels; they are left out, unless no later
    episode learnt from anything. Numbers are those of this process.
    """

    def __init__(
        self,
        actor_num_params: int,
        critic_num_params: int,
        enable_grad_checkpoint: bool = False,
        ignore_first_episodes: int = 1,
        *,
        clock: Clock = time.perf_counter,
    ) -> None:
        _check_counts(
            actor_num_params=actor_num_params,
            critic_num_params=critic_num_params,
            ignore_first_episodes=ignore_first_episodes,
        )
        self._num_params = actor_num_params + critic_num_params
        self._enable_grad_checkpoint = enable_grad_checkpoint
        self._ignore_first_episodes = ignore_first_episodes
        self._episodes_started = 0
        self._warmup = WorkMeter(clock)
        self._work = self._warmup

    @property
    def summary(self) -> PerformanceSummary:
        """What has been measured since the warm-up, up to the latest hook."""
        work = self._work if self._work.samples else self._warmup
        return work.summary("Trainer", phases=(_LEARN, _UPDATE), compute_phase=_LEARN, rest="wait for data")

    def on_fit_start(self) -> None:
        """Begin to measure; what an earlier fit left is forgotten."""
        self._episodes_started = 0
        self._warmup = self._work = WorkMeter(self._work.clock)
        self._work.mark()

    def on_fit_end(self) -> None:
        """Log the summary."""
        self._work.mark()
        logger.info("%s", self.summary.render())

    def on_episode_start(self, episode: int) -> None:  # noqa: ARG002
        """Begin the measured span when the warm-up is over."""
        # Counted here, not read off `episode`: a resumed run starts at a later number, as cold as any other.
        self._episodes_started += 1
        if self._episodes_started == self._ignore_first_episodes + 1:
            self._work = WorkMeter(self._work.clock)
        self._work.mark()

    def on_episode_end(self, episode: int) -> None:  # noqa: ARG002
        """Extend the measured span to the end of the episode."""
        self._work.mark()

    def on_batch_start(self) -> None:
        """Start the clock of *learn*."""
        self._work.start(_LEARN)

    def on_batch_end(self, metrics: dict[str, float], experience: Experience) -> None:  # noqa: ARG002
        """Count the batch and stop the clock."""
        samples, tokens, response_tokens = _count(experience)
        flops = transformer_flops(self._num_params, tokens, backward=True, recompute=self._enable_grad_checkpoint)
        self._work.stop(_LEARN)
        self._work.add(samples=samples, tokens=tokens, response_tokens=response_tokens, flops=flops)

    def on_update_start(self) -> None:
        """Start the clock of *update*."""
        self._work.start(_UPDATE)

    def on_update_end(self) -> None:
        """Stop the clock of *update*."""
        self._work.stop(_UPDATE)


def num_parameters(model: Any) -> int:
    """Weights of a model; 0 if it is none, like a reward function."""
    parameters = getattr(model, "parameters", None)
    return sum(parameter.numel() for parameter in parameters()) if callable(parameters) else 0


def _count(experience: Experience) -> tuple[int, int, int]:
    """Return the numbers of samples, of tokens without padding, and of response tokens among these."""
    samples, width = experience.sequences.shape  # [B, S]
    mask = experience.attention_mask  # [B, S]
    action_mask = experience.action_mask  # [B, A]
    tokens = samples * width if mask is None else int(mask.sum())
    # Without an action mask every action is a response token.
    response_tokens = experience.action_log_probs.numel() if action_mask is None else int(action_mask.sum())
    return samples, tokens, response_tokens


def _check_counts(**counts: int) -> None:
    for name, count in counts.items():
        if count < 0:
            raise ConfigError(f"{name} must be 0 or more, got {count}. Pass 0 for what the run does not have.")
