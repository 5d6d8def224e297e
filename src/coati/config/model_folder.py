"""What a model's folder says about itself, read without torch: sizes, names of weights, and whether files are whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_VALUE_HEAD = "value_head.safetensors"  # `coati.models.value_head.HEAD_FILE`, which needs torch
_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "seq_length", "max_seq_len")


def read_json(path: Path) -> dict[str, Any]:
    """Read an object from a JSON file; empty where there is none."""
    return _read_object(path) or {}


def _read_object(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def config_number(folder: Path, *keys: str) -> int | None:
    """Return the first of these numbers that the model's config has; None where it has none."""
    config = read_json(folder / "config.json")
    nested = config.get("text_config")
    for part in (nested if isinstance(nested, dict) else {}, config):
        for key in keys:
            if isinstance(number := part.get(key), int) and number > 0:
                return number
    return None


def context_length(folder: Path) -> int | None:
    """Return how many tokens fit the model."""
    return config_number(folder, *_CONTEXT_KEYS)


def vocabulary_size(folder: Path) -> int | None:
    """Return how many tokens the model knows."""
    return config_number(folder, "vocab_size")


def largest_token(folder: Path) -> int | None:
    """Return the largest token id of a tokenizer's own vocabulary, without tokens that were added to it."""
    vocabulary = read_json(folder / "tokenizer.json").get("model", {}).get("vocab")
    if isinstance(vocabulary, dict):
        return max(vocabulary.values(), default=None)
    return len(vocabulary) - 1 if isinstance(vocabulary, list) and vocabulary else None


def weight_names(folder: Path) -> frozenset[str]:
    """Return the names of the weights in its safetensors files; empty where there are none to read."""
    if names := read_json(folder / _INDEX).get("weight_map"):
        return frozenset(names)
    try:
        with safe_open(folder / _WEIGHTS, framework="numpy") as file:
            return frozenset(file.keys())
    except (OSError, SafetensorError):
        return frozenset()


def has_value_head(folder: Path) -> bool:
    """Say whether a critic or reward model that is loaded from here has a head; True where its config does not say."""
    architectures = read_json(folder / "config.json").get("architectures") or []
    is_classifier = not architectures or str(architectures[0]).endswith("ForSequenceClassification")
    return is_classifier or (folder / _VALUE_HEAD).is_file()


def folder_problem(folder: Path) -> str | None:
    """Find what is wrong with a model's folder, as far as its files tell without being read whole."""
    if _read_object(folder / "config.json") is None:
        return "whose config.json is not a JSON object"
    if (folder / _INDEX).is_file():
        index = read_json(folder / _INDEX).get("weight_map")
        if not isinstance(index, dict) or not index:
            return f"whose {_INDEX} has no weight_map"
        names = sorted(set(map(str, index.values())))
    elif (folder / _WEIGHTS).is_file():
        names = [_WEIGHTS]
    elif any(any(folder.glob(pattern)) for pattern in ("*.safetensors", "*.bin", "*.bin.index.json")):
        return None
    else:
        return f"which has no weights ({_WEIGHTS}, or {_INDEX} and its parts)"
    for name in names:
        try:
            with safe_open(folder / name, framework="numpy") as file:
                if not file.keys():
                    return f"whose {name} is empty"
        except FileNotFoundError:
            return f"which lacks {name}"
        except (OSError, SafetensorError) as error:
            return f"whose {name} is damaged ({error})"
    return None
