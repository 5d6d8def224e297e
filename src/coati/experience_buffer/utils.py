"""Single samples, and how batches come apart into them and go together again.

A `BufferItem` holds no padding, so samples from different batches can be mixed: the prompt's left padding and
the response's right padding are removed by `split_experience_batch` and put back, as wide as the new batch
needs, by `make_experience_batch`.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from coati.errors import DataError
from coati.experience_maker.base import (
    EXPERIENCE_FIELDS,
    PER_SAMPLE_FIELDS,
    PER_TOKEN_FIELDS,
    REQUIRED_FIELDS,
    Experience,
)
from coati.wire import decode, encode

# Id or version of a sample whose maker did not say.
UNKNOWN_ID = -1
_MASKS = ("attention_mask", "action_mask")


@dataclasses.dataclass
class BufferItem:
    """One sample without padding: the fields of `Experience`, less the batch dimension.

    Pickles as numpy arrays, which Ray moves far faster than many small torch tensors; many items at once as an
    `ItemParcel` faster still.
    """

    sequences: Tensor  # [S]
    action_log_probs: Tensor  # [A]
    values: Tensor  # [A]
    reward: Tensor  # []
    kl: Tensor  # [A]
    advantages: Tensor  # [A]
    attention_mask: Tensor | None  # [S]
    action_mask: Tensor | None  # [A]
    sample_ids: Tensor | None = None  # []
    group_ids: Tensor | None = None  # []
    policy_versions: Tensor | None = None  # [A]
    rollout_log_probs: Tensor | None = None  # [A]
    temperatures: Tensor | None = None  # []
    proximal_log_probs: Tensor | None = None  # [A]
    returns: Tensor | None = None  # [A]
    reference_log_probs: Tensor | None = None  # [A]

    # Set by the sender: (sender, sequence number). A retried delivery carries the same one and is dropped.
    delivery_id: tuple[str, int] | None = None
    # Set by the sender of a bounded run: which of the run's rounds this sample is. Trained on in this order.
    round_index: int | None = None

    @property
    def num_actions(self) -> int:
        """Response tokens of this sample."""
        return int(self.action_log_probs.shape[0])

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens of this sample."""
        return int(self.sequences.shape[0]) - self.num_actions

    def validate(self) -> None:
        """Raise DataError if the fields do not fit each other, before the item can poison a batch."""
        for name in EXPERIENCE_FIELDS:
            value = getattr(self, name)
            if not isinstance(value, Tensor) and (value is not None or name in REQUIRED_FIELDS):
                raise DataError(f"buffer item.{name} must be a tensor, got {type(value).__name__}.")
        if self.sequences.ndim != 1 or self.action_log_probs.ndim != 1:
            raise DataError(
                f"a buffer item is one sample: sequences must be [S] and action_log_probs [A], got "
                f"{list(self.sequences.shape)} and {list(self.action_log_probs.shape)}. "
                "Use split_experience_batch to take a batch apart."
            )
        for name in EXPERIENCE_FIELDS:
            tensor = getattr(self, name)
            if tensor is None:
                continue
            if name in PER_SAMPLE_FIELDS:
                if tensor.numel() != 1:
                    raise DataError(f"buffer item.{name} must hold one number, got shape {list(tensor.shape)}.")
                continue
            expected = self.sequences.shape if name in PER_TOKEN_FIELDS else self.action_log_probs.shape
            if tensor.shape != expected:
                raise DataError(
                    f"buffer item.{name} must be {list(expected)}, got {list(tensor.shape)}. "
                    "Fields of one sample share its length; the item was refused, the buffer is unharmed."
                )
        if self.sequences.is_floating_point():
            raise DataError(f"buffer item.sequences must hold token ids, got {self.sequences.dtype}.")
        if self.num_prompt_tokens < 0:
            raise DataError(
                f"a buffer item has {self.num_actions} response tokens but only {len(self.sequences)} in its "
                "sequences, which hold the prompt and the response."
            )

    def __reduce__(self) -> tuple[Callable[..., "BufferItem"], tuple[Any, ...]]:
        packed = {name: encode(value) for name in EXPERIENCE_FIELDS if (value := getattr(self, name)) is not None}
        return _unpack_item, (packed, self.delivery_id, self.round_index)


def _unpack_item(packed: dict[str, Any], delivery_id: tuple[str, int] | None, round_index: int | None) -> BufferItem:
    # Copies, because arrays from the object store are read-only; a sample is a few kilobytes.
    fields: dict[str, Any] = dict.fromkeys(EXPERIENCE_FIELDS)
    fields.update({name: decode(wire, copy=True) for name, wire in packed.items()})
    return BufferItem(**fields, delivery_id=delivery_id, round_index=round_index)


