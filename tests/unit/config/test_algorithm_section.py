"""`[algorithm]`: short and long spelling, defaults that depend on the name, and conflicts."""

import pytest

from coati.config import build_config, dump_config, load_config
from coati.errors import ConfigError

MINIMAL = ["model.path=m", "prompts.path=p.jsonl", "reward.function=rewards:f", "rollout.samples_per_prompt=4"]


def loaded(*overrides):
    return load_config(None, [*MINIMAL, *overrides])


def test_short_and_long_spelling_mean_the_same(tmp_path):
    file = tmp_path / "run.toml"
    rest = '[model]\npath="m"\n[prompts]\npath="p"\n[reward]\nmodel="r"\n[rollout]\nsamples_per_prompt=4\n'
    file.write_text('algorithm = "grpo"\n' + rest)
    short = load_config(file, ["algorithm.kl_coef=0.5"])
    file.write_text(rest + '[algorithm]\nname = "grpo"\nkl_coef = 0.5\n')
    assert short == load_config(file)
    assert load_config(file, ["algorithm=rloo"]).algorithm.name == "rloo"
    assert load_config(file, ["algorithm=rloo"]).algorithm.kl_coef == 0.5  # only the name changed


def test_unset_keys_take_the_algorithms_defaults_and_set_keys_stay():
    grpo = loaded("algorithm=grpo", "algorithm.normalization=token").algorithm
    assert (grpo.kl_in, grpo.kl_coef, grpo.kl_estimator, grpo.whiten_advantages) == ("loss", 0.04, "k3", False)
    assert grpo.normalization == "token"


@pytest.mark.parametrize(
    ("overrides", "low", "high"),
    [
        ([], 0.2, 0.2),
        (["algorithm.eps_clip=0.3"], 0.3, 0.3),  # symmetric, so both
        (["algorithm.eps_clip=0.3", "algorithm.eps_clip_high=0.4"], 0.3, 0.4),
        (["algorithm.eps_clip_high=0.4"], 0.2, 0.4),
        (["algorithm=dapo"], 0.2, 0.28),
        (["algorithm=dapo", "algorithm.eps_clip=0.1"], 0.1, 0.28),
        (["algorithm=dapo", "algorithm.loss=cispo"], 1.0, 4.0),
        (["algorithm.loss=dppo", "algorithm.eps_clip=0.1"], 0.1, 0.1),
    ],
)
def test_the_clip_range(overrides, low, high):
    algorithm = loaded(*overrides).algorithm
    assert (algorithm.eps_clip, algorithm.eps_clip_high) == (low, high)


def test_a_saved_config_is_complete_and_loads_back(tmp_path):
    config = loaded("algorithm=gspo")
    file = tmp_path / "config.toml"
    file.write_text(dump_config(config))
    assert "eps_clip_high = 0.0004" in file.read_text()
    assert load_config(file) == config


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["algorithm=gpro"], "algorithm.name must be 'ppo', 'grpo'"),
        (["algorithm=grpo", "algorithm.kl_estimator=k1"], 'algorithm.kl_estimator must be "k2" or "k3"'),
        (["algorithm.dynamic_sampling=true"], "algorithm.dynamic_sampling must be false"),
        (["algorithm=gspo", "algorithm.normalization=token"], 'algorithm.normalization must be "sequence"'),
        (["algorithm.loss=dppo", "algorithm.correction=decoupled"], 'algorithm.correction must be "none"'),
        (["algorithm.loss=dppo", "algorithm.importance=mask"], 'algorithm.importance must be "truncate"'),
        (["algorithm.loss=icepop", "algorithm.correction=none"], 'algorithm.importance must be "truncate"'),
        (["algorithm=maxrl", "algorithm.kl_in=reward", "algorithm.kl_coef=0.1"], 'algorithm.kl_in must be "loss"'),
        (["algorithm=grpo", "algorithm.critic_warmup_steps=2"], "algorithm.critic_warmup_steps must be 0"),
        (["algorithm=grpo", "algorithm.adaptive_lam=0.05"], "algorithm.adaptive_lam must be 0"),
        (["algorithm.critic_warmup_steps=100"], "algorithm.critic_warmup_steps must be less than"),
        (["algorithm.kl_target=0.1"], "algorithm.kl_target must be 0"),
        (["algorithm.importance_floor=0.5"], "algorithm.importance_floor must be 0"),
        (["algorithm=grpo", "rollout.samples_per_prompt=1"], "rollout.samples_per_prompt must be 2 or more"),
        (["algorithm=rloo", "train.batch_size=6"], "Make train.batch_size a multiple of 4"),
        (["algorithm=rloo", "train.batch_size=6", "train.update_steps=2", "train.total_steps=3"], "train.total_steps"),
    ],
)
def test_conflicting_settings_are_rejected(overrides, message):
    with pytest.raises(ConfigError) as caught:
        loaded(*overrides)
    assert message in str(caught.value)
    assert str(caught.value).count("must") == 1  # one message per mistake


@pytest.mark.parametrize("cut", ["rollout.top_k=20", "rollout.top_p=0.9", "rollout.generate.min_p=0.1"])
@pytest.mark.parametrize("loss", ["clip", "cispo", "icepop"])
def test_truncated_sampling_is_rejected_while_stale_data_is_corrected(cut, loss):
    key = cut.partition("=")[0]
    with pytest.raises(ConfigError, match=f"{key} must be 0|{key} must be 1") as caught:
        loaded(cut, f"algorithm.loss={loss}")
    assert "algorithm.correction" in str(caught.value)
    if loss != "icepop":  # its mask is a correction
        loaded(cut, f"algorithm.loss={loss}", "algorithm.correction=none")
        loaded(cut, f"algorithm.loss={loss}", "topology.max_staleness=0")
    loaded(cut, f"algorithm.loss={loss}", "rollout.do_sample=false")


def test_groups_may_span_batches_but_not_trainers():
    loaded("algorithm=rloo", "train.batch_size=6", "train.update_steps=2", "train.total_steps=4")
    with pytest.raises(ConfigError, match=r"samples_per_prompt"):
        loaded("algorithm=rloo", "train.batch_size=6", "topology.trainers=2")


def test_a_number_in_place_of_the_section():
    with pytest.raises(ConfigError, match="algorithm must be a table"):
        build_config({"model": {"path": "m"}, "prompts": {"path": "p"}, "reward": {"model": "r"}, "algorithm": 3})
