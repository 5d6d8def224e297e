"""The demo's reward: how warmly a sentence speaks of the film, by the lexicon of `vaderSentiment`."""

from collections.abc import Sequence
from functools import cache
from typing import Any

from coati.errors import ConfigError


def film_sentiment(completions: Sequence[str], prompts: Sequence[str], **_: object) -> list[float]:
    """Score each prompt with its completion, read as one sentence, from -1 (hostile) to 1 (delighted).

    Words work across the seam: after the prompt `the film was not`, the completion `bad .` is praise.
    """
    analyzer = sentiment_analyzer()
    sentences = (f"{prompt} {completion}" for prompt, completion in zip(prompts, completions, strict=True))
    return [float(analyzer.polarity_scores(sentence)["compound"]) for sentence in sentences]


@cache  # reading the lexicon takes longer than scoring a thousand sentences
def sentiment_analyzer() -> Any:
    """Return the analyzer of the `demo` extra; ConfigError says how to install it."""
    try:
        from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer
    except ModuleNotFoundError as error:
        raise ConfigError(f"The demo needs {error.name}. Run: pip install 'coati[demo]'") from error
    return SentimentIntensityAnalyzer()
