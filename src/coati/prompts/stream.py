"""Prompts in one global, endless order, pass after pass over the table, that every maker can look up.

A sample therefore has the same id, and with it the same random draws, on every maker. Prompts that cannot be used keep
their position in the order; they are skipped, and counted by reason.
"""

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

# Keys of a batch and arguments of reward functions, which a column of the same name would shadow.
RESERVED_COLUMNS = ("input_ids", "attention_mask", "sample_ids", "group_ids", "prompt", "prompts", "completions")

SKIP_EMPTY = "without tokens"
SKIP_TOO_LONG = "longer than prompts.max_tokens"
SKIP_NO_ROOM = "without room for a response"
CUT_SHORT = "with less room than max_new_tokens"

_CACHED_PROMPTS = 1024  # a small table is tokenized once, a prompt of a large table whenever it is used
# No text has more characters per token. A text too long by this bound is skipped: tokenizing it could take minutes.
_CHARACTERS_PER_TOKEN = 32


class PromptStream:
    """The prompts of a table in an endless order, by position. A position means the same prompt on every maker.

    The columns of a sample are `prompt`, the rendered text, and every other column of the table. Prompts that leave no
    room for a response in the model's `context_length` are skipped. Raises DataError if no prompt is usable.
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
        if taken := [name for name in table.other_columns if name in RESERVED_COLUMNS]:
            raise DataError(
                f"{table.source} has a column {taken[0]!r} besides the prompts in {table.column!r}, but this name is "
                f"reserved. Rename the column. Reserved names: {', '.join(RESERVED_COLUMNS)}."
            )
        self.skipped: Counter[str] = Counter()  # number of positions so far, by reason
        self.samples_per_batch = rollout.prompts_per_batch * rollout.samples_per_prompt
        self.table, self._tokenizer, self._seed, self._shuffle = table, tokenizer, seed, prompts.shuffle
        self._samples_per_prompt, self._max_new_tokens = rollout.samples_per_prompt, rollout.max_new_tokens
        self._levels = _levels(table, prompts.curriculum) if prompts.curriculum else None
        self._context_length, self._name = context_length, name
        self._limits = {SKIP_TOO_LONG: prompts.max_tokens} if prompts.max_tokens else {}
        if context_length is not None:
            self._limits[SKIP_NO_ROOM] = context_length - 1
        self._warned: set[str] = set()
        self._prompt = lru_cache(maxsize=_CACHED_PROMPTS)(self._encode)
        self._order = lru_cache(maxsize=2)(self._order_of)
        if all(self._prompt(row).drop_reason for row in range(len(table))):
            counts = ", ".join(f"{count:,} {reason}" for reason, count in self.survey().items())
            raise DataError(
                f"{table.source} has no usable prompts: {counts}. The limits are prompts.max_tokens = "
                f"{prompts.max_tokens} (0 = no limit) and the model's context of {context_length} tokens. Shorten the "
                "prompts, raise prompts.max_tokens, or use a model with a longer context."
            )

    def survey(self, limit: int = 0) -> Counter[str]:
        """Count the prompts that every pass skips or whose responses are cut short, by reason. 0 means no limit."""
        prompts = map(self._prompt, range(len(self.table))[: limit or None])
        reasons = (one.drop_reason or CUT_SHORT * self._is_cut(one.tokens) for one in prompts)
        return Counter(filter(None, reasons))

    def batch(self, numbers: Sequence[int], *, group_size: int = 1) -> tuple[list[Sample], dict[int, str]]:
        """Return the samples of the leases with these numbers, and the reasons for skipped leases, by number.

        A lease covers `group_size` samples of one prompt, all or one of them. Samples of one prompt are adjacent.
        """
        samples: list[Sample] = []
        skipped = {}
        for number in numbers:
            ids = range(number * group_size, (number + 1) * group_size)
            position, repeat = divmod(ids.start, self._samples_per_prompt)
            pass_number, place = divmod(position, len(self.table))
            prompt = self._prompt(row := self._order(pass_number)[place])
            if not prompt.drop_reason:
                if self._is_cut(prompt.tokens):
                    sizes = f"{len(prompt.tokens)} tokens and max_new_tokens = {self._max_new_tokens}"
                    where = f"a prompt of {sizes} exceed the model's context of {self._context_length} tokens"
                    self._warn_once("Some responses will be cut short", where)
                samples += [dataclasses.replace(prompt, id=one, group=position) for one in ids]
                continue
            skipped[number] = prompt.drop_reason
            if repeat == 0:  # otherwise this position is already counted
                self.skipped[prompt.drop_reason] += 1
                where = f"first: {self.table.where(row)}; later ones are only counted"
                self._warn_once(f"Skipping prompts {prompt.drop_reason}", where)
        return samples, skipped

    def _order_of(self, pass_number: int) -> Sequence[int]:
        order: Sequence[int] = range(len(self.table))
        if self._shuffle:
            order = keyed_generator(self._seed, pass_number, stream=STREAM_PROMPTS).permutation(len(order)).tolist()
        return order if self._levels is None else sorted(order, key=self._levels.__getitem__)

    def _encode(self, row: int) -> Sample:
        """Return the sample from which all samples of a row are copied; `drop_reason` is the reason to skip the row."""
        prompt = self.table.rows[row][self.table.column]
        where = f"{self.table.where(row)}: {self.table.column!r}"
        text = _render(prompt, self._tokenizer, where=where)
        if reason := self._skip_reason(1 + len(text) // _CHARACTERS_PER_TOKEN):
            return Sample(UNKNOWN_ID, [], drop_reason=reason)
        try:
            ids = self._tokenize(text, is_chat=not isinstance(prompt, str))
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            raise DataError(f"{where} cannot be tokenized: {what}. Correct the text.") from error
        columns = {"prompt": text, **{name: self.table.rows[row].get(name) for name in self.table.other_columns}}
        return Sample(UNKNOWN_ID, ids, columns=columns, drop_reason=self._skip_reason(len(ids)))

    def _tokenize(self, text: str, *, is_chat: bool) -> list[int]:
        """Return token ids. A plain text gets the tokenizer's special tokens except a final end token, a chat none."""
        ids = list(self._tokenizer(text, add_special_tokens=not is_chat, verbose=False)["input_ids"])  # any length
        end = self._tokenizer.eos_token_id
        if not is_chat and ids and ids[-1] == end:
            written = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
            if _num_trailing(ids, end) > _num_trailing(written, end):  # keep one that is part of the text
                ids.pop()
        return ids

    def _skip_reason(self, num_tokens: int) -> str:
        if num_tokens == 0:
            return SKIP_EMPTY
        return next((reason for reason, limit in self._limits.items() if num_tokens > limit), "")

    def _warn_once(self, topic: str, details: str) -> None:
        if topic not in self._warned:
            self._warned.add(topic)
            logger.warning("%s: %s (%s).", self._name, topic, details)

    def _is_cut(self, tokens: Sequence[int]) -> bool:
        return self._context_length is not None and len(tokens) + self._max_new_tokens > self._context_length


