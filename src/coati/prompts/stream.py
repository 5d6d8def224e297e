"""Prompts in one global, endless order, which every maker can look up: pass after pass over the table.

So a sample has the same id, and with it the same draws, whichever maker makes it. Prompts that cannot be used keep
their position, and are counted by reason.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from coati.config import PromptSettings, RolloutSettings
from coati.errors import DataError
from coati.experience import UNKNOWN_ID, Sample
from coati.prompts.table import PromptTable
from coati.randomness import STREAM_PROMPTS, keyed_generator

logger = logging.getLogger(__name__)

# Keys of a batch, and what reward functions are called with: a column of that name would hide one of them.
RESERVED_COLUMNS = ("input_ids", "attention_mask", "sample_ids", "group_ids", "prompt", "prompts", "completions")

SKIP_EMPTY = "without tokens"
SKIP_TOO_LONG = "longer than prompts.max_tokens"
SKIP_NO_ROOM = "without room for a response"
CUT_SHORT = "with less room than max_new_tokens"

_CACHED_PROMPTS = 1024  # a small table is tokenized once; of a large one, each prompt when it is used
# No text has more characters per token than this, so a much longer one is skipped without the minutes that tokenizing
# megabytes may take.
_CHARACTERS_PER_TOKEN = 32


class PromptStream:
    """Prompts by their numbers in an endless order; a number means the same prompt to everyone. DataError if none fits.

    The columns of a batch are `prompt` (B texts, as rendered) and every other column of the table (B values each).
    Samples of one prompt are adjacent. Prompts that leave no room in the model's `context_length` are skipped.
    """

    def __init__(
        self,
        table: PromptTable,
        tokenizer: Any,
        prompts: PromptSettings,
        rollout: RolloutSettings,
        *,
        seed: int = 0,
        context_length: int | None = None,
        name: str = "[prompts]",
    ) -> None:
        self.columns = table.other_columns
        """All columns but the prompts."""
        if taken := [name for name in self.columns if name in RESERVED_COLUMNS]:
            raise DataError(
                f"{table.source} has a column {taken[0]!r} besides the prompts in {table.column!r}, but that name is "
                f"reserved, as are {', '.join(RESERVED_COLUMNS)}. Rename the column."
            )
        self.skipped: Counter[str] = Counter()
        """Positions skipped so far, by reason."""
        self.samples_per_batch = rollout.prompts_per_batch * rollout.samples_per_prompt
        self._table, self._tokenizer, self._seed, self._shuffle = table, tokenizer, seed, prompts.shuffle
        self._samples_per_prompt, self._max_new_tokens = rollout.samples_per_prompt, rollout.max_new_tokens
        self._levels = _levels(table, prompts.curriculum) if prompts.curriculum else None
        self._context_length, self._name = context_length, name
        self._limits = {SKIP_TOO_LONG: prompts.max_tokens} if prompts.max_tokens else {}
        if context_length is not None:
            self._limits[SKIP_NO_ROOM] = context_length - 1
        self._warned: set[str] = set()
        self._prompt = lru_cache(maxsize=_CACHED_PROMPTS)(self._encode)
        self._order = lru_cache(maxsize=2)(self._order_of)
        if all(self._prompt(row).lost for row in range(len(table))):
            counts = ", ".join(f"{count:,} {reason}" for reason, count in self.survey().items())
            raise DataError(
                f"{table.source} has no usable prompts: {counts}. The limits are prompts.max_tokens = "
                f"{prompts.max_tokens} (0 = none) and the model's context of {context_length} tokens. Shorten the "
                "prompts, raise prompts.max_tokens, or use a model with a longer context."
            )

    @property
    def num_prompts(self) -> int:
        """Prompts of one pass."""
        return len(self._table)

    def survey(self, most: int = 0) -> Counter[str]:
        """Tokenize all prompts, or the first ones, and count those that a pass skips or has cut short, by reason."""
        prompts = map(self._prompt, range(len(self._table))[: most or None])
        reasons = (one.lost or CUT_SHORT * self._is_cut(one.tokens) for one in prompts)
        return Counter(filter(None, reasons))

    def batch(self, numbers: Sequence[int], *, group_size: int = 1) -> tuple[list[Sample], dict[int, str]]:
        """Return the samples of the leases with these numbers, and why some of them cannot be made, by number.

        A lease is for `group_size` samples of one prompt: all of them, or one.
        """
        samples: list[Sample] = []
        skipped = {}
        for number in numbers:
            ids = range(number * group_size, (number + 1) * group_size)
            position, repeat = divmod(ids.start, self._samples_per_prompt)
            pass_number, place = divmod(position, len(self._table))
            prompt = self._prompt(row := self._order(pass_number)[place])
            if not prompt.lost:
                if self._is_cut(prompt.tokens):
                    sizes = f"{len(prompt.tokens)} tokens and max_new_tokens = {self._max_new_tokens}"
                    where = f"a prompt of {sizes} exceed the context of {self._context_length}"
                    self._warn_once("Some responses will be cut short", where)
                samples += [dataclasses.replace(prompt, id=one, group=position) for one in ids]
                continue
            skipped[number] = prompt.lost
            if repeat == 0:  # else it is counted
                self.skipped[prompt.lost] += 1
                where = f"first in {self._table.where(row)}; others are only counted"
                self._warn_once(f"Skipping prompts {prompt.lost}", where)
        return samples, skipped

    def _order_of(self, pass_number: int) -> Sequence[int]:
        """The rows in the order of one pass."""
        order: Sequence[int] = range(len(self._table))
        if self._shuffle:
            order = keyed_generator(self._seed, pass_number, stream=STREAM_PROMPTS).permutation(len(order)).tolist()
        return order if self._levels is None else sorted(order, key=self._levels.__getitem__)

    def _encode(self, row: int) -> Sample:
        """What all samples of a row are copied from; `lost` says why there are none."""
        prompt = self._table.rows[row][self._table.column]
        where = f"{self._table.where(row)}: {self._table.column!r}"
        text = _render(prompt, self._tokenizer, where=where)
        if reason := self._skip_reason(1 + len(text) // _CHARACTERS_PER_TOKEN):
            return Sample(UNKNOWN_ID, [], lost=reason)
        try:
            ids = self._tokenize(text, is_chat=not isinstance(prompt, str))
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            raise DataError(f"{where} cannot be tokenized: {what}. Correct the text.") from error
        columns = {"prompt": text, **{name: self._table.rows[row].get(name) for name in self.columns}}
        return Sample(UNKNOWN_ID, ids, columns=columns, lost=self._skip_reason(len(ids)))

    def _tokenize(self, text: str, *, is_chat: bool) -> list[int]:
        """Return token ids; a plain text gets the tokenizer's special tokens, but no end token. A chat has its own."""
        ids = list(self._tokenizer(text, add_special_tokens=not is_chat, verbose=False)["input_ids"])  # any length
        end = self._tokenizer.eos_token_id
        if not is_chat and ids and ids[-1] == end:
            written = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
            if _num_last(ids, end) > _num_last(written, end):  # one that the text itself spells out stays
                ids.pop()
        return ids

    def _skip_reason(self, num_tokens: int) -> str:
        if num_tokens == 0:
            return SKIP_EMPTY
        return next((reason for reason, most in self._limits.items() if num_tokens > most), "")

    def _warn_once(self, topic: str, details: str) -> None:
        if topic not in self._warned:
            self._warned.add(topic)
            logger.warning("%s: %s (%s).", self._name, topic, details)

    def _is_cut(self, tokens: Sequence[int]) -> bool:
        """Whether a prompt leaves less room than a response may need."""
        return self._context_length is not None and len(tokens) + self._max_new_tokens > self._context_length


def _levels(table: PromptTable, curriculum: str) -> list[float]:
    column, sign = curriculum.removeprefix("-"), -1 if curriculum.startswith("-") else 1
    levels = []
    for index, row in enumerate(table.rows):
        level = row.get(column)
        if isinstance(level, bool) or not isinstance(level, int | float) or not math.isfinite(level):
            raise DataError(
                f"{table.where(index)}: the column {column!r}, which prompts.curriculum names, must be a number, got "
                f"{level!r}. Give every row one, or name another column."
            )
        levels.append(sign * level)
    return levels


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


def _num_last(ids: Sequence[int], token_id: int) -> int:
    """How often a token is repeated at the end."""
    return next((count for count, last in enumerate(reversed(ids)) if last != token_id), len(ids))
