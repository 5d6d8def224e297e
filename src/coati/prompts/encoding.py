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
    """Return the token ids of a rendered prompt, without an end token that the tokenizer appends.

    Raises:
        DataError: when the tokenizer fails.
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
