import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

from coati.demo.grammar import GRAMMAR, PROMPTS, can_continue, is_grammatical, sample_sentence, vocabulary


def _sentences(count: int, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    return [sample_sentence(rng) for _ in range(count)]


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32))
def test_every_sampled_sentence_is_recognised(seed: int):
    sentence = sample_sentence(random.Random(seed))
    assert is_grammatical(sentence)
    assert is_grammatical(f"  {sentence.replace(' ', '   ')}\n")


def test_sampling_is_a_function_of_the_rng():
    assert _sentences(20, seed=3) == _sentences(20, seed=3)
    assert _sentences(20, seed=3) != _sentences(20, seed=4)


def test_shuffled_sentences_are_rejected():
    rng = random.Random(1)
    rejected = 0
    for sentence in _sentences(200):
        words = sentence.split()
        rng.shuffle(words)
        # A shuffle can land on a sentence again; what is accepted must at least end like one.
        rejected += not is_grammatical(" ".join(words))
    assert rejected >= 195


@pytest.mark.parametrize(
    "text",
    [
        "",
        ".",
        "the film was good",  # no full stop
        "the film was good . .",  # something after the end
        "the film was good . the plot was bad .",  # two sentences
        "the film were good .",  # number
        "the songs was good .",
        "the film was very very good .",
        "i thought the film .",
        "i loved the film and .",
        "the film was and the plot was good .",
        "the film was quixotic .",  # not a word of the language
        "The film was good .",  # the language is lower case
    ],
)
def test_near_misses_are_rejected(text: str):
    assert not is_grammatical(text)


@pytest.mark.parametrize(
    "text",
    [
        "the film was good .",
        "the songs were not bad .",
        "i thought the weak plot seemed extremely dull but we loved the clever characters .",
    ],
)
def test_sentences_written_by_hand_are_accepted(text: str):
    assert is_grammatical(text)


def test_vocabulary_is_exactly_what_sentences_use():
    used = {word for sentence in _sentences(3000) for word in sentence.split()}
    assert used == set(vocabulary())
    assert vocabulary() == sorted(set(vocabulary()))
    assert 56 <= len(vocabulary()) <= 70
    assert not used & set(GRAMMAR)


def test_vocabulary_is_a_fresh_list():
    vocabulary().clear()
    assert vocabulary()


def test_prompts_open_sentences():
    assert 8 <= len(set(PROMPTS)) == len(PROMPTS) <= 12
    for prompt in PROMPTS:
        assert 1 <= len(prompt.split()) <= 4
        assert can_continue(prompt)


def test_can_continue_is_about_proper_prefixes():
    sentence = "i thought the plot was not bad and the cast was good ."
    words = sentence.split()
    assert all(can_continue(" ".join(words[:count])) for count in range(len(words)))
    assert not can_continue(sentence)
    assert not can_continue("the songs was")


def test_sentences_are_short_varied_and_only_slightly_kind():
    sentences = _sentences(2000)
    lengths = [len(sentence.split()) for sentence in sentences]
    assert sum(length <= 15 for length in lengths) / len(lengths) > 0.9
    assert max(lengths) <= 20
    assert len(set(sentences)) / len(sentences) > 0.85
    analyzer = SentimentIntensityAnalyzer()
    assert 0.0 < statistics.mean(analyzer.polarity_scores(s)["compound"] for s in sentences) < 0.25
