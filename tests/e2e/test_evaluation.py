"""Evaluation end to end: `[[eval]]` in a run on Ray, and `coati eval`."""

import json

import pytest
from fault_schedule import Fault, Schedule

from coati.monitor import read_jsonl

SETS = """
[[eval]]
name = "held-out"
prompts = {{ path = "{prompts}" }}
rollout = {{ samples_per_prompt = 2 }}
every = 2
best_by = "avg@2"
"""


@pytest.fixture
def evaluated_run(film_run, tmp_path):
    """Settings of a run with an evaluation set."""
    film_run.write_text(film_run.read_text().replace("        ", "") + SETS.format(prompts=tmp_path / "prompts.jsonl"))
    return film_run


def numbers(record):
    return {name: value for name, value in record.items() if "@" in name or name in ("samples", "response_length")}


@pytest.mark.usefixtures("forked_workers")
def test_a_run_whose_maker_dies_in_an_evaluation_finds_what_coati_eval_finds(evaluated_run, coati_here, tmp_path):
    out, schedule = tmp_path / "out", Schedule(tmp_path / "faults", [Fault("maker.evaluated", "kill")])
    finished = coati_here("train", evaluated_run, **schedule.environment)
    told = finished.stdout + finished.stderr
    assert finished.returncode == 0, told
    assert schedule.has_happened(0)
    again = coati_here("train", "--resume", out)
    assert again.returncode == 2
    assert "is complete" in again.stderr, "the final evaluation was written before the model"
    rows = read_jsonl(out / "evaluations.jsonl")
    assert [row["version"] for row in rows] == [0, 2, 3]
    assert str(out / "best") in finished.stdout
    assert "held-out avg@2" in finished.stdout, "progress shows it"
    audit = coati_here("audit", out)
    assert audit.returncode == 0, audit.stdout
    asked = coati_here("eval", out, "--output", tmp_path / "found.json", "--show", 1)
    assert asked.returncode == 0, asked.stdout + asked.stderr
    final, base = json.loads((tmp_path / "found.json").read_text())
    assert (numbers(rows[-1]), numbers(rows[0])) == (numbers(final), numbers(base))
    assert (final["version"], base["version"]) == (rows[-1]["version"], 0)
    for promised in ("avg@2", "pass@1", "difference", "held-out"):
        assert promised in asked.stdout
    best = json.loads((out / "best" / "evaluation.json").read_text())
    alone = coati_here("eval", out / "best", "--base", "none", "--output", tmp_path / "best.json")
    assert alone.returncode == 0, alone.stderr
    (found,) = json.loads((tmp_path / "best.json").read_text())
    assert (numbers(found), found["version"]) == (numbers(best), best["version"])
    assert best["avg@2"] == max(row["avg@2"] for row in rows)
    page = coati_here("report", out)
    assert page.returncode == 0, page.stderr
    assert "held-out avg@2" in page.stdout


def test_what_cannot_be_evaluated_is_one_clear_message(film_run, base_model, coati_here, tmp_path):
    for arguments, expected in (
        ((tmp_path / "nowhere",), "must be the folder of a model"),
        ((base_model,), "--config"),
        ((base_model, "--config", film_run), "has no [[eval]] set"),
    ):
        finished = coati_here("eval", *arguments)
        assert finished.returncode == 2
        assert expected in finished.stderr
        assert "Traceback" not in finished.stderr


@pytest.mark.long
@pytest.mark.usefixtures("forked_workers")
def test_two_makers_train_on_and_a_metric_that_does_not_improve_ends_the_run(evaluated_run, coati_here, tmp_path):
    (tmp_path / "film_rewards.py").write_text(
        (tmp_path / "film_rewards.py").read_text()
        + "\n\ndef same(completions):\n    return [0.5 for _ in completions]\n"
    )
    sets = evaluated_run.read_text() + 'reward = { function = "film_rewards:same" }\npatience = 2\n'
    evaluated_run.write_text(sets.replace("every = 2", "every = 1"))
    settings = ("topology.makers=2", "topology.max_staleness=1", "train.total_steps=400", "train.save_every=0")
    finished = coati_here("train", evaluated_run, *(part for one in settings for part in ("--set", one)))
    told = finished.stdout + finished.stderr
    assert finished.returncode == 0, told
    assert "Stopped early" in finished.stdout
    rows = read_jsonl(tmp_path / "out" / "evaluations.jsonl")
    assert [row["is_best"] for row in rows] == [True, False, False]
    assert rows[0]["version"] < rows[1]["version"] < rows[2]["version"]
    assert len(read_jsonl(tmp_path / "out" / "metrics.jsonl")) < 800
    assert (tmp_path / "out" / "model" / "config.json").is_file()
    assert list((tmp_path / "out" / "checkpoints").glob("version-*")), "from where it may be continued"
    assert coati_here("audit", tmp_path / "out").returncode == 0
