"""What a model's folder says of itself, read without torch: how many tokens fit, what its weights are called, and
whether its files are whole."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

# A header is text about tensors. One that claims to be larger is no safetensors file.
_LARGEST_HEADER = 100 * 2**20
_WEIGHTS, _INDEX, _METADATA = "model.safetensors", "model.safetensors.index.json", "__metadata__"
_VALUE_HEAD = "value_head.safetensors"  # `coati.models.value_head.HEAD_FILE`, which needs torch
_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "seq_length", "max_seq_len")


def context_length(folder: Path) -> int | None:
    """Tokens that fit the model; None where its config does not say."""
    config = _read_json(folder / "config.json")
    nested = config.get("text_config")
    for part in (nested if isinstance(nested, dict) else {}, config):
        for key in _CONTEXT_KEYS:
            if isinstance(length := part.get(key), int) and length > 0:
                return length
    return None


def weight_names(folder: Path) -> frozenset[str]:
    """Names of the weights in its safetensors files; empty where there are none to be read."""
    if names := _read_json(folder / _INDEX).get("weight_map"):
        return frozenset(names)
    return frozenset(_header(folder / _WEIGHTS)[0]) - {_METADATA}


def has_value_head(folder: Path) -> bool:
    """Whether a critic or reward model that is loaded from here brings a head; True where its config does not say."""
    architectures = _read_json(folder / "config.json").get("architectures") or []
    is_classifier = not architectures or str(architectures[0]).endswith("ForSequenceClassification")
    return is_classifier or (folder / _VALUE_HEAD).is_file()


def folder_problem(folder: Path) -> str:
    """What is wrong with a model's folder, as far as its files tell without being read whole; empty if nothing is."""
    try:
        is_config = isinstance(json.loads((folder / "config.json").read_text(encoding="utf-8")), dict)
    except (OSError, ValueError):
        is_config = False
    if not is_config:
        return "whose config.json is no JSON object"
    if (folder / _INDEX).is_file():
        index = _read_json(folder / _INDEX).get("weight_map")
        if not isinstance(index, dict) or not index:
            return f"whose {_INDEX} has no weight_map"
        files = sorted(set(map(str, index.values())))
    elif (folder / _WEIGHTS).is_file():
        files = [_WEIGHTS]
    else:
        return "" if _has_other_weights(folder) else f"which has no weights ({_WEIGHTS}, or {_INDEX} and its parts)"
    return next((problem for name in files if (problem := _file_problem(folder / name))), "")


def _has_other_weights(folder: Path) -> bool:
    return any(any(folder.glob(pattern)) for pattern in ("*.safetensors", "*.bin", "*.bin.index.json"))


def _file_problem(path: Path) -> str:
    """A file that is there has a header, and as many bytes as its header says."""
    if not path.is_file():
        return f"which lacks {path.name}"
    header, data_start = _header(path)
    places = [entry.get("data_offsets") for name, entry in header.items() if name != _METADATA]
    ends = [place[1] for place in places if isinstance(place, list) and len(place) == 2]
    if not header or len(ends) < len(places):
        return f"whose {path.name} is no safetensors file, or torn"
    expected = data_start + max(ends, default=0)
    if (size := path.stat().st_size) != expected:
        return f"whose {path.name} is torn: it has {size:,} bytes, and its header speaks of {expected:,}"
    return ""


def _header(path: Path) -> tuple[dict[str, dict[str, Any]], int]:
    """What a safetensors file says of each tensor, and where the tensors begin; nothing if it is none.

    The file begins with the length of that header.
    """
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length)) if length <= _LARGEST_HEADER else {}
    except (OSError, struct.error, ValueError):
        return {}, 0
    is_one = isinstance(header, dict) and all(isinstance(entry, dict) for entry in header.values())
    return (header, 8 + length) if is_one else ({}, 0)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
