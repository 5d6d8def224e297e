"""The library of rewards, with the real packages: small cases by hand, then hostile completions."""

import contextlib
import math
import sys
import threading

import pytest
import torch

from coati.config import RewardSettings
from coati.errors import ConfigError
from coati.rewards import PendingScores, RewardRequest, RewardScorer, build_reward
from coati.rewards.calling import Verdict, call_function, load_reward_function
from coati.rewards.library import LIBRARY, isolation_of, verifiers

PATIENT = {"seconds": 60.0}  # far more than ordinary completions take
HOSTILE = {
    "empty": "",
    "spaces": " \n\t" * 1000,
    "huge": "word " * 400_000,
    "one line": "x" * 2_000_000,
    "nested": "[" * 200_000,
    "tags": "<answer>" * 50_000,
    "unicode": "\ud800\x00\u202e\U0001f4a9" * 100,
    "numbers": "NaN, -Infinity, 1e999, " + "9" * 50_000,
    "latex": "$" + "\\frac{" * 5000 + "1" + "}{2}" * 5000 + "$",
    "power": "\\boxed{9^{9^{9^{9}}}}",
    "fence": "```" * 10_001,
}


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


def request_of(completions, **columns):
    size = len(completions)
    ones = torch.ones(size, 3, dtype=torch.long)
    return RewardRequest(
        prompts=["what?"] * size,
        completions=list(completions),
        columns={name: values if isinstance(values, list) else [values] * size for name, values in columns.items()},
        sequences=ones,
        attention_mask=ones,
        action_mask=ones[:, 1:].bool(),
    )


@pytest.fixture(scope="module")
def built():
    """Build rewards as a run does; child processes are kept, because they are slow to start."""
    made = {}

    def build(name, **options):
        key = name, str(options)
        if key not in made:
            made[key] = build_reward(RewardSettings(function=name, options=options), load_model=None)
        return made[key]

    yield build
    for reward in made.values():
        if reward._process is not None:
            reward._process.kill()


def run_scorer(reward, completions, **columns):
    scorer = RewardScorer(reward, None, max_quarantined=len(completions))
    scorer.working.add(reward.name)
    found = PendingScores(scorer, request_of(completions, **columns), torch.device("cpu"))
    return found().tolist(), found


def test_equal_expressions_are_equal_answers(built):
    pytest.importorskip("math_verify")
    cases = [
        ("so the answer is $\\frac{1}{2}$", "0.5", 1.0),
        ("\\boxed{2x + x}", "\\frac{6x}{2}", 1.0),
        ("first 3, no: \\boxed{4}", 4, 1.0),
        ("\\boxed{5}", "4", 0.0),
        ("I do not know", "4", 0.0),
        ("$x^2 + 2x + 1$", "(x+1)^2", 1.0),  # an answer without LaTeX delimiters
        ("\\boxed{[0,1)}", "[0,1)", 1.0),
        ("", "4", 0.0),
    ]
    texts, answers, expected = map(list, zip(*cases, strict=True))
    values, found = run_scorer(built("math-verify", **PATIENT), texts, answer=answers)
    assert values == expected
    assert found.remarks()[3]["details"]["math-verify"]["found"] == "5"
    assert not found.failures


def test_an_unreadable_answer_is_a_failure_and_not_a_wrong_completion(built):
    pytest.importorskip("math_verify")
    values, found = run_scorer(built("math-verify", **PATIENT), ["\\boxed{1}", "\\boxed{1}"], answer=["", "1"])
    assert values[1] == 1.0
    assert "cannot read the answer ''" in found.failures[0]
    _, found = run_scorer(built("math-verify", **PATIENT), ["yes"], answer=["yes"])
    assert "cannot read the answer 'yes'" in found.failures[0]


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


def test_math_works_on_a_thread_too():
    pytest.importorskip("math_verify")
    function, found = load_reward_function("math-verify"), []
    columns = {"completions": ["\\boxed{7}"], "answer": ["7"], "timeout_seconds": 60.0}
    thread = threading.Thread(target=lambda: found.append(call_function(function, columns, 1)))
    thread.start()
    thread.join(120)
    assert found[0][0].score == 1.0