def _levels(table: PromptTable, curriculum: str) -> list[float]:
    column, sign = curriculum.removeprefix("-"), -1 if curriculum.startswith("-") else 1
    levels = []
    for index, row in enumerate(table.rows):
        level = row.get(column)
        if isinstance(level, bool) or not isinstance(level, int | float) or not math.isfinite(level):
            raise DataError(
                f"{table.where(index)}: column {column!r}, which prompts.curriculum names, must be a finite number, "
                f"got {level!r}. Give every row a number, or name another column."
            )
        levels.append(sign * level)
    return levels


def _render(prompt: str | list[dict[str, Any]], tokenizer: Any, *, where: str) -> str:
    """Return the text to tokenize: the prompt itself, or the messages rendered by the chat template."""
    if isinstance(prompt, str):
        return prompt
    if getattr(tokenizer, "chat_template", None) is None:
        raise DataError(
            f"{where} has chat messages, but the tokenizer has no chat template. Use a chat model's tokenizer "
            "(model.tokenizer), or plain texts."
        )
    is_open = prompt[-1]["role"] == "assistant"  # the response continues this message
    options = {"continue_final_message": is_open, "add_generation_prompt": not is_open}
    try:
        return str(tokenizer.apply_chat_template(prompt, tokenize=False, **options))
    except Exception as error:  # templates may raise anything, for example about the order of roles
        roles = ", ".join(str(message["role"]) for message in prompt)
        raise DataError(
            f"{where}: the tokenizer's chat template rejects messages with the roles {roles}: "
            f"{type(error).__name__}: {error}. Correct the messages, or choose another tokenizer."
        ) from error


def _num_trailing(ids: Sequence[int], token_id: int) -> int:
    return next((count for count, last in enumerate(reversed(ids)) if last != token_id), len(ids))
