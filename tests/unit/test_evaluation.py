"""Fresh samples of a model: scored, compared with the initial model, and drawn apart from training."""

import math
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from coati import assembly
from coati.evaluation import EvaluatedSample, Evaluation, evaluate


def sample(response, reward=0.0, kl=0.0):
    return EvaluatedSample(prompt="p", response=response, reward=reward, kl=kl)


def test_means_by_hand():
    # rewards 1 and 3, one without score; KL 0.5, 1 and 1.5; two texts among three
    samples = (sample("a", 1.0, 0.5), sample("b", 3.0, 1.0), sample("a", math.nan, 1.5))
    found = Evaluation(samples=samples)
    assert (found.reward, found.kl) == (2.0, 1.0)
    assert found.distinct_fraction == pytest.approx(2 / 3)
    assert samples[0].text == "p a"
    assert math.isnan(Evaluation(samples=samples[2:]).reward)


class Numbers:
    """A tokenizer that writes numbers."""

    def decode(self, ids, skip_special_tokens):
        return " ".join(map(str, ids))


class FakeScorer:
    """Pays by length."""

    tokenizer = Numbers()

    def __call__(self, sequences, attention_mask, action_mask, columns):
        return action_mask.sum(dim=1).float()


@pytest.fixture
def config(tmp_path, monkeypatch):
    """A run of two prompts with two samples each, on a tiny saved model and on another initial one."""
    torch.set_num_threads(1)
    for seed, name in enumerate(("initial", "trained")):
        torch.manual_seed(seed)
        sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 11}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.5}
        LlamaForCausalLM(LlamaConfig(**sizes, **heads, eos_token_id=2, bos_token_id=None)).save_pretrained(
            tmp_path / name
        )
    prompts = {
        "input_ids": torch.tensor([[0, 3], [0, 3], [4, 5], [4, 5]]),
        "attention_mask": [[0, 1]] * 2 + [[1, 1]] * 2,
    }
    monkeypatch.setattr(assembly, "make_scorer", lambda config: FakeScorer())
    monkeypatch.setattr(assembly, "generate_options", lambda config: {"temperature": 0.9})
    monkeypatch.setattr(assembly, "make_prompts", lambda config: [prompts] * 10)
    return SimpleNamespace(
        reference_path=str(tmp_path / "initial"),
        trained=str(tmp_path / "trained"),
        rollout=SimpleNamespace(engine="native", prompts_per_batch=2, samples_per_prompt=2, max_new_tokens=5),
        run=SimpleNamespace(seed=0),
    )


def test_as_many_samples_as_asked_for_each_with_its_text_and_score(config):
    found = evaluate(config, config.trained, num_samples=6)
    assert [one.prompt for one in found.samples] == ["3", "3", "4 5", "4 5", "3", "3"]
    assert all(one.reward == len(one.response.split()) <= 5 for one in found.samples)
    assert found.distinct_fraction > 0.5  # the second batch has ids, and so draws, of its own
    assert found.kl != 0.0
    assert evaluate(config, config.trained, num_samples=6) == found


def test_the_initial_model_has_no_distance_to_itself(config):
    assert evaluate(config, config.reference_path, num_samples=2).kl == 0.0
