"""The `ExperienceMaker` interface, and the batch that passes through its stages."""

import dataclasses
import inspect
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from coati.errors import DataError
from coati.experience import Experience as Experience
from coati.experience import Sample
from coati.monitor.metrics import Mean, Metric, Sum
from coati.monitor.timeline import Timeline
from coati.rewards import PendingScores
from coati.rewards.calling import to_json_value

MEMORY_REMEDY = (  # remedy when a maker runs out of memory
    "Lower rollout.prompts_per_batch, rollout.samples_per_prompt or rollout.max_new_tokens, or give the maker more of "
    "the GPU (topology.gpus_per_maker)."
)
_RECORDED_CHARACTERS = 10_000  # limit per text of a quarantined sample


class AllSamplesDropped(DataError):
    """Every sample of a batch was dropped. The message says why."""


@dataclasses.dataclass
class MakerBatch:
    """Samples that are scored together, and the experience made from them, which each stage completes further."""

    samples: list[Sample]  # all samples; `experience` holds those that were not dropped
    experience: Experience | None = None  # None until it is made, and if all samples were dropped
    scores: PendingScores | None = None  # scores that a reward function is still computing
    version: int = 0  # version of the weights that scored the batch
    incarnation: int = 0  # incarnation of the trainers that these weights came from
    metrics: dict[str, Metric] = dataclasses.field(default_factory=dict)
    """Metrics to report with the batch, besides those derived from the experience."""
    drop_error: AllSamplesDropped | None = None  # why all samples were dropped
    quarantined: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    """Records of samples on which the reward failed: their texts and the error."""

    @property
    def is_ready(self) -> bool:
        """Whether the batch can be finished without waiting for rewards."""
        return self.scores is None or self.scores.is_ready

    def kept_samples(self) -> list[Sample]:
        """Return the sample of each row of the experience."""
        assert self.experience is not None
        assert self.experience.sample_ids is not None
        by_id = {sample.id: sample for sample in self.samples}
        return [by_id[one] for one in self.experience.sample_ids.tolist()]

    def take_scores(self) -> None:
        """Write pending scores into the experience, and copy the reward's remarks and errors to the samples."""
        if (scores := self.scores) is None or self.experience is None:
            return
        self.experience.reward, request = scores(), scores.request
        unscored, failures = scores.unscored, scores.failures
        for row, (sample, remarks) in enumerate(zip(self.kept_samples(), scores.remarks(), strict=True)):
            sample.remarks = remarks
            if row in unscored:
                sample.drop_reason = f"no score by {unscored[row]!r}"
            if (error := failures.get(row)) is not None:
                sample.drop_reason, sample.is_quarantined = error, True
                texts = {"prompt": request.prompts[row], "completion": request.completions[row], "error": error}
                cut = {name: text[:_RECORDED_CHARACTERS] for name, text in texts.items()}
                ids = {"sample_id": sample.id, "group_id": sample.id if sample.group is None else sample.group}
                self.quarantined.append({**ids, **cut, "columns": sample_facts(sample)["columns"]})
        self.metrics |= reward_metrics(scores)
        self.scores = None

    def keep(self, rows: Tensor, reason: str = "") -> Experience:
        """Drop the samples where the bool mask `rows` is False, record why, and return the remaining experience."""
        assert self.experience is not None
        if not bool(rows.all()):
            for sample, is_kept in zip(self.kept_samples(), rows.tolist(), strict=True):
                if reason and not is_kept:
                    sample.drop_reason = reason
            self.experience = self.experience.select(rows)
        return self.experience


def reward_metrics(scores: PendingScores) -> dict[str, Metric]:
    """Return the number of reward retries, and the mean score of each term of a sum of rewards.

    Terms without a finite score have no mean. Metric names allow only lower-case letters, digits and underscores.
    """
    metrics: dict[str, Metric] = {"reward/retries": Sum(float(scores.num_retries))}
    for term, values in scores.terms.items():
        if len(found := values[values.isfinite()].double()):
            name = re.sub("[^a-z0-9_]", "_", term.lower())
            metrics[f"reward/term_{name}"] = Mean(float(found.mean()), float(len(found)))
    return metrics


def with_ids(samples: Sequence[Sample], first: int) -> list[Sample]:
    """Return copies of the samples with consecutive ids, starting at `first`."""
    return [sample.changed(id=first + index) for index, sample in enumerate(samples)]


def sample_facts(sample: Sample) -> dict[str, Any]:
    """Return what is recorded of a sample besides its response and score.

    That is the original prompt (decoding its tokens may not restore it), the reward's remarks, and the dataset's
    columns as JSON values, with long values truncated.
    """
    prompt = {"prompt": sample.columns["prompt"]} if "prompt" in sample.columns else {}
    columns = {name: to_json_value(value) for name, value in sample.columns.items() if name != "prompt"}
    return {**prompt, **sample.remarks, "columns": columns}


class ExperienceMaker(ABC):
    """Turns prompts into experience with four models. `critic` and `initial_model` are None if they are not needed.

    To write your own maker, implement `make_experience`, which is called with whole batches. If it declares keyword
    arguments named `sample_ids`, `group_ids` or `columns`, it receives those of the prompts too. An override that takes
    **kwargs receives those that the method it overrides declares. transformers models are accepted as they are. The
    reward model may be a `RewardScorer`, or any module that maps (sequences, attention_mask) to one score per sample.
    """

    policy_version: int = 0  # version of the models' weights; set before each call
    timeline: Timeline  # records how the maker spends its time; set before the first batch

    def __init__(
        self, actor: nn.Module, critic: nn.Module | None, reward_model: Any, initial_model: nn.Module | None
    ) -> None:
        self.actor = actor
        self.critic = critic
        self.reward_model = reward_model
        self.initial_model = initial_model

    @property
    def trained_models(self) -> dict[str, nn.Module]:
        """The models that the trainer updates, keyed by their names in weight updates."""
        return {"actor": self.actor} | ({} if self.critic is None else {"critic": self.critic})

    @abstractmethod
    def make_experience(self, input_ids: Tensor, attention_mask: Tensor, **generate_kwargs: Any) -> Experience:
        """Generate a response to each prompt and score it."""


def build_maker(make: Callable[..., ExperienceMaker], models: Sequence[Any], **settings: Any) -> ExperienceMaker:
    """Call `make`, a class or function, with the four models and those of `settings` that it declares."""
    declared = inspect.signature(make).parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in declared):
        names = {parameter.name for parameter in declared}
        settings = {name: value for name, value in settings.items() if name in names}
    return make(*models, **settings)
