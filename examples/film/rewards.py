"""Two example reward functions for film opinions.

A reward function takes `completions` and, if its signature names them, `prompts` and columns of the dataset, all as
lists of equal length. It returns one number per completion, or None for "no score"; such a sample is dropped and
counted.
"""

GOOD_WORDS = """
    amazing beautiful brilliant charming clever delightful excellent fantastic funny good great lovely superb
    wonderful admired enjoyed liked loved
"""
BAD_WORDS = "awful bad boring dull horrible poor stupid terrible weak disliked hated"

PRAISE = frozenset(GOOD_WORDS.split())
BLAME = frozenset(BAD_WORDS.split())


def praise(completions: list[str]) -> list[float | None]:
    """Return how positive each completion is, from -1 to 1: (good - bad words) / (good + bad words + 1).

    The + 1 lets further words of praise count, with diminishing returns. `not` negates the next word.
    """
    return [_praise(text.lower().split()) for text in completions]


def on_topic(prompts: list[str], completions: list[str], topic: list[str]) -> list[float]:
    """Return 1 if the prompt or completion mentions the topic of its row, else 0."""
    texts = zip(prompts, completions, topic, strict=True)
    return [float(word in f"{prompt} {completion}".lower().split()) for prompt, completion, word in texts]


def _praise(words: list[str]) -> float | None:
    if not words:
        return None  # an empty completion has no score
    good = bad = 0
    for before, word in zip(["", *words], words, strict=False):
        is_good, is_bad = word in PRAISE, word in BLAME
        if before == "not":
            is_good, is_bad = is_bad, is_good
        good += is_good
        bad += is_bad
    return (good - bad) / (good + bad + 1)
