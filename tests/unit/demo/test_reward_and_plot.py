"""The demo's reward and the picture of its run."""

import math
import sys

import pytest
from PIL import Image

from coati.demo.plot import plot_rewards
from coati.demo.reward import film_sentiment, import_extra
from coati.errors import ConfigError


def test_praise_scores_above_neutral_above_blame():
    completions = [" was wonderful .", " was long .", " was awful ."]
    scores = film_sentiment(completions=completions, prompts=["the film"] * 3, film_id=[1, 2, 3])
    assert scores[0] > 0.5 > scores[1] == 0.0 > -0.4 > scores[2]


def test_prompt_and_completion_are_one_sentence():
    # The lexicon's great is 3.1, and compound = x / sqrt(x² + 15): 3.1 / 4.9609 = 0.6249.
    assert film_sentiment([" great ."], ["the film was"]) == [0.6249]
    assert film_sentiment([" bad ."], ["the film was not"])[0] > 0 > film_sentiment([" bad ."], ["the film was"])[0]


@pytest.mark.parametrize("package", ["vaderSentiment", "matplotlib"])
def test_a_missing_package_names_the_extra(monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=rf"{package}.*pip install 'coati\[demo\]'"):
        import_extra(package)


def test_the_plot_is_a_png_and_points_that_are_not_finite_are_left_out(tmp_path):
    rewards = [(step, 0.1 * step) for step in range(10)] + [(10, math.nan)]
    plot_rewards(tmp_path / "rewards.png", rewards, [(1, math.inf)])
    with Image.open(tmp_path / "rewards.png") as picture:
        assert picture.format == "PNG"
        assert picture.size == (1200, 810)
