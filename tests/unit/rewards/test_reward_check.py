"""`coati reward check`: rows in, scores, terms, details and failures out, without a model."""

import json
import sys

import pytest
import tiny
from typer.testing import CliRunner

from coati.cli.main import app
from coati.errors import ConfigError, DataError, RewardError

FUNCTIONS = """
def words(completions):
    return [{"score": len(text.split()), "first": text[:1]} for text in completions]


def picky(completions, answer):
    pairs = zip(completions, answer)
    return [ValueError("too odd") if right == "odd" else float(right in text) for text, right in pairs]


def silent(completions):
    return [None] * len(completions)
"""


@pytest.fixture
def check(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("COLUMNS", "250")
    (tmp_path / "checked_rewards.py").write_text(FUNCTIONS)

    def run(source, rows, *options):
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        found = CliRunner().invoke(app, ["reward", "check", source, "--rows", "rows.jsonl", *options])
        if found.exception is not None and not isinstance(found.exception, SystemExit):
            raise found.exception
        return found.exit_code, found.output

    yield run
    sys.modules.pop("checked_rewards", None)


def row(completion, answer="no", **more):
    return {"prompt": "why?", "completion": completion, "answer": answer, **more}


def test_a_custom_function(check):
    code, text = check("checked_rewards:words", [row("so it is"), row("")])
    assert code == 0
    assert "score: 2 of 2 rows; mean 1.5, lowest 0, highest 3" in text
    assert '{"words": {"first": "s"}}' in text
    assert "rows.jsonl:2" in text


def test_a_library_reward_with_options_and_columns(check):
    rows = [row("\\boxed{4}", solution="4"), row("five", solution="4")]
    code, text = check("regex", rows, "--set", "reward.options.pattern='[0-9]'")
    assert (code, "mean 0.5" in text) == (0, True)
    with pytest.raises(ConfigError, match=r"option 'pattern': .* valid string, got 1"):
        check("regex", rows, "--set", "reward.options.pattern=1")
    code, text = check("checked_rewards:picky", [row("yes", solution="yes")], "--set", "reward.columns.answer=solution")
    assert "mean 1" in text


def test_the_terms_of_a_run_on_samples_of_a_run(check, tmp_path):
    terms = (
        '{ function = "checked_rewards:words", weight = 0.5 }, { function = "checked_rewards:picky", name = "right" }'
    )
    (tmp_path / "run.toml").write_text(
        f'model.path = "no/model"\nprompts.path = "prompts.jsonl"\nreward.terms = [{terms}]\n'
    )
    sample = {"version": 3, "prompt": "why?", "response": "no way", "reward": 9.0, "columns": {"answer": "no"}}
    code, text = check("run.toml", [sample])
    assert code == 0
    assert "score: 1 of 1 row; mean 2," in text
    assert "words: 1 of 1 row; mean 2," in text
    assert "right: 1 of 1 row; mean 1," in text


def test_failures_come_first_are_counted_by_cause_and_exit_with_1(check):
    rows = [row("a no"), row("b", "odd"), row("c", "odd")]
    code, text = check("checked_rewards:picky", rows, "--show", "2", "--set", "reward.retries=2")
    assert code == 1
    assert text.index("rows.jsonl:2") < text.index("rows.jsonl:3")
    assert "rows.jsonl:1" not in text
    assert "failed on 2 rows: Reward function 'picky' raised ValueError" in text
    assert "score: 1 of 3 rows; mean 1" in text
    assert "2 retries" in text
    code, text = check("checked_rewards:picky", [row("b", "odd")])  # and if it has never scored one
    assert code == 1
    assert "score: 0 of 1 row\n" in text


def test_token_lengths_need_a_local_tokenizer(check, tmp_path):
    tiny.save_words(tmp_path)
    options = ("--set", "reward.options.maximum=2")
    code, text = check("length", [row("a b"), row("a b c")], *options, "--set", "model.path=model")
    assert (code, "mean 0.5" in text) == (0, True)
    with pytest.raises(RewardError, match=r"completion_ids.*model\.path"):
        check("length", [row("a b")], *options)


def test_missing_scores_and_failures_look_different_and_lines_do_not_wrap(check, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    terms = '{ function = "checked_rewards:picky" }, { function = "checked_rewards:silent" }'
    (tmp_path / "run.toml").write_text(
        f'model.path = "no/model"\nprompts.path = "prompts.jsonl"\nreward.terms = [{terms}]\n'
    )
    code, text = check("run.toml", [row("b", "odd"), row("no")] * 6)
    assert code == 1
    assert "rows.jsonl:11: score failed, picky failed, silent none" in text
    assert "rows.jsonl:12: score none, picky 1, silent none" in text
    assert "6 rows (None" in text


def test_rows_and_rewards_that_cannot_be_checked(check):
    with pytest.raises(DataError, match="completion or response"):
        check("checked_rewards:words", [{"prompt": "why?", "answer": "x"}])
    with pytest.raises(ConfigError, match="reward model"):
        check("checked_rewards:words", [row("a")], "--set", "reward.function=", "--set", "reward.model=rm")
    with pytest.raises(ConfigError, match="no_such"):
        check("no_such:function", [row("a")])
