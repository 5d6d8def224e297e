"""`[[eval]]` in a settings file: what a set inherits from the run, and what is rejected."""

import pytest

from coati import entry
from coati.config import build_config, dump_config, load_config, plan_lines
from coati.errors import ConfigError

RUN = {
    "model": {"path": "m"},
    "prompts": {"path": "train.jsonl"},
    "reward": {"function": "rewards:f", "search_paths": ["/here"]},
    "rollout": {"samples_per_prompt": 4, "max_new_tokens": 9},
}


def settings(**one):
    held_out = {"name": "held-out", "prompts": {"path": "test.jsonl"}}
    return build_config({**RUN, "eval": [held_out | one]})


def test_a_set_inherits_settings_from_the_run():
    (one,) = settings(rollout={"temperature": 0.6}).eval
    assert (one.rollout.temperature, one.rollout.max_new_tokens, one.rollout.samples_per_prompt) == (0.6, 9, 4)
    assert one.reward.function == "rewards:f"
    assert one.metrics == ["avg@4", "pass@1", "pass@4"]
    (own,) = settings(reward={"function": "rewards:exact"}).eval
    assert (own.reward.function, list(own.reward.search_paths)) == ("rewards:exact", ["/here"])


@pytest.mark.parametrize("is_own", [False, True])
def test_a_reward_passed_to_train_replaces_that_of_sets_without_their_own(is_own):
    own = {"reward": {"function": "rewards:exact"}} if is_own else {}
    config = entry.choose_settings(settings(**own), reward=lambda completions: [0.0] * len(completions))
    assert (config.eval[0].reward == config.reward) == (not is_own)


def test_dumped_settings_load_as_the_same(tmp_path):
    config = settings(rollout={"top_p": 0.9}, every=5, best_by="pass@4", patience=3, pass_at=[2, 4])
    (tmp_path / "run.toml").write_text(dump_config(config))
    assert load_config(tmp_path / "run.toml").eval == config.eval


def test_paths_are_relative_to_the_folder_of_the_file(tmp_path):
    (tmp_path / "test.jsonl").write_text("")
    (tmp_path / "run.toml").write_text(dump_config(settings()))
    config = load_config(tmp_path / "run.toml")
    assert config.eval[0].prompts.path == str(tmp_path / "test.jsonl")
    assert config.input_paths["eval[0].prompts.path"] == str(tmp_path / "test.jsonl")


def test_search_paths_of_a_set_override_those_of_the_run(tmp_path):
    (tmp_path / "graders").mkdir()
    own = settings(reward={"function": "g:f", "search_paths": ["graders"]})
    (tmp_path / "run.toml").write_text(dump_config(own))
    config = load_config(tmp_path / "run.toml").with_absolute_paths()
    assert config.eval[0].reward.search_paths[0] == str(tmp_path / "graders")
    assert str(tmp_path / "graders") not in config.reward.search_paths
    assert settings().with_absolute_paths().eval[0].reward == settings().with_absolute_paths().reward


@pytest.mark.parametrize(
    ("one", "key"),
    [
        ({"name": "Held out"}, "name"),
        ({"prompts": {}}, "prompts.path"),
        ({"rollout": {"temperature": -1.0}}, "rollout.temperature"),
        ({"rollout": {"engine": "reference"}}, "rollout.engine"),
        ({"pass_at": [8]}, "pass_at"),
        ({"pass_at": [0]}, "pass_at"),
        ({"best_by": "avg@1"}, "best_by"),
        ({"patience": 2, "best_by": "avg@4"}, "patience"),
        ({"interval": 2}, "interval"),
    ],
)
def test_invalid_settings_are_rejected_by_name(one, key):
    with pytest.raises(ConfigError) as error:
        settings(**one)
    assert f"eval[0].{key}" in str(error.value)


def test_options_that_the_engine_lacks_are_rejected_before_the_run():
    slow = {"generate": {"max_time": 5.0}}
    with pytest.raises(ConfigError, match=r"eval\[0\]\.rollout.*max_time"):
        settings(rollout=slow)
    held_out = {"name": "held-out", "prompts": {"path": "test.jsonl"}, "rollout": slow}
    for rollout in ({"engine": "reference"}, {"generate": {"use_cache": False}}):  # which selects the reference engine
        one = {**held_out, "rollout": slow | rollout} if "engine" in rollout else held_out
        build_config({**RUN, "rollout": RUN["rollout"] | rollout, "eval": [one]})


def test_batch_invariance_is_the_runs():
    held_out = {"name": "a", "prompts": {"path": "t"}, "rollout": {"batch_invariant": True}}
    with pytest.raises(ConfigError, match=r"eval\[0\]\.rollout\.batch_invariant must be the same as in \[rollout\]"):
        build_config({**RUN, "eval": [held_out]})
    run = build_config({**RUN, "rollout": {**RUN.get("rollout", {}), "batch_invariant": True}, "eval": [held_out]})
    assert run.eval[0].rollout.batch_invariant


def test_an_engine_other_than_the_runs_is_rejected_with_the_right_remedy():
    slow, other = {"generate": {"max_time": 5.0}}, {"engine": "reference"}
    sets = [{"name": name, "prompts": {"path": "t"}, "rollout": own} for name, own in (("a", slow), ("b", other))]
    with pytest.raises(
        ConfigError, match=r'eval\[1\]\.rollout\.engine .* got "reference"\. Makers have only one engine'
    ):
        build_config({**RUN, "eval": sets})


def test_names_must_differ_and_only_one_set_may_choose_the_best():
    first = {"name": "a", "prompts": {"path": "a.jsonl"}, "best_by": "avg@4"}
    for second in ({**first, "name": "b"}, {**first, "best_by": ""}):
        with pytest.raises(ConfigError, match="eval"):
            build_config({**RUN, "eval": [first, second]})


def test_the_plan_lists_sets():
    (line,) = [line for line in plan_lines(settings(every=5)) if line.startswith("Evaluation")]
    assert "4 samples" in line
    assert "before training, every 5 versions, at the end" in line


def test_the_plan_describes_sets_and_counts_their_prompts(tmp_path):
    (tmp_path / "test.jsonl").write_text('{"prompt": "a"}\n\n' * 7)
    own = {"rollout": {"do_sample": False, "max_new_tokens": 9}, "before": False, "at_end": False, "max_prompts": 100}
    one = {"prompts": {"path": str(tmp_path / "test.jsonl")}, "best_by": "avg@4", "every": 2, "patience": 3, **own}
    line = next(line for line in plan_lines(settings(**one)) if line.startswith("Evaluation held-out: "))
    for part in (
        "7 prompts",
        "greedy decoding",
        "9 new tokens",
        "every 2 versions; keeps the best model by avg@4",
        "3 evaluations",
    ):
        assert part in line
    config = build_config({**RUN, "prompts": one["prompts"]})
    (line,) = [line for line in plan_lines(config) if line.startswith("Prompts: ")]
    per_prompt = config.train.total_steps * config.train.batch_size / config.rollout.samples_per_prompt / 7
    assert f"7 prompts, each used {per_prompt:.3g} times" in line
