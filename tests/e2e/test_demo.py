"""`coati demo`, as a person runs it, for three seeds: one through Ray, two in one process."""

import json

import pytest
from PIL import Image
from transformers import pipeline

OPTIONS = {0: (), 1: ("--sync",), 2: ("--sync",)}


@pytest.fixture(scope="module")
def demos(coati_command, tmp_path_factory, base_model):
    found = {}
    for seed in OPTIONS:
        output = tmp_path_factory.mktemp("demo") / "out"
        finished = coati_command("demo", "--seed", seed, "--output", output, *OPTIONS[seed])
        assert finished.returncode == 0, finished.stderr + finished.stdout
        found[seed] = (output, finished.stdout)
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_it_learns_over_three_seeds(demos):
    summaries = [json.loads((output / "summary.json").read_text()) for output, _ in demos.values()]
    for summary in summaries:
        assert summary["before"]["reward"] <= 0.3
        assert summary["after"]["kl"] < 8.0
        assert summary["after"]["distinct"] >= 0.9
        assert summary["after"]["reward"] >= summary["before"]["reward"] + 0.3
    assert sum(summary["after"]["reward"] for summary in summaries) / len(summaries) >= 0.7


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_demo_leaves_what_it_promises(demos):
    output, text = demos[0]
    for promised in ("Before", "After", "mean reward", "Try next", "version"):
        assert promised in text
    with Image.open(output / "reward.png") as picture:
        assert picture.format == "PNG"
        assert min(picture.size) > 300
    metrics = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    rewards = [line["reward/mean"] for line in metrics if "reward/mean" in line]
    assert len(rewards) >= 10
    assert max(line.get("train/age_max", 0) for line in metrics) <= 1  # the demo's staleness bound
    generated = pipeline("text-generation", str(output / "model"))("the film", max_new_tokens=16)
    assert generated[0]["generated_text"].startswith("the film ")
