"""The forms of a sample that several packages share: `Sample`, `Experience` and `BufferItem`.

Shapes: B samples, P prompt tokens (left-padded), A response tokens (right-padded), S = P + A.

A sample takes these forms on its way from prompt to gradient:

    form           where    made by                            what it is
    dict           maker    prompts/table.py                   a row of a dataset: one prompt and its columns
    Sample         maker    PromptStream.batch                 the prompt as tokens; later the response and its outcome
    MakerBatch     maker    NaiveExperienceMaker               samples that are scored together, and their experience
    Experience     maker    join_samples                       padded responses; later rewards, KL and advantages
    RewardRequest  maker    RewardScorer.begin                 prompts and responses as text and tokens, for rewards
    BufferItem     both     split_experience_batch             one sample without padding, as it is buffered
    ItemBundle     maker    ItemSender.send                    items for one trainer, pickled as one array per field
    Experience     trainer  pad_items                          items of several makers, padded again
    MicroBatch     trainer  micro_batches                      the rows of one pass
    PackedRows     both     PackedRows.of                      rows joined end to end, for training and scoring passes
"""

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from coati.config.generate import GenerateOptions
from coati.errors import DataError
from coati.wire import WireTensor, decode, encode

logger = logging.getLogger(__name__)
_log_once = functools.cache(logger.debug)

# Id or version that the sample's maker did not set.
UNKNOWN_ID = -1
_NOTHING = torch.empty(0)
_OPTIONS = GenerateOptions()


@dataclasses.dataclass(eq=False)
class Sample:
    """One sample of a maker: a prompt, its generate options, the response, and the outcome."""

    id: int  # keys its random draws
    tokens: list[int]  # the prompt, and the tokens of earlier turns
    limit: int = 0  # maximum number of response tokens; below 1 if the prompt leaves no room
    seed: int = 0
    options: GenerateOptions = dataclasses.field(default_factory=lambda: _OPTIONS)
    is_kept: bool = False  # whether the engine keeps its slot and cache after the response, until `extend` or `cancel`
    needs_log_probs: bool = True
    """False in evaluations, which read no log-probs. Allows all options; log-probs may be those after truncation."""

    group: int | None = None  # equal for all samples of a prompt
    unit: int = UNKNOWN_ID
    """Samples of a unit are scored and dropped together: the group if the algorithm compares samples, else the id."""
    lease: tuple[int, int] | None = None  # number and epoch of the lease that it is made for
    columns: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # dataset columns, for the reward

    response: Tensor = _NOTHING  # [A] including the end-of-sequence token
    log_probs: Tensor = _NOTHING  # [A] at the sampling temperature, before top-k/top-p truncation
    versions: Tensor = _NOTHING  # [A] int64: version of the weights that wrote each token
    is_cut: bool = False  # whether the length limit ended it, not an end-of-sequence token or stop string

    remarks: dict[str, Any] = dataclasses.field(default_factory=dict)  # reward terms and details
    drop_reason: str = ""  # empty if it was dropped because of another sample of its unit
    is_quarantined: bool = False  # dropped because the reward failed on it or on another sample of its unit

    # Used by the engine:
    num_drawn: int = 0  # number of tokens drawn in earlier turns
    is_over: bool = False  # whether this turn has ended or was cancelled
    place: Any = None  # its slot

    def changed(self, **fields: Any) -> "Sample":
        """Return a copy with other values of these fields, faster than `dataclasses.replace`."""
        copy = object.__new__(Sample)
        vars(copy).update(vars(self), **fields)
        return copy

    def next_turn(self, response: Sequence[int], tokens: Sequence[int], limit: int) -> "Sample":
        """Return a copy for the next turn, whose prompt is extended by the response and by `tokens`."""
        return self.changed(
            tokens=[*self.tokens, *response, *tokens],
            limit=limit,
            num_drawn=self.num_drawn + len(response),
            is_over=False,
        )


