"""The interface of a maker, its prompts, and a batch on its way through it."""

import dataclasses
import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from coati.errors import DataError
from coati.experience import BufferItem, Experience
from coati.monitor.metrics import Metric
from coati.monitor.timeline import Timeline
from coati.rewards import PendingScores
from coati.rewards.calling import recorded

__all__ = ["AllSamplesDropped", "Experience", "ExperienceMaker", "MakerBatch", "PromptBatch"]

LESS_TO_MAKE = (
    "Lower rollout.prompts_per_batch, rollout.samples_per_prompt or rollout.max_new_tokens, or give the maker more of "
    "the GPU (topology.gpus_per_maker)."
)
"""What to do when a maker runs out of memory."""
_RECORDED_CHARACTERS = 10_000  # of each text of a sample in quarantine


class AllSamplesDropped(DataError):
    """Every sample of a batch had to be dropped; the message says why."""


@dataclasses.dataclass(frozen=True, eq=False)
class PromptBatch:
    """Prompts, left-padded, with the ids of the samples to make from them and the dataset's columns."""

    input_ids: Tensor  # [B, P]
    attention_mask: Tensor  # [B, P]
    sample_ids: Tensor | None = None  # [B]
    group_ids: Tensor | None = None  # [B]
    lease_epochs: Tensor | None = None  # [B] of the leases under which they are made
    columns: Mapping[str, Sequence[Any]] = dataclasses.field(default_factory=dict)

    def __len__(self) -> int:
        return int(self.input_ids.shape[0])

    @classmethod
    def parse(cls, batch: Any) -> Self:
        """Accept a tensor of input_ids, or a dict of `input_ids`, usually `attention_mask`, and columns.

        Raises DataError unless prompts are padded on the left and everything has one entry per prompt.

        >>> len(PromptBatch.parse(torch.tensor([[1, 2], [3, 4]])))
        2
        """
        if isinstance(batch, Tensor):
            batch = {"input_ids": batch}
        if not isinstance(batch, Mapping) or "input_ids" not in batch:
            found = f"keys {sorted(map(str, batch))}" if isinstance(batch, Mapping) else type(batch).__name__
            raise DataError(
                "a batch from the data loader must be a tensor of input_ids, or a dict with 'input_ids' and "
                f"'attention_mask', got {found}."
            )
        columns = dict(batch)
        input_ids = _as_matrix("input_ids", columns.pop("input_ids"))
        mask = columns.pop("attention_mask", None)
        attention_mask = torch.ones_like(input_ids) if mask is None else _as_matrix("attention_mask", mask)
        _check_left_padding(input_ids, attention_mask)
        sample_ids, group_ids = (
            _as_ids(name, columns.pop(name, None), len(input_ids)) for name in ("sample_ids", "group_ids")
        )
        for name, column in columns.items():
            if not hasattr(column, "__len__") or len(column) != len(input_ids):
                raise DataError(
                    f"column {name!r} of a batch must have one entry for each of its {len(input_ids)} prompts, "
                    f"got {len(column) if hasattr(column, '__len__') else type(column).__name__}."
                )
        return cls(input_ids, attention_mask, sample_ids, group_ids, columns=columns)

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Several batches as one; they have the same columns."""
        if len(parts) == 1:
            return parts[0]
        width = max(part.input_ids.shape[1] for part in parts)

        def column(name: str) -> Tensor | None:
            tensors = [tensor for part in parts if (tensor := getattr(part, name)) is not None]
            if tensors and tensors[0].ndim == 2:
                tensors = [F.pad(tensor, (width - tensor.shape[1], 0)) for tensor in tensors]
            return torch.cat(tensors) if tensors else None

        tensors = {name: column(name) for name in vars(parts[0]) if name != "columns"}
        columns = {name: [value for part in parts for value in part.columns[name]] for name in parts[0].columns}
        return cls(**tensors, columns=columns)  # type: ignore[arg-type]

    def numbered(self, first_id: int) -> Self:
        """The batch with sample ids from `first_id` on."""
        return dataclasses.replace(self, sample_ids=torch.arange(len(self)) + first_id)

    def to(self, device: torch.device) -> Self:
        """The batch with its tensors on the device."""
        return self._mapped(lambda tensor: tensor.to(device))

    def select(self, rows: Tensor | slice) -> Self:
        """Some of the prompts: a slice, or those where a bool mask is True."""
        kept = range(len(self))[rows] if isinstance(rows, slice) else rows.nonzero().flatten().tolist()
        columns = {name: [column[row] for row in kept] for name, column in self.columns.items()}
        return self._mapped(lambda tensor: tensor[rows], columns=columns)

    def check_groups(self) -> None:
        """Raise DataError unless every sample has another of its prompt to be compared with."""
        if self.group_ids is None:
            raise DataError(
                "the algorithm compares the samples of a prompt, but the batch has no group_ids. "
                "Pass group_ids, the same number for all samples of a prompt."
            )
        sizes = torch.unique(self.group_ids, return_counts=True)[1]
        if int(sizes.min()) < 2:
            raise DataError(
                f"the algorithm compares the samples of a prompt, but {int((sizes < 2).sum())} of {len(sizes)} groups "
                "of the batch have only one. Put at least two samples of each prompt into a batch."
            )

    def _mapped(self, change: Callable[[Tensor], Tensor], **changes: Any) -> Self:
        changes |= {name: change(value) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return dataclasses.replace(self, **changes)


@dataclasses.dataclass
class MakerBatch:
    """A batch on its way through a maker: prompts, then rollout and scores, finally experience."""

    prompts: PromptBatch
    """The prompts as they were admitted."""
    experience: Experience | None = None
    """Without rewards while `scores` are pending, without advantages until it is finished; None if all was dropped."""
    scores: PendingScores | None = None
    """Scores that a reward function is still computing."""
    version: int = 0
    """Version of the weights that scored it."""
    incarnation: int = 0
    """Of the trainers that these weights came from."""
    metrics: dict[str, Metric] = dataclasses.field(default_factory=dict)
    """Reported with the batch, besides what is read off the experience."""
    dropped: AllSamplesDropped | None = None
    """Why no sample is left."""
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
        """The dataset's columns of a sample, and what rewards say of it besides the score."""
        return {**self.verdicts.get(-1 if sample_id is None else sample_id, {}), "columns": self.columns_of(sample_id)}

    def columns_of(self, sample_id: int | None) -> dict[str, Any]:
        """The dataset's columns of a sample as JSON has them; of a long value the beginning, as text."""
        ids = [] if self.prompts.sample_ids is None else self.prompts.sample_ids.tolist()
        if sample_id not in ids:
            return {}
        row = ids.index(sample_id)
        return {name: recorded(column[row]) for name, column in self.prompts.columns.items() if name != "prompt"}

    def keep(self, rows: Tensor, reason: str = "") -> Experience:
        """Drop the samples where the bool mask is False, and note why; returns the others."""
        assert self.experience is not None
        if not bool(rows.all()):
            if reason and self.experience.sample_ids is not None:
                self.losses |= dict.fromkeys(self.experience.sample_ids[~rows].tolist(), reason)
            self.experience = self.experience.select(rows)
        return self.experience


