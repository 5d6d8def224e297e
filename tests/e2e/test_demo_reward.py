import sys

import pytest

from coati.demo import reward
from coati.demo.extras import check_demo_extras, import_extra
from coati.demo.reward import film_sentiment
from coati.errors import ConfigError, RewardError


def test_praise_scores_above_neutral_above_blame():
    scores = film_sentiment(
        completions=["was wonderful .", "was long .", "was awful ."],
        prompts=["the film"] * 3,
        film_id=[1, 2, 3],
    )
    assert scores[0] > 0.5 > scores[1] == 0.0 > -0.4 > scores[2]
    assert all(type(score) is float for score in scores)


def test_prompt_and_completion_are_one_sentence():
    # The lexicon's great is 3.1, and compound = x / sqrt(x² + 15): 3.1 / 4.9609 = 0.6249.
    assert film_sentiment(["great ."], ["the film was"]) == [0.6249]
    # The prompt's negation turns the completion's word round, and the prompt's own words count.
    assert film_sentiment(["bad ."], ["the film was not"])[0] > 0 > film_sentiment(["bad ."], ["the film was"])[0]
    assert film_sentiment(["."], ["i loved the film"])[0] > 0.5


def test_empty_inputs():
    assert film_sentiment([], []) == []
    assert film_sentiment([""], [""]) == [0.0]


def test_prompts_and_completions_must_match():
    with pytest.raises(RewardError, match="got 1 prompts and 2 completions"):
        film_sentiment(["a", "b"], ["the film"])


@pytest.mark.parametrize("package", ["vaderSentiment", "matplotlib"])
def test_a_missing_package_names_the_extra(monkeypatch, package: str):
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    # An empty search path is what a machine without the package looks like.
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(sys, "meta_path", [finder for finder in sys.meta_path if "editable" not in repr(finder)])
    with pytest.raises(ConfigError, match=rf"{package}.*pip install 'coati\[demo\]'"):
        import_extra(f"{package}.submodule")


def test_a_missing_reward_package_is_found_before_the_work(monkeypatch):
    check_demo_extras()
    for name in [name for name in sys.modules if name.partition(".")[0] == "vaderSentiment"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(ConfigError, match="vaderSentiment"):
        check_demo_extras()


def test_other_import_failures_keep_their_own_message():
    with pytest.raises(ModuleNotFoundError, match=r"vaderSentiment\.nothing"):
        import_extra("vaderSentiment.nothing")


def test_the_lexicon_is_read_once():
    assert reward._analyzer() is reward._analyzer()
