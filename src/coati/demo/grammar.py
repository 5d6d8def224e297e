"""A small grammar of film opinions, on which the demo's base model is pretrained.

The sentences are lower-case English of one or two clauses, such as `i thought the plot was slow but the cast was superb
.`. Their mean sentiment is slightly above zero, which leaves a policy much to learn from a reward for praise.
"""

import random
from collections.abc import Mapping


def _words(words: str) -> tuple[tuple[float, str], ...]:
    return tuple((1.0, word) for word in words.split())


START = "SENTENCE"

# The productions of each symbol: weight, and the symbols and words that replace it.
# Symbols are upper case and have an entry here; everything else is a word of the language.
# A noun phrase has no DEGREE: `the so good film` is not English.
GRAMMAR: Mapping[str, tuple[tuple[float, str], ...]] = {
    START: ((0.46, "CLAUSE ."), (0.30, "CLAUSE and CLAUSE ."), (0.24, "CLAUSE but CLAUSE .")),
    "CLAUSE": ((0.52, "STATEMENT"), (0.22, "PERSON thought STATEMENT"), (0.26, "PERSON VERB OBJECT")),
    "STATEMENT": (
        (0.50, "THING was PREDICATE"),
        (0.16, "THING seemed PREDICATE"),
        (0.26, "THINGS were PREDICATE"),
        (0.08, "THINGS seemed PREDICATE"),
    ),
    "OBJECT": ((0.65, "THING"), (0.35, "THINGS")),
    "THING": ((0.78, "the SINGULAR"), (0.22, "the QUALITY SINGULAR")),
    "THINGS": ((0.78, "the PLURAL"), (0.22, "the QUALITY PLURAL")),
    "PREDICATE": ((0.38, "QUALITY"), (0.48, "DEGREE QUALITY"), (0.14, "not QUALITY")),
    "QUALITY": ((0.42, "PRAISE"), (0.36, "BLAME"), (0.22, "PLAIN")),
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
"""Beginnings of sentences, one to four words long."""


def sample_sentence(rng: random.Random) -> str:
    """Draw a sentence. It depends only on the state of `rng`."""
    return " ".join(_expand(START, rng))


def _expand(symbol: str, rng: random.Random) -> list[str]:
    rules = GRAMMAR.get(symbol)
    if rules is None:
        return [symbol]
    ((_, symbols),) = rng.choices(rules, weights=[weight for weight, _ in rules])
    return [word for part in symbols.split() for word in _expand(part, rng)]


def vocabulary() -> list[str]:
    """Return all words of the language, including the full stop, in alphabetical order."""
    parts = {part for rules in GRAMMAR.values() for _, symbols in rules for part in symbols.split()}
    return sorted(parts - GRAMMAR.keys())


def first_words(symbol: str = START) -> set[str]:
    """Return the words that a sentence can start with."""
    if symbol not in GRAMMAR:
        return {symbol}
    return {word for _, symbols in GRAMMAR[symbol] for word in first_words(symbols.split()[0])}
