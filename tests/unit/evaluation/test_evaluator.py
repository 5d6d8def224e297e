"""Evaluating a model on a set: prompts, sampling and reward. Every score counts once, and no failure counts as 0."""

import logging
import shutil
import statistics

import pytest

from coati import build
from coati.errors import RewardError
from coati.evaluation.estimates import estimate, pass_at_k
from coati.evaluation.evaluator import evaluate_model

FOUR = {"samples_per_prompt": 4}


@pytest.fixture
def evaluate(config_of, words):
    def run(*sets, **sections):
        return evaluate_model(config_of(*sets, **sections), str(words / "model"))

    return run


def scores_by_prompt(found):
    scores = {}
    for sample in found.samples:
        scores.setdefault(sample["prompt_number"], []).append(sample["score"])
    return scores


def test_every_prompt_is_sampled_and_metrics_match_the_samples(evaluate):
    (found,) = evaluate({"rollout": FOUR, "pass_at": [1, 3], "reward": {"function": "rewards_of_evaluation:has_c"}})
    scores = scores_by_prompt(found)
    assert [len(own) for own in scores.values()] == [4] * 5
    assert {sample["prompt"] for sample in found.samples} == {"c", "d", "e f", "h", "a b c d"}
    assert all(sample["score"] == float("c" in sample["response"]) for sample in found.samples)
    assert found.estimates["avg@4"] == estimate([statistics.fmean(own) for own in scores.values()])
    assert found.estimates["pass@3"] == estimate([pass_at_k(4, int(sum(own)), 3) for own in scores.values()])
    assert set(found.estimates) == {"avg@4", "pass@1", "pass@3"}
    assert (found.record["prompts"], found.record["samples"], found.record["unscored"]) == (5, 20, 0)
    assert 0 < found.estimates["avg@4"].mean < 1, "otherwise the test shows nothing"


def test_samples_do_not_depend_on_the_batch_size(evaluate):
    together, apart = (evaluate({"rollout": {**FOUR, "prompts_per_batch": size}})[0] for size in (5, 2))
    assert together.samples == apart.samples
    assert together.estimates == apart.estimates


def test_draws_depend_on_the_seed_of_the_set_only(evaluate):
    first, again, other = (evaluate({"rollout": FOUR, "seed": seed})[0] for seed in (0, 0, 1))
    assert first.samples == again.samples != other.samples
    elsewhere = evaluate({"rollout": FOUR}, run={"seed": 7})[0]
    assert elsewhere.samples == first.samples, "the seed of the run does not matter"


def test_sampling_settings_of_a_set_override_those_of_the_run(evaluate):
    plain, greedy, short = evaluate(
        {"name": "plain", "rollout": FOUR},
        {"name": "greedy", "rollout": {**FOUR, "do_sample": False}},
        {"name": "short", "rollout": {**FOUR, "max_new_tokens": 1}},
    )
    for samples in scores_by_prompt(greedy).values():
        assert len(set(samples)) == 1
    assert len({sample["response"] for sample in plain.samples}) > len({s["response"] for s in greedy.samples})
    assert {sample["tokens"] for sample in short.samples} == {1}
    assert max(sample["tokens"] for sample in plain.samples) == 4


def test_columns_reach_the_reward_and_max_prompts_limits_a_set(evaluate):
    (found,) = evaluate({"max_prompts": 3, "rollout": FOUR, "reward": {"function": "rewards_of_evaluation:is_answer"}})
    answers = dict(zip(range(3), "abc", strict=True))
    assert len(found.samples) == 12
    assert all(one["score"] == float(answers[one["prompt_number"]] in one["response"]) for one in found.samples)


@pytest.mark.parametrize("reward", ["raises_on_g", "gives_g_none"])
def test_a_sample_without_a_score_is_left_out_and_reported_and_never_counts_as_0(evaluate, reward, caplog):
    with caplog.at_level(logging.ERROR):
        (found,) = evaluate({"rollout": FOUR, "reward": {"function": f"rewards_of_evaluation:{reward}"}})
    lost = [sample for sample in found.samples if "g" in sample["response"]]
    assert lost
    assert all(sample["score"] is None for sample in lost)
    assert all(bool(sample["error"]) == (reward == "raises_on_g") for sample in lost)
    kept = [[score for score in own if score is not None] for own in scores_by_prompt(found).values()]
    assert found.estimates["avg@4"].mean == pytest.approx(
        statistics.fmean(statistics.fmean(own) for own in kept if own)
    )
    assert len(found.values["pass@4"]) == sum(len(own) == 4 for own in kept) < 5
    assert found.record["unscored"] == len(lost)
    assert f"{len(lost)} of 20" in caplog.text


def test_samples_have_the_score_of_each_term(evaluate):
    terms = [{"function": f"rewards_of_evaluation:{name}"} for name in ("has_c", "gives_g_none")]
    (found,) = evaluate({"rollout": FOUR, "reward": {"terms": terms}})
    for sample in found.samples:
        has_c = float("c" in sample["response"])
        assert sample["terms"] == {"has_c": has_c, "gives_g_none": None if "g" in sample["response"] else has_c}


def test_a_model_has_the_version_of_the_run_that_saved_it(config_of, words, tmp_path):
    config = config_of({"max_prompts": 1})
    assert evaluate_model(config, str(words / "model"))[0].record["version"] == 0
    other = shutil.copytree(words / "model", tmp_path / "other")
    assert evaluate_model(config, str(other))[0].record["version"] is None
    checkpoint = other.rename(tmp_path / "version-20")
    assert evaluate_model(config, str(checkpoint))[0].record["version"] == 20


def test_sets_with_equal_rewards_share_a_scorer(evaluate, monkeypatch):
    made, make = [], build.make_scorer
    monkeypatch.setattr(build, "make_scorer", lambda config, *args: made.append(config.reward) or make(config, *args))
    own = {"function": "rewards_of_evaluation:has_c"}
    found = evaluate(*({"name": name, "reward": own} for name in ("a", "b")), {"name": "c"}, {"name": "d"})
    assert len(found) == 4
    assert [one.function for one in made] == ["rewards_of_evaluation:has_c", "rewards_of_evaluation:likes_c"]


def test_a_reward_that_never_works_is_an_error(evaluate):
    with pytest.raises(RewardError, match="no such column"):
        evaluate({"reward": {"function": "rewards_of_evaluation:always_raises"}})
