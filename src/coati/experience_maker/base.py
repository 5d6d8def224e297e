"""The interface of a maker, and a batch on its way through it."""

import dataclasses
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from coati.errors import DataError
from coati.experience import Experience
from coati.monitor.metrics import Metric
from coati.monitor.timeline import Timeline
from coati.prompts.batch import PromptBatch
from coati.rewards import PendingScores
from coati.rewards.calling import recorded

__all__ = ["AllSamplesDropped", "Experience", "ExperienceMaker", "MakerBatch"]

LESS_TO_MAKE = (  # what to do when a maker runs out of memory
    "Lower rollout.prompts_per_batch, rollout.samples_per_prompt or rollout.max_new_tokens, or give the maker more of "
    "the GPU (topology.gpus_per_maker)."
)
_RECORDED_CHARACTERS = 10_000  # of each text of a sample in quarantine


class AllSamplesDropped(DataError):
    """Every sample of a batch had to be dropped; the message says why."""


@dataclasses.dataclass
class MakerBatch:
    """A batch on its way through a maker: prompts, then rollout and scores, finally experience."""

    prompts: PromptBatch
    experience: Experience | None = None
    """Without rewards while `scores` are pending, without advantages until it is finished; None if all was dropped."""
    scores: PendingScores | None = None  # scores that a reward function is still computing
    version: int = 0  # version of the weights that scored it
    incarnation: int = 0  # of the trainers that these weights came from
    metrics: dict[str, Metric] = dataclasses.field(default_factory=dict)
    """Reported with the batch, besides what is read off the experience."""
    dropped: AllSamplesDropped | None = None  # why no sample is left
    losses: dict[int, str] = dataclasses.field(default_factory=dict)
    """Why samples were left out, by their ids; those of their groups that were left out with them are not named."""
    verdicts: dict[int, dict[str, Any]] = dataclasses.field(default_factory=dict)
    """The terms of a weighted reward and the details that rewards gave, by sample id."""
    quarantined: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    """Samples on which the reward failed, as text, with the error: to be written down."""
    quarantined_ids: set[int] = dataclasses.field(default_factory=set)
    """The ids of these samples, and of all that were left out with them."""
    quarantined_groups: set[int] = dataclasses.field(default_factory=set)
    """Their groups; where the algorithm does not compare samples, each is a group of its own, by its id."""

    @property
    def is_ready(self) -> bool:
        """Whether it can be finished without a wait."""
        return self.scores is None or self.scores.is_ready

    def note_verdicts(self, scores: PendingScores) -> None:
        """Note what the reward says of each sample, and those on which it failed."""
        assert self.experience is not None
        assert self.experience.sample_ids is not None
        ids, request = self.experience.sample_ids.tolist(), scores.request
        self.verdicts = dict(zip(ids, scores.remarks(), strict=True))
        self.losses |= {ids[row]: f"no score by {name!r}" for row, name in scores.unscored.items()}
        groups = ids if self.experience.group_ids is None else self.experience.group_ids.tolist()
        for row, error in sorted(scores.failures.items()):
            self.losses[ids[row]] = error
            texts = {"prompt": request.prompts[row], "completion": request.completions[row], "error": error}
            cut = {name: text[:_RECORDED_CHARACTERS] for name, text in texts.items()}
            columns = self.columns_of(ids[row])
            self.quarantined.append({"sample_id": ids[row], "group_id": groups[row], **cut, "columns": columns})

    def facts_of(self, sample_id: int | None) -> dict[str, Any]:
        """The prompt as it was given, the dataset's columns, and what rewards say of a sample besides the score."""
        facts = self.verdicts.get(-1 if sample_id is None else sample_id, {})
        if "prompt" in self.prompts.columns and (row := self._row_of(sample_id)) is not None:
            facts = {"prompt": self.prompts.columns["prompt"][row], **facts}  # a tokenizer may lose words of it
        return {**facts, "columns": self.columns_of(sample_id)}

    def columns_of(self, sample_id: int | None) -> dict[str, Any]:
        """The dataset's columns of a sample as JSON has them; of a long value the beginning, as text."""
        if (row := self._row_of(sample_id)) is None:
            return {}
        return {name: recorded(column[row]) for name, column in self.prompts.columns.items() if name != "prompt"}

    def _row_of(self, sample_id: int | None) -> int | None:
        ids = [] if self.prompts.sample_ids is None else self.prompts.sample_ids.tolist()
        return ids.index(sample_id) if sample_id in ids else None

    def keep(self, rows: Tensor, reason: str = "") -> Experience:
        """Drop the samples where the bool mask is False, and note why; returns the others."""
        assert self.experience is not None
        if not bool(rows.all()):
            if reason and self.experience.sample_ids is not None:
                self.losses |= dict.fromkeys(self.experience.sample_ids[~rows].tolist(), reason)
            self.experience = self.experience.select(rows)
        return self.experience


class ExperienceMaker(ABC):
    """Turns prompts into experience with four models; `critic` and `initial_model` are None where none is needed.

    To write a maker, implement `make_experience`, which then makes whole batches. If it declares keyword arguments
    named `sample_ids`, `group_ids` or `columns`, it gets those of the prompts too; so does an override that takes
    **kwargs, if what it overrides declares them. Models of transformers are accepted as they are; the reward model may
    be any module that maps (sequences, attention_mask) to one score per sample, or a `RewardScorer`.
    """

    policy_version: int = 0  # version of the weights that the models have; set before each call
    timeline: Timeline  # the account of the actor's time, set before the first batch

    def __init__(
        self, actor: nn.Module, critic: nn.Module | None, reward_model: Any, initial_model: nn.Module | None
    ) -> None:
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


def build_maker(make: Callable[..., ExperienceMaker], models: Sequence[Any], **settings: Any) -> ExperienceMaker:
    """Call `make`, a class or function, with the four models and those of the settings that it declares."""
    declared = inspect.signature(make).parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in declared):
        names = {parameter.name for parameter in declared}
        settings = {name: value for name, value in settings.items() if name in names}
    return make(*models, **settings)
