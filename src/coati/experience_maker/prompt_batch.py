"""A batch of prompts as it comes from a data loader."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from coati.errors import DataError


@dataclasses.dataclass(frozen=True)
class PromptBatch:
    """Prompts, left-padded, with the ids of the samples to be made of them and the dataset's columns."""

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
        ids = {name: columns.pop(name, None) for name in ("sample_ids", "group_ids")}
        parsed = cls(
            input_ids,
            attention_mask,
            **{name: None if value is None else torch.as_tensor(value).long() for name, value in ids.items()},
            columns=columns,
        )
        for name, column in columns.items():
            if not hasattr(column, "__len__") or len(column) != len(parsed):
                raise DataError(
                    f"column {name!r} of a batch must have one entry for each of its {len(parsed)} prompts, "
                    f"got {len(column) if hasattr(column, '__len__') else type(column).__name__}."
                )
        return parsed

    def rows(self, start: int, stop: int) -> "PromptBatch":
        """Some of the prompts."""
        return PromptBatch(
            self.input_ids[start:stop],
            self.attention_mask[start:stop],
            None if self.sample_ids is None else self.sample_ids[start:stop],
            None if self.group_ids is None else self.group_ids[start:stop],
            {name: column[start:stop] for name, column in self.columns.items()},
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
            f"{name} of a batch must be [B, P] with at least one prompt and one token, got {list(value.shape)}."
        )
    matrix: Tensor = value.long()
    return matrix
