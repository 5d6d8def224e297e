"""Sections built in code: keywords, validation, and arguments that repeat a setting."""

import pickle

import pytest

from coati.config import AlgorithmSettings, Deadlines, RewardTerm, TrainSettings
from coati.errors import ConfigError


def test_sections_are_built_by_keyword_with_defaults():
    train = TrainSettings(actor_lr=3e-3)
    assert (train.actor_lr, train.batch_size, train.optimizer_steps) == (3e-3, 16, 100)
    assert pickle.loads(pickle.dumps(train)) == train


def test_invalid_values_raise_config_error_together():
    with pytest.raises(ConfigError, match=r"(?s)train\.actor_lr .*train\.batchsize"):
        TrainSettings(actor_lr=0, batchsize=3)
    with pytest.raises(ConfigError, match="update_steps"):
        TrainSettings(total_steps=1, update_steps=2)
    with pytest.raises(ConfigError, match="weight"):
        RewardTerm(weight="x")


def test_arguments_fill_in_unset_fields():
    algorithm = AlgorithmSettings().with_arguments("options.algorithm", eps_clip=("eps_clip", 0.05, 0.2))
    assert (algorithm.eps_clip, algorithm.eps_clip_high) == (0.05, 0.05)


def test_a_default_argument_does_not_override_a_setting():
    algorithm = AlgorithmSettings(eps_clip=0.05)
    assert algorithm.with_arguments("options.algorithm", eps_clip=("eps_clip", 0.2, 0.2)).eps_clip == 0.05
    assert algorithm.with_arguments("options.algorithm", eps_clip=("eps_clip", 0.05, 0.2)).eps_clip == 0.05


def test_an_argument_that_contradicts_a_setting_is_rejected():
    with pytest.raises(ConfigError, match=r"timeout = 3\.0 contradicts options\.deadlines\.update_seconds = 5"):
        Deadlines(update_seconds=5).with_arguments("options.deadlines", timeout=("update_seconds", 3.0, 600.0))