def split_experience_batch(experience: Experience, *, share_memory: bool = False) -> list[BufferItem]:
    """One item for each sample, without the prompt's left padding and the response's right padding.

    Each item has memory of its own. With `share_memory` all of them look at one copy of the batch, which is quicker and
    right for items that stay together until they are sent.
    """
    experience.validate()
    num_prompt_tokens = experience.num_prompt_tokens
    starts = _leading_zeros(experience.attention_mask, num_prompt_tokens, experience.num_samples)
    lengths = _last_true(experience.full_action_mask())
    fields: dict[str, list[Tensor]] = {}
    for name, tensor in experience.tensors():
        rows: Iterable[Tensor] = (tensor.detach().clone() if share_memory else tensor.detach()).unbind(0)
        if name in PER_TOKEN_FIELDS:
            rows = (row[start : num_prompt_tokens + end] for row, start, end in zip(rows, starts, lengths, strict=True))
        elif name not in PER_SAMPLE_FIELDS:
            rows = (row[:end] for row, end in zip(rows, lengths, strict=True))
        # Clones, so that an item does not keep its whole batch alive.
        fields[name] = list(rows) if share_memory else [row.clone() for row in rows]
    nothing: dict[str, Any] = dict.fromkeys(EXPERIENCE_FIELDS)
    return [
        BufferItem(**nothing | {name: parts[row] for name, parts in fields.items()})
        for row in range(experience.num_samples)
    ]


def make_experience_batch(items: Sequence[BufferItem]) -> Experience:
    """Pad (prompts left, responses right) and stack.

    >>> tokens, floats = torch.tensor([[5, 6, 7]]), torch.zeros(1, 2)
    >>> experience = Experience(tokens, floats, floats, torch.ones(1), floats, floats, None, None)
    >>> make_experience_batch(split_experience_batch(experience)).sequences
    tensor([[5, 6, 7]])
    """
    if not items:
        raise DataError("make_experience_batch needs at least one item, got none.")
    for item in items:
        item.validate()
    prompts = [item.num_prompt_tokens for item in items]
    width_prompt = max(prompts)
    is_ragged = min(prompts) < width_prompt or len({item.num_actions for item in items}) > 1
    fields: dict[str, Tensor | None] = {}
    for name in EXPERIENCE_FIELDS:
        parts = [getattr(item, name) for item in items]
        if name in _MASKS and (is_ragged or any(part is not None for part in parts)):
            parts = [_mask_of(item, name) for item in items]
        if all(part is None for part in parts):
            fields[name] = None
            continue
        # Samples of a hand-written maker may mix with ours: what they do not say is filled in as unknown.
        parts = [_unknown(item, name) if part is None else part for item, part in zip(items, parts, strict=True)]
        if name in PER_SAMPLE_FIELDS:
            fields[name] = torch.stack([part.reshape(()) for part in parts])
            continue
        if name in PER_TOKEN_FIELDS and is_ragged:
            parts = [
                F.pad(part, (width_prompt - prompt, 0)) if prompt < width_prompt else part
                for part, prompt in zip(parts, prompts, strict=True)
            ]
        fields[name] = pad_sequence(_of_one_dtype(parts), batch_first=True) if is_ragged else torch.stack(parts)
    return Experience(**fields)  # type: ignore[arg-type]


def _of_one_dtype(parts: list[Tensor]) -> list[Tensor]:
    """The tensors in a dtype that holds them all; `pad_sequence` would take that of the first."""
    dtypes = {part.dtype for part in parts}
    if len(dtypes) == 1:
        return parts
    widest = functools.reduce(torch.promote_types, dtypes)
    return [part.to(widest) for part in parts]


def _mask_of(item: BufferItem, name: str) -> Tensor:
    mask: Tensor | None = getattr(item, name)
    if mask is not None:
        return mask
    if name == "attention_mask":
        return torch.ones_like(item.sequences, dtype=torch.long)
    return torch.ones_like(item.action_log_probs, dtype=torch.bool)


def _unknown(item: BufferItem, name: str) -> Tensor:
    if name in ("rollout_log_probs", "proximal_log_probs", "reference_log_probs"):
        return item.action_log_probs
    if name == "returns":
        return item.advantages + item.values
    if name == "temperatures":
        return torch.ones((), device=item.sequences.device)
    if name == "policy_versions":
        return torch.full_like(item.action_log_probs, UNKNOWN_ID, dtype=torch.long)
    return torch.tensor(UNKNOWN_ID, device=item.sequences.device)


def _leading_zeros(attention_mask: Tensor | None, num_prompt_tokens: int, num_samples: int) -> list[int]:
    """For each row, how many prompt positions before the first real token."""
    if attention_mask is None or num_prompt_tokens == 0:
        return [0] * num_samples
    seen = attention_mask[:, :num_prompt_tokens].ne(0).long().cumsum(dim=1)
    return [int(count) for count in seen.eq(0).sum(dim=1)]


def _last_true(mask: Tensor) -> list[int]:
    """For each row, one past the last True (0 if there is none)."""
    if mask.shape[1] == 0:
        return [0] * mask.shape[0]
    positions = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    return [int(length) for length in (mask.long() * positions).amax(dim=1)]
