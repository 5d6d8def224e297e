"""The examples in docs/evaluation.md run."""

import re
import shutil
import tomllib
from pathlib import Path

import pytest
from rich.console import Console

from coati.cli.eval import show_evaluation
from coati.config import build_config, dump_config, load_config
from coati.evaluation.estimates import paired_difference
from coati.evaluation.evaluator import Evaluation

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "evaluation.md").read_text(encoding="utf-8")


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_an_interval_stays_on_one_line_of_80_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    counts = {"prompts": 60, "samples": 60, "response_length": 123.4, "cut_fraction": 0.0123, "unscored": 0}
    one, other = (
        Evaluation({"name": "set", **counts}, [], {"avg@1": {number: high * (number % 2) for number in range(60)}})
        for high in (0.2, 0.9)
    )
    show_evaluation(Console(), {"/a/long/path/to/runs/film/model": one, "runs/demo/base": other}, 0)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "avg@1" in line]
    difference = paired_difference(one.values["avg@1"], other.values["avg@1"])
    assert line.split("   ")[-3:] == [str(one.estimates["avg@1"]), str(other.estimates["avg@1"]), str(difference)]
    assert len(line) <= 80


def test_the_settings_are_valid():
    (text,) = blocks("toml")
    run = {"model": {"path": "m"}, "prompts": {"path": "p.jsonl"}, "reward": {"function": "rewards:f"}}
    (one,) = build_config({**run, **tomllib.loads(text)}).eval
    assert (one.patience, one.rollout.samples_per_prompt, one.best_by) == (5, 8, "avg@8")


def test_the_program_runs(config_of, words, tmp_path, monkeypatch, capsys):
    config = config_of({"rollout": {"samples_per_prompt": 4}})
    (tmp_path / "run.toml").write_text(dump_config(config))
    shutil.copytree(words / "model", tmp_path / "runs" / "film" / "model")
    monkeypatch.chdir(tmp_path)
    (program,) = blocks("python")
    exec(compile(program, "docs/evaluation.md", "exec"), {})
    estimate, difference = re.findall(r"-?\d\.\d{3} \[-?\d\.\d{3}, -?\d\.\d{3}\]", capsys.readouterr().out)
    assert estimate.startswith("0.")
    assert difference == "0.000 [-0.606, 0.606]", "both are the same model, on 5 prompts"


def test_the_example_evaluates_prompts_that_it_does_not_train_on(monkeypatch):
    monkeypatch.chdir(ROOT)
    config = load_config(Path("examples/film/run.toml"))
    trained, held_out = (
        set(Path(one.path).read_text().splitlines()) for one in (config.prompts, config.eval[0].prompts)
    )
    assert trained.isdisjoint(held_out)
    assert len(held_out) == 8


@pytest.mark.parametrize(
    "command", [line.partition("#")[0].split() for block in blocks("bash") for line in block.splitlines()]
)
def test_the_options_of_commands_exist(command):
    from typer.testing import CliRunner

    from coati.cli.main import app

    assert command[:2] == ["coati", "eval"]
    output = CliRunner().invoke(app, ["eval", "--help"], env={"COLUMNS": "200"}).output
    assert all(word in output for word in command[2:] if word.startswith("--"))
