"""The table of algorithms: the papers' values, and the settings that follow from them."""

from typing import get_args

import pytest

from coati.config import AlgorithmSettings
from coati.config.algorithm import ALGORITHMS, LOSSES, AlgorithmName
from coati.errors import ConfigError

EACH = {name: AlgorithmSettings(name=name) for name in ALGORITHMS}


def test_settings_accept_every_algorithm_and_default_to_ppo():
    assert get_args(AlgorithmName) == tuple(ALGORITHMS)
    assert AlgorithmSettings() == AlgorithmSettings(name="ppo")
    assert not ALGORITHMS["ppo"].defaults  # its defaults are those of the fields, which the docs show


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_default_of_an_algorithm_is_a_setting(name):
    for field, value in ALGORITHMS[name].defaults.items():
        assert getattr(EACH[name], field) == value


def test_properties_of_each_algorithm():
    assert [name for name, each in EACH.items() if each.uses_critic] == ["ppo", "vapo"]
    assert [name for name, each in EACH.items() if not each.uses_groups] == ["ppo", "reinforce++", "vapo", "distill"]
    assert [name for name, each in EACH.items() if each.dynamic_sampling] == ["dapo"]
    assert [name for name, each in EACH.items() if each.loss_row.ratio == "sequence"] == ["gspo"]
    assert [name for name, each in EACH.items() if each.normalization == "constant"] == ["dr_grpo"]
    whitening = ["ppo", "reinforce++", "reinforce++_baseline", "vapo", "distill"]
    assert [name for name, each in EACH.items() if each.whiten_advantages] == whitening
    assert (EACH["dapo"].eps_clip, EACH["dapo"].eps_clip_high) == (0.2, 0.28)


def test_a_symmetric_clip_range_stays_symmetric():
    assert AlgorithmSettings(eps_clip=0.3).eps_clip_high == 0.3
    assert AlgorithmSettings(eps_clip=0.3, eps_clip_high=0.4).eps_clip_high == 0.4
    assert AlgorithmSettings(name="dapo", eps_clip=0.1).eps_clip_high == 0.28


def test_critic_lam_defaults_to_lam():
    assert AlgorithmSettings(lam=0.5).critic_lam == 0.5
    assert (AlgorithmSettings(lam=1).critic_lam, AlgorithmSettings(eps_clip=1).eps_clip_high) == (1.0, 1.0)
    assert AlgorithmSettings(lam=0.5, critic_lam=1.0).critic_lam == 1.0
    assert EACH["ppo"].critic_lam == EACH["ppo"].lam
    assert AlgorithmSettings(name="vapo", lam=0.5).critic_lam == 1.0
    changed = AlgorithmSettings().with_arguments("algorithm", lam=("lam", 0.8, 0.95))
    assert (changed.lam, changed.critic_lam) == (0.8, 0.8)


def test_the_kl_penalty_is_in_the_reward_or_in_the_loss():
    assert (EACH["grpo"].kl_loss_coef, EACH["grpo"].kl_reward_coef) == (0.04, 0.0)
    assert (EACH["ppo"].kl_loss_coef, EACH["ppo"].kl_reward_coef) == (0.0, 0.1)


@pytest.mark.parametrize(
    ("settings", "max_staleness", "correction"),
    [
        ({}, 0, "none"),
        ({}, 1, "decoupled"),
        ({}, -1, "decoupled"),
        ({"name": "gspo"}, 0, "decoupled"),  # its clip range is narrower than an engine's rounding errors
        ({"loss": "sapo"}, 1, "decoupled"),
        ({"loss": "cispo"}, 1, "none"),  # its ratio is relative to the sampling policy
        ({"loss": "dppo"}, -1, "none"),
        ({"loss": "losses:mine"}, 4, "none"),
        ({"loss": "icepop"}, 0, "decoupled"),  # the mask also catches errors of engines
        ({"loss": "cispo", "importance": "mask"}, 0, "decoupled"),
        ({"correction": "none"}, 4, "none"),
        ({"correction": "decoupled"}, 0, "decoupled"),
    ],
)
def test_auto_correction(settings, max_staleness, correction):
    assert AlgorithmSettings(**settings).resolved(max_staleness).correction == correction


def test_an_unknown_algorithm_is_rejected_with_the_known_names():
    with pytest.raises(ConfigError, match=r"algorithm\.name .*grpo"):
        AlgorithmSettings(name="gpro")


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_loss_works_with_every_algorithm_and_sets_its_defaults(name, loss):
    settings = AlgorithmSettings(name=name, loss=loss)
    for field, value in LOSSES[loss].defaults.items():
        assert getattr(settings, field) == value
    own = AlgorithmSettings(name=name, loss=loss, eps_clip=0.1, importance_cap=3.0)
    assert (own.eps_clip, own.importance_cap) == (0.1, 3.0)


def test_a_custom_loss_is_given_as_module_and_function():
    assert AlgorithmSettings(loss="my.losses:loss_1").loss_row.surrogate == "own"
    for wrong in ("cipso", "my.losses", "my losses:f", ""):
        with pytest.raises(ConfigError, match=r'algorithm\.loss must be "clip", "cispo".* or "module:function"'):
            AlgorithmSettings(loss=wrong)
