"""The prompts of one batch inside a maker: rows that are filtered together, and groups that can be compared."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from coati.errors import DataError


class PromptRows:
    """The rows of one batch, filtered together."""

    def __init__(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        sample_ids: Tensor,
        group_ids: Tensor | None,
        columns: dict[str, Sequence[Any]],
    ) -> None:
        self.input_ids = input_ids
        self.attention_mask = attention_mask
        self.sample_ids = sample_ids
        self.group_ids = group_ids
        self.columns = columns

    @classmethod
    def checked(
        cls,
        input_ids: Tensor,  # [B, P]
        attention_mask: Tensor | None,  # [B, P]; None: nothing is padding
        sample_ids: Tensor | None,  # [B]; None: numbered from `first_id` on
        group_ids: Tensor | None,  # [B]
        columns: Mapping[str, Sequence[Any]],
        *,
        first_id: int = 0,
    ) -> "PromptRows":
        """The rows of a batch as it came. Raises DataError unless it is padded on the left and everything fits."""
        if input_ids.ndim != 2 or input_ids.shape[1] == 0 or input_ids.shape[0] == 0:
            raise DataError(
                f"input_ids must be [B, P] with at least one prompt and one token, got "
                f"{list(input_ids.shape)}. Pad ragged prompts on the left and pass an attention_mask."
            )
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        _check_left_padding(input_ids, attention_mask)
        num_prompts = input_ids.shape[0]
        if sample_ids is None:
            sample_ids = torch.arange(num_prompts) + first_id
        for name, ids in (("sample_ids", sample_ids), ("group_ids", group_ids)):
            if ids is not None and tuple(ids.shape) != (num_prompts,):
                raise DataError(f"{name} must be [{num_prompts}], one for each prompt, got {list(ids.shape)}.")
        for name, column in columns.items():
            if len(column) != num_prompts:
                raise DataError(
                    f"column {name!r} must have one entry for each of {num_prompts} prompts, got {len(column)}."
                )
        return cls(input_ids, attention_mask, sample_ids, group_ids, dict(columns))

    def to_device(self, device: torch.device) -> None:
        """Move the tensors, in place."""
        self.input_ids = self.input_ids.to(device)
        self.attention_mask = self.attention_mask.to(device)
        self.sample_ids = self.sample_ids.to(device)
        self.group_ids = None if self.group_ids is None else self.group_ids.to(device)

    def select(self, rows: Tensor) -> "PromptRows":
        """The rows where the bool mask is True."""
        kept = rows.nonzero().flatten().tolist()
        return PromptRows(
            self.input_ids[rows],
            self.attention_mask[rows],
            self.sample_ids[rows],
            None if self.group_ids is None else self.group_ids[rows],
            {name: [column[row] for row in kept] for name, column in self.columns.items()},
        )


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
            "Pad on the left only, and leave nothing out of a prompt."
        )


def check_groups(group_ids: Tensor | None) -> None:
    """Raise DataError unless every sample has another of its prompt to be compared with."""
    if group_ids is None:
        raise DataError(
            "the algorithm compares the samples of a prompt, but the batch has no group_ids. "
            "Pass group_ids, the same number for all samples of a prompt."
        )
    sizes = torch.unique(group_ids, return_counts=True)[1]
    if int(sizes.min()) < 2:
        raise DataError(
            f"the algorithm compares the samples of a prompt, but {int((sizes < 2).sum())} of {len(sizes)} groups of "
            "the batch have only one. Put at least two samples of each prompt into a batch."
        )
