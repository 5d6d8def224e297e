"""From a TOML file or a table, and `section.key=value` overrides, to `RunSettings`, and back to TOML."""

from __future__ import annotations

import copy
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import ValidationError

from coati.config.problems import describe
from coati.config.run_settings import RunSettings, change_paths
from coati.errors import ConfigError


def load_config(path: Path | None, overrides: Sequence[str] = (), *, reward: str | None = None) -> RunSettings:
    """Read settings from a TOML file (or none), apply overrides, check everything.

    Relative paths in the file count from its folder if they exist there, else from the working directory. Two defaults
    depend on the file: `run.name` (its stem) and `reward.search_paths` (its folder).

    Args:
        path: the TOML file; None starts from nothing but the overrides.
        overrides: `section.key=value` each, the value in TOML's spelling; what is not TOML counts as a bare text.
        reward: the name of a function that replaces whatever `[reward]` names.

    Raises:
        ConfigError: with one line per problem.

    Example:
        >>> config = load_config(
        ...     None, ["model.path=m", "prompts.path=p.jsonl", "reward.function=rewards:f", "train.epochs=2"]
        ... )
        >>> config.train.epochs, config.reward.function
        (2, 'rewards:f')
    """
    if path is None:
        return build_config({}, overrides, reward=reward)
    path = Path(path)
    data = _with_algorithm_table(_read_toml(path))
    run = data.setdefault("run", {})
    if isinstance(run, dict):
        run.setdefault("name", path.stem)
    _count_from(path.parent, data)
    return build_config(data, overrides, reward=reward, source=str(path))


def build_config(
    data: Mapping[str, Any], overrides: Sequence[str] = (), *, reward: str | None = None, source: str = ""
) -> RunSettings:
    """Turn a table of sections into checked settings; `source` is named in the error, the rest is as in `load_config`.

    Raises:
        ConfigError: with one line per problem.
    """
    sections = copy.deepcopy(_with_algorithm_table(data))
    for override in overrides:
        _apply_override(sections, override)
    if reward is not None:
        named = sections.get("reward", {})
        sections["reward"] = {key: named[key] for key in named if key not in ("model", "terms")} | {"function": reward}
    run = sections.setdefault("run", {})
    if isinstance(run, dict):
        run.setdefault("output", f"runs/{run.get('name', 'run')}")
    for name, field in RunSettings.model_fields.items():
        if field.is_required():
            sections.setdefault(name, {})  # so that the error names the settings that are missing
    try:
        return RunSettings.model_validate(sections)
    except ValidationError as error:
        problems = describe(RunSettings, error)
    where = f" in {source}{' with --set' if overrides else ''}" if source else ""
    noun = "setting is" if len(problems) == 1 else "settings are"
    lines = "\n".join(f"  {problem}" for problem in problems)
    raise ConfigError(f"{len(problems)} {noun} wrong{where}:\n{lines}")


def dump_config(config: RunSettings) -> str:
    """Return TOML text with every setting written out; `load_config` reads it back to equal settings."""
    return tomli_w.dumps(config.model_dump())


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
            f"There is no settings file {path} (working directory: {Path.cwd()}). Check the path; "
            "examples/film/run.toml is a file to start from."
        ) from None
    except IsADirectoryError:
        raise ConfigError(f"{path} is a folder. Name the TOML file in it.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as UTF-8 text: {error}.") from None
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        short = re.search(r"(?m)^\s*algorithm\s*=\s*(\S+)", text)
        if short and re.search(r"(?m)^\s*\[\s*algorithm\s*\]", text):
            raise ConfigError(
                f"{path} names the algorithm twice: as algorithm = {short[1]} and as the table [algorithm]. Remove the "
                f"first and write name = {short[1]} under [algorithm]."
            ) from None
        raise ConfigError(
            f"{path} is not valid TOML: {error}. Check that line: texts need quotes, and tables look like [train]."
        ) from None


def _count_from(folder: Path, data: dict[str, Any]) -> None:
    """Have relative paths of a file count from its folder, where they exist there."""

    def place(_key: str, path: str) -> str:
        return str(folder / path) if (folder / path).exists() else path

    change_paths(data, place)
    reward = data.get("reward")
    paths = reward.setdefault("search_paths", ["."]) if isinstance(reward, dict) else None
    if isinstance(reward, dict) and isinstance(paths, list) and all(isinstance(path, str) for path in paths):
        # Absolute, because actors need not start in the driver's working directory.
        reward["search_paths"] = [str(Path(place("", path)).resolve()) for path in paths]


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
            raise ConfigError(f"{override!r} sets a key of {outer}, which is not a table. Set {outer} as a whole.")
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
