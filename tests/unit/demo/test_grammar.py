"""The film grammar: its sentences are recognised, others are not."""

import random
import runpy
import statistics
from pathlib import Path

import pytest

from coati.demo.grammar import GRAMMAR, PROMPTS, first_words, sample_sentence, vocabulary
from coati.demo.reward import film_sentiment

is_grammatical = runpy.run_path(str(Path(__file__).parents[3] / "benchmarks" / "sentences.py"))["is_grammatical"]


@pytest.fixture(scope="module")
def sentences():
    rng = random.Random(0)
    return [sample_sentence(rng) for _ in range(3000)]


def test_every_sampled_sentence_is_recognised(sentences):
    assert all(map(is_grammatical, sentences))
    assert is_grammatical(f"  {sentences[0].replace(' ', '   ')}\n")


def test_shuffled_sentences_are_rejected(sentences):
    rng = random.Random(1)
    shuffled = [" ".join(rng.sample(words := sentence.split(), len(words))) for sentence in sentences[:200]]
    assert sum(map(is_grammatical, shuffled)) <= 5  # a shuffled sentence may be grammatical again


@pytest.mark.parametrize(
    "text",
    [
        "",
        ".",
        "the film was good",  # no full stop
        "the film was good . .",
        "the film was good . the plot was bad .",
        "the film were good .",  # number agreement
        "the songs was good .",
        "the film was very very good .",
        "i thought the film .",
        "i loved the film and .",
        "the film was quixotic .",  # not a word of the language
        "The film was good .",  # the language is lower case
    ],
)
def test_near_misses_are_rejected(text):
    assert not is_grammatical(text)


def test_the_vocabulary_is_exactly_the_words_of_sentences(sentences):
    assert {word for sentence in sentences for word in sentence.split()} == set(vocabulary())
    assert {sentence.split()[0] for sentence in sentences} == first_words()
    assert not set(vocabulary()) & set(GRAMMAR)


def test_prompts_are_beginnings_of_sentences(sentences):
    rng, missing = random.Random(2), set(PROMPTS)
    for sentence in [*sentences, *(sample_sentence(rng) for _ in range(1000))]:
        missing = {prompt for prompt in missing if not sentence.startswith(f"{prompt} ")}
    assert not missing


def test_sentences_are_short_varied_and_slightly_positive(sentences):
    assert max(len(sentence.split()) for sentence in sentences) <= 20
    assert len(set(sentences)) / len(sentences) > 0.8
    assert 0.0 < statistics.mean(film_sentiment(sentences[:1000], [""] * 1000)) < 0.25
