"""One prompt, from a row to token ids.

A plain text gets the tokenizer's own special tokens; chat messages go through the tokenizer's chat template, which
writes special tokens itself. Either way the prompt ends open: no end-of-sequence token follows it, and a chat whose
last message is the assistant's is continued within that message.
"""

from __future__ import annotations

from typing import Any

from coati.errors import DataError


def render_prompt(prompt: str | list[dict[str, Any]], tokenizer: Any, *, where: str) -> str:
    """Return the text that is tokenized: the prompt itself, or the chat as the template writes it.

    Raises:
        DataError: when the tokenizer cannot render chat messages.
    """
    if isinstance(prompt, str):
        return prompt
    if getattr(tokenizer, "chat_template", None) is None:
        raise DataError(
            f"{where} holds chat messages, but the tokenizer has no chat template. Use a chat model's tokenizer "
            "(model.tokenizer), or plain texts."
        )
    is_begun = prompt[-1]["role"] == "assistant"
    options = {"continue_final_message": is_begun, "add_generation_prompt": not is_begun}
    try:
        return str(tokenizer.apply_chat_template(prompt, tokenize=False, **options))
    except Exception as error:  # templates raise what they like, for example about the order of roles
        roles = ", ".join(str(message["role"]) for message in prompt)
        raise DataError(
            f"{where}: the tokenizer's chat template refuses messages with the roles {roles}: "
            f"{type(error).__name__}: {error}. Correct the messages, or choose another tokenizer."
        ) from error


def tokenize_prompt(text: str, tokenizer: Any, *, is_chat: bool, where: str) -> list[int]:
    """Return the token ids of a rendered prompt.

    Raises:
        DataError: when the tokenizer fails.
    """
    try:
        ids = _tokenize(text, tokenizer, add_special_tokens=not is_chat)
        if is_chat or not ids or ids[-1] != tokenizer.eos_token_id:
            return ids
        bare_ids = _tokenize(text, tokenizer, add_special_tokens=False)
    except Exception as error:
        raise DataError(f"{where} cannot be tokenized: {type(error).__name__}: {error}. Correct the text.") from error
    # Drop the end tokens that the tokenizer appended, but none that the text itself spells out.
    surplus = _trailing(ids, ids[-1]) - _trailing(bare_ids, ids[-1])
    return ids[: len(ids) - surplus]


def _tokenize(text: str, tokenizer: Any, *, add_special_tokens: bool) -> list[int]:
    # verbose=False: lengths are judged by the stream, so the tokenizer need not warn about them.
    return list(tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"])


def _trailing(ids: list[int], token: int) -> int:
    count = 0
    while count < len(ids) and ids[-1 - count] == token:
        count += 1
    return count