@dataclasses.dataclass
class _SampleFields:
    """The fields that `Experience` and `BufferItem` share; an item's tensors have no batch dimension."""

    sequences: Tensor  # [B, S] prompt and response token ids
    action_log_probs: Tensor  # [B, A] log π(token) of response tokens under the policy that sampled them
    values: Tensor  # [B, A] the critic's estimate V(state before the token); 0 without a critic
    reward: Tensor  # [B] score of each sequence, without the KL penalty
    kl: Tensor  # [B, A] per-token estimate of KL(policy || initial model)
    advantages: Tensor  # [B, A] not whitened
    attention_mask: Tensor | None  # [B, S] 1 on real tokens, 0 on padding
    action_mask: Tensor | None  # [B, A] True on response tokens, the end-of-sequence token included, False after it

    sample_ids: Tensor | None = None  # [B] int64: identifies the sample and keys its random draws
    group_ids: Tensor | None = None  # [B] int64: equal for all samples of a prompt
    policy_versions: Tensor | None = None  # [B, A] int64: version of the weights that wrote each token
    temperatures: Tensor | None = None  # [B] log-probs here and in training are those of softmax(logits / temperature)
    proximal_log_probs: Tensor | None = None  # [B, A] under the weights that first saw the batch; set by the learner
    reference_log_probs: Tensor | None = None  # [B, A] under the initial model, if the KL penalty is in the loss
    returns: Tensor | None = None  # [B, A] the critic's targets; None: advantages + values
    is_cut: Tensor | None = None  # [B] bool: whether the length limit ended the response

    _label: ClassVar[str]
    _num_dims: ClassVar[int]  # of sequences

    @property
    def num_actions(self) -> int:
        """Number of response tokens, including padding."""
        return int(self.action_log_probs.shape[-1])

    @property
    def num_prompt_tokens(self) -> int:
        """Number of prompt tokens, including padding."""
        return int(self.sequences.shape[-1]) - self.num_actions

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield name and tensor of every field that is set."""
        for name in EXPERIENCE_FIELDS:
            value = getattr(self, name)
            if value is not None:
                yield name, value

    def validate(self) -> None:
        """Raise DataError if the shapes of the fields do not agree."""
        fields, label = vars(self), self._label
        for name in ("sequences", "action_log_probs"):
            tensor = fields[name]
            if not isinstance(tensor, Tensor) or tensor.ndim != self._num_dims:
                came = list(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
                raise DataError(
                    f"{label}.{name} must be a tensor with {self._num_dims} dimension(s), got {came}. Use "
                    "make_experience_batch to make a batch from samples, split_experience_batch to split one."
                )
        if self.sequences.is_floating_point():
            raise DataError(f"{label}.sequences must hold token ids, got {self.sequences.dtype}.")
        if self.num_prompt_tokens < 0:
            raise DataError(
                f"{label}.action_log_probs has {self.num_actions} response tokens, more than the "
                f"{self.sequences.shape[-1]} of {label}.sequences, which must hold the prompt and the response."
            )
        token_shape, response_shape = self.sequences.shape, self.action_log_probs.shape
        sample_shape = token_shape[:-1]
        for name in EXPERIENCE_FIELDS:  # runs for every sample, so it must be fast
            value = fields[name]
            if value is None and name not in REQUIRED_FIELDS:
                continue
            if not isinstance(value, Tensor):
                raise DataError(f"{label}.{name} must be a tensor, got {type(value).__name__}.")
            if name in PER_SAMPLE_FIELDS:
                expected = sample_shape
                if not expected and value.numel() == 1:
                    continue
            else:
                expected = token_shape if name in PER_TOKEN_FIELDS else response_shape
            if value.shape != expected:
                raise DataError(
                    f"{label}.{name} must be {list(expected)}, got {list(value.shape)}. All fields share the number of "
                    "samples and tokens; pad ragged samples with make_experience_batch."
                )


EXPERIENCE_FIELDS = tuple(field.name for field in dataclasses.fields(_SampleFields))
REQUIRED_FIELDS = EXPERIENCE_FIELDS[:6]
PER_TOKEN_FIELDS = ("sequences", "attention_mask")  # [B, S]
PER_SAMPLE_FIELDS = ("reward", "sample_ids", "group_ids", "temperatures", "is_cut")  # [B]; all others are [B, A]


@dataclasses.dataclass
class Experience(_SampleFields):
    """A batch of samples with everything that PPO needs to train on them.

    The first eight fields are the contract's. The others default to None.

    >>> tokens, floats = torch.tensor([[5, 6, 7]]), torch.zeros(1, 2)
    >>> experience = Experience(tokens, floats, floats, torch.ones(1), floats, floats, None, None)
    >>> experience.num_samples, experience.num_prompt_tokens, experience.num_actions
    (1, 1, 2)
    """

    _label = "experience"
    _num_dims = 2

    @classmethod
    def blank(cls, num_samples: int, *, like: Tensor = _NOTHING) -> Self:
        """Return samples of one prompt token and one masked response token, with the float dtype and device of `like`.

        A rank without data trains on 0 of them, or runs a pass over 1, while other ranks have data.
        """
        tokens, floats = like.new_zeros(num_samples, 2, dtype=torch.long), like.new_zeros(num_samples, 1)
        ids, scores, mask = tokens[:, 0], floats[:, 0], torch.ones_like(tokens)
        return cls(
            *(tokens, floats, floats, scores, floats, floats, mask, floats.bool()),
            sample_ids=ids,
            group_ids=ids,
            policy_versions=floats.long(),
            temperatures=torch.ones_like(scores),
            reference_log_probs=floats,
            is_cut=scores.bool(),
        )

    @property
    def num_samples(self) -> int:
        """Number of samples, B."""
        return int(self.sequences.shape[0])

    def critic_targets(self) -> Tensor:
        """Return `returns`, or advantages + values if it is None, [B, A]."""
        return self.advantages + self.values if self.returns is None else self.returns

    def full_action_mask(self) -> Tensor:
        """Return `action_mask`, or all True if it is None, [B, A] bool."""
        if self.action_mask is not None:
            return self.action_mask.bool()
        return torch.ones_like(self.action_log_probs, dtype=torch.bool)

    def tokens_and_masks(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return sequences, attention mask and action mask; a mask that is None becomes all ones."""
        ones = torch.ones_like(self.sequences, dtype=torch.long)
        return self.sequences, ones if self.attention_mask is None else self.attention_mask, self.full_action_mask()

    def sample_metrics(self, *, has_reference: bool = False) -> dict[str, float]:
        """Return metrics of rewards, KL and lengths. An uncut response of at most one token counts as empty.

        A KL of exactly 0 is a metric only if it was measured (`has_reference`).
        """
        if (num_samples := self.num_samples) == 0:
            return {}
        mask = self.full_action_mask()
        lengths, reward = mask.sum(dim=1), self.reward.double()
        metrics = {
            "reward/mean": float(reward.mean()),
            "reward/std": float(reward.std(correction=0)),
            "reward/min": float(reward.min()),
            "reward/max": float(reward.max()),
            "response/length": float(lengths.double().mean()),
        }
        kl = float(self.kl.double().masked_fill(~mask, 0.0).sum())
        if has_reference or kl:
            metrics |= {"kl/per_sample": kl / num_samples, "kl/per_token": kl / max(1.0, float(lengths.sum()))}
        if self.group_ids is not None:
            groups: dict[int, list[float]] = {}
            for group, score in zip(self.group_ids.tolist(), reward.tolist(), strict=True):
                groups.setdefault(group, []).append(score)
            if compared := [scores for scores in groups.values() if len(scores) > 1]:
                metrics["reward/group_std"] = float(np.mean([np.std(scores) for scores in compared]))
                metrics["reward/equal_groups"] = float(np.mean([len({*scores}) == 1 for scores in compared]))
        if (is_cut := self.is_cut) is not None:
            metrics["response/cut_fraction"] = float(is_cut.double().mean())
            metrics["response/empty"] = float((~is_cut & (lengths <= 1)).sum())
        return metrics

    def age_metrics(self, trainer_version: int) -> dict[str, float]:
        """Return mean and maximum age of samples (their oldest token) and mean age of tokens, in versions, or 0."""
        ages = dict.fromkeys(("train/age_mean", "train/age_max", "train/token_age_mean"), 0.0)
        if self.policy_versions is None:
            return ages
        is_known = self.full_action_mask() & (self.policy_versions >= 0)  # [B, A]
        if not bool(is_known.any()):
            return ages
        of_tokens = (trainer_version - self.policy_versions).masked_fill(~is_known, 0).double()
        of_samples = of_tokens.amax(dim=1)[is_known.any(dim=1)]
        found = of_samples.mean(), of_samples.max(), of_tokens[is_known].mean()
        return dict(zip(ages, map(float, found), strict=True))

    @torch.no_grad()
    def to_device(self, device: torch.device | str) -> None:
        """Move every tensor to `device` in place. Fields that are None stay None."""
        for name, tensor in list(self.tensors()):
            setattr(self, name, tensor.to(device, non_blocking=tensor.device.type == "cpu" and tensor.is_pinned()))

    def pin_memory(self) -> Self:
        """Pin every tensor for fast copies to the GPU, and return self. Without CUDA this does nothing."""
        if not torch.cuda.is_available():
            _log_once("pin_memory() does nothing here: this machine has no CUDA device")
            return self
        for name, tensor in list(self.tensors()):
            if tensor.device.type == "cpu" and not tensor.is_pinned():
                setattr(self, name, tensor.pin_memory())
        return self

    def select(self, rows: Tensor | slice) -> "Experience":
        """Return a new experience of the samples that `rows` selects: an index tensor, a bool mask or a slice."""
        return dataclasses.replace(self, **{name: tensor[rows] for name, tensor in self.tensors()})


