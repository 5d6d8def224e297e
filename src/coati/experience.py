"""The forms of a sample that several packages share: `Sample`, which a maker writes, `Experience` and `BufferItem`.

Shapes: B samples, P prompt tokens (left-padded), A response tokens (right-padded), S = P + A.

A sample takes nine forms on its way from prompt to gradient, two of them on both sides:

    row of a dataset    dict        prompts/            one prompt and its columns
    Sample              maker                           the prompt as tokens; then the response, and what became of it
    MakerBatch          maker       experience_maker/   samples that are scored together, and their experience
    Experience          maker                           prompts and responses, padded; then rewards, KL and advantages
    RewardRequest       maker       rewards/            the same as text and tokens, for rewards
    BufferItem          both                            one sample without padding; so it waits at the trainer
    ItemBundle          maker                           items for one trainer, which pickle as an array for each field
    Experience          trainer                         items of several makers, padded again
    MicroBatch          trainer     trainer/            the rows of one pass
    PackedRows          both        models/             rows joined end to end for a model, here or for scoring

Beside them: each engine has its own buffers for what it is writing, rewards answer a request with `PendingScores` (a
`Verdict` for each sample), and `PackedRows.actions` says which packed tokens are scored. A `Lease` is the right to make
one group: the samples of a prompt where they are compared, else one sample.
"""

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from coati.config.generate import GenerateOptions
from coati.errors import DataError
from coati.wire import WireTensor, decode, encode

logger = logging.getLogger(__name__)

# Id or version of a sample whose maker did not set it.
UNKNOWN_ID = -1
_NOTHING = torch.empty(0)
_OPTIONS = GenerateOptions()


