"""The library of rewards: small cases by hand."""

import contextlib
import math
import sys

import pytest

from coati.errors import ConfigError
from coati.rewards.calling import Verdict, call_function, load_reward_function
from coati.rewards.library import LIBRARY, isolation_of, verifiers


def scores(name, completions, options=None, **offered):
    verdicts = call_function(
        load_reward_function(name, options=options), {"completions": completions, **offered}, len(completions)
    )
    assert not [verdict.error for verdict in verdicts if verdict.error]
    return [verdict.score for verdict in verdicts]


def test_a_pattern_matches_a_part_or_the_whole_text():
    texts = ["the answer is 42.", "42", "forty-two", ""]
    assert scores("regex", texts, {"pattern": r"\d+"}) == [1.0, 1.0, 0.0, 0.0]
    assert scores("regex", texts, {"pattern": r"\d+", "whole": True}) == [0.0, 1.0, 0.0, 0.0]


def test_a_pattern_that_takes_too_long_is_a_failure_of_that_sample():
    function = load_reward_function("regex", options={"pattern": "(a|aa)+$", "seconds": 0.2})
    slow, fine = call_function(function, {"completions": ["a" * 100 + "!", "aaa"]}, 2)
    assert math.isnan(slow.score)
    assert "took more than 0.2 s" in slow.error
    assert fine.score == 1.0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>a</think><answer>b</answer>", 1.0),
        ("\n<think>\n</think>\n\n<answer></answer> ", 1.0),
        ("<answer>b</answer><think>a</think>", 0.0),
        ("<think>a</think><answer>b", 0.0),
        ("so <think>a</think><answer>b</answer>", 0.0),
        ("<think>a</think> so <answer>b</answer>", 0.0),
        ("<think>a</think><answer>b</answer> so", 0.0),
        ("<think><think>a</think></think><answer>b</answer>", 0.0),
        ("<think>a<answer>b</think></answer>", 0.0),
        ("", 0.0),
    ],
)
def test_tags_must_be_in_order_once_each_and_enclose_all_text(text, expected):
    assert scores("format", [text]) == [expected]


def test_custom_tags_and_a_prefix_in_the_prompt():
    assert scores("format", ["a</why>", "<why>a</why>"], {"tags": ["why"], "prefix": "<why>"}) == [1.0, 0.0]


def test_lengths_by_hand():
    # 1 from 4 to 10 words, and a quarter less for each word outside
    options = {"minimum": 4, "maximum": 10, "margin": 4, "unit": "words"}
    assert scores("length", ["w " * count for count in (0, 1, 2, 4, 10, 12, 14, 99)], options) == [
        *(0.0, 0.25, 0.5, 1.0),
        *(1.0, 0.5, 0.0, 0.0),
    ]
    assert scores("length", ["äöü", "äöü!"], {"maximum": 3, "unit": "characters"}) == [1.0, 0.0]
    assert scores("length", ["", ""], {"maximum": 2}, completion_ids=[[5, 6], [5, 6, 7]]) == [1.0, 0.0]


def test_the_overlong_penalty_by_hand():
    # DAPO, L_max = 10 and L_cache = 4: (6 - length) / 4 between 6 and 10 tokens
    ids = [[0] * count for count in (0, 6, 7, 8, 10, 11, 1000)]
    found = scores("overlong", [""] * 7, {"max_tokens": 10, "buffer_tokens": 4}, completion_ids=ids)
    assert found == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0, -1.0]


def test_repetition_by_hand():
    # pairs of "a b a b a b": ab ba ab ba ab, 2 distinct of 5
    found = scores("repetition", ["", "a", "a b c d", "a b a b a b", "a a a a"], {"size": 2})
    assert found == pytest.approx([0.0, 0.0, 0.0, 2 / 5 - 1, 1 / 3 - 1])
    assert scores("repetition", ["哈哈哈哈"], {"size": 1, "unit": "characters"}) == [-0.75]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("regex", {}, "missing a required argument: 'pattern'"),
        ("regex", {"pattern": "("}, "valid pattern"),
        ("regex", {"patern": "x", "pattern": "x"}, "unexpected keyword argument 'patern'.*options are pattern, whole"),
        ("regex", {"pattern": 1}, "option 'pattern': Input should be a valid string, got 1"),
        ("repetition", {"size": "4"}, "option 'size': Input should be a valid integer, got '4'"),
        ("format", {"tags": "think"}, "option 'tags': 'str' instances are not allowed"),
        ("format", {"tags": []}, "at least one tag"),
        ("length", {"maximum": 1, "minimum": 2}, "minimum <= maximum"),
        (
            "length",
            {"maximum": 1, "unit": "bytes"},
            "option 'unit': Input should be 'tokens', 'words' or 'characters', got 'bytes'",
        ),
        ("overlong", {"max_tokens": 4, "buffer_tokens": 5}, "buffer_tokens <= max_tokens"),
        ("repetition", {"size": 0}, "size >= 1"),
        ("json-schema", {"schema": {"type": "no such type"}}, "valid schema"),
    ],
)
def test_wrong_options(name, options, message):
    with pytest.raises(ConfigError, match=message):
        load_reward_function(name, options=options)


@pytest.mark.parametrize(("name", "extra"), [("math-verify", "rewards"), ("reasoning-gym", "reasoning")])
def test_the_error_for_a_missing_package_names_the_extra(monkeypatch, name, extra):
    monkeypatch.setitem(sys.modules, name.replace("-", "_"), None)
    with pytest.raises(ConfigError, match=rf"{name.replace('-', '_')} is not installed.*'\.\[{extra}\]'"):
        load_reward_function(name)


def test_columns_do_not_override_options():
    """A column with the name of an option."""
    columns = {"pattern": ["b"], "seconds": [0], "completions": ["a"]}
    assert call_function(load_reward_function("regex", options={"pattern": "a"}), columns, 1)[0].score == 1.0


def test_running_out_of_memory_is_a_failure_even_if_the_package_catches_it():
    def careless(completion):
        with contextlib.suppress(Exception):
            raise MemoryError
        return Verdict(0.0)

    failed, sound = verifiers._each(
        lambda text: careless(text) if text == "huge" else Verdict(0.0), 60.0, 600.0, ["huge", "small"]
    )
    assert "MemoryError" in failed.error
    assert sound == Verdict(0.0)


def test_verifiers_run_in_a_process_and_clients_on_a_thread():
    assert {name for name in LIBRARY if isolation_of(name, "thread") == "process"} == {
        "math-verify",
        "reasoning-gym",
        "json-schema",
    }
    assert {name for name in LIBRARY if isolation_of(name, "process") == "thread"} == {"http", "judge", "teacher"}
