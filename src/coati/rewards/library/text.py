"""Rewards that read only the completion. Each function takes options and returns the reward function."""

import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import Literal

from coati.errors import ConfigError
from coati.rewards.calling import Verdict, needed_package, require

Unit = Literal["tokens", "words", "characters"]


def regex(*, pattern: str, whole: bool = False, seconds: float = 1.0) -> Callable[..., list[Verdict]]:
    """Score 1 if the pattern is found (with `whole`, if it matches the whole text), else 0.

    The syntax is that of the package `regex`, a superset of Python's. A search longer than `seconds` is a failure.
    """
    package = needed_package("regex")
    try:
        compiled = package.compile(pattern)
    except package.error as error:
        raise ConfigError(
            f"Reward 'regex' needs a valid pattern, got {pattern!r}: {error}. Correct reward.options."
        ) from None
    find = compiled.fullmatch if whole else compiled.search

    def verdict(text: str) -> Verdict:
        try:  # concurrent: release the GIL
            return Verdict(float(find(text, timeout=seconds, concurrent=True) is not None))
        except TimeoutError:
            return Verdict(error=f"took more than {seconds:g} s to search for its pattern")

    return lambda completions: [verdict(text) for text in completions]


def tags(*, tags: Sequence[str] = ("think", "answer"), prefix: str = "") -> Callable[..., list[float]]:
    """Score 1 if the text consists of these tags, each once and closed, in this order, else 0.

    `prefix` is the start of the response that is already in the prompt, such as "<think>".
    """
    require("format", bool(tags), "at least one tag")

    def matches(text: str) -> bool:
        text = rest = prefix + text
        for tag in tags:
            opening, closing = f"<{tag}>", f"</{tag}>"
            if (text.count(opening), text.count(closing)) != (1, 1) or not rest.strip().startswith(opening):
                return False
            _, _, rest = rest.partition(closing)
        return not rest.strip()

    return lambda completions: [float(matches(text)) for text in completions]


def length(
    *, maximum: float, minimum: float = 0, margin: float = 0, unit: Unit = "tokens"
) -> Callable[..., list[float]]:
    """Score 1 for a length from `minimum` to `maximum`; outside, the score falls to 0 over `margin`."""
    require("length", minimum <= maximum and margin >= 0, "minimum <= maximum and margin >= 0")

    def rate(parts: Sequence[Hashable]) -> float:
        excess = max(minimum - len(parts), len(parts) - maximum, 0)
        return max(0.0, 1.0 - excess / margin) if margin else float(excess == 0)

    return _rating(unit, rate)


def overlong(*, max_tokens: int, buffer_tokens: int, unit: Unit = "tokens") -> Callable[..., list[float]]:
    """Score DAPO's soft overlong penalty: 0 up to `max_tokens` - `buffer_tokens`, then down to -1 at `max_tokens`."""
    require("overlong", 0 < buffer_tokens <= max_tokens, "0 < buffer_tokens <= max_tokens")
    start = max_tokens - buffer_tokens
    return _rating(unit, lambda parts: min(0.0, max(-1.0, (start - len(parts)) / buffer_tokens)))


def repetition(*, size: int = 4, unit: Unit = "words") -> Callable[..., list[float]]:
    """Score minus the fraction of repeated n-grams of `size` units: 0 without repetition, near -1 in a loop."""
    require("repetition", size >= 1, "size >= 1")

    def rate(parts: Sequence[Hashable]) -> float:
        ngrams = list(zip(*(itertools.islice(parts, start, None) for start in range(size)), strict=False))
        return len(set(ngrams)) / len(ngrams) - 1.0 if ngrams else 0.0

    return _rating(unit, rate)


def _rating(unit: Unit, rate: Callable[[Sequence[Hashable]], float]) -> Callable[..., list[float]]:
    if unit == "tokens":
        return lambda completion_ids: [rate(ids) for ids in completion_ids]
    return lambda completions: [rate(text.split() if unit == "words" else text) for text in completions]
