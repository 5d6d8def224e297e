"""Recognize sentences of the demo's film grammar."""

import re
from functools import cache

from coati.demo.grammar import GRAMMAR, START


def is_grammatical(text: str) -> bool:
    """Return whether `text` is one complete sentence of the grammar, ignoring extra white space.

    Example:
        >>> is_grammatical("the film was very good .")
        True
        >>> is_grammatical("the film were very good .")
        False
    """
    return _sentence_pattern().fullmatch(" ".join(text.split())) is not None


@cache
def _sentence_pattern() -> re.Pattern[str]:
    return re.compile(_pattern(START))


def _pattern(symbol: str) -> str:
    if symbol not in GRAMMAR:
        return re.escape(symbol)
    return f"(?:{'|'.join(' '.join(map(_pattern, symbols.split())) for _, symbols in GRAMMAR[symbol])})"
