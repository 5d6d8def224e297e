"""Hooks into the loops of makers and trainers, and two callbacks that measure performance.

Callbacks are pickled into the Ray actors and run there, in the thread of the loop; the data they collect stays there.
"""

# The diagrams in `MakerCallback` and `TrainerCallback` show when each hook runs.
# ruff: noqa: D102

import logging
from typing import TYPE_CHECKING, Any

from coati.errors import format_seconds
from coati.monitor.timeline import Timeline, TimeUse, label_of

if TYPE_CHECKING:
    from coati.experience import Experience

logger = logging.getLogger(__name__)


class _Callback:
    timeline = Timeline()  # where the actor's time went; the actor sets it before it runs a hook


class MakerCallback(_Callback):
    """Hooks into the working loop of an experience maker. Each does nothing unless overridden.

    They run in this order, even if a maker begins a batch before the previous one is delivered::

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
    def on_make_experience_end(self, experience: "Experience") -> None: ...
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

    A batch is empty if this trainer has run out of data while others in its group have not. At `on_update_end` the new
    weights are in flight to the makers; at `on_fit_end` the makers have verified the last ones.
    """

    def on_fit_start(self) -> None: ...
    def on_fit_end(self) -> None: ...
    def on_episode_start(self, episode: int) -> None: ...
    def on_episode_end(self, episode: int) -> None: ...
    def on_epoch_start(self, epoch: int) -> None: ...
    def on_epoch_end(self, epoch: int) -> None: ...
    def on_batch_start(self) -> None: ...
    def on_batch_end(self, metrics: dict[str, float], experience: "Experience") -> None: ...
    def on_update_start(self) -> None: ...
    def on_update_end(self) -> None: ...


class _PerformanceEvaluator(_Callback):
    """Counts the samples and tokens of a loop and takes its duration from the timeline; `str` gives a summary."""

    title: str
    flops_per_token: float
    samples = 0
    tokens = 0  # of prompts and responses, without padding
    use = TimeUse()

    def __str__(self) -> str:
        samples, seconds = self.samples, self.use.elapsed
        if samples == 0 or seconds == 0:
            return f"{self.title}: {samples} samples in {format_seconds(seconds)}, so nothing to measure"
        shares = [f"{label_of(what)} {spent / seconds:.0%}" for what, spent in self.use.seconds.items() if spent]
        return (
            f"{self.title}: {samples:,} samples ({samples / seconds:,.2f}/s, {format_seconds(seconds / samples)} each),"
            f" {self.tokens:,} tokens ({self.tokens / seconds:,.0f}/s) in {format_seconds(seconds)}, "
            f"{self.flops_per_token * self.tokens / seconds / 1e9:,.2f} GFLOP/s\n  of the time: {', '.join(shares)}"
        )

    def _begin(self) -> None:
        self.samples = self.tokens = 0
        self._began = self.timeline.read()

    def _count(self, experience: "Experience") -> None:
        mask = experience.attention_mask  # [B, S]
        self.samples += len(experience.sequences)
        self.tokens += experience.sequences.numel() if mask is None else int(mask.sum())

    def _end(self) -> None:
        self.use = self.timeline.read().after(self._began)
        logger.info("%s", self)


class ExperienceMakerPerformanceEvaluator(_PerformanceEvaluator, MakerCallback):
    """Measures throughput, FLOP/s and time shares of each working loop of a maker; logs a summary at the end.

    Each prompt or response token costs 2 FLOPs per actor weight to generate and 2 FLOPs per weight of every model to
    score. A prompt that several samples share counts once per sample, although it is computed once.
    """

    title = "Experience maker"

    def __init__(
        self, actor_num_params: int, critic_num_params: int, initial_model_num_params: int, reward_model_num_params: int
    ) -> None:
        scored = actor_num_params + critic_num_params + initial_model_num_params + reward_model_num_params
        self.flops_per_token = 2.0 * (actor_num_params + scored)

    on_loop_start = _PerformanceEvaluator._begin
    on_make_experience_end = _PerformanceEvaluator._count
    on_loop_end = _PerformanceEvaluator._end


class TrainerPerformanceEvaluator(_PerformanceEvaluator, TrainerCallback):
    """Measures throughput, FLOP/s and time shares of each `fit` of a trainer; logs a summary at the end.

    Each token costs 6 FLOPs per weight of actor and critic (forward 2, backward 4), or 8 with gradient checkpointing. A
    prompt that several samples share counts once per sample, and a sample counts once per epoch. The first
    `ignore_first_episodes` episodes are warm-up; they are excluded if more episodes follow.
    """

    title = "Trainer"

    def __init__(
        self,
        actor_num_params: int,
        critic_num_params: int,
        enable_grad_checkpoint: bool = False,
        ignore_first_episodes: int = 1,
    ) -> None:
        self.flops_per_token = (8.0 if enable_grad_checkpoint else 6.0) * (actor_num_params + critic_num_params)
        self._num_warmup = ignore_first_episodes

    def on_fit_start(self) -> None:
        self._num_episodes = 0
        self._begin()

    def on_episode_start(self, episode: int) -> None:  # noqa: ARG002
        # Counted here, because `episode` does not start at 0 in a resumed run, which needs the same warm-up.
        self._num_episodes += 1
        if self._num_episodes == self._num_warmup + 1:
            self._begin()

    def on_batch_end(self, metrics: dict[str, float], experience: "Experience") -> None:  # noqa: ARG002
        self._count(experience)

    on_fit_end = _PerformanceEvaluator._end


def num_parameters(model: Any) -> int:
    """Return the number of weights of a model; 0 for anything else, such as a reward function."""
    parameters = getattr(model, "parameters", None)
    return sum(parameter.numel() for parameter in parameters()) if callable(parameters) else 0
