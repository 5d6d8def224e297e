"""`coati demo` as a user runs it. Long tests cover three seeds, two of them with --sync in this process."""

import json
from pathlib import Path

import pytest
from transformers import pipeline

from coati.cli import demo as command
from coati.config import load_config
from coati.evaluation.evaluator import evaluate_model
from coati.monitor import read_jsonl

SEEDS = (0, 1, 2)


@pytest.fixture(scope="module")
def demo(coati_command, tmp_path_factory):
    """The folder and the text of a demo that a person runs."""
    output = tmp_path_factory.mktemp("demo") / "out"
    finished = coati_command("demo", "--seed", SEEDS[0], "--output", output)
    assert finished.returncode == 0, finished.stderr + finished.stdout
    return output, finished.stdout


def check_learning(output):
    config = load_config(output / "config.toml")
    (untrained,), (found,) = (evaluate_model(config, str(output / model)) for model in ("base", "model"))
    before, after = (one.record[f"avg@{command.SAMPLES_PER_PROMPT}"] for one in (untrained, found))
    assert before <= 0.3
    assert after >= before + 0.3
    # Makers may write nothing with the weights of one version.
    kls = [row["kl/per_sample"] for row in read_jsonl(output / "metrics.jsonl") if "kl/per_sample" in row]
    assert kls[-1] < 8.0
    texts = [sample["prompt"] + sample["response"] for sample in found.samples[::4]]
    assert len(set(texts)) >= 0.9 * len(texts), "it does not write the same sentence again and again"
    return after


@pytest.mark.long
def test_it_learns_over_three_seeds(demo, tmp_path):
    scores = [check_learning(demo[0])]
    for seed in SEEDS[1:]:
        command.demo(seed=seed, output=tmp_path / str(seed), sync=True, verbose=False)
        scores.append(check_learning(tmp_path / str(seed)))
    assert sum(scores) / len(scores) >= 0.7


def test_the_demo_learns_and_leaves_what_it_promises(demo):
    output, text = demo
    check_learning(output)
    for promised in ("untrained model", "trained model", "Reward curve:", "report.html", "Try next", "version"):
        assert promised in text
    for noise in ("pass@", "difference", "unscored"):
        assert noise not in text
    assert "mean reward" in (output / "report.html").read_text()
    saved = load_config(output / "config.toml")
    assert Path(saved.model.path).is_absolute()  # a copy of the file works anywhere
    assert Path(saved.prompts.path).is_absolute()
    assert "80/80 (100%)" in text
    assert "version 80" in text.splitlines()[max(i for i, line in enumerate(text.splitlines()) if "80/80" in line)]
    metrics = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    rewards = [line["reward/mean"] for line in metrics if "reward/mean" in line]
    assert len(rewards) >= 10
    assert max(line.get("train/age_max", 0) for line in metrics) <= 1  # the demo's staleness bound
    generated = pipeline("text-generation", str(output / "model"))("the film", max_new_tokens=16)
    assert generated[0]["generated_text"].startswith("the film ")
