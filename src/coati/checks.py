"""Checks before anything starts: are the model, the prompts and the reward really there?

They need no torch, so a dry run makes them in an instant, unless the reward's own module takes longer to import. What
only shows when models, tokenizer and prompts are loaded is left to the run, which loads them before it trains.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import socket
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from safetensors import SafetensorError, safe_open

from coati.config import RunSettings
from coati.config.plan import read_json
from coati.errors import ConfigError, DataError
from coati.prompts.table import check_source, load_prompts, looks_local
from coati.rewards.calling import OFFERED, keyword_parameters, load_reward_function

logger = logging.getLogger(__name__)

_CONNECT_SECONDS = 3.0
# Enough rows to meet a wrong column or a wrong kind of prompt, few enough to be instant on any file.
_PEEKED_ROWS = 8


def preflight(config: RunSettings, *, has_reward: bool = False) -> list[str]:
    """Find what would stop the run: full messages; empty when nothing is known to.

    With `has_reward` a program brings the reward, and `[reward]` only names it.
    """
    problems = [*_model_problems(config), *_data_problems(config, has_reward=has_reward)]
    for one in config.eval:
        own = _data_problems(config.for_evaluation(one), has_reward=has_reward and one.reward == config.reward)
        problems += [f"eval {one.name!r}: {problem}" for problem in own]
    trackers = (name for name in config.logging.tracker_names if importlib.util.find_spec(name) is None)
    return [
        *problems,
        *(f"logging.trackers names {name!r}, which is not installed. pip install {name}" for name in trackers),
    ]


def _data_problems(config: RunSettings, *, has_reward: bool) -> list[str]:
    columns: list[str] | None = None
    prompt_problems = []
    try:
        columns = _peeked_columns(config)
    except DataError as error:
        text = str(error)
        prompt_problems.append(text if text.startswith("prompts.path") else f"prompts.path: {text}")
    return [*prompt_problems, *([] if has_reward else _reward_problems(config, columns))]


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
        if key.endswith("prompts.path") or not looks_local(path):
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
    for index, part in enumerate(config.reward.parts):
        key = f"reward.terms[{index}].function" if config.reward.terms else "reward.function"
        if not part.function:
            continue
        try:
            function = load_reward_function(part.function, config.reward_search_paths, part.options)
        except ConfigError as error:
            yield f"{key}: {error}"
            continue
        if columns is None:
            continue
        named, _ = keyword_parameters(function)
        own = {parameter for parameter, is_required in named.items() if is_required and parameter not in part.columns}
        if missing := sorted({*own, *part.columns.values()} - {*OFFERED, *columns}):
            yield (
                f"{key} {part.function!r} needs {missing[0]!r}, but a reward gets {', '.join(OFFERED)} and the "
                f"dataset's columns ({', '.join(sorted(columns)) or 'none'}). Rename the parameter, give it a default, "
                "name its column in columns, or add the column."
            )
