"""What a model's folder says of itself, read without torch: how many tokens fit, and what its weights are called."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

# A header is text about tensors. One that claims to be larger is no safetensors file.
_LARGEST_HEADER = 100 * 2**20
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
    if names := _read_json(folder / "model.safetensors.index.json").get("weight_map"):
        return frozenset(names)
    return _header_names(folder / "model.safetensors")


def _header_names(path: Path) -> frozenset[str]:
    """A safetensors file begins with the length of its header, and the header with a name for each tensor."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length)) if length <= _LARGEST_HEADER else {}
    except (OSError, struct.error, ValueError):
        return frozenset()
    return frozenset(header) - {"__metadata__"} if isinstance(header, dict) else frozenset()


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
