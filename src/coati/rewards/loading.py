"""Rewards from settings: functions by name, models through a loader, weighted sums of both."""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from coati.config.reward_source import find_module
from coati.config.sections import RewardSettings, reward_label
from coati.errors import ConfigError
from coati.rewards.base import Reward, WeightedSum
from coati.rewards.function import FunctionReward
from coati.rewards.model import ModelReward


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
    module = _import_module(name, module_name, search_paths)
    if not hasattr(module, attribute):
        public = [known for known in vars(module) if not known.startswith("_")]
        close = difflib.get_close_matches(attribute, public, n=3)
        functions = [known for known in public if callable(getattr(module, known))]
        hint = f"Did you mean {', '.join(close)}?" if close else f"It has {', '.join(functions) or 'none'}."
        raise ConfigError(f"Reward function {name!r}: {_origin(module)} has no {attribute!r}. {hint}")
    function: Callable[..., Any] = getattr(module, attribute)
    if not callable(function):
        raise ConfigError(f"Reward function {name!r} is a {type(function).__name__}, not a function.")
    return function


def _import_module(name: str, module_name: str, search_paths: Sequence[Path]) -> ModuleType:
    folders = list(dict.fromkeys(str(Path(path).resolve()) for path in search_paths))
    spec = find_module(module_name, [Path(folder) for folder in folders])
    if spec is None:
        raise ConfigError(
            f"Reward function {name!r}: no module {module_name!r} in {', '.join(folders) or 'the search paths'} or the "
            "installed packages. Check the name, or add its folder to reward.search_paths."
        )
    loaded = sys.modules.get(module_name)
    if loaded is not None and spec.origin and spec.has_location and _origin(loaded) != spec.origin:
        raise ConfigError(
            f"Reward function {name!r}: {spec.origin} is meant, but {module_name!r} is already imported from "
            f"{_origin(loaded)}. Rename your module."
        )
    sys.path[:0] = folders
    try:
        return importlib.import_module(module_name)
    except Exception as error:  # a module may raise anything
        raise ConfigError(
            f"Reward function {name!r}: importing {spec.origin or module_name} raised {type(error).__name__}: {error}."
        ) from error
    finally:
        for folder in folders:
            sys.path.remove(folder)
        sys.path.extend(folder for folder in folders if folder not in sys.path)


def _origin(module: ModuleType) -> str:
    return getattr(module, "__file__", None) or module.__name__
