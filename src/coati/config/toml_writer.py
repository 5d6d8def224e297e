"""Settings as TOML text: the standard library reads TOML but does not write it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from coati.config.run_settings import RunSettings
from coati.errors import ConfigError

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def dump_config(config: RunSettings) -> str:
    """Return TOML text with every setting spelled out; `load_config` reads it back to an equal config.

    Example:
        >>> from coati.config import build_config
        >>> config = build_config(
        ...     {"model": {"path": "m"}, "prompts": {"path": "p.jsonl"}, "reward": {"model": "r"}}
        ... )
        >>> print(dump_config(config).split("[model]")[0].strip())
        [run]
        name = "run"
        seed = 0
        output = ""
    """
    sections = config.model_dump()
    blocks = [
        "\n".join([f"[{name}]", *(f"{key} = {toml_value(value)}" for key, value in section.items())])
        for name, section in sections.items()
    ]
    return "\n\n".join(blocks) + "\n"


def toml_value(value: Any) -> str:
    """Spell one value the way a TOML file does; errors quote values like this too.

    Example:
        >>> toml_value(True), toml_value({"a": [1, "x"]})
        ('true', '{ a = [1, "x"] }')
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        # JSON escapes what TOML wants escaped, except DEL.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Mapping):
        pairs = ", ".join(f"{_key(key)} = {toml_value(item)}" for key, item in value.items())
        return f"{{ {pairs} }}" if pairs else "{}"
    if isinstance(value, Sequence):
        return f"[{', '.join(map(toml_value, value))}]"
    raise ConfigError(
        f"A setting must be a text, number, true/false, list or table, got {value!r} "
        f"({type(value).__name__}). "
        "TOML has no other values."
    )


def _key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else toml_value(key)