class OtherWork(Protocol):
    """What a maker does now and then besides making experience: an evaluation."""

    def run(self, pipeline: Any, tell: Callable[[], None] = lambda: None) -> None:
        """Do it, with nothing else in the maker's hands. `pipeline` is its `ExperiencePipeline`.

        Call `tell` now and then: trainers wait for a maker as long as they hear that it works.
        """


class WorkSource(ABC):
    """Where a maker's work comes from: leases, or a data loader. The attributes are those of a data loader."""

    wait_name = "wait_prompts"
    """The activity of a maker that waits for prompts."""
    capacity = 0
    """Samples that a maker works on at a time, with others coming as some have ended; 0 for whole batches."""
    least = 1
    """Fewest samples that it yields at once."""
    room: int | None = None
    """How many samples the maker could begin now; set by its loop, None if that is a whole batch."""
    num_skipped = 0
    """Prompts that were skipped so far."""
    awaited = "the next batch of prompts. Check what the data loader waits for"
    """What a maker waits for when it waits for prompts, for messages."""
    last_answer = 0.0
    """When whoever gives out work last said that there is none yet, by the monotonic clock."""

    @abstractmethod
    def __iter__(self) -> Iterator[PromptBatch | OtherWork]:
        """Yield batches of prompts, or other work that comes first; may wait for them."""

    def poll(self) -> PromptBatch | OtherWork | None:
        """Return what may be begun now; None if that is nothing."""
        raise NotImplementedError  # a data loader only waits

    def settle(self) -> None:  # noqa: B027  (without leases there is nothing to tell)
        """Tell trainers what became of their leases, and that the maker is at other work."""

    def attach_leases(self, batch: MakerBatch, items: list[BufferItem]) -> list[BufferItem]:  # noqa: ARG002
        """Account for what was made of a batch; returns what is to be delivered."""
        return items


