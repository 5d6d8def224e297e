"""Checks before anything starts, without torch: are the model, the prompts and the reward really there?

What only shows when they are loaded is left to the run, which loads them before it trains.
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
_ANOTHER_COPY = "Use another copy, or write it again with save_pretrained."


def check_sources(config: RunSettings, *, has_reward: bool = False) -> None:
    """Raise ConfigError with all that `preflight` finds; what comes from a hub that cannot be reached must be here."""
    avoid_hub_without_network(config)
    if problems := preflight(config, has_reward=has_reward):
        raise ConfigError("\n".join(problems))


def preflight(config: RunSettings, *, has_reward: bool = False) -> list[str]:
    """Find what would stop the run: full messages; empty when nothing is known to.

    With `has_reward` a program brings the reward, and `[reward]` only names it.
    """
    problems = [*_model_problems(config), *_data_problems(config, has_reward=has_reward)]
    for one in config.eval:
        own = _data_problems(config.for_evaluation(one), has_reward=has_reward and one.reward == config.reward)
        problems += [f"eval {one.name!r}: {problem}" for problem in own if problem not in problems]
    trackers = (name for name in config.logging.tracker_names if importlib.util.find_spec(name) is None)
    return problems + [
        f"logging.trackers names {name!r}, which is not installed. pip install {name}" for name in trackers
    ]


def avoid_hub_without_network(config: RunSettings) -> None:
    """Set HF_HUB_OFFLINE if the run reads something from the hub, which cannot be reached.

    Its library would try for half a minute per file, even if it was downloaded before. It reads the variable when it is
    imported, so call this first.
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


def _model_problems(config: RunSettings) -> Iterator[str]:
    """Find what is wrong with the folders of models, as far as their files tell without being read whole."""
    for key, path in config.input_paths.items():
        if key.endswith(("prompts.path", "]")) or not looks_local(path):
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
        elif read_json(folder / needed) is None:
            yield f"{key} is {path!r}, whose {needed} is not a JSON object. {_ANOTHER_COPY}"
        else:
            for file in folder.glob("*.safetensors"):
                try:
                    with safe_open(file, framework="numpy"):
                        pass
                except (OSError, SafetensorError) as error:
                    yield f"{key} is {path!r}, whose {file.name} is damaged ({error}). {_ANOTHER_COPY}"


def _data_problems(config: RunSettings, *, has_reward: bool) -> Iterator[str]:
    """Find what is wrong with prompts, as far as the first rows tell, and with the reward for their columns."""
    columns, path = None, config.prompts.path
    try:
        check_source(path)
        if path.endswith(".jsonl"):
            columns = load_prompts(path, column=config.prompts.column, limit=_PEEKED_ROWS).other_columns
    except DataError as error:
        text = str(error)
        yield text if text.startswith("prompts.path") else f"prompts.path: {text}"
    if not has_reward:
        yield from _reward_problems(config, columns)


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
