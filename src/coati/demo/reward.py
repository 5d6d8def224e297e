"""The demo's reward: the sentiment of a sentence by the lexicon of `vaderSentiment`."""

from collections.abc import Sequence
from functools import cache
from typing import Any

from coati.rewards.calling import needed_package


def film_sentiment(completions: Sequence[str], prompts: Sequence[str], **_: object) -> list[float]:
    """Score each prompt and completion, as one sentence, from -1 (negative) to 1 (positive)."""
    analyzer = sentiment_analyzer()
    sentences = (f"{prompt} {completion}" for prompt, completion in zip(prompts, completions, strict=True))
    return [float(analyzer.polarity_scores(sentence)["compound"]) for sentence in sentences]


@cache  # reading the lexicon takes longer than scoring a thousand sentences
def sentiment_analyzer() -> Any:
    """Return the sentiment analyzer. ConfigError if the `demo` extra is not installed."""
    return needed_package("vaderSentiment.vaderSentiment", "demo").SentimentIntensityAnalyzer()
