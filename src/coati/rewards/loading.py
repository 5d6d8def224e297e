"""Rewards from settings: functions by name, models through a loader, weighted sums of both."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from coati.config.checks import find_module, find_reward_problem
from coati.config.sections import RewardSettings, reward_label
from coati.errors import ConfigError
from coati.rewards.base import ModelReward, Reward, WeightedSum
from coati.rewards.function import FunctionReward


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
        loaded = load_reward_function(function, search_paths)
        return FunctionReward(loaded, name=name, timeout_seconds=settings.timeout_seconds)

    if settings.terms:
        return WeightedSum([(build(term.function, term.model, term.label), term.weight) for term in settings.terms])
    return build(settings.function, settings.model, reward_label(settings.function, settings.model))


def load_reward_function(name: str, search_paths: Sequence[Path] = ()) -> Callable[..., Any]:
    """Import the function that "module:function" names.

    The search paths come first in `sys.path` during the import, and last from then on, because a reward may import its
    neighbours when it is called.

    Raises:
        ConfigError: on bad syntax, a missing or broken module, a missing name, or something that is not
        callable.

    Example:
        >>> load_reward_function("math:sqrt")(9.0)
        3.0
    """
    module_name, colon, attribute = name.partition(":")
    if not colon or not attribute.isidentifier() or not all(map(str.isidentifier, module_name.split("."))):
        raise ConfigError(
            f'A reward function must be given as "module:function", got {name!r}. '
            'For praise() in rewards.py write "rewards:praise".'
        )
    folders = [Path(path).resolve() for path in search_paths]
    if problem := find_reward_problem("Reward function", name, folders):
        raise ConfigError(problem)
    function: Callable[..., Any] | None = getattr(_import_module(name, module_name, folders), attribute, None)
    if not callable(function):
        raise ConfigError(f"Reward function {name!r}: {attribute!r} is a {type(function).__name__}, not a function.")
    return function


def _import_module(name: str, module_name: str, folders: Sequence[Path]) -> ModuleType:
    spec, loaded = find_module(module_name, folders), sys.modules.get(module_name)
    assert spec is not None
    origin = getattr(loaded, "__file__", None)
    if spec.has_location and origin is not None and origin != spec.origin:
        raise ConfigError(
            f"Reward function {name!r}: {spec.origin} is meant, but {module_name!r} is already imported from {origin}. "
            "Rename your module."
        )
    paths = list(dict.fromkeys(map(str, folders)))
    sys.path[:0] = paths
    try:
        return importlib.import_module(module_name)
    except Exception as error:  # a module may raise anything
        raise ConfigError(
            f"Reward function {name!r}: importing {spec.origin or module_name} raised {type(error).__name__}: {error}."
        ) from error
    finally:
        for path in paths:
            sys.path.remove(path)
        sys.path.extend(path for path in paths if path not in sys.path)
