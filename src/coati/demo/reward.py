"""The demo's reward: how warmly a sentence speaks of the film, by the lexicon of `vaderSentiment`."""

from collections.abc import Sequence
from functools import cache
from typing import Any

from coati.demo.extras import import_extra
from coati.errors import RewardError


def film_sentiment(completions: Sequence[str], prompts: Sequence[str], **_: object) -> list[float]:
    """Score each prompt with its completion, read as one sentence, from -1 (hostile) to 1 (delighted).

    The whole sentence is scored because words work across the seam: after the prompt `the film was not`, the
    completion `bad .` is praise. Further columns of the data are accepted and ignored.

    Example:
        >>> good, bad = film_sentiment(["was wonderful .", "was awful ."], ["the film", "the film"])
        >>> good > 0 > bad
        True
    """
    if len(completions) != len(prompts):
        raise RewardError(
            f"film_sentiment needs one prompt per completion, got {len(prompts)} prompts and "
            f"{len(completions)} completions. Repeat each prompt once per completion sampled from it."
        )
    analyzer = _analyzer()
    sentences = (f"{prompt} {completion}" for prompt, completion in zip(prompts, completions, strict=True))
    return [float(analyzer.polarity_scores(sentence)["compound"]) for sentence in sentences]


@cache
def _analyzer() -> Any:
    # Cached: reading the lexicon takes longer than scoring a thousand sentences.
    return import_extra("vaderSentiment.vaderSentiment").SentimentIntensityAnalyzer()
