"""Single samples, and how batches come apart into them and go together again.

A `BufferItem` holds no padding, so samples from different batches can be mixed: the prompt's left padding and
the response's right padding are removed by `split_experience_batch` and put back, as wide as the new batch
needs, by `make_experience_batch`.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

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

    Pickles as numpy arrays, which Ray moves far faster than many small torch tensors.
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
        fields = vars(self)
        for name in REQUIRED_FIELDS:
            if not isinstance(fields[name], Tensor):
                raise DataError(f"buffer item.{name} must be a tensor, got {type(fields[name]).__name__}.")
        if self.sequences.ndim != 1 or self.action_log_probs.ndim != 1:
            raise DataError(
                f"a buffer item is one sample: sequences must be [S] and action_log_probs [A], got "
                f"{list(self.sequences.shape)} and {list(self.action_log_probs.shape)}. "
                "Use split_experience_batch to take a batch apart."
            )
        token_shape, response_shape = self.sequences.shape, self.action_log_probs.shape
        for name in EXPERIENCE_FIELDS:  # of every sample, several times on its way: as little as will do
            value = fields[name]
            if value is None:
                continue
            if not isinstance(value, Tensor):
                raise DataError(f"buffer item.{name} must be a tensor, got {type(value).__name__}.")
            if name in PER_SAMPLE_FIELDS:
                if value.numel() != 1:
                    raise DataError(f"buffer item.{name} must hold one number, got shape {list(value.shape)}.")
                continue
            expected = token_shape if name in PER_TOKEN_FIELDS else response_shape
            if value.shape != expected:
                raise DataError(
                    f"buffer item.{name} must be {list(expected)}, got {list(value.shape)}. "
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


def split_experience_batch(experience: Experience) -> list[BufferItem]:
    """One item for each sample, without the prompt's left padding and the response's right padding.

    The items of a batch share memory: each field is one tensor without padding, of which every item has its part.
    """
    experience.validate()
    num_prompt_tokens, device = experience.num_prompt_tokens, experience.sequences.device
    starts = _leading_zeros(experience.attention_mask, num_prompt_tokens, experience.num_samples)
    lengths = _last_true(experience.full_action_mask())
    token_columns = torch.arange(experience.sequences.shape[1], device=device)
    starts_at, ends_at = torch.tensor([starts, lengths], device=device).unsqueeze(-1)  # [B, 1] each
    is_response = token_columns[: experience.num_actions] < ends_at
    is_token = (token_columns >= starts_at) & (token_columns < num_prompt_tokens + ends_at)
    num_tokens = [num_prompt_tokens + length - start for start, length in zip(starts, lengths, strict=True)]
    columns: dict[str, Sequence[Any]] = dict.fromkeys(EXPERIENCE_FIELDS, [None] * experience.num_samples)
    for name, tensor in experience.tensors():
        tensor = tensor.detach()
        if name in PER_SAMPLE_FIELDS:
            columns[name] = tensor.clone().unbind()
        elif name in PER_TOKEN_FIELDS:
            columns[name] = torch.split(tensor[is_token], num_tokens)
        else:
            columns[name] = torch.split(tensor[is_response], lengths)
    return [BufferItem(*row) for row in zip(*columns.values(), strict=True)]


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
    prompts, responses = [item.num_prompt_tokens for item in items], [item.num_actions for item in items]
    width_prompt, width_response = max(prompts), max(responses)
    is_ragged = min(prompts) != width_prompt or min(responses) != width_response
    device = items[0].sequences.device
    token_places = _Places(
        starts=[width_prompt - length for length in prompts],
        lengths=[prompt + response for prompt, response in zip(prompts, responses, strict=True)],
        width=width_prompt + width_response,
        device=device,
    )
    response_places = _Places(starts=[0] * len(items), lengths=responses, width=width_response, device=device)
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
        else:
            fields[name] = (token_places if name in PER_TOKEN_FIELDS else response_places).filled(parts)
    return Experience(**fields)  # type: ignore[arg-type]


class _Places:
    """Where the entries of all rows go in a padded batch, worked out once for all fields of the same shape."""

    def __init__(self, *, starts: list[int], lengths: list[int], width: int, device: torch.device) -> None:
        self._shape = (len(lengths), width)
        counts = torch.tensor(lengths, device=device)
        # Row r begins at r·width + start; within it the entries follow each other.
        begins = torch.arange(len(lengths), device=device) * width + torch.tensor(starts, device=device)
        before = counts.cumsum(0) - counts
        self._flat = torch.arange(sum(lengths), device=device) + (begins - before).repeat_interleave(counts)

    def filled(self, parts: Sequence[Tensor]) -> Tensor:
        """The parts in their places, and 0 everywhere else."""
        entries = torch.cat(list(parts))
        return entries.new_zeros(self._shape[0] * self._shape[1]).index_copy_(0, self._flat, entries).view(self._shape)


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
    counts: list[int] = seen.eq(0).sum(dim=1).tolist()
    return counts


def _last_true(mask: Tensor) -> list[int]:
    """For each row, one past the last True (0 if there is none)."""
    if mask.shape[1] == 0:
        return [0] * mask.shape[0]
    positions = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    lengths: list[int] = (mask.long() * positions).amax(dim=1).tolist()
    return lengths
