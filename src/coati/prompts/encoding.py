"""One prompt, from a row to token ids.

A plain text gets the tokenizer's own special tokens; a list of chat messages goes through the tokenizer's
chat template, which writes special tokens itself. Either way the prompt ends open: no end-of-sequence token
follows it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from coati.errors import DataError


class EncodedPrompt(NamedTuple):
    """A prompt as the model will see it."""

    text: str
    """The text that was tokenized: the prompt itself, or the rendered chat."""
    ids: list[int]


def encode_prompt(prompt: str | list[dict[str, Any]], tokenizer: Any, *, where: str) -> EncodedPrompt:
    """Tokenize one prompt; `where` names the row in errors.

    Raises:
        DataError: when the tokenizer cannot render chat messages.
    """
    is_chat = not isinstance(prompt, str)
    text = prompt if isinstance(prompt, str) else _render_chat(prompt, tokenizer, where)
    ids = _tokenize(text, tokenizer, add_special_tokens=not is_chat)
    if not is_chat and ids and ids[-1] == tokenizer.eos_token_id:
        ids = _without_added_eos(ids, _tokenize(text, tokenizer, add_special_tokens=False))
    return EncodedPrompt(text, ids)


def _tokenize(text: Any, tokenizer: Any, *, add_special_tokens: bool) -> list[int]:
    # verbose=False: we judge lengths ourselves, with the reason counted, so the tokenizer need not warn.
    return list(tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"])


def _without_added_eos(ids: list[int], bare_ids: list[int]) -> list[int]:
    """Drop the end tokens that the tokenizer appended, but none that the text itself spells out."""
    eos = ids[-1]
    surplus = _trailing(ids, eos) - _trailing(bare_ids, eos)
    return ids[: len(ids) - surplus]


def _trailing(ids: list[int], token: int) -> int:
    count = 0
    while count < len(ids) and ids[-1 - count] == token:
        count += 1
    return count


def _render_chat(messages: list[dict[str, Any]], tokenizer: Any, where: str) -> str:
    if getattr(tokenizer, "chat_template", None) is None:
        raise DataError(
            f"{where} must be a plain text, because the tokenizer has no chat template, got a list of "
            f"{len(messages)} chat messages. Use a chat model's tokenizer (model.tokenizer), or plain "
            "prompts."
        )
    try:
        return str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
    except Exception as error:  # templates raise what they like, for example about the order of roles
        roles = ", ".join(str(message.get("role")) for message in messages)
        raise DataError(
            f"{where} must be chat messages that the tokenizer's template accepts, got the roles {roles}: "
            f"{type(error).__name__}: {error}. Correct the messages, or choose another tokenizer."
        ) from error
