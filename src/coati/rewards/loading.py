"""Rewards from settings: functions by name, models through a loader, weighted sums of both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from coati.config.checks import load_reward_function
from coati.config.sections import RewardSettings, reward_label
from coati.rewards.base import ModelReward, Reward, WeightedSum
from coati.rewards.function import FunctionReward
from coati.rewards.isolation import RewardProcess


def function_reward(
    function: str | Callable[..., Any], settings: RewardSettings, *, name: str, search_paths: Sequence[Path] = ()
) -> FunctionReward:
    """Make a reward of a function, or of the one that "module:function" names, as `settings.isolation` says."""
    called: Callable[..., Any] | RewardProcess
    if settings.isolation == "process":
        called = RewardProcess(function, settings, search_paths=search_paths)
    else:
        called = load_reward_function(function, search_paths) if isinstance(function, str) else function
    return FunctionReward(called, name=name, timeout_seconds=settings.timeout_seconds)


def build_reward(
    settings: RewardSettings, *, search_paths: Sequence[Path], load_model: Callable[[str], nn.Module]
) -> Reward:
    """Make the reward that `[reward]` describes.

    Args:
        settings: the section.
        search_paths: folders for the modules of functions, usually `config.reward_search_paths`.
        load_model: turns a path or hub name into a module called as `model(sequences, attention_mask)`.

    Raises:
        ConfigError: when a function cannot be loaded.
    """

    def build(function: str, model: str, name: str) -> Reward:
        if model:
            return ModelReward(load_model(model), name)
        return function_reward(function, settings, name=name, search_paths=search_paths)

    if settings.terms:
        return WeightedSum([(build(term.function, term.model, term.label), term.weight) for term in settings.terms])
    return build(settings.function, settings.model, reward_label(settings.function, settings.model))
