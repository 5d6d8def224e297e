"""Finds reward functions: by name in the library, or as "module:function"."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from coati.errors import ConfigError

LIBRARY = {
    "math-verify": "verifiers:math_verify",
    "reasoning-gym": "verifiers:reasoning_gym",
    "json-schema": "verifiers:json_schema",
    "regex": "text:regex",
    "format": "text:tags",
    "length": "text:length",
    "repetition": "text:repetition",
    "overlong": "text:overlong",
    "http": "remote:http",
    "judge": "remote:judge",
}
"""The rewards that have a name, and what makes each from its options."""
_ISOLATION = {"verifiers": "process", "remote": "thread"}


def isolation_of(name: str, chosen: str) -> str:
    """Return where a function runs: as `chosen`, but verifiers in a process, which can be killed, and clients not."""
    return _ISOLATION.get(LIBRARY.get(name, "").partition(":")[0], chosen)


def load_reward_function(
    name: str, search_paths: Sequence[Path] = (), options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """Return the function of the library that has this name, or import the one that "module:function" names.

    `options` are those of the library's function, or arguments that are the same in every call of your own. ConfigError
    says why it cannot be loaded.

    >>> load_reward_function("math:sqrt")(9.0)
    3.0
    >>> load_reward_function("length", options={"maximum": 3, "unit": "words"})(["so short", "not so short now"])
    [1.0, 0.0]
    """
    options, is_ours = options or {}, name in LIBRARY
    function = _imported(f"{__package__}.{LIBRARY[name]}" if is_ours else name, search_paths)
    if not (is_ours or options):
        return function
    signature = inspect.signature(function)
    try:
        (signature.bind if is_ours else signature.bind_partial)(**options)
    except TypeError as error:
        known = ", ".join(signature.parameters)
        raise ConfigError(f"Reward {name!r}: {error}. Its options are {known} (docs/rewards.md).") from None
    return function(**options) if is_ours else functools.partial(function, **options)


def needed_package(name: str, extra: str = "rewards") -> Any:
    """Import a package of the library; ConfigError names the extra to install if it is not there."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ConfigError(f"The package {error.name} is not installed. Run pip install 'coati[{extra}]'.") from None


def require(name: str, is_met: bool, rule: str) -> None:
    """Raise ConfigError unless the options of a reward meet a rule."""
    if not is_met:
        raise ConfigError(f"Reward {name!r} needs {rule}. Correct reward.options.")


def keyword_parameters(function: Callable[..., Any]) -> tuple[dict[str, bool], bool]:
    """Return the parameters that can be passed by keyword, with True for required ones; and whether it takes others.

    What `options` have decided is none of them.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some compiled functions do not tell: offer the two that every reward knows
        return {"prompts": True, "completions": True}, False
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    named = {
        parameter.name: parameter.default is inspect.Parameter.empty
        for parameter in parameters
        if parameter.kind in kinds and parameter.name not in bound_options(function)
    }
    return named, any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)


def bound_options(function: Callable[..., Any]) -> Mapping[str, Any]:
    """Return the arguments that `options` have decided; no column may take their place."""
    return function.keywords if isinstance(function, functools.partial) else {}


def _imported(name: str, search_paths: Sequence[Path]) -> Callable[..., Any]:
    """Import a function. The search paths come first in `sys.path` during the import, and last from then on, because a
    reward may import its neighbours when it is called."""
    module_name, _, attribute = name.partition(":")
    if not all(map(str.isidentifier, (attribute, *module_name.split(".")))):
        raise ConfigError(
            f'A reward function must be one of {", ".join(LIBRARY)}, or "module:function", got {name!r}. '
            'For praise() in rewards.py write "rewards:praise".'
        )
    paths = list(dict.fromkeys(str(Path(path).resolve()) for path in search_paths))
    sys.path[:0] = paths
    importlib.invalidate_caches()  # a file written a moment ago must be seen
    package = module_name.partition(".")[0]
    spec, loaded = PathFinder.find_spec(package), getattr(sys.modules.get(package), "__file__", None)
    where = spec.origin if spec is not None and spec.has_location else None
    try:
        if where is not None and loaded not in (None, where):
            raise ImportError(f"{package!r} is already imported from {loaded}; rename your module")
        module = importlib.import_module(module_name)
        if not callable(function := getattr(module, attribute, None)):
            sys.modules.pop(module_name)  # to be read again when it is corrected
            public = {key: value for key, value in vars(module).items() if not key.startswith("_")}
            own = [key for key, value in public.items() if getattr(value, "__module__", "") == module_name]
            raise AttributeError(f"it has no function {attribute!r}, but {', '.join(own) or 'none'}")
    except Exception as error:  # a module may raise anything
        raise ConfigError(
            f"Reward function {name!r} cannot be loaded from {where or ', '.join(paths) or 'the installed packages'}: "
            f"{type(error).__name__}: {error}. Check the name and reward.search_paths."
        ) from error
    finally:
        for path in paths:
            sys.path.remove(path)
        sys.path.extend(path for path in paths if path not in sys.path)
    return function  # type: ignore[no-any-return]
