"""The interface of a maker, and a batch on its way through it."""

import dataclasses
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from coati.errors import DataError
from coati.experience import Experience, Sample
from coati.experience_maker.statistics import reward_metrics
from coati.monitor.metrics import Metric
from coati.monitor.timeline import Timeline
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
    """Samples that a maker scores together: then their experience, first without rewards, at last with advantages."""

    samples: list[Sample]  # all of them; `experience` has those that are left
    experience: Experience | None = None  # None before it is made, and if all were dropped
    scores: PendingScores | None = None  # scores that a reward function is still computing
    version: int = 0  # version of the weights that scored it
    incarnation: int = 0  # of the trainers that these weights came from
    metrics: dict[str, Metric] = dataclasses.field(default_factory=dict)
    """Reported with the batch, besides what is read off the experience."""
    dropped: AllSamplesDropped | None = None  # why no sample is left
    quarantined: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    """Samples on which the reward failed, as text, with the error: to be written down."""

    @property
    def is_ready(self) -> bool:
        """Whether it can be finished without a wait."""
        return self.scores is None or self.scores.is_ready

    def left(self) -> list[Sample]:
        """The samples of the rows of the experience."""
        assert self.experience is not None
        assert self.experience.sample_ids is not None
        by_id = {sample.id: sample for sample in self.samples}
        return [by_id[one] for one in self.experience.sample_ids.tolist()]

    def take_scores(self) -> None:
        """Write pending scores into the experience, and note what the reward says of each sample."""
        if (scores := self.scores) is None or self.experience is None:
            return
        self.experience.reward, request = scores(), scores.request
        unscored, failures = scores.unscored, scores.failures
        for row, (sample, remarks) in enumerate(zip(self.left(), scores.remarks(), strict=True)):
            sample.remarks = remarks
            if row in unscored:
                sample.lost = f"no score by {unscored[row]!r}"
            if (error := failures.get(row)) is not None:
                sample.lost, sample.is_quarantined = error, True
                texts = {"prompt": request.prompts[row], "completion": request.completions[row], "error": error}
                cut = {name: text[:_RECORDED_CHARACTERS] for name, text in texts.items()}
                ids = {"sample_id": sample.id, "group_id": sample.id if sample.group is None else sample.group}
                self.quarantined.append({**ids, **cut, "columns": facts_of(sample)["columns"]})
        self.metrics |= reward_metrics(scores)
        self.scores = None

    def keep(self, rows: Tensor, reason: str = "") -> Experience:
        """Drop the samples where the bool mask is False, and note why; returns the others."""
        assert self.experience is not None
        if not bool(rows.all()):
            for sample, is_kept in zip(self.left(), rows.tolist(), strict=True):
                if reason and not is_kept:
                    sample.lost = reason
            self.experience = self.experience.select(rows)
        return self.experience


def numbered(samples: Sequence[Sample], first: int) -> list[Sample]:
    """The samples with ids from `first` on."""
    return [dataclasses.replace(sample, id=first + index) for index, sample in enumerate(samples)]


def facts_of(sample: Sample) -> dict[str, Any]:
    """What is written down of a sample besides its response and score.

    The prompt as it was given, because a tokenizer may lose words of it; what rewards say; the dataset's columns as
    JSON has them, of a long value the beginning.
    """
    prompt = {"prompt": sample.columns["prompt"]} if "prompt" in sample.columns else {}
    columns = {name: recorded(value) for name, value in sample.columns.items() if name != "prompt"}
    return {**prompt, **sample.remarks, "columns": columns}


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
