"""Two rewards for film opinions, written the way any reward function is.

A reward function takes `completions`, and `prompts` or columns of the dataset by name where it wants them.
All are lists of equal length. It returns one number per completion, or None where a sample deserves no score;
such a sample is left out of training and counted.
"""

GOOD_WORDS = """
    amazing beautiful brilliant charming clever delightful excellent fantastic funny good great lovely superb
    wonderful admired enjoyed liked loved
"""
BAD_WORDS = "awful bad boring dull horrible poor stupid terrible weak disliked hated"

PRAISE = frozenset(GOOD_WORDS.split())
BLAME = frozenset(BAD_WORDS.split())


def praise(completions: list[str]) -> list[float | None]:
    """How kind a completion is, from -1 to 1: good words less bad ones, over both and one more.

    Because of the one more, further words of praise count, but ever less; `not` turns the next word around.
    """
    return [_praise(text.lower().split()) for text in completions]


def on_topic(prompts: list[str], completions: list[str], topic: list[str]) -> list[float]:
    """Return 1 for an opinion that mentions the topic of its row, in the prompt or after it, else 0."""
    texts = zip(prompts, completions, topic, strict=True)
    return [float(word in f"{prompt} {completion}".lower().split()) for prompt, completion, word in texts]


def _praise(words: list[str]) -> float | None:
    if not words:
        return None  # nothing was written, so there is nothing to judge
    good = bad = 0
    for before, word in zip(["", *words], words, strict=False):
        is_good, is_bad = word in PRAISE, word in BLAME
        if before == "not":
            is_good, is_bad = is_bad, is_good
        good += is_good
        bad += is_bad
    return (good - bad) / (good + bad + 1)
