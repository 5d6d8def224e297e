"""Rewards of the library that need packages, in their processes; then hostile completions for all of them."""

import math
import threading

import pytest
import torch

from coati.config import RewardSettings
from coati.rewards import PendingScores, RewardRequest, RewardScorer, build_reward
from coati.rewards.calling import call_function, load_reward_function
from coati.rewards.library import LIBRARY

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
