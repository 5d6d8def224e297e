"""Fresh samples of a model: scored, compared with the initial model, and drawn apart from training."""

import json
from pathlib import Path

import pytest

from coati.cli.demo import demo_config
from coati.demo.base_model import pretrain
from coati.demo.grammar import PROMPTS


@pytest.fixture
def fresh_samples(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[3] / "benchmarks"))
    import fresh_samples

    return fresh_samples


def test_means_by_hand(fresh_samples):
    def sample(response, reward=0.0, kl=0.0):
        return fresh_samples.EvaluatedSample(prompt="the film", response=response, reward=reward, kl=kl)

    # rewards 1, 3 and 2; KL 0.5, 1 and 1.5; two texts among three, two sentences
    samples = (sample(" was good .", 1.0, 0.5), sample(" was", 3.0, 1.0), sample(" was good .", 2.0, 1.5))
    found = fresh_samples.Evaluation(samples).numbers
    assert found == {"reward": 2.0, "kl": 1.0, "distinct": pytest.approx(2 / 3), "grammatical": pytest.approx(2 / 3)}


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluation")
    for seed, name in enumerate(("initial", "trained")):
        pretrain(folder / name, seed=seed, steps=1, batch_size=2)
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    return demo_config(folder / "initial", seed=0, output=folder)


def test_as_many_samples_as_asked_for_each_with_its_text_and_score(config, fresh_samples):
    trained = str(config.output_folder / "trained")
    found = fresh_samples.evaluate(config, trained, num_samples=70)
    assert len(found.samples) == 70
    assert {one.prompt for one in found.samples} == set(PROMPTS)
    assert all(len(one.response.split()) <= 16 and -1 <= one.reward <= 1 for one in found.samples)
    assert found.numbers["distinct"] > 0.5
    assert found.numbers["kl"] != 0.0
    assert fresh_samples.evaluate(config, trained, num_samples=70) == found


def test_the_initial_model_has_no_distance_to_itself(config, fresh_samples):
    found = fresh_samples.evaluate(config, config.reference_path, num_samples=2)
    assert found.numbers["kl"] == pytest.approx(0.0, abs=1e-4)