class ExperienceMaker(ABC):
    """Turns prompts into experience with four models: actor, critic, reward model and initial model.

    To write a maker, implement `make_experience`; the holder and the synchronous loop need nothing else, and have it
    make whole batches. If it declares keyword arguments named `sample_ids`, `group_ids` or `columns`, it gets those of
    the prompts too; so does an override that takes **kwargs, if what it overrides declares them.

    `critic` and `initial_model` are None for algorithms that need none. `actor` and `initial_model` may be plain
    transformers models or an `Actor`; the reward model may be any module that maps (sequences, attention_mask) to one
    score per sample, or a `RewardScorer`.
    """

    policy_version: int = 0
    """Version of the weights that the models have; set before each call."""
    is_stream: bool = False
    """Whether it can begin samples while others are being written."""
    timeline: Timeline
    """The account of the actor's time, set before the first batch."""
    _waiting: tuple[tuple[PromptBatch, dict[str, Any]], ...] = ()

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

    # What the loop calls. Here a whole batch is made at once, and nothing is written before.

    num_writing = 0
    """Samples that were submitted, and for which `write` has something to do."""

    @property
    def room(self) -> int:
        """How many samples it can begin now."""
        return 0 if self._waiting else sys.maxsize

    @property
    def num_written(self) -> int:
        """Samples that `score` can take."""
        return sum(len(prompts) for prompts, _ in self._waiting)

    def submit(self, prompts: PromptBatch, **generate_kwargs: Any) -> None:
        """Take prompts in."""
        self._waiting = (*self._waiting, (prompts, generate_kwargs))

    def write(self) -> None:
        """Write a few tokens of each response."""
        raise NotImplementedError

    @torch.no_grad()
    def score(self) -> MakerBatch:
        """Turn what is written into experience, as far as that needs the models; reward functions may still run.

        Ids and versions that `make_experience` leaves out are filled in, if it returns one sample for each prompt.
        """
        (prompts, generate_kwargs), *rest = self._waiting
        self._waiting = tuple(rest)
        known = {"sample_ids": prompts.sample_ids, "group_ids": prompts.group_ids, "columns": prompts.columns}
        declared = _declared_keywords(type(self))
        known = {name: value for name, value in known.items() if name in declared}
        try:
            experience = self.make_experience(prompts.input_ids, prompts.attention_mask, **known, **generate_kwargs)
        except AllSamplesDropped as error:
            return MakerBatch(prompts, dropped=error)
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


def _declared_keywords(maker_class: type) -> set[str]:
    """Return what `make_experience` takes by name; one that passes **kwargs on takes what the one it overrides does."""
    names: set[str] = set()
    for owner in maker_class.__mro__:
        if (method := vars(owner).get("make_experience")) is not None:
            parameters = inspect.signature(method).parameters
            names |= parameters.keys()
            if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
                break
    return names


def build_maker(make: Callable[..., ExperienceMaker], models: Sequence[Any], **settings: Any) -> ExperienceMaker:
    """Call `make`, a class or function, with the four models and those of the settings that it declares."""
    declared = inspect.signature(make).parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in declared):
        names = {parameter.name for parameter in declared}
        settings = {name: value for name, value in settings.items() if name in names}
    return make(*models, **settings)


def _as_matrix(name: str, value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        try:
            value = torch.as_tensor(value)
        except (ValueError, TypeError) as error:
            raise DataError(
                f"{name} of a batch must be [B, P], but its rows have different lengths or are not numbers "
                f"({error}). Pad prompts on the left, e.g. tokenizer.pad with padding_side='left'."
            ) from error
    if value.ndim != 2 or value.numel() == 0:
        raise DataError(
            f"{name} of a batch must be [B, P] with at least one prompt and one token, got {list(value.shape)}. "
            "Pad ragged prompts on the left and pass an attention_mask."
        )
    matrix: Tensor = value.long()
    return matrix


def _as_ids(name: str, value: Any, num_prompts: int) -> Tensor | None:
    if value is None:
        return None
    ids = torch.as_tensor(value).long()
    if tuple(ids.shape) != (num_prompts,):
        raise DataError(f"{name} must be [{num_prompts}], one for each prompt, got {list(ids.shape)}.")
    return ids


def _check_left_padding(input_ids: Tensor, attention_mask: Tensor) -> None:
    if attention_mask.shape != input_ids.shape:
        raise DataError(
            f"attention_mask must have the shape of input_ids, {list(input_ids.shape)}, "
            f"got {list(attention_mask.shape)}."
        )
    if bool((attention_mask[:, -1] == 0).any()):
        raise DataError(
            "prompts must be padded on the left, but the last attention_mask column holds zeros. "
            "Set tokenizer.padding_side = 'left'."
        )
    if bool((attention_mask[:, 1:] < attention_mask[:, :-1]).any()):
        raise DataError(
            "attention_mask must be zeros and then ones in every row, but one has a zero after a one. "
            "Pad on the left only, and mask nothing inside a prompt."
        )
