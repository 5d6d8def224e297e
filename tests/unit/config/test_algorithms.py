"""The table of algorithms: what the papers say, and what settings make of it."""

from typing import get_args

import pytest

from coati.config import AlgorithmSettings
from coati.config.algorithm import ALGORITHMS, LOSSES, AlgorithmName
from coati.errors import ConfigError

EACH = {name: AlgorithmSettings(name=name) for name in ALGORITHMS}


def test_settings_know_every_algorithm_and_ppo_is_the_default():
    assert get_args(AlgorithmName) == tuple(ALGORITHMS)
    assert AlgorithmSettings() == AlgorithmSettings(name="ppo")
    assert not ALGORITHMS["ppo"].defaults  # its defaults are the fields' own, which the docs show


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_default_of_an_algorithm_is_a_setting(name):
    for field, value in ALGORITHMS[name].defaults.items():
        assert getattr(EACH[name], field) == value


def test_which_needs_what():
    assert [name for name, each in EACH.items() if each.uses_critic] == ["ppo", "vapo"]
    assert [name for name, each in EACH.items() if not each.uses_groups] == ["ppo", "reinforce++", "vapo", "distill"]
    assert [name for name, each in EACH.items() if each.dynamic_sampling] == ["dapo"]
    assert [name for name, each in EACH.items() if each.loss_row.ratio == "sequence"] == ["gspo"]
    assert [name for name, each in EACH.items() if each.normalization == "constant"] == ["dr_grpo"]
    whitening = ["ppo", "reinforce++", "reinforce++_baseline", "vapo", "distill"]
    assert [name for name, each in EACH.items() if each.whiten_advantages] == whitening
    assert (EACH["dapo"].eps_clip, EACH["dapo"].eps_clip_high) == (0.2, 0.28)


def test_the_clip_range_stays_symmetric_where_it_was():
    assert AlgorithmSettings(eps_clip=0.3).eps_clip_high == 0.3
    assert AlgorithmSettings(eps_clip=0.3, eps_clip_high=0.4).eps_clip_high == 0.4
    assert AlgorithmSettings(name="dapo", eps_clip=0.1).eps_clip_high == 0.28


def test_the_critics_lambda_is_the_policys_unless_it_has_its_own():
    assert AlgorithmSettings(lam=0.5).critic_lam == 0.5
    assert (AlgorithmSettings(lam=1).critic_lam, AlgorithmSettings(eps_clip=1).eps_clip_high) == (1.0, 1.0)
    assert AlgorithmSettings(lam=0.5, critic_lam=1.0).critic_lam == 1.0
    assert EACH["ppo"].critic_lam == EACH["ppo"].lam
    assert AlgorithmSettings(name="vapo", lam=0.5).critic_lam == 1.0
    changed = AlgorithmSettings().with_arguments("algorithm", lam=("lam", 0.8, 0.95))
    assert (changed.lam, changed.critic_lam) == (0.8, 0.8)


def test_the_kl_penalty_is_in_one_place():
    assert (EACH["grpo"].kl_loss_coef, EACH["grpo"].kl_reward_coef) == (0.04, 0.0)
    assert (EACH["ppo"].kl_loss_coef, EACH["ppo"].kl_reward_coef) == (0.0, 0.1)


@pytest.mark.parametrize(
    ("settings", "max_staleness", "correction"),
    [
        ({}, 0, "none"),
        ({}, 1, "decoupled"),
        ({}, -1, "decoupled"),
        ({"name": "gspo"}, 0, "decoupled"),  # its clip is narrower than the rounding of an engine
        ({"loss": "sapo"}, 1, "decoupled"),
        ({"loss": "cispo"}, 1, "none"),  # its ratio is to the policy that sampled
        ({"loss": "dppo"}, -1, "none"),
        ({"loss": "losses:mine"}, 4, "none"),
        ({"loss": "icepop"}, 0, "decoupled"),  # the mask is for what engines do, too
        ({"loss": "cispo", "importance": "mask"}, 0, "decoupled"),
        ({"correction": "none"}, 4, "none"),
        ({"correction": "decoupled"}, 0, "decoupled"),
    ],
)
def test_what_auto_corrects(settings, max_staleness, correction):
    assert AlgorithmSettings(**settings).resolved(max_staleness).correction == correction


def test_an_unknown_name_is_told_the_known_ones():
    with pytest.raises(ConfigError, match=r"algorithm\.name .*grpo"):
        AlgorithmSettings(name="gpro")


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_loss_goes_with_every_algorithm_and_brings_its_defaults(name, loss):
    settings = AlgorithmSettings(name=name, loss=loss)
    for field, value in LOSSES[loss].defaults.items():
        assert getattr(settings, field) == value
    own = AlgorithmSettings(name=name, loss=loss, eps_clip=0.1, importance_cap=3.0)
    assert (own.eps_clip, own.importance_cap) == (0.1, 3.0)


def test_a_loss_of_ones_own_is_named_by_module_and_function():
    assert AlgorithmSettings(loss="my.losses:loss_1").loss_row.surrogate == "own"
    for wrong in ("cipso", "my.losses", "my losses:f", ""):
        with pytest.raises(ConfigError, match=r'algorithm\.loss must be "clip", "cispo".* or "module:function"'):
            AlgorithmSettings(loss=wrong)