@dataclasses.dataclass
class BufferItem(_SampleFields):
    """One sample: the fields of `Experience` without padding and batch dimension. Pickles as numpy arrays."""

    delivery_id: str | None = None  # set by the sender: equal for all items of a send and its retries
    # Set by the source of the leases:
    lease: tuple[int, int] | None = None  # number and epoch of the lease that this sample was made for
    scored_by: int = UNKNOWN_ID  # version of the weights that scored it; may be newer than those that wrote it

    _label = "buffer item"
    _num_dims = 1

    def __reduce__(self) -> tuple[Callable[..., "BufferItem"], tuple[Any, ...]]:
        return _item_from_wire, (_to_wire([self]),)


class ItemBundle(list[BufferItem]):
    """Items of one batch, pickled together, which is ten times faster. Unpickles as a plain list.

    >>> import copy
    >>> type(copy.copy(ItemBundle([])))  # copying uses pickle's protocol
    <class 'list'>
    """

    def __reduce__(self) -> tuple[Callable[..., list[BufferItem]], tuple[Any, ...]]:
        return _from_wire, (_to_wire(self),)


def join_items(items: Sequence[BufferItem]) -> dict[str, Tensor]:
    """Concatenate each field of all items into one tensor, for the wire or a file, with its length in each item.

    A length of -1 stands for None, because items of different makers may lack different fields.
    """
    joined = {}
    for name in EXPERIENCE_FIELDS:
        fields = [getattr(item, name) for item in items]
        if present := [field if field.ndim == 1 else field.reshape(-1) for field in fields if field is not None]:
            joined[name] = torch.cat(present)
            joined[f"{name}.lengths"] = torch.tensor([-1 if field is None else field.numel() for field in fields])
    return joined


