"""`coati demo` for three seeds: one as a person runs it, and two with --sync, in this process."""

import json

import pytest
from PIL import Image
from transformers import pipeline

from coati.cli.demo import run_demo

SEEDS = (0, 1, 2)


@pytest.fixture(scope="module")
def demos(coati_command, tmp_path_factory, base_model):
    outputs = [tmp_path_factory.mktemp("demo") / "out" for _ in SEEDS]
    finished = coati_command("demo", "--seed", SEEDS[0], "--output", outputs[0])
    assert finished.returncode == 0, finished.stderr + finished.stdout
    for seed, output in zip(SEEDS[1:], outputs[1:], strict=True):
        run_demo(seed=seed, output=output, sync=True, verbose=False)
    return outputs, finished.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_it_learns_over_three_seeds(demos):
    summaries = [json.loads((output / "summary.json").read_text()) for output in demos[0]]
    for summary in summaries:
        assert summary["before"]["reward"] <= 0.3
        assert summary["after"]["kl"] < 8.0
        assert summary["after"]["distinct"] >= 0.9
        assert summary["after"]["reward"] >= summary["before"]["reward"] + 0.3
    assert sum(summary["after"]["reward"] for summary in summaries) / len(summaries) >= 0.7


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_demo_leaves_what_it_promises(demos):
    (output, *_), text = demos
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
