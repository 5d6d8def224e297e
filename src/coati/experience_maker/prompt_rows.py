"""The prompts of one batch inside a maker: rows that are filtered together, and groups that can be compared."""

from collections.abc import Sequence
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