def separate_items(joined: Mapping[str, Tensor]) -> list[BufferItem]:
    """Return the items that `join_items` concatenated. They share memory."""
    num_items = len(joined["sequences.lengths"]) if "sequences" in joined else 0
    columns: dict[str, Sequence[Any]] = dict.fromkeys(EXPERIENCE_FIELDS, [None] * num_items)
    for name in EXPERIENCE_FIELDS:
        if name in joined:
            lengths = joined[f"{name}.lengths"].tolist()
            present = [length for length in lengths if length >= 0]
            parts = iter(joined[name].unbind() if name in PER_SAMPLE_FIELDS else torch.split(joined[name], present))
            columns[name] = [None if length < 0 else next(parts) for length in lengths]
    return [BufferItem(*row) for row in zip(*columns.values(), strict=True)]


# Delivery id, lease and `scored_by` of an item.
_Sent = tuple[str | None, tuple[int, int] | None, int]
_WireItems = tuple[dict[str, WireTensor], list[_Sent]]


def _to_wire(items: Sequence[BufferItem]) -> _WireItems:
    fields = {name: encode(tensor) for name, tensor in join_items(items).items()}
    return fields, [(item.delivery_id, item.lease, item.scored_by) for item in items]


def _from_wire(wire_items: _WireItems) -> list[BufferItem]:
    fields, senders = wire_items
    items = separate_items({name: decode(wire) for name, wire in fields.items()})
    for item, sent in zip(items, senders, strict=True):
        item.delivery_id, item.lease, item.scored_by = sent
    return items


def _item_from_wire(wire_items: _WireItems) -> BufferItem:
    (item,) = _from_wire(wire_items)
    return item
