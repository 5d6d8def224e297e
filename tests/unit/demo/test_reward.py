"""The demo's reward."""

import sys

import pytest

from coati.demo.reward import film_sentiment, sentiment_analyzer
from coati.errors import ConfigError


def test_praise_scores_higher_than_neutral_and_neutral_higher_than_blame():
    completions = [" was wonderful .", " was long .", " was awful ."]
    scores = film_sentiment(completions=completions, prompts=["the film"] * 3, film_id=[1, 2, 3])
    assert scores[0] > 0.5 > scores[1] == 0.0 > -0.4 > scores[2]


def test_prompt_and_completion_are_scored_as_one_sentence():
    # `great` is 3.1 in the lexicon, and compound = x / sqrt(x² + 15): 3.1 / 4.9609 = 0.6249.
    assert film_sentiment([" great ."], ["the film was"]) == [0.6249]
    assert film_sentiment([" bad ."], ["the film was not"])[0] > 0 > film_sentiment([" bad ."], ["the film was"])[0]


def test_the_error_for_a_missing_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "vaderSentiment.vaderSentiment", None)
    sentiment_analyzer.cache_clear()
    with pytest.raises(ConfigError, match=r"vaderSentiment.*pip install '\.\[demo\]'"):
        film_sentiment([" great ."], ["the film was"])
