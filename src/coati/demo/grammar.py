"""A small grammar of film opinions: what the demo's base model learns, and the test of what it writes later.

The sentences are lower-case English of one or two clauses, such as `i thought the plot was slow but the cast
was superb .`. Praise, blame and neutral words are balanced so that the mean sentiment sits a little above
zero: a policy trained towards praise has far to go. There are enough words of praise that it can get there
without repeating itself.

One table of weighted rules drives both directions, sampling and recognising, so the two cannot drift apart.
Left out: questions, negated verbs, anything recursive. Every sentence is short by construction.
"""

import random
from collections.abc import Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import NamedTuple


class Rule(NamedTuple):
    """One way to rewrite a symbol: how often it is taken, and the symbols and words it turns into."""

    weight: float
    symbols: tuple[str, ...]


def _rules(*alternatives: tuple[float, str]) -> tuple[Rule, ...]:
    return tuple(Rule(weight, tuple(symbols.split())) for weight, symbols in alternatives)


def _words(words: str) -> tuple[Rule, ...]:
    return tuple(Rule(1.0, (word,)) for word in words.split())


_START = "SENTENCE"

# Symbols are upper case and have an entry here; everything else is a word of the language.
# No degree inside a noun phrase: `the so good film` is not English.
GRAMMAR: Mapping[str, tuple[Rule, ...]] = MappingProxyType(
    {
        _START: _rules((0.46, "CLAUSE ."), (0.30, "CLAUSE and CLAUSE ."), (0.24, "CLAUSE but CLAUSE .")),
        "CLAUSE": _rules((0.52, "STATEMENT"), (0.22, "PERSON thought STATEMENT"), (0.26, "PERSON VERB OBJECT")),
        "STATEMENT": _rules(
            (0.50, "THING was PREDICATE"),
            (0.16, "THING seemed PREDICATE"),
            (0.26, "THINGS were PREDICATE"),
            (0.08, "THINGS seemed PREDICATE"),
        ),
        "OBJECT": _rules((0.65, "THING"), (0.35, "THINGS")),
        "THING": _rules((0.78, "the SINGULAR"), (0.22, "the QUALITY SINGULAR")),
        "THINGS": _rules((0.78, "the PLURAL"), (0.22, "the QUALITY PLURAL")),
        "PREDICATE": _rules((0.38, "QUALITY"), (0.48, "DEGREE QUALITY"), (0.14, "not QUALITY")),
        "QUALITY": _rules((0.42, "PRAISE"), (0.36, "BLAME"), (0.22, "PLAIN")),
        "PERSON": _words("i we"),
        "VERB": _words("loved liked enjoyed admired hated disliked watched remembered"),
        "SINGULAR": _words("film plot story acting ending music script cast"),
        "PLURAL": _words("actors songs scenes characters"),
        "DEGREE": _words("very really so quite extremely slightly"),
        "PRAISE": _words(
            "great good brilliant wonderful beautiful funny charming "
            "delightful excellent superb amazing fantastic clever lovely"
        ),
        "BLAME": _words("bad terrible boring awful dull poor weak horrible stupid"),
        "PLAIN": _words("long short slow quiet loud simple old"),
    }
)

PROMPTS: tuple[str, ...] = (
    "the film",
    "the plot",
    "the cast was",
    "the songs were",
    "i thought",
    "i thought the plot",
    "i thought the music",
    "we thought the ending",
    "we thought the actors",
    "i watched the film",
    "the scenes",
    "the story seemed",
)
"""Openings of one to four words that the grammar can continue."""


def sample_sentence(rng: random.Random) -> str:
    """Draw one sentence; equal states of `rng` give equal sentences.

    Example:
        >>> sentence = sample_sentence(random.Random(0))
        >>> is_grammatical(sentence)
        True
    """
    return " ".join(_expand(_START, rng))


def _expand(symbol: str, rng: random.Random) -> list[str]:
    rules = GRAMMAR.get(symbol)
    if rules is None:
        return [symbol]
    (rule,) = rng.choices(rules, weights=[rule.weight for rule in rules])
    return [word for part in rule.symbols for word in _expand(part, rng)]


@cache
def _vocabulary() -> tuple[str, ...]:
    words = {part for rules in GRAMMAR.values() for rule in rules for part in rule.symbols if part not in GRAMMAR}
    return tuple(sorted(words))


def vocabulary() -> list[str]:
    """List every word of the language, full stop included, in alphabetical order."""
    return list(_vocabulary())


def is_grammatical(text: str) -> bool:
    """Say whether `text` is one complete sentence of the grammar, words set apart by white space.

    Example:
        >>> is_grammatical("the film was very good .")
        True
        >>> is_grammatical("the film were very good .")
        False
    """
    words = text.split()
    return len(words) in _ends(_START, words, 0)


def can_continue(text: str) -> bool:
    """Say whether `text` is an opening: a proper prefix, in whole words, of at least one sentence.

    Example:
        >>> can_continue("i thought the"), can_continue("the the")
        (True, False)
    """
    words = text.split()
    return _is_prefix((_START,), words)


def _ends(symbol: str, words: Sequence[str], start: int) -> set[int]:
    """Return every position at which `symbol`, begun at `start`, can be complete."""
    rules = GRAMMAR.get(symbol)
    if rules is None:
        return {start + 1} if start < len(words) and words[start] == symbol else set()
    ends: set[int] = set()
    for rule in rules:
        reached = {start}
        for part in rule.symbols:
            reached = {end for position in reached for end in _ends(part, words, position)}
        ends |= reached
    return ends


def _is_prefix(pending: tuple[str, ...], words: Sequence[str]) -> bool:
    """Say whether the `pending` symbols can produce `words` and at least one word more."""
    if not pending:
        return False
    if not words:
        return True
    first, rest = pending[0], pending[1:]
    rules = GRAMMAR.get(first)
    if rules is None:
        return words[0] == first and _is_prefix(rest, words[1:])
    return any(_is_prefix(rule.symbols + rest, words) for rule in rules)
