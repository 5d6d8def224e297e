"""Parses batches of prompts from a user's data loader."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from coati.errors import DataError
from coati.experience import UNKNOWN_ID, Sample


def parse_prompts(batch: Any) -> list[Sample]:
    """Turn a batch into samples: a tensor of `input_ids`, [B, P], or a dict with `input_ids`.

    The dict may have an `attention_mask`, `sample_ids`, `group_ids` and columns. Without `sample_ids`, the ids of the
    samples are `UNKNOWN_ID`. Raises DataError unless prompts are left-padded and every value has one entry per prompt.

    >>> [sample.tokens for sample in parse_prompts(torch.tensor([[1, 2], [3, 4]]))]
    [[1, 2], [3, 4]]
    """
    if isinstance(batch, Tensor):
        batch = {"input_ids": batch}
    if not isinstance(batch, Mapping) or "input_ids" not in batch:
        found = f"keys {sorted(map(str, batch))}" if isinstance(batch, Mapping) else type(batch).__name__
        raise DataError(
            "a batch from the data loader must be a tensor of input_ids, or a dict with 'input_ids' and usually "
            f"'attention_mask', got {found}."
        )
    columns = {name: column.tolist() if isinstance(column, Tensor) else column for name, column in batch.items()}
    input_ids = _as_matrix("input_ids", batch["input_ids"])
    mask = batch.get("attention_mask")
    attention_mask = torch.ones_like(input_ids) if mask is None else _as_matrix("attention_mask", mask)
    _check_left_padding(input_ids, attention_mask)
    for name in ("input_ids", "attention_mask"):
        columns.pop(name, None)
    columns = {name: column for name, column in columns.items() if column is not None or not name.endswith("_ids")}
    for name, column in columns.items():
        if not hasattr(column, "__len__") or len(column) != len(input_ids):
            raise DataError(
                f"{name!r} of a batch must have one entry for each of its {len(input_ids)} prompts, got "
                f"{len(column) if hasattr(column, '__len__') else type(column).__name__}."
            )
    nothing = [None] * len(input_ids)
    sample_ids, group_ids = (columns.pop(name, nothing) for name in ("sample_ids", "group_ids"))
    lengths = attention_mask.sum(dim=1).tolist()
    return [
        Sample(
            UNKNOWN_ID if sample_ids[row] is None else int(sample_ids[row]),
            tokens[len(tokens) - lengths[row] :],
            group=None if group_ids[row] is None else int(group_ids[row]),
            columns={name: column[row] for name, column in columns.items()},
        )
        for row, tokens in enumerate(input_ids.tolist())
    ]


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
            "prompts of a batch must be padded on the left: every row of attention_mask must be zeros and then ones, "
            "at least one. Set tokenizer.padding_side = 'left', and mask no token inside a prompt."
        )