@dataclasses.dataclass(eq=False)
class Sample:
    """One sample of a maker: a prompt, how to continue it, the response, and what became of it."""

    id: int  # keys its randomness
    tokens: list[int]  # what it is continued from: the prompt, and whatever came in earlier turns
    limit: int = 0  # the most tokens of the response; less than 1 where the prompt leaves no room for one
    seed: int = 0
    options: GenerateOptions = dataclasses.field(default_factory=lambda: _OPTIONS)
    is_kept: bool = False
    """Whether it keeps its place when its response has ended, to be continued (`extend`) or let go (`cancel`)."""
    needs_log_probs: bool = True
    """False where none are read, as in an evaluation: any options go then, and log-probs may be of what a cut left."""

    group: int | None = None  # the same for all samples of a prompt
    unit: int = UNKNOWN_ID
    """What it is scored and dropped with: its group if the samples of a prompt are compared, else its id."""
    lease: tuple[int, int] | None = None  # number and epoch of the lease that it is made for
    columns: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of the dataset, for the reward

    response: Tensor = _NOTHING  # [A] with the token that ended it
    log_probs: Tensor = _NOTHING  # [A] at the sampling temperature, before top-k/top-p cut anything
    versions: Tensor = _NOTHING  # [A] int64: version of the weights that wrote each token
    is_cut: bool = False  # the length limit ended it, and no end-of-sequence token or stop string

    remarks: dict[str, Any] = dataclasses.field(default_factory=dict)  # the terms of a sum of rewards, and details
    lost: str = ""  # why it is left out; empty if that is because of another sample of its unit
    is_quarantined: bool = False  # left out because the reward failed on it, or on another of its unit

    # Up to the engine:
    num_drawn: int = 0  # tokens drawn in earlier turns
    is_over: bool = False  # whether this turn has ended, or was cancelled
    place: Any = None  # where it is written

    def next_turn(self, response: Sequence[int], tokens: Sequence[int], limit: int) -> "Sample":
        """The turn that follows: after the response come further tokens, and then the next response."""
        return dataclasses.replace(
            self,
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
    values: Tensor  # [B, A] the critic's estimate V(state before the token); zeros without a critic
    reward: Tensor  # [B] the score of each sequence, without the KL penalty
    kl: Tensor  # [B, A] per-token estimate of KL(policy || initial model)
    advantages: Tensor  # [B, A] not whitened
    attention_mask: Tensor | None  # [B, S] 1 on real tokens, 0 on padding
    action_mask: Tensor | None  # [B, A] True on response tokens, the end-of-sequence token included, False after it

    sample_ids: Tensor | None = None  # [B] int64: identifies the sample and keys its randomness
    group_ids: Tensor | None = None  # [B] int64: the same for all samples of a prompt
    policy_versions: Tensor | None = None  # [B, A] int64: version of the weights that wrote each token
    temperatures: Tensor | None = None  # [B] log-probs here and in training are those of softmax(logits / temperature)
    proximal_log_probs: Tensor | None = None  # [B, A] of the weights that first saw the batch; written by the learner
    reference_log_probs: Tensor | None = None  # [B, A] of the initial model, where the KL penalty is in the loss
    returns: Tensor | None = None  # [B, A] the critic's targets; None: advantages + values
    is_cut: Tensor | None = None  # [B] bool: whether the length limit ended the response

    _label: ClassVar[str]
    _num_dims: ClassVar[int]  # of sequences

    @property
    def num_actions(self) -> int:
        """Response tokens, padding included."""
        return int(self.action_log_probs.shape[-1])

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens, padding included."""
        return int(self.sequences.shape[-1]) - self.num_actions

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every field that is set, by name."""
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
                    f"{label}.{name} must be a tensor with {self._num_dims} dimension(s), got {came}. "
                    "make_experience_batch makes a batch of samples, split_experience_batch takes one apart."
                )
        if self.sequences.is_floating_point():
            raise DataError(f"{label}.sequences must hold token ids, got {self.sequences.dtype}.")
        if self.num_prompt_tokens < 0:
            raise DataError(
                f"{label}.action_log_probs has {self.num_actions} response tokens, more than the "
                f"{self.sequences.shape[-1]} of {label}.sequences. Sequences hold the prompt and the response."
            )
        token_shape, response_shape = self.sequences.shape, self.action_log_probs.shape
        sample_shape = token_shape[:-1]
        for name in EXPERIENCE_FIELDS:  # runs for every sample, so it does no more than it must
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
    """A batch of samples with everything PPO needs to learn from them.

    The first eight fields are the contract; the others describe where each sample came from and default to None.

    >>> tokens, floats = torch.tensor([[5, 6, 7]]), torch.zeros(1, 2)
    >>> experience = Experience(tokens, floats, floats, torch.ones(1), floats, floats, None, None)
    >>> experience.num_samples, experience.num_prompt_tokens, experience.num_actions
    (1, 1, 2)
    """

    _label = "experience"
    _num_dims = 2

    @classmethod
    def empty(cls) -> Self:
        """An experience of no samples, for a rank that has no data while others do."""
        tokens, ids = torch.zeros(0, 2, dtype=torch.long), torch.zeros(0, dtype=torch.long)
        scores, floats = torch.zeros(0), torch.zeros(0, 1)
        return cls(
            *(tokens, floats, floats, scores, floats, floats, tokens, floats.bool()),
            sample_ids=ids,
            group_ids=ids,
            policy_versions=floats.long(),
            temperatures=scores,
            reference_log_probs=floats,
            is_cut=scores.bool(),
        )

    @property
    def num_samples(self) -> int:
        """B."""
        return int(self.sequences.shape[0])

    def critic_targets(self) -> Tensor:
        """`returns`, or advantages + values where the experience has none, [B, A]."""
        return self.advantages + self.values if self.returns is None else self.returns

    def full_action_mask(self) -> Tensor:
        """`action_mask`, or all True where the experience has none, [B, A] bool."""
        if self.action_mask is not None:
            return self.action_mask.bool()
        return torch.ones_like(self.action_log_probs, dtype=torch.bool)

    def tokens_and_masks(self) -> tuple[Tensor, Tensor, Tensor]:
        """Sequences, attention mask and action mask; ones where the experience has no mask."""
        ones = torch.ones_like(self.sequences, dtype=torch.long)
        return self.sequences, ones if self.attention_mask is None else self.attention_mask, self.full_action_mask()

    def age_metrics(self, trainer_version: int) -> dict[str, float]:
        """Mean and greatest age of the samples, in versions, each as old as its oldest token, and the mean age of the
        tokens; 0 where no version is known."""
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
        """Move every tensor in place, leaving None alone."""
        for name, tensor in list(self.tensors()):
            setattr(self, name, tensor.to(device, non_blocking=tensor.device.type == "cpu" and tensor.is_pinned()))

    def pin_memory(self) -> Self:
        """Pin every tensor for fast copies to the GPU; without CUDA a no-op that is logged once, at debug level."""
        if not torch.cuda.is_available():
            _log_no_pinning()
            return self
        for name, tensor in list(self.tensors()):
            if tensor.device.type == "cpu" and not tensor.is_pinned():
                setattr(self, name, tensor.pin_memory())
        return self

    def select(self, rows: Tensor | slice) -> "Experience":
        """The samples that `rows` picks (an index tensor, a bool mask or a slice), as a new experience."""
        return dataclasses.replace(self, **{name: tensor[rows] for name, tensor in self.tensors()})