def test_reasoning_gym_entries_are_scored_by_their_tasks(built):
    gym = pytest.importorskip("reasoning_gym")
    entries = [
        *gym.create_dataset("leg_counting", size=2, seed=1),
        *gym.create_dataset("chain_sum", size=2, seed=1),
    ]
    columns = {"answer": [entry["answer"] for entry in entries], "metadata": [entry["metadata"] for entry in entries]}
    right = [f"<think>hm</think><answer> {entry['answer']} </answer>" for entry in entries]
    reward = built("reasoning-gym", **PATIENT)
    values, found = run_scorer(reward, right, **columns)
    assert values == [1.0] * 4
    assert found.remarks()[2]["details"]["reasoning-gym"] == {"found": entries[2]["answer"]}
    assert run_scorer(reward, ["<answer>no</answer>"] * 4, **columns)[0] != values
    assert run_scorer(reward, [entry["answer"] for entry in entries], **columns)[0] == [0.0] * 4  # no tags
    _, found = run_scorer(reward, ["<answer>1</answer>"], answer=["1"], metadata=['{"source_dataset": "no such task"}'])
    assert "no such task" in found.failures[0]


SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"pattern": "^(a+)+$"}},
    "required": ["a"],
}


def test_json_is_checked_against_a_schema(built):
    texts = [
        '{"a": 1}',
        'Sure:\n```json\n{"a": 2}\n```\nDone.',
        '{"a": 3, "b": "```a```"}',
        '{"a": "1"}',
        '{"a": NaN}',
        "[1]",
        "a: 1",
    ]
    values, found = run_scorer(built("json-schema", schema=SCHEMA, **PATIENT), texts)
    assert values == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert found.remarks()[3]["details"]["json-schema"]["fault"].startswith("$.a: ")
    assert not found.failures
    ours = load_reward_function("json-schema")
    rows = {"completions": ["1", "1"], "schema": [{"type": "integer"}, '{"type": "string"}'], "timeout_seconds": 60.0}
    assert [verdict.score for verdict in call_function(ours, rows, 2)] == [1.0, 0.0]


def test_a_schema_pattern_that_takes_too_long_is_a_failure_of_that_sample(built):
    slow = '{"a": 1, "b": "' + "a" * 60 + '!"}'
    values, found = run_scorer(built("json-schema", schema=SCHEMA, seconds=0.3), [slow, '{"a": 1}'])
    assert "took more than 0.3 s" in found.failures[0]
    assert values[1] == 1.0 or "took more than 0.3 s" in found.failures[1]


def test_a_remote_schema_is_not_fetched(built):
    ours = load_reward_function("json-schema")
    rows = {"completions": ["1"], "schema": [{"$ref": "http://127.0.0.1:9/schema.json"}], "timeout_seconds": 60.0}
    assert "Unresolvable" in call_function(ours, rows, 1)[0].error


COLUMNS = {
    "math-verify": {"answer": "1"},
    "reasoning-gym": {"answer": "1", "metadata": {"source_dataset": "leg_counting"}},
}
OPTIONS = {
    "math-verify": {"seconds": 0.3},
    "reasoning-gym": PATIENT,  # nothing here keeps it busy, and its process takes seconds to start
    "regex": {"pattern": r"(\w+\s?)+$", "seconds": 0.1},
    "length": {"maximum": 10},
    "overlong": {"max_tokens": 10, "buffer_tokens": 5},
    "json-schema": {"schema": SCHEMA, "seconds": 0.3},
}


@pytest.mark.parametrize(
    "name", [name for name in LIBRARY if name not in ("http", "judge", "teacher")]
)  # see test_remote.py
def test_hostile_completions_get_a_score_or_fail_alone(built, name):
    if name in COLUMNS:
        pytest.importorskip(name.replace("-", "_"))
    reward = built(name, **OPTIONS.get(name, {}))
    scorer = RewardScorer(reward, None, max_quarantined=1)
    scorer.working.add(reward.name)
    texts = [*HOSTILE.values(), "1"]
    pending = PendingScores(scorer, request_of(texts, **COLUMNS.get(name, {})), torch.device("cpu"))
    values = pending().tolist()
    for row, value in enumerate(values):
        assert math.isfinite(value) != (row in pending.failures), list(HOSTILE)[row]
    assert all("took more than" in error for error in pending.failures.values()), pending.failures
    assert not pending.failures or name in OPTIONS
    after = (run_scorer(reward, ["1"], **COLUMNS.get(name, {})) for _ in range(10))
    assert any(not found.failures and math.isfinite(values[0]) for values, found in after)  # this machine may be slow


def test_verifiers_run_in_a_process_and_clients_on_a_thread():
    assert {name for name in LIBRARY if isolation_of(name, "thread") == "process"} == {
        "math-verify",
        "reasoning-gym",
        "json-schema",
    }
    assert {name for name in LIBRARY if isolation_of(name, "process") == "thread"} == {"http", "judge", "teacher"}
