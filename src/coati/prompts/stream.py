"""Batches of prompts in one global order that does not depend on how many makers share it.

Passes over the table follow each other without end; position n of that order is prompt group n, and belongs
to shard n % num_shards. So a sample has the same id, and with it the same random draws, however the work is
shared. Prompts that cannot be used keep their position: they are skipped, counted by reason, and their ids
never appear. When the number of makers changes during a run, all streams continue from one position beyond
every position that was used; positions before it that no maker had reached are left out.
"""

from __future__ import annotations

import itertools
import logging
from array import array
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from coati.errors import ConfigError, DataError
from coati.prompts.table import PromptTable
from coati.randomness import STREAM_PROMPTS, keyed_generator

logger = logging.getLogger(__name__)

# Keys of a batch, and what reward functions are called with: a column of that name would hide one of them.
RESERVED_COLUMNS = ("input_ids", "attention_mask", "sample_ids", "group_ids", "prompt", "prompts", "completions")

SKIP_EMPTY = "no tokens"
SKIP_TOO_LONG = "longer than max_prompt_tokens"
SKIP_NO_ROOM = "no room for a response in the context"

_CACHED_PROMPTS = 1024  # a small table is tokenized once; of a large one, each prompt when it is used
# No text has more characters per token than this, so a much longer one is skipped without the minutes that tokenizing
# megabytes may take.
_CHARACTERS_PER_TOKEN = 32


class _Prompt(NamedTuple):
    text: str  # as it was tokenized
    ids: array[int]
    skip_reason: str | None


class _Place(NamedTuple):
    position: int  # in the global order
    row: int
    prompt: _Prompt


