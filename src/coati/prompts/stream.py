"""Batches of prompts in one global order that does not depend on how many makers share it.

Passes over the table follow each other without end; position n of that order is prompt group n, and belongs
to shard n % num_shards. So a sample has the same id, and with it the same random draws, however the work is
shared. Prompts that cannot be used keep their position: they are skipped, counted by reason, and their ids
never appear. When the work is shared anew in the middle of a run, all streams go on from one position, beyond
every position that was used; those that nobody had reached by then are left out.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch

from coati.errors import ConfigError, DataError
from coati.prompts.encoding import EncodedPrompt, encode_prompt
from coati.prompts.table import PromptTable, check_rows
from coati.randomness import STREAM_PROMPTS, keyed_generator

logger = logging.getLogger(__name__)

# Keys of a batch, and what reward functions are called with: a column of that name would hide one of them.
RESERVED_COLUMNS = (
    "input_ids",
    "attention_mask",
    "sample_ids",
    "group_ids",
    "prompt",
    "prompts",
    "completions",
)

SKIP_EMPTY = "no tokens"
SKIP_TOO_LONG = "longer than max_prompt_tokens"
SKIP_NO_ROOM = "no room for a response in the context"


class PromptStream:
    """An iterable of prompt batches; every `iter()` starts from the beginning and gives the same batches.

    A batch is a dict with `input_ids` [B, P] (left-padded) and `attention_mask` [B, P], `sample_ids` [B] and
    `group_ids` [B] (all int64), `prompt` (B texts, as rendered) and every other column of the table (B values
    each). The samples of one prompt stand side by side. Only the last batch of a finite stream may be
    smaller.

    Args:
        table: the prompts.
        tokenizer: a transformers tokenizer.
        column: the column of the table that holds the prompts.
        batch_size: samples in a batch, a multiple of `samples_per_prompt`.
        samples_per_prompt: how often each prompt is repeated.
        seed: with `shuffle`, decides the order together with the number of the pass.
        shuffle: a new order for every pass; False = the table's order.
        context_length: the model's; None = not limited.
        max_prompt_tokens: longer prompts are skipped; 0 = no limit of its own.
        max_new_tokens: what will be asked of the model; only used to say when the context will cut it short.
        shard: which of `num_shards` this stream is.
        num_shards: how many streams share the order.
        num_epochs: passes over the table; None = endless.
        first_position: where to begin in the order; positions before it belong to others.

    Attributes:
        skipped: positions passed over so far, by reason. Sums over shards are sums over the run.
    """

    def __init__(
        self,
        table: PromptTable,
        tokenizer: Any,
        *,
        column: str = "prompt",
        batch_size: int,
        samples_per_prompt: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        context_length: int | None = None,
        max_prompt_tokens: int = 0,
        max_new_tokens: int = 1,
        shard: int = 0,
        num_shards: int = 1,
        num_epochs: int | None = None,
        first_position: int = 0,
    ) -> None:
        if samples_per_prompt < 1 or batch_size < 1 or batch_size % samples_per_prompt:
            raise ConfigError(
                f"batch_size must be a multiple of samples_per_prompt, both 1 or more, got {batch_size} and "
                f"{samples_per_prompt}. Use batch_size = prompts times samples_per_prompt."
            )
        if not 0 <= shard < num_shards:
            raise ConfigError(
                f"shard must be from 0 to num_shards - 1, got shard {shard} of {num_shards}. Number the makers from 0."
            )
        if first_position < 0:
            raise ConfigError(f"first_position must be 0 or more, got {first_position}. Positions count from 0.")
        if column != table.column:  # the table only vouches for its own column
            check_rows(table.rows, column=column, source=table.source)
        self.skipped: Counter[str] = Counter()
        self._table, self._tokenizer, self._column = table, tokenizer, column
        self._groups_per_batch = batch_size // samples_per_prompt
        self._samples_per_prompt = samples_per_prompt
        self._seed, self._shuffle = seed, shuffle
        self._context_length, self._max_prompt_tokens = context_length, max_prompt_tokens
        self._max_new_tokens = max_new_tokens
        self._shard, self._num_shards, self._num_epochs = shard, num_shards, num_epochs
        self._first_position = first_position
        self._pad_id = _pad_id(tokenizer)
        self._other_columns = _other_columns(table, column)
        self._encoded: dict[int, EncodedPrompt] = {}
        self._warned: set[str] = set()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        groups = self._usable_groups()
        while batch := list(itertools.islice(groups, self._groups_per_batch)):
            yield self._collate(batch)

    def _usable_groups(self) -> Iterator[tuple[int, int]]:
        """Yield (position, row) of this shard's usable prompts."""
        first_epoch = self._first_position // len(self._table)
        epochs = itertools.count(first_epoch) if self._num_epochs is None else range(first_epoch, self._num_epochs)
        fruitless_epochs = 0
        for epoch in epochs:
            fruitless_epochs += 1
            for position, row in self._epoch_groups(epoch):
                reason = self._skip_reason(row)
                if reason:
                    self._count_skip(reason, row)
                    continue
                fruitless_epochs = 0
                yield position, row
            if fruitless_epochs:
                self._check_anything_usable(fruitless_epochs)

    def _epoch_groups(self, epoch: int) -> Iterator[tuple[int, int]]:
        """Yield (position, row) of this shard's part of one pass, usable or not."""
        size = len(self._table)
        if self._shuffle:
            order = keyed_generator(self._seed, epoch, stream=STREAM_PROMPTS).permutation(size).tolist()
        else:
            order = list(range(size))
        start = max(0, self._first_position - epoch * size)
        first = start + (self._shard - epoch * size - start) % self._num_shards  # the shard's first place in this pass
        for place in range(first, size, self._num_shards):
            yield epoch * size + place, order[place]

    def _encode(self, row: int) -> EncodedPrompt:
        if row not in self._encoded:
            where = f"{self._table.source}, row {row}: {self._column!r}"
            self._encoded[row] = encode_prompt(self._table.rows[row][self._column], self._tokenizer, where=where)
        return self._encoded[row]

    def _skip_reason(self, row: int) -> str:
        length = len(self._encode(row).ids)
        if length == 0:
            return SKIP_EMPTY
        if 0 < self._max_prompt_tokens < length:
            return SKIP_TOO_LONG
        if self._context_length is None:
            return ""
        if length >= self._context_length:
            return SKIP_NO_ROOM
        if length + self._max_new_tokens > self._context_length:
            self._warn_once(
                "cut short",
                "Some responses will be cut short: a prompt of %d tokens leaves room for %d of "
                "max_new_tokens=%d in a "
                "context of %d.",
                length,
                self._context_length - length,
                self._max_new_tokens,
                self._context_length,
            )
        return ""

    def _count_skip(self, reason: str, row: int) -> None:
        self.skipped[reason] += 1
        self._warn_once(
            reason,
            "Skipping prompts of %s: %s, first row %d with %d tokens (max_prompt_tokens=%d, "
            "context_length=%s). "
            "Further ones are counted without a message.",
            self._table.source,
            reason,
            row,
            len(self._encode(row).ids),
            self._max_prompt_tokens,
            self._context_length,
        )

    def _warn_once(self, topic: str, message: str, *values: object) -> None:
        if topic not in self._warned:
            self._warned.add(topic)
            logger.warning(message, *values)

    def _check_anything_usable(self, fruitless_epochs: int) -> None:
        """Raise instead of searching for ever, when no row is usable or none that this shard will meet."""
        reasons = [self._skip_reason(row) for row in range(len(self._table))]
        # Without shuffling, a shard meets the same rows again after num_shards passes at the latest.
        is_endless = self._num_epochs is None
        nothing_comes = is_endless and not self._shuffle and fruitless_epochs >= self._num_shards
        if not all(reasons) and not nothing_comes:
            return
        lengths = [len(self._encode(row).ids) for row in range(len(self._table))]
        counts = ", ".join(f"{count} with {reason}" for reason, count in Counter(filter(None, reasons)).items())
        whose = "" if all(reasons) else f" that shard {self._shard} of {self._num_shards} meets"
        raise DataError(
            f"{self._table.source} must have prompts that fit, got none{whose}: of {len(lengths)} prompts, "
            f"{counts}. "
            f"They have {min(lengths)} to {max(lengths)} tokens; the limits are max_prompt_tokens="
            f"{self._max_prompt_tokens} (0 = none) and context_length={self._context_length}. "
            "Shorten the prompts, raise prompts.max_tokens, or use a model with a longer context."
        )

    def _collate(self, groups: list[tuple[int, int]]) -> dict[str, Any]:
        repeats = range(self._samples_per_prompt)
        samples = [(position, row, repeat) for position, row in groups for repeat in repeats]
        encoded = [self._encode(row) for _, row, _ in samples]
        length = max(len(prompt.ids) for prompt in encoded)
        missing = [length - len(prompt.ids) for prompt in encoded]
        padded = [[self._pad_id] * count + list(prompt.ids) for count, prompt in zip(missing, encoded, strict=True)]
        masks = [[0] * count + [1] * (length - count) for count in missing]
        ids = [position * self._samples_per_prompt + repeat for position, _, repeat in samples]
        return {
            "input_ids": torch.tensor(padded, dtype=torch.long),  # [B, P]
            "attention_mask": torch.tensor(masks, dtype=torch.long),  # [B, P]
            "sample_ids": torch.tensor(ids, dtype=torch.long),  # [B]
            "group_ids": torch.tensor([position for position, _, _ in samples], dtype=torch.long),  # [B]
            "prompt": [prompt.text for prompt in encoded],
            **{name: [self._table.rows[row].get(name) for _, row, _ in samples] for name in self._other_columns},
        }


def _pad_id(tokenizer: Any) -> int:
    for token_id in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token_id is not None:
            return int(token_id)
    raise ConfigError(
        "model.tokenizer must have a padding or an end-of-sequence token, got one with neither. "
        "Set tokenizer.pad_token and save it again."
    )


def _other_columns(table: PromptTable, column: str) -> list[str]:
    names = [name for name in table.columns if name != column]
    for name in names:
        if name in RESERVED_COLUMNS:
            raise DataError(
                f"{table.source} must not have a column called {name!r} beside the prompts in {column!r}: "
                "batches use "
                f"that name themselves. Rename it; the taken names are {', '.join(RESERVED_COLUMNS)}."
            )
    return names
