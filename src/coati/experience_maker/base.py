"""The interface of a maker, and a batch on its way through one."""

from __future__ import annotations

import dataclasses
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from coati.errors import DataError
from coati.experience import Experience
from coati.experience_maker.prompt_batch import PromptBatch
from coati.monitor.metrics import Metric
from coati.monitor.timeline import Timeline

if TYPE_CHECKING:
    from coati.rewards import PendingScores

__all__ = ["AllSamplesDropped", "Experience", "ExperienceMaker", "MakerBatch"]


class AllSamplesDropped(DataError):
    """Every sample of a batch had to be dropped; the message says why."""


@dataclasses.dataclass
class MakerBatch:
    """A batch on its way through a maker: prompts, then rollout and scores, finally experience."""

    prompts: PromptBatch
    """The prompts as they were admitted."""
    experience: Experience | None = None
    """Without rewards while `scores` are pending, without advantages until it is finished; None if all was dropped."""
    scores: PendingScores | None = None
    """Scores that a reward function is still computing."""
    is_cut: Tensor | None = None
    """[B] bool: responses that ran into the length limit; None if the maker does not know."""
    version: int = 0
    """Version of the weights that wrote the last token."""
    metrics: dict[str, Metric] = dataclasses.field(default_factory=dict)
    """Reported with the batch, besides what is read off the experience."""
    dropped: AllSamplesDropped | None = None
    """Why no sample is left."""

    @property
    def is_ready(self) -> bool:
        """Whether it can be finished without a wait."""
        return self.scores is None or self.scores.is_ready

    def wait(self, seconds: float) -> None:
        """Wait until it is ready, for at most so many seconds."""
        if self.scores is not None:
            self.scores.wait(seconds)

    def keep(self, rows: Tensor) -> None:
        """Drop the samples where the bool mask is False."""
        assert self.experience is not None
        self.experience = self.experience.select(rows)
        self.is_cut = None if self.is_cut is None else self.is_cut[rows]


class ExperienceMaker(ABC):
    """Turns prompts into experience with four models: actor, critic, reward model and initial model.

    To write a maker, implement `make_experience`; the holder and the synchronous loop need nothing else. If it declares
    keyword arguments named `sample_ids`, `group_ids` or `columns`, it gets those of the prompts too.

    `critic` is None for algorithms that need none. `actor` and `initial_model` may be plain transformers models or an
    `Actor`; the reward model may be any module that maps (sequences, attention_mask) to one score per sample, or a
    `RewardScorer`.
    """

    policy_version: int = 0
    """Version of the weights that the models have; set before each batch."""
    between_tokens: Callable[[], int] | None = None
    """Set while a batch is made. A maker may call it between two tokens: it delivers what is ready, may change the
    weights, and returns their version."""
    has_time_between_tokens: bool = False
    """Whether the host waits for a GPU while tokens are generated, and `between_tokens` is called meanwhile."""
    timeline: Timeline
    """The account of the actor's time, set before the first batch."""

    def __init__(self, actor: nn.Module, critic: nn.Module | None, reward_model: Any, initial_model: nn.Module) -> None:
        self.actor = actor
        self.critic = critic
        self.reward_model = reward_model
        self.initial_model = initial_model

    @property
    def trained_models(self) -> dict[str, nn.Module]:
        """The models that a trainer updates, by the names that weight updates use."""
        return {"actor": self.actor} | ({} if self.critic is None else {"critic": self.critic})

    @abstractmethod
    def make_experience(self, input_ids: Tensor, attention_mask: Tensor, **generate_kwargs: Any) -> Experience:
        """Generate a response to each prompt and score it."""

    @torch.no_grad()
    def begin(self, prompts: PromptBatch, **generate_kwargs: Any) -> MakerBatch:
        """Do everything that needs the models. Override it, with `finish`, to leave slow rewards running meanwhile.

        Ids and versions that `make_experience` leaves out are filled in, if it returns one sample for each prompt.
        """
        known = {"sample_ids": prompts.sample_ids, "group_ids": prompts.group_ids, "columns": prompts.columns}
        declared = inspect.signature(self.make_experience).parameters
        known = {name: value for name, value in known.items() if name in declared}
        with self.timeline.span("generate"):
            experience = self.make_experience(prompts.input_ids, prompts.attention_mask, **known, **generate_kwargs)
        if experience.num_samples == len(prompts):
            for name in ("sample_ids", "group_ids"):
                if getattr(experience, name) is None:
                    setattr(experience, name, getattr(prompts, name))
        if experience.policy_versions is None:
            experience.policy_versions = torch.full_like(
                experience.action_log_probs, self.policy_version, dtype=torch.long
            )
        return MakerBatch(prompts, experience)

    def finish(self, batch: MakerBatch) -> None:  # noqa: B027  (nothing is left to do after `make_experience`)
        """Complete the experience, without the models: wait for rewards, drop bad samples, estimate advantages."""
