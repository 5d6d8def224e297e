"""Hooks into the loops of makers and trainers, and two callbacks that measure performance.

They are pickled into the Ray actors and run there, in the thread of the loop: what they collect stays in the actor.
"""

# The diagrams of `MakerCallback` and `TrainerCallback` say when each hook runs.
# ruff: noqa: D102

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from coati.counting import format_seconds
from coati.monitor.timeline import Timeline

if TYPE_CHECKING:
    from coati.experience import Experience

logger = logging.getLogger(__name__)


class _Callback:
    timeline: Timeline | None = None
    """The account of the actor's time, which the actor sets before its loop starts."""


class MakerCallback(_Callback):
    """Hooks into the working loop of an experience maker. Each does nothing unless overridden.

    They run in this order, even where a maker begins a batch before the last one is delivered::

        on_loop_start
          on_batch_start
            on_make_experience_start, on_make_experience_end(experience)
            on_send_start, on_send_end
          on_batch_end                                          … for every batch of prompts
        on_loop_end
    """

    def on_loop_start(self) -> None: ...
    def on_loop_end(self) -> None: ...
    def on_make_experience_start(self) -> None: ...
    def on_make_experience_end(self, experience: Experience) -> None: ...
    def on_send_start(self) -> None: ...
    def on_send_end(self) -> None: ...
    def on_batch_start(self) -> None: ...
    def on_batch_end(self) -> None: ...


class TrainerCallback(_Callback):
    """Hooks into the fit loop of a trainer. Each does nothing unless overridden.

    They run in this order::

        on_fit_start
          on_episode_start(episode)
            on_epoch_start(epoch)
              on_batch_start, on_batch_end(metrics, experience)  … for every batch, once it has arrived
            on_epoch_end(epoch)                                  … for every epoch
            on_update_start, on_update_end
          on_episode_end(episode)                                … for every episode
        on_fit_end

    `metrics` is what the training step returned. A batch is empty in a trainer that has no data left while others of
    its group have some. At `on_update_end` new weights have been read for the makers, which verify them while training
    continues; at `on_fit_end` they have verified the last.
    """

    def on_fit_start(self) -> None: ...
    def on_fit_end(self) -> None: ...
    def on_episode_start(self, episode: int) -> None: ...
    def on_episode_end(self, episode: int) -> None: ...
    def on_epoch_start(self, epoch: int) -> None: ...
    def on_epoch_end(self, epoch: int) -> None: ...
    def on_batch_start(self) -> None: ...
    def on_batch_end(self, metrics: dict[str, float], experience: Experience) -> None: ...
    def on_update_start(self) -> None: ...
    def on_update_end(self) -> None: ...


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


class PerformanceSummary:
    """What a loop achieved from the moment this is created to the latest `add` or `mark`; log it with `str`.

    `phases` says which activities of the timeline make up each phase; FLOPs are done in the first.
    """

    def __init__(self, title: str, timeline: Timeline | None, phases: Mapping[str, tuple[str, ...]]) -> None:
        self.samples = 0
        self.tokens = 0  # of prompts and responses, without padding
        self.response_tokens = 0
        self.flops = 0.0
        self._title = title
        self._phases = phases
        self._timeline = timeline or Timeline()
        self._began = self._timeline.read()
        self.mark()

    def add(self, experience: Experience, *, flops_per_token: float, flops_per_sample: float = 0.0) -> None:
        """Count a batch that is done."""
        mask, action_mask = experience.attention_mask, experience.action_mask  # [B, S], [B, A]
        tokens = experience.sequences.numel() if mask is None else int(mask.sum())
        self.samples += len(experience.sequences)
        self.tokens += tokens
        # Without an action mask every action is a response token.
        self.response_tokens += experience.action_log_probs.numel() if action_mask is None else int(action_mask.sum())
        self.flops += flops_per_token * tokens + flops_per_sample * len(experience.sequences)
        self.mark()

    def mark(self) -> None:
        """Extend the measured period to now."""
        use = self._timeline.read().after(self._began)
        self.seconds = use.elapsed
        self.phase_seconds = {phase: use.spent(*activities) for phase, activities in self._phases.items()}
        self.phase_seconds["other"] = max(use.elapsed - sum(self.phase_seconds.values()), 0.0)

    def __str__(self) -> str:
        samples, seconds, phases = self.samples, self.seconds, self.phase_seconds
        if samples == 0 or seconds == 0:
            return f"{self._title}: {samples} samples in {format_seconds(seconds)}, so nothing to measure"
        first = next(iter(phases))
        parts = [f"{name} {format_seconds(spent / samples)} ({spent / seconds:.0%})" for name, spent in phases.items()]
        return (
            f"{self._title}: {samples:,} samples ({samples / seconds:,.2f}/s), {self.tokens:,} tokens "
            f"({self.tokens / seconds:,.0f}/s, {self.response_tokens:,} in responses) in {format_seconds(seconds)}\n"
            f"  {self.flops / max(phases[first], 1e-9) / 1e9:,.2f} GFLOP/s in {first}, "
            f"{self.flops / seconds / 1e9:,.2f} GFLOP/s overall\n"
            f"  per sample {format_seconds(seconds / samples)}: {', '.join(parts)}"
        )