@functools.cache  # once per process
def _log_no_pinning() -> None:
    logger.debug("pin_memory() does nothing here: this machine has no CUDA device")


@dataclasses.dataclass
class BufferItem(_SampleFields):
    """One sample: the fields of `Experience` without padding and batch dimension. Pickles as numpy arrays."""

    # Set by the sender:
    delivery_id: str | None = None  # the same for all items sent together, and for a retry: without leases it tells
    lease: tuple[int, int] | None = None  # number and epoch of the lease that this sample was made for
    scored_by: int = UNKNOWN_ID  # version of the weights that scored it, maybe newer than those that wrote it

    _label = "buffer item"
    _num_dims = 1

    def __reduce__(self) -> tuple[Callable[..., "BufferItem"], tuple[Any, ...]]:
        return _item_from_wire, (_to_wire([self]),)


class ItemBundle(list[BufferItem]):
    """Items of one batch, which pickle ten times faster together and unpickle as a plain list.

    >>> import copy
    >>> type(copy.copy(ItemBundle([])))  # a copy is made by pickling's rules
    <class 'list'>
    """

    def __reduce__(self) -> tuple[Callable[..., list[BufferItem]], tuple[Any, ...]]:
        return _from_wire, (_to_wire(self),)


def join_items(items: Sequence[BufferItem]) -> dict[str, Tensor]:
    """Few large tensors, for the wire or a file: each field of all items end to end, and its length in each item.

    A length of -1 stands for None: samples of different makers may lack different fields.
    """
    joined = {}
    for name in EXPERIENCE_FIELDS:
        fields = [getattr(item, name) for item in items]
        if present := [field.reshape(-1) for field in fields if field is not None]:
            joined[name] = torch.cat(present)
            joined[f"{name}.lengths"] = torch.tensor([-1 if field is None else field.numel() for field in fields])
    return joined


def separate_items(joined: Mapping[str, Tensor]) -> list[BufferItem]:
    """The items that `join_items` joined. They share memory."""
    num_items = len(joined["sequences.lengths"]) if "sequences" in joined else 0
    columns: dict[str, Sequence[Any]] = dict.fromkeys(EXPERIENCE_FIELDS, [None] * num_items)
    for name in EXPERIENCE_FIELDS:
        if name in joined:
            lengths = joined[f"{name}.lengths"].tolist()
            present = [length for length in lengths if length >= 0]
            parts = iter(joined[name].unbind() if name in PER_SAMPLE_FIELDS else torch.split(joined[name], present))
            columns[name] = [None if length < 0 else next(parts) for length in lengths]
    return [BufferItem(*row) for row in zip(*columns.values(), strict=True)]


# What the sender has set.
_Sent = tuple[str | None, tuple[int, int] | None, int]
_WireItems = tuple[dict[str, WireTensor], list[_Sent]]


def _to_wire(items: Sequence[BufferItem]) -> _WireItems:
    fields = {name: encode(tensor) for name, tensor in join_items(items).items()}
    return fields, [(item.delivery_id, item.lease, item.scored_by) for item in items]


def _from_wire(wire_items: _WireItems) -> list[BufferItem]:
    fields, senders = wire_items
    # Arrays from the object store are read-only; the items share the copy.
    items = separate_items({name: decode(wire, copy=True) for name, wire in fields.items()})
    for item, sent in zip(items, senders, strict=True):
        item.delivery_id, item.lease, item.scored_by = sent
    return items


def _item_from_wire(wire_items: _WireItems) -> BufferItem:
    (item,) = _from_wire(wire_items)
    return item
