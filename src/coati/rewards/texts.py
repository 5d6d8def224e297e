"""Prompts and completions as text, from the tokens of a rollout. Special tokens are left out of both."""

from itertools import compress
from typing import Any

from torch import Tensor

# Enough to hold a whole character and a token that is not special; few enough to decode for every sample.
_CONTEXT_TOKENS = 8


def decode_prompts(
    tokenizer: Any,
    sequences: Tensor,  # [B, S] left-padded prompt, then response, S = P + A
    attention_mask: Tensor,  # [B, S]
    action_mask: Tensor,  # [B, A] True on response tokens
) -> list[str]:
    """Return the text of each prompt."""
    return [_decode(tokenizer, ids) for ids in _prompt_ids(sequences, attention_mask, action_mask)]


def decode_completions(
    tokenizer: Any,
    sequences: Tensor,  # [B, S]
    attention_mask: Tensor,  # [B, S]
    action_mask: Tensor,  # [B, A]
) -> list[str]:
    """Return the text that each response adds to its prompt.

    Tokenizers in the style of SentencePiece drop the space of the first token that they decode, so a response is
    decoded together with the end of its prompt, whose text is then cut off.
    """
    contexts = [ids[-_CONTEXT_TOKENS:] for ids in _prompt_ids(sequences, attention_mask, action_mask)]
    responses = _kept(sequences[:, sequences.shape[1] - action_mask.shape[1] :], action_mask)
    texts = []
    for context, response in zip(contexts, responses, strict=True):
        before, whole = _decode(tokenizer, context), _decode(tokenizer, context + response)
        # They differ where the prompt ends within a character that the response finishes.
        texts.append(whole.removeprefix(before) if whole.startswith(before) else _decode(tokenizer, response))
    return texts


def _prompt_ids(sequences: Tensor, attention_mask: Tensor, action_mask: Tensor) -> list[list[int]]:
    length = sequences.shape[1] - action_mask.shape[1]  # P
    return _kept(sequences[:, :length], attention_mask[:, :length])


def _kept(ids: Tensor, mask: Tensor) -> list[list[int]]:
    """The ids of each row that the mask keeps; padding may be a real token, so only the mask tells."""
    return [list(compress(*row)) for row in zip(ids.tolist(), mask.tolist(), strict=True)]


def _decode(tokenizer: Any, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=True))