class ExperienceMakerPerformanceEvaluator(MakerCallback):
    """Measures each loop of a maker: throughput, time per sample by phase, FLOP/s. Logs its `summary` at the end.

    With B samples of N tokens in all, prompt and response without padding, and a key-value cache, an experience takes::

        2·P_actor·(N − B)                            generation: all tokens but each sample's last
        2·(P_actor + P_critic + P_initial_model + P_reward_model)·N    one forward of each to score

    A model that is absent has 0 parameters. What is computed once (a prompt of several samples) counts each time.
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
        self.summary: PerformanceSummary | None = None

    def on_loop_start(self) -> None:
        phases = {
            "make experience": ("generate", "score", "wait_rewards"),
            "send": ("send", "wait_room"),
            "wait for weights": ("wait_weights",),
        }
        self.summary = PerformanceSummary("Experience maker", self.timeline, phases)

    def on_make_experience_end(self, experience: Experience) -> None:
        assert self.summary is not None, "the loop has started"
        self.summary.add(experience, flops_per_token=self._flops_per_token, flops_per_sample=self._flops_per_sample)

    def on_loop_end(self) -> None:
        assert self.summary is not None, "the loop has started"
        self.summary.mark()
        logger.info("%s", self.summary)


class TrainerPerformanceEvaluator(TrainerCallback):
    """Measures each fit of a trainer: throughput, time per sample by phase, FLOP/s. Logs its `summary` at the end.

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
        self._flops_per_token = (8.0 if enable_grad_checkpoint else 6.0) * (actor_num_params + critic_num_params)
        self._num_warmup = ignore_first_episodes
        self._num_episodes = 0
        self._next: PerformanceSummary | None = None  # of what follows the warm-up: counts from its first batch
        self.summary: PerformanceSummary | None = None

    def on_fit_start(self) -> None:
        self._num_episodes, self.summary = 0, self._new_summary()

    def on_episode_start(self, episode: int) -> None:  # noqa: ARG002
        # Counted here, not read off `episode`: a resumed run starts at a later number, as cold as any other.
        self._num_episodes += 1
        self._next = self._new_summary() if self._num_episodes == self._num_warmup + 1 else None

    def on_batch_end(self, metrics: dict[str, float], experience: Experience) -> None:  # noqa: ARG002
        self.summary, self._next = self._next or self.summary, None
        assert self.summary is not None, "fit has started"
        self.summary.add(experience, flops_per_token=self._flops_per_token)

    def on_episode_end(self, episode: int) -> None:  # noqa: ARG002
        if self.summary is not None and self._next is None:
            self.summary.mark()

    def on_fit_end(self) -> None:
        logger.info("%s", self.summary)

    def _new_summary(self) -> PerformanceSummary:
        phases = {"learn": ("train",), "update": ("publish", "wait_delivery"), "wait for data": ("wait_data",)}
        return PerformanceSummary("Trainer", self.timeline, phases)


def num_parameters(model: Any) -> int:
    """Return the number of weights of a model; 0 for what is not a model, such as a reward function."""
    parameters = getattr(model, "parameters", None)
    return sum(parameter.numel() for parameter in parameters()) if callable(parameters) else 0