class PromptStream:
    """An endless iterable of prompt batches; every `iter()` starts over and gives the same batches.

    A batch is a dict with `input_ids` [B, P] (left-padded) and `attention_mask` [B, P], `sample_ids` [B] and
    `group_ids` [B] (all int64), `prompt` (B texts, as rendered) and every other column of the table (B values
    each). The samples of one prompt are adjacent.

    Args:
        table: the prompts.
        tokenizer: a transformers tokenizer.
        prompts_per_batch: prompts in a batch.
        samples_per_prompt: how often each prompt is repeated.
        seed: with `shuffle`, decides the order together with the number of the pass.
        shuffle: a new order for every pass; False = the table's order.
        context_length: the model's; None = not limited.
        max_prompt_tokens: longer prompts are skipped; 0 = limited by the context only.
        max_new_tokens: what will be asked of the model; only used to say when the context will cut it short.
        shard: which of `num_shards` this stream is.
        num_shards: how many streams share the order.
        first_position: where to begin in the order.

    Attributes:
        skipped: positions skipped so far, by reason. Sums over shards are sums over the run.
    """

    def __init__(
        self,
        table: PromptTable,
        tokenizer: Any,
        *,
        prompts_per_batch: int,
        samples_per_prompt: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        context_length: int | None = None,
        max_prompt_tokens: int = 0,
        max_new_tokens: int = 1,
        shard: int = 0,
        num_shards: int = 1,
        first_position: int = 0,
    ) -> None:
        assert min(prompts_per_batch, samples_per_prompt) > 0
        assert 0 <= shard < num_shards
        assert first_position >= 0
        columns = table.other_columns
        if taken := [name for name in columns if name in RESERVED_COLUMNS]:
            raise DataError(
                f"{table.source} has a column {taken[0]!r} besides the prompts in {table.column!r}, but that name is "
                f"reserved, as are {', '.join(RESERVED_COLUMNS)}. Rename the column."
            )
        self.skipped: Counter[str] = Counter()
        self._table, self._tokenizer, self._columns = table, tokenizer, columns
        self._prompts_per_batch, self._samples_per_prompt = prompts_per_batch, samples_per_prompt
        self._seed, self._shuffle = seed, shuffle
        self._context_length, self._max_new_tokens = context_length, max_new_tokens
        self._limits = {SKIP_TOO_LONG: max_prompt_tokens} if max_prompt_tokens else {}
        if context_length is not None:
            self._limits[SKIP_NO_ROOM] = context_length - 1
        self._shard, self._num_shards = shard, num_shards
        self._first_position = first_position
        self._pad_id = _pad_id(tokenizer)
        self._warned: set[str] = set()
        self._prompt = lru_cache(maxsize=_CACHED_PROMPTS)(self._encode)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        places = self._usable_places()
        while True:
            yield self._collate(list(itertools.islice(places, self._prompts_per_batch)))

    def _usable_places(self) -> Iterator[_Place]:
        # One stream alone meets every row in a pass, and one of several in as many passes; in a shuffled order the
        # odds of missing a usable row in 20 times as many are 1 to 10^8.
        patience = self._num_shards * (20 if self._shuffle and self._num_shards > 1 else 1)
        fruitless_passes = 0
        for epoch in itertools.count(self._first_position // len(self._table)):
            fruitless_passes += 1
            for position, row in self._places(epoch):
                prompt = self._prompt(row)
                if prompt.skip_reason is None:
                    fruitless_passes = 0
                    yield _Place(position, row, prompt)
                else:
                    self._count_skip(prompt.skip_reason, row)
            if fruitless_passes >= patience:
                raise self._nothing_usable()

    def _places(self, epoch: int) -> Iterator[tuple[int, int]]:
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

    def _encode(self, row: int) -> _Prompt:
        prompt = self._table.rows[row][self._table.column]
        where = f"{self._table.where(row)}: {self._table.column!r}"
        text = _render(prompt, self._tokenizer, where=where)
        if reason := self._skip_reason(1 + len(text) // _CHARACTERS_PER_TOKEN):
            return _Prompt("", array("q"), reason)
        ids = _tokenize(text, self._tokenizer, is_chat=not isinstance(prompt, str), where=where)
        return _Prompt(text, array("q", ids), self._skip_reason(len(ids)))

    def _skip_reason(self, num_tokens: int) -> str | None:
        if num_tokens == 0:
            return SKIP_EMPTY
        return next((reason for reason, most in self._limits.items() if num_tokens > most), None)

    def _count_skip(self, reason: str, row: int) -> None:
        self.skipped[reason] += 1
        self._warn_once(f"Skipping prompts: {reason}", f"first in {self._table.where(row)}; others are only counted")

    def _warn_once(self, topic: str, details: str) -> None:
        if topic not in self._warned:
            self._warned.add(topic)
            logger.warning("%s (%s).", topic, details)

    def _nothing_usable(self) -> DataError:
        counts = ", ".join(f"{count} with {reason}" for reason, count in self.skipped.items())
        whose = "" if self._num_shards == 1 else f" for maker {self._shard} of {self._num_shards}"
        return DataError(
            f"{self._table.source} has no usable prompts{whose}: {counts}. The limits are prompts.max_tokens = "
            f"{self._limits.get(SKIP_TOO_LONG, 0)} (0 = none) and the model's context of {self._context_length} "
            "tokens. Shorten the prompts, raise prompts.max_tokens, or use a model with a longer context."
        )

    def _collate(self, places: list[_Place]) -> dict[str, Any]:
        repeats = self._samples_per_prompt
        samples = [place for place in places for _ in range(repeats)]
        length = max(len(place.prompt.ids) for place in places)
        if self._context_length is not None and length + self._max_new_tokens > self._context_length:
            room = self._context_length - length
            self._warn_once(
                "Some responses will be cut short",
                f"a prompt of {length} tokens leaves room for {room}, not for max_new_tokens = {self._max_new_tokens}",
            )
        missing = [length - len(place.prompt.ids) for place in samples]
        ids = [[self._pad_id] * gap + place.prompt.ids.tolist() for gap, place in zip(missing, samples, strict=True)]
        groups = torch.tensor([place.position for place in samples], dtype=torch.long)  # [B]
        return {
            "input_ids": torch.tensor(ids, dtype=torch.long),  # [B, P]
            "attention_mask": torch.tensor([[0] * gap + [1] * (length - gap) for gap in missing], dtype=torch.long),
            "sample_ids": groups * repeats + torch.arange(repeats).repeat(len(places)),  # [B]
            "group_ids": groups,
            "prompt": [place.prompt.text for place in samples],
            **{name: [self._table.rows[place.row].get(name) for place in samples] for name in self._columns},
        }


def _pad_id(tokenizer: Any) -> int:
    for token_id in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token_id is not None:
            return int(token_id)
    raise ConfigError(
        "The tokenizer (model.tokenizer) has neither a padding nor an end-of-sequence token. Set tokenizer.pad_token "
        "and save it again."
    )


def _render(prompt: str | list[dict[str, Any]], tokenizer: Any, *, where: str) -> str:
    """Return the text that is tokenized: the prompt itself, or the chat as the template writes it."""
    if isinstance(prompt, str):
        return prompt
    if getattr(tokenizer, "chat_template", None) is None:
        raise DataError(
            f"{where} holds chat messages, but the tokenizer has no chat template. Use a chat model's tokenizer "
            "(model.tokenizer), or plain texts."
        )
    is_begun = prompt[-1]["role"] == "assistant"  # continued within that message
    options = {"continue_final_message": is_begun, "add_generation_prompt": not is_begun}
    try:
        return str(tokenizer.apply_chat_template(prompt, tokenize=False, **options))
    except Exception as error:  # templates raise what they like, for example about the order of roles
        roles = ", ".join(str(message["role"]) for message in prompt)
        raise DataError(
            f"{where}: the tokenizer's chat template refuses messages with the roles {roles}: "
            f"{type(error).__name__}: {error}. Correct the messages, or choose another tokenizer."
        ) from error


def _tokenize(text: str, tokenizer: Any, *, is_chat: bool, where: str) -> list[int]:
    """Return the token ids of a rendered prompt.

    A plain text gets the tokenizer's own special tokens, but no end token; chat templates write special tokens
    themselves.
    """
    try:
        ids = list(tokenizer(text, add_special_tokens=not is_chat, verbose=False)["input_ids"])  # any length
        if not is_chat and ids and ids[-1] == tokenizer.eos_token_id:
            written = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
            if _num_last(ids, ids[-1]) > _num_last(written, ids[-1]):  # one that the text itself spells out stays
                ids.pop()
    except Exception as error:
        raise DataError(f"{where} cannot be tokenized: {type(error).__name__}: {error}. Correct the text.") from error
    return ids


def _num_last(ids: list[int], token_id: int) -> int:
    """Return how often a token is repeated at the end."""
    return next((count for count, last in enumerate(reversed(ids)) if last != token_id), len(ids))
