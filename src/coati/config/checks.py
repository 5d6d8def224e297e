"""Checks before anything starts: are the model, the prompts and the reward really there?

They need no torch, so a dry run makes them in an instant. What only a hub or an import
can tell (a hub name, a column of a Parquet file) is left to the run itself.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import socket
import sys
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

from coati.config.model_folder import (
    context_length,
    folder_problem,
    has_value_head,
    largest_token,
    vocabulary_size,
    weight_names,
)
from coati.config.reward_source import find_reward_problem
from coati.config.run_settings import RunSettings
from coati.errors import DataError
from coati.prompts.table import FILE_SUFFIXES, load_prompts

logger = logging.getLogger(__name__)

_CONNECT_SECONDS = 3.0
# Enough rows to meet a wrong column or a wrong kind of prompt, few enough to be instant on any file.
_PEEKED_ROWS = 8


def preflight(config: RunSettings, *, has_reward: bool = False) -> list[str]:
    """Find what would stop the run: full messages; empty when nothing is known to.

    With `has_reward` a program brings the reward, and `[reward]` only names it.
    """
    return [
        *_model_problems(config),
        *_size_problems(config),
        *_lora_problems(config),
        *_prompt_problems(config),
        *([] if has_reward else _reward_problems(config)),
        *_output_problems(config),
    ]


def looks_local(path: str) -> bool:
    """Say whether a model or dataset path means this machine rather than a hub.

    A hub name has at most one slash (`owner/name`). Anything that exists, starts like a path, has more
    slashes, or lies in a folder that exists is local.

    Example:
        >>> looks_local("./model"), looks_local("runs/demo/model"), looks_local("nobody/some-model-of-mine")
        (True, True, False)
    """
    if path.startswith(("/", ".", "~")) or path.count("/") > 1 or Path(path).exists():
        return True
    return "/" in path and Path(path).parent.is_dir()


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


def _model_problems(config: RunSettings) -> list[str]:
    problems = []
    for key, path in config.input_paths.items():
        if key == "prompts.path" or not looks_local(path):
            continue
        needed = "tokenizer_config.json" if key == "model.tokenizer" else "config.json"
        if not Path(path).is_dir():
            hint = f" `coati demo` makes {path}." if path in ("runs/demo/base", "runs/demo/model") else ""
            problems.append(f"{key} {path!r} is not a folder. {_path_rule()}{hint}")
        elif not (Path(path) / needed).is_file():
            problems.append(f"{key} {path!r} has no {needed}. Name the folder that save_pretrained wrote.")
        elif key != "model.tokenizer" and (problem := folder_problem(Path(path))):
            problems.append(f"{key} is {path!r}, {problem}. Use another copy, or write it again with save_pretrained.")
        elif key.startswith("reward.") and not has_value_head(Path(path)):
            problems.append(
                f"{key} {path!r} has no head that scores: every score would be 0. Use a sequence-classification model "
                "with one label, or a folder saved by coati.models.RewardModel."
            )
    return problems


def _size_problems(config: RunSettings) -> list[str]:
    """Responses that do not fit, and vocabularies that do not go together, where the folders tell."""
    problems, path, wanted = [], Path(config.model.path), config.rollout.max_new_tokens
    context, vocabulary = context_length(path), vocabulary_size(path)
    if context is not None and wanted >= context:
        problems.append(
            f"rollout.max_new_tokens must be below the {context} tokens that fit {path}, prompt included, got "
            f"{wanted}. Lower it, so that prompts have room too."
        )
    if vocabulary is None:
        return problems
    token = largest_token(Path(config.tokenizer_path))
    if token is not None and token >= vocabulary:
        problems.append(
            f"The tokenizer {config.tokenizer_path!r} has token {token}, but model.path {str(path)!r} knows only "
            f"{vocabulary} tokens (vocab_size). Use the model's own tokenizer."
        )
    for key, other in config.input_paths.items():
        size = None if key in ("model.path", "model.tokenizer", "prompts.path") else vocabulary_size(Path(other))
        if size is not None and (size != vocabulary if key == "model.reference" else size < vocabulary):
            problems.append(
                f"{key} {other!r} knows {size} tokens, but model.path {str(path)!r} knows {vocabulary} (vocab_size). "
                "Use a model with the same tokenizer."
            )
    return problems


def _path_rule() -> str:
    return f"Check the path: relative ones count from the folder of the TOML file, then from {Path.cwd()}."


def _lora_problems(config: RunSettings) -> list[str]:
    """Targets that no weight of the model is named after; only where its files can be looked into."""
    names = weight_names(Path(config.model.path))
    if not config.lora.rank or not names:
        return []
    modules = {name.removesuffix(".weight").rpartition(".")[2] for name in names if name.endswith("_proj.weight")}
    paths = {name.rpartition(".")[0] for name in names}
    missing = [
        target
        for target in config.lora.target_modules
        if not any(path == target or path.endswith(f".{target}") for path in paths)
    ]
    known = f" It has {', '.join(sorted(modules))}." if modules else ""
    return [
        f"lora.target_modules must name layers of {config.model.path}, got {target!r}, which none is called.{known} "
        "Leave the list empty for all linear layers."
        for target in missing
    ]


def _prompt_problems(config: RunSettings) -> list[str]:
    path = Path(config.prompts.path)
    if path.suffix in FILE_SUFFIXES:
        if not path.is_file():
            return [f"prompts.path {str(path)!r} does not exist. {_path_rule()}"]
        if path.suffix != ".jsonl":
            return _extra_problems(str(path))
        try:
            load_prompts(path, column=config.prompts.column, limit=_PEEKED_ROWS)
        except DataError as error:
            return [f"prompts.path: {error}"]
        return []
    if looks_local(config.prompts.path) and not path.is_dir():
        kinds = ", ".join(FILE_SUFFIXES)
        return [
            f"prompts.path must be a file ({kinds}), a `datasets` folder or a `datasets` name, got {str(path)!r}. "
            f"{_path_rule()}"
        ]
    return _extra_problems(str(path))


def _extra_problems(path: str) -> list[str]:
    if importlib.util.find_spec("datasets") is not None:
        return []
    return [
        f"prompts.path {path!r} needs the datasets package. Run pip install 'coati[data]', or write the prompts as "
        "JSONL."
    ]


def _reward_problems(config: RunSettings) -> list[str]:
    functions = {"reward.function": config.reward.function} | {
        f"reward.terms[{index}].function": term.function for index, term in enumerate(config.reward.terms)
    }
    columns = _peeked_columns(config)
    found = (
        find_reward_problem(key, function, config.reward_search_paths, columns)
        for key, function in functions.items()
        if function
    )
    return [problem for problem in found if problem]


def _peeked_columns(config: RunSettings) -> list[str] | None:
    """The dataset's columns but the prompt's, where a look at its first rows tells them."""
    path = Path(config.prompts.path)
    if path.suffix != ".jsonl" or not path.is_file():
        return None
    try:
        return sorted(load_prompts(path, column=config.prompts.column, limit=_PEEKED_ROWS).other_columns)
    except DataError:
        return None  # reported with the prompts


def _output_problems(config: RunSettings) -> list[str]:
    folder = config.output_folder
    blocking = [parent for parent in (folder, *folder.parents) if parent.exists() and not parent.is_dir()]
    if blocking:
        return [
            f"run.output must be a folder, got {str(folder)!r}, but {str(path)!r} is a file. Choose another run.output."
            for path in blocking
        ]
    nearest = next(path for path in (folder.resolve(), *folder.resolve().parents) if path.is_dir())
    if os.access(nearest, os.W_OK | os.X_OK):
        return []
    return [
        f"run.output must be a folder that you may write to, got {str(folder)!r}, but {str(nearest)!r} is not yours to "
        "write in. Choose another run.output, or change its permissions."
    ]
