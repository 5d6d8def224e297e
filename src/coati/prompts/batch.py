"""Prompts on their way through a maker, in one form from the prompt stream, or a user's data loader, to the engine."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from coati.errors import DataError


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
        """Accept what a data loader gives: a tensor of input_ids, or a dict of `input_ids`, usually `attention_mask`,
        and columns.

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
        ids = {name: columns.pop(name, None) for name in ("sample_ids", "group_ids")}
        ids = {name: torch.as_tensor(value).long() for name, value in ids.items() if value is not None}
        for name, column in (ids | columns).items():
            if not hasattr(column, "__len__") or len(column) != len(input_ids):
                raise DataError(
                    f"{name!r} of a batch must have one entry for each of its {len(input_ids)} prompts, got "
                    f"{len(column) if hasattr(column, '__len__') else type(column).__name__}."
                )
        return cls(input_ids, attention_mask, **ids, columns=columns)

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

    def to(self, device: torch.device) -> Self:
        """The batch with its tensors on the device."""
        tensors: dict[str, Any] = {name: tensor.to(device) for name, tensor in self._tensors()}
        return dataclasses.replace(self, **tensors)

    def select(self, rows: Sequence[int]) -> Self:
        """Some of the prompts."""
        columns = {name: [column[row] for row in rows] for name, column in self.columns.items()}
        return dataclasses.replace(self, **{name: tensor[rows] for name, tensor in self._tensors()}, columns=columns)

    def _tensors(self) -> list[tuple[str, Tensor]]:
        return [(name, value) for name, value in vars(self).items() if isinstance(value, Tensor)]


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


def _check_left_padding(input_ids: Tensor, attention_mask: Tensor) -> None:
    if attention_mask.shape != input_ids.shape:
        raise DataError(
            f"attention_mask must have the shape of input_ids, {list(input_ids.shape)}, "
            f"got {list(attention_mask.shape)}."
        )
    if bool((attention_mask.diff(dim=1) < 0).any()) or bool((attention_mask[:, -1] == 0).any()):
        raise DataError(
            "prompts must be padded on the left: attention_mask must be zeros and then ones in every row, ending in a "
            "one. Set tokenizer.padding_side = 'left', and mask nothing inside a prompt."
        )
