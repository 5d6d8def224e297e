"""Checks before anything starts: are the model, the prompts and the reward really there?

They need no torch, so a dry run makes them in an instant, unless the reward's own module takes longer to import. What
only shows when models, tokenizer and prompts are loaded is left to the run, which loads them before it trains.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import logging
import os
import socket
import sys
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from safetensors import SafetensorError, safe_open

from coati.config.run_settings import RunSettings
from coati.errors import ConfigError, DataError
from coati.prompts.table import check_source, load_prompts, looks_local

logger = logging.getLogger(__name__)

_CONNECT_SECONDS = 3.0
# Enough rows to meet a wrong column or a wrong kind of prompt, few enough to be instant on any file.
_PEEKED_ROWS = 8


def preflight(config: RunSettings, *, has_reward: bool = False) -> list[str]:
    """Find what would stop the run: full messages; empty when nothing is known to.

    With `has_reward` a program brings the reward, and `[reward]` only names it.
    """
    columns: list[str] | None = None
    prompt_problems = []
    try:
        columns = _peeked_columns(config)
    except DataError as error:
        text = str(error)
        prompt_problems.append(text if text.startswith("prompts.path") else f"prompts.path: {text}")
    return [
        *_model_problems(config),
        *prompt_problems,
        *([] if has_reward else _reward_problems(config, columns)),
    ]


def avoid_hub_without_network(config: RunSettings) -> None:
    """Set HF_HUB_OFFLINE if the run reads something from the hub, which cannot be reached.

    Its library tries for half a minute per file, even if the file was downloaded before. It reads the variable when it
    is imported, so call this first.
    """
    if "HF_HUB_OFFLINE" in os.environ or all(map(looks_local, config.input_paths.values())):
        return
    hub = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    if hub.hostname is None or urllib.request.getproxies():  # a proxy may reach what we cannot
        return
    try:
        socket.create_connection((hub.hostname, hub.port or 443), timeout=_CONNECT_SECONDS).close()
    except OSError as error:
        logger.warning("%s cannot be reached (%s); using downloaded models and datasets only.", hub.hostname, error)
        os.environ["HF_HUB_OFFLINE"] = "1"
        if (constants := sys.modules.get("huggingface_hub.constants")) is not None:
            constants.HF_HUB_OFFLINE = True  # type: ignore[attr-defined]


def read_json(path: Path) -> dict[str, Any] | None:
    """Read an object from a JSON file; None where there is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def folder_problem(folder: Path) -> str | None:
    """Find what is wrong with a model's folder, as far as its files tell without being read whole."""
    if read_json(folder / "config.json") is None:
        return "whose config.json is not a JSON object"
    for path in folder.glob("*.safetensors"):
        try:
            with safe_open(path, framework="numpy"):
                pass
        except (OSError, SafetensorError) as error:
            return f"whose {path.name} is damaged ({error})"
    return None


def _model_problems(config: RunSettings) -> Iterator[str]:
    for key, path in config.input_paths.items():
        if key == "prompts.path" or not looks_local(path):
            continue
        folder, needed = Path(path), "tokenizer_config.json" if key == "model.tokenizer" else "config.json"
        if not folder.is_dir():
            hint = f" `coati demo` makes {path}." if path in ("runs/demo/base", "runs/demo/model") else ""
            yield (
                f"{key} {path!r} is not a folder. Check the path: relative ones count from the folder of the TOML "
                f"file, then from {Path.cwd()}.{hint}"
            )
        elif not (folder / needed).is_file():
            yield f"{key} {path!r} has no {needed}. Name the folder that save_pretrained wrote."
        elif key != "model.tokenizer" and (problem := folder_problem(folder)):
            yield f"{key} is {path!r}, {problem}. Use another copy, or write it again with save_pretrained."


def _peeked_columns(config: RunSettings) -> list[str] | None:
    """Return the dataset's columns but the prompt's, where a look at its first rows tells them. DataError if it can
    not be read."""
    check_source(path := config.prompts.path)
    if not path.endswith(".jsonl"):
        return None
    return load_prompts(path, column=config.prompts.column, limit=_PEEKED_ROWS).other_columns


def _reward_problems(config: RunSettings, columns: Sequence[str] | None) -> Iterator[str]:
    functions = {"reward.function": config.reward.function} | {
        f"reward.terms[{index}].function": term.function for index, term in enumerate(config.reward.terms)
    }
    for key, name in functions.items():
        if not name:
            continue
        try:
            function = load_reward_function(name, config.reward_search_paths)
        except ConfigError as error:
            yield f"{key}: {error}"
            continue
        if columns is None:
            continue
        parameters = keyword_parameters(function) or {}
        needed = [parameter for parameter, is_required in parameters.items() if is_required]
        if missing := [parameter for parameter in needed if parameter not in ("prompts", "completions", *columns)]:
            yield (
                f"{key} {name!r} has a parameter {missing[0]!r}, but a reward gets prompts, completions and the "
                f"dataset's columns ({', '.join(sorted(columns)) or 'none'}). Rename it, give it a default, or add the "
                "column."
            )


def load_reward_function(name: str, search_paths: Sequence[Path] = ()) -> Callable[..., Any]:
    """Import the function that "module:function" names.

    The search paths come first in `sys.path` during the import, and last from then on, because a reward may import its
    neighbours when it is called. ConfigError says why it cannot be loaded.

    >>> load_reward_function("math:sqrt")(9.0)
    3.0
    """
    module_name, _, attribute = name.partition(":")
    if not all(map(str.isidentifier, (attribute, *module_name.split(".")))):
        raise ConfigError(
            f'A reward function must be given as "module:function", got {name!r}. '
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


def keyword_parameters(function: Callable[..., Any]) -> dict[str, bool] | None:
    """Return the parameters that can be passed by keyword, with True for required ones; None = takes any."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some compiled functions do not tell: offer the two that every reward knows
        return {"prompts": True, "completions": True}
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return {
        parameter.name: parameter.default is inspect.Parameter.empty
        for parameter in parameters
        if parameter.kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    }
