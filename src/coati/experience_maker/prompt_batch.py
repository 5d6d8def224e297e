"""The prompts of one batch, from the data loader to the rollout engine."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from coati.errors import DataError


@dataclasses.dataclass(frozen=True)
class PromptBatch:
    """Prompts, left-padded, with the ids of the samples to make from them and the dataset's columns."""

    input_ids: Tensor  # [B, P]
    attention_mask: Tensor  # [B, P]
    sample_ids: Tensor | None = None  # [B]
    group_ids: Tensor | None = None  # [B]
    columns: Mapping[str, Sequence[Any]] = dataclasses.field(default_factory=dict)

    def __len__(self) -> int:
        return int(self.input_ids.shape[0])

    @classmethod
    def parse(cls, batch: Any) -> "PromptBatch":
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
        return cls(input_ids, attention_mask, sample_ids, group_ids, columns)

    def numbered(self, first_id: int) -> "PromptBatch":
        """The batch with sample ids from `first_id` on."""
        return dataclasses.replace(self, sample_ids=torch.arange(len(self)) + first_id)

    def to(self, device: torch.device) -> "PromptBatch":
        """The batch with its tensors on the device."""
        return self._mapped(lambda tensor: tensor.to(device), self.columns)

    def select(self, rows: Tensor | slice) -> "PromptBatch":
        """Some of the prompts: a slice, or those where a bool mask is True."""
        kept = range(len(self))[rows] if isinstance(rows, slice) else rows.nonzero().flatten().tolist()
        columns = {name: [column[row] for row in kept] for name, column in self.columns.items()}
        return self._mapped(lambda tensor: tensor[rows], columns)

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

    def _mapped(self, change: Callable[[Tensor], Tensor], columns: Mapping[str, Sequence[Any]]) -> "PromptBatch":
        return PromptBatch(
            change(self.input_ids),
            change(self.attention_mask),
            None if self.sample_ids is None else change(self.sample_ids),
            None if self.group_ids is None else change(self.group_ids),
            columns,
        )


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
