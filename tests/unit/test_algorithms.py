"""The table of algorithms: what the papers say, and that settings and table agree."""

import doctest
from typing import get_args

import pytest

import coati.algorithms
from coati.algorithms import ALGORITHMS, algorithm_of
from coati.config import AlgorithmSettings
from coati.config.algorithm import AlgorithmName
from coati.errors import ConfigError


def test_examples():
    assert doctest.testmod(coati.algorithms).failed == 0


def test_settings_know_every_algorithm_and_ppo_is_the_default():
    assert get_args(AlgorithmName) == tuple(ALGORITHMS)
    section = AlgorithmSettings()
    assert section.name == "ppo"
    for name, value in ALGORITHMS["ppo"].defaults.items():
        assert AlgorithmSettings.model_fields[name].default == value  # what the docs show
        assert getattr(section, name) == value


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_default_of_an_algorithm_becomes_a_setting(name):
    assert AlgorithmSettings(name=name).resolved == ALGORITHMS[name]


def test_who_needs_what():
    assert [name for name, row in ALGORITHMS.items() if row.uses_critic] == ["ppo"]
    assert [name for name, row in ALGORITHMS.items() if not row.uses_groups] == ["ppo", "reinforce++"]
    assert [name for name, row in ALGORITHMS.items() if row.dynamic_sampling] == ["dapo"]
    assert [name for name, row in ALGORITHMS.items() if row.ratio == "sequence"] == ["gspo"]
    assert [name for name, row in ALGORITHMS.items() if row.normalization == "constant"] == ["dr_grpo"]
    assert [name for name, row in ALGORITHMS.items() if row.whiten_advantages] == [
        "ppo", "reinforce++", "reinforce++_baseline",
    ]  # fmt: skip
    assert (ALGORITHMS["dapo"].eps_clip, ALGORITHMS["dapo"].eps_clip_high) == (0.2, 0.28)


def test_an_unknown_name_is_told_the_known_ones():
    with pytest.raises(ConfigError, match=r"algorithm must be one of ppo, grpo, .*, got 'gpro'"):
        algorithm_of("gpro")
    row = ALGORITHMS["rloo"]
    assert algorithm_of(row) is row
