"""Rewards that read nothing but the completion: patterns, tags, lengths, repetition.

Each name is a function of options that returns the reward function.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal, get_args

from coati.errors import ConfigError
from coati.reward_functions.calling import Verdict
from coati.reward_functions.loading import needed_package, require

Unit = Literal["tokens", "words", "characters"]


def regex(*, pattern: str, whole: bool = False, seconds: float = 1.0) -> Callable[..., list[Verdict]]:
    """1 where the pattern (of the package `regex`, a superset of Python's) is found, or matches the whole text; else 0.

    A search that takes more than `seconds` is a failure on that sample.
    """
    needed_package("regex")
    import regex as engine

    try:
        compiled = engine.compile(pattern)
    except (engine.error, TypeError) as error:
        raise ConfigError(f"Reward 'regex' needs a valid pattern, got {pattern!r}: {error}. Correct it.") from None

    def verdict(text: str) -> Verdict:
        try:  # the engine lets other threads run meanwhile, and keeps its deadline itself
            found = (compiled.fullmatch if whole else compiled.search)(text, timeout=seconds, concurrent=True)
        except TimeoutError:
            return Verdict(error=f"took more than {seconds:g} s to search for its pattern")
        return Verdict(float(found is not None))

    return lambda completions: [verdict(text) for text in completions]


def tags(*, tags: Sequence[str] = ("think", "answer"), prefix: str = "") -> Callable[..., list[float]]:
    """1 where the text is these tags, each once and closed, in this order, with nothing around them; else 0.

    `prefix` is what the prompt has written of the response already, such as "<think>".
    """
    if not tags or isinstance(tags, str):
        raise ConfigError(f'Reward \'format\' needs a list of tags, got {tags!r}. For example ["think", "answer"].')

    def matches(text: str) -> bool:
        text = rest = prefix + text
        for tag in tags:
            opening, closing = f"<{tag}>", f"</{tag}>"
            rest = rest.strip()
            if text.count(opening) != 1 or text.count(closing) != 1 or not rest.startswith(opening):
                return False
            _, _, rest = rest.partition(closing)
        return not rest.strip()

    return lambda completions: [float(matches(text)) for text in completions]


def length(
    *, maximum: float, minimum: float = 0, margin: float = 0, unit: Unit = "tokens"
) -> Callable[..., list[float]]:
    """1 from `minimum` to `maximum`; outside it falls to 0 over `margin`."""
    require("length", minimum <= maximum and margin >= 0, "minimum <= maximum and margin >= 0")

    def rate(parts: Sequence[Hashable]) -> float:
        excess = max(minimum - len(parts), len(parts) - maximum, 0)
        return max(0.0, 1.0 - excess / margin) if margin else float(excess == 0)

    return _rating("length", unit, rate)


def overlong(*, max_tokens: int, buffer_tokens: int, unit: Unit = "tokens") -> Callable[..., list[float]]:
    """DAPO's soft overlong penalty: 0 up to `max_tokens` - `buffer_tokens`, then down to -1 at `max_tokens`."""
    require("overlong", 0 < buffer_tokens <= max_tokens, "0 < buffer_tokens <= max_tokens")

    def rate(parts: Sequence[Hashable]) -> float:
        return min(0.0, max(-1.0, (max_tokens - buffer_tokens - len(parts)) / buffer_tokens))

    return _rating("overlong", unit, rate)


def repetition(*, size: int = 4, unit: Unit = "words") -> Callable[..., list[float]]:
    """Minus the share of runs of `size` words that occurred before: 0 where none is repeated, near -1 in a loop."""
    require("repetition", size >= 1, "size >= 1")

    def rate(parts: Sequence[Hashable]) -> float:
        runs = list(zip(*(itertools.islice(parts, start, None) for start in range(size)), strict=False))
        return len(set(runs)) / len(runs) - 1.0 if runs else 0.0

    return _rating("repetition", unit, rate)


def _rating(name: str, unit: Unit, rate: Callable[[Sequence[Hashable]], float]) -> Callable[..., list[Any]]:
    """A reward function that rates the tokens, words or characters of each completion."""
    require(name, unit in get_args(Unit), f"one of the units {', '.join(get_args(Unit))}, got {unit!r}")
    if unit == "tokens":
        return lambda completion_ids: [rate(ids) for ids in completion_ids]
    return lambda completions: [rate(text.split() if unit == "words" else text) for text in completions]
