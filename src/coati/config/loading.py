"""From a TOML file and `section.key=value` overrides to a `RunSettings`, or to one error that says it all."""

from __future__ import annotations

import copy
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from coati.config.problems import find_problems
from coati.config.run_settings import RunSettings
from coati.errors import ConfigError


def load_config(path: Path | None, overrides: Sequence[str] = ()) -> RunSettings:
    """Read settings from a TOML file (or none), apply overrides, check everything.

    Three defaults depend on the file and are written out, so that the saved config stands by itself:
    `run.name` (the file's stem), `run.output` (`runs/<name>`) and `reward.search_paths` (the file's folder).
    Relative paths count from the working directory.

    Args:
        path: the TOML file; None starts from nothing but the overrides.
        overrides: `section.key=value` each, the value in TOML's spelling; what is not TOML counts as a bare
            text.

    Raises:
        ConfigError: with one line per problem.

    Example:
        >>> config = load_config(
        ...     None, ["model.path=m", "prompts.path=p.jsonl", "reward.function=rewards:f", "train.epochs=2"]
        ... )
        >>> config.train.epochs, config.reward.function
        (2, 'rewards:f')
    """
    data = _with_algorithm_table({} if path is None else _read_toml(Path(path)))
    alone = copy.deepcopy(data)
    for override in overrides:
        _apply_override(data, override)
    filled = _with_file_defaults(data, path)
    try:
        return build_config(filled, source="" if path is None else str(path))
    except ConfigError:
        in_file = find_problems(_with_file_defaults(alone, path))
        if path is None or all(problem in in_file for problem in find_problems(filled)):
            raise
    return build_config(filled, source=f"{path} with the values of --set")


def build_config(data: Mapping[str, Any], *, source: str = "") -> RunSettings:
    """Turn a table of sections into a checked `RunSettings`; `source` is named in the error.

    Raises:
        ConfigError: with one line per problem.
    """
    sections = _with_algorithm_table(data)
    try:
        return RunSettings.model_validate(sections)
    except ValidationError:
        problems = find_problems(sections)
    where = f" in {source}" if source else ""
    noun = "setting is" if len(problems) == 1 else "settings are"
    lines = "\n".join(f"  {problem}" for problem in problems)
    # `from None` is not needed: the pydantic error is no longer being handled here, so its text never shows.
    raise ConfigError(f"{len(problems)} {noun} wrong{where}:\n{lines}")


def _with_algorithm_table(data: Mapping[str, Any]) -> dict[str, Any]:
    """`algorithm = "grpo"` is short for a table with that name."""
    sections = dict(data)
    if isinstance(sections.get("algorithm"), str):
        sections["algorithm"] = {"name": sections["algorithm"]}
    return sections


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(
            f"The settings file must exist, got {path}, which is not there (working directory: "
            f"{Path.cwd()}). "
            "Check the path; examples/film/run.toml is a file to start from."
        ) from None
    except IsADirectoryError:
        raise ConfigError(
            f"The settings file must be a TOML file, got the folder {path}. Name the file in it."
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"The settings file must be readable UTF-8 text, got {path}: {error}. Check its encoding and permissions."
        ) from None
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(
            f"{path} must be valid TOML, got: {error}. Check that line: texts need quotes, and tables look "
            "like [train]."
        ) from None


def _with_file_defaults(data: Mapping[str, Any], path: Path | None) -> dict[str, Any]:
    filled = copy.deepcopy(dict(data))
    run = filled.setdefault("run", {})
    if isinstance(run, dict):
        run.setdefault("name", "run" if path is None else Path(path).stem)
        if isinstance(run["name"], str):
            run.setdefault("output", f"runs/{run['name']}")
    reward = filled.get("reward")
    if isinstance(reward, dict) and path is not None:
        # Absolute, because actors need not start in the driver's working directory.
        reward.setdefault("search_paths", [str(Path(path).resolve().parent)])
    return filled


def _apply_override(data: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if parts == ["algorithm"]:
        parts.append("name")  # the short way, as in the file
    if not equals or len(parts) < 2 or not all(parts):
        raise ConfigError(
            f"An override must be section.key=value, got {override!r}. For example train.total_steps=200."
        )
    table = data
    for depth, part in enumerate(parts[:-1]):
        inner = table.setdefault(part, {})
        if not isinstance(inner, dict):
            outer = ".".join(parts[: depth + 1])
            raise ConfigError(
                f"An override must lead to a key of a table, got {override!r}, but {outer} is not a table. "
                f"Set {outer} as a whole."
            )
        table = inner
    table[parts[-1]] = parse_override_value(text.strip())


def parse_override_value(text: str) -> Any:
    """Read a value in TOML's spelling; what is not TOML is a bare text.

    Example:
        >>> [parse_override_value(text) for text in ("3", "1e-5", "true", "[1, 2]", "rewards:praise")]
        [3, 1e-05, True, [1, 2], 'rewards:praise']
    """
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    # A line break inside the text could smuggle further keys in: then it is no single value.
    return parsed["value"] if set(parsed) == {"value"} else text
