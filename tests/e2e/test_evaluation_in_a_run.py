"""Evaluations in a synchronous run: results equal those of the saved models, and training does not change."""

import json

import pytest

import coati
from coati.evaluation.evaluator import evaluate_model
from coati.ledger.audit import audit_run
from coati.monitor import read_jsonl

pytestmark = pytest.mark.usefixtures("one_thread")

HELD_OUT = {"rollout": {"samples_per_prompt": 4}, "every": 2}


@pytest.fixture
def train(config_of, tmp_path):
    """Train synchronously; return the result and the rows of evaluations.jsonl."""

    def go(*sets, **sections):
        options = {name: sections.pop(name) for name in ("should_stop", "reward") if name in sections}
        result = coati.train(config_of(*sets, **sections), sync=True, **options)
        path = tmp_path / "out" / "evaluations.jsonl"
        return result, read_jsonl(path) if path.exists() else []

    return go


def numbers(record):
    """The part of a record that must not depend on where the evaluation is done."""
    return {name: value for name, value in record.items() if name not in ("seconds", "step", "time", "is_best")}


@pytest.mark.parametrize("sections", [{}, {"lora": {"rank": 2}}], ids=["all weights", "adapters"])
def test_a_run_and_its_saved_models_get_the_same_results(train, config_of, words, tmp_path, sections):
    result, rows = train(HELD_OUT | {"best_by": "avg@4"}, train={"actor_lr": 0.1}, **sections)
    assert [row["version"] for row in rows] == [0, 2, 4]
    config = config_of(HELD_OUT)
    base, final = (evaluate_model(config, str(path))[0] for path in (words / "model", result.model))
    assert numbers(rows[0]) == numbers(base.record)
    assert numbers(rows[2]) == numbers(final.record)
    assert numbers(base.record) != numbers(final.record), "otherwise the test shows nothing"
    lines = (tmp_path / "out/evaluations/held-out-4.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == final.samples
    best = json.loads((result.folder / "best" / "evaluation.json").read_text())
    assert best["avg@4"] == max(row["avg@4"] for row in rows)
    assert numbers(evaluate_model(config, str(result.folder / "best"))[0].record) == numbers(best)


def test_results_of_evaluations_are_metrics(train):
    result, rows = train(HELD_OUT, {**HELD_OUT, "name": "other", "before": False, "every": 0})
    written = [row for row in read_jsonl(result.folder / "metrics.jsonl") if "eval/held-out/avg@4" in row]
    first, _, last = [row for row in rows if row["name"] == "held-out"]
    for row, found in ((written[0], first), (written[-1], last)):
        for name in ("avg@4", "avg@4_low", "avg@4_high", "pass@4", "unscored", "version"):
            assert row[f"eval/held-out/{name}"] == found[name]
    assert [row["eval/held-out/version"] for row in written] == [0, 2, 4]
    (other,) = [row for row in rows if row["name"] == "other"]
    assert result.metrics["eval/other/pass@4"] == other["pass@4"]


def test_evaluations_do_not_change_training(train, tmp_path):
    weights = []
    for sets in ((), (HELD_OUT | {"every": 1, "best_by": "avg@4"},)):
        result, _ = train(*sets, run={"output": str(tmp_path / f"out-{len(sets)}")})
        weights.append((result.model / "model.safetensors").read_bytes())
        assert audit_run(result.folder).table()[-1] == ("all leased", "", 32, 32), (
            "samples of evaluations are not in the account"
        )
    assert weights[0] == weights[1]


def test_a_metric_that_does_not_improve_ends_the_run(train):
    reward = {"function": "rewards_of_evaluation:same_for_all"}
    never_better = HELD_OUT | {"every": 1, "best_by": "avg@4", "patience": 2, "reward": reward}
    result, rows = train(never_better, train={"total_steps": 9})
    assert [(row["version"], row["is_best"]) for row in rows] == [(0, True), (1, False), (2, False)]
    assert "avg@4" in result.stop_reason
    assert not result.was_stopped
    assert result.num_samples == 16
    assert (result.model / "config.json").is_file()
    assert (result.folder / "checkpoints" / "version-2" / "state.json").is_file()


def test_a_resumed_run_repeats_no_evaluation(train, tmp_path):
    sets = HELD_OUT | {"every": 1, "best_by": "avg@4"}
    whole, expected = train(sets, run={"output": str(tmp_path / "whole")})
    expected = read_jsonl(tmp_path / "whole" / "evaluations.jsonl")
    path = tmp_path / "out" / "evaluations.jsonl"
    stopped, rows = train(sets, should_stop=lambda: path.exists() and len(read_jsonl(path)) >= 3)
    assert stopped.was_stopped
    assert len(rows) == 3
    resumed = coati.train(resume=stopped.folder, sync=True)
    rows = read_jsonl(resumed.folder / "evaluations.jsonl")
    assert [numbers(row) for row in rows] == [numbers(row) for row in expected]
    assert [row["version"] for row in rows] == [0, 1, 2, 3, 4]
    assert (resumed.model / "model.safetensors").read_bytes() == (whole.model / "model.safetensors").read_bytes()


def test_a_function_passed_to_train_scores_the_sets_without_their_own_reward(train):
    def likes_d(completions):
        return [text.split().count("d") / 4 for text in completions]

    own = {**HELD_OUT, "name": "own", "reward": {"function": "rewards_of_evaluation:same_for_all"}}
    result, _ = train(HELD_OUT, own, reward=likes_d)
    for name, score in (("held-out", lambda text: text.split().count("d") / 4), ("own", lambda _: 0.5)):
        samples = read_jsonl(result.folder / "evaluations" / f"{name}-0.jsonl")
        assert all(sample["score"] == score(sample["response"]) for sample in samples)


def test_a_reward_that_fails_sometimes_does_not_end_the_run(train, caplog):
    result, rows = train(HELD_OUT | {"reward": {"function": "rewards_of_evaluation:raises_on_g"}})
    assert all(row["unscored"] > 0 and "avg@4" in row for row in rows)
    assert "have no score" in caplog.text + (result.folder / "warnings.log").read_text()
