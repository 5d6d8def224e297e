"""What is wrong with a table of settings, in words: key, rule, value and remedy, one line per problem.

pydantic finds the problems; here they are said the way a person would say them, and all at once. Rules
between keys can only be judged when the keys are sound by themselves, so unsound ones are taken out (their
defaults stand in) and what the rules then say about anything that was taken out is not repeated.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from coati.config.run_settings import RunSettings
from coati.config.section import Section
from coati.config.toml_writer import toml_value
from coati.errors import ConfigError

# What stands in for a required key that is missing or wrong while the rest is judged.
_STAND_IN = "stand-in"


def find_problems(data: Mapping[str, Any]) -> list[str]:
    """Return every problem of the settings in `data`, each a full message; empty when they are sound.

    Example:
        >>> problems = find_problems({"model": {"path": "m"}, "prompts": {"path": "p.jsonl"}, "reward": {}})
        >>> len(problems)
        1
    """
    messages = [_unknown((name,), value) for name, value in data.items() if name not in RunSettings.model_fields]
    sections: dict[str, Section] = {}
    unsound: set[str] = set()
    for name, field in RunSettings.model_fields.items():
        model = field.annotation
        assert isinstance(model, type)
        assert issubclass(model, Section)
        found, keys, sections[name] = _judge_section(name, model, data.get(name, {}))
        messages += found
        unsound |= keys
    between = RunSettings.model_construct(None, **sections).problems()
    return messages + [line for line in between if not _mentions(line, unsound)]


def describe(model: type[BaseModel], error: ValidationError) -> list[str]:
    """Say everything that is wrong with one section, as `find_problems` does for a whole file."""
    names = (name for name, field in RunSettings.model_fields.items() if field.annotation is model)
    prefix = next(names, "")
    return [line for detail in error.errors(include_url=False) for line in _say(prefix, model, detail)]


def _judge_section(name: str, model: type[Section], values: Any) -> tuple[list[str], set[str], Section]:
    """Return a section's problems, the dotted keys that are unsound, and a sound section to go on with."""
    if not isinstance(values, Mapping):
        line = f"{name} must be a table of settings, got {_spell(values)}. Write its keys under [{name}]."
        return [line], {f"{name}."}, _stand_in(model)
    try:
        return [], set(), model.model_validate(dict(values))
    except ValidationError as error:
        details = error.errors(include_url=False)
    messages = [line for detail in details for line in _say(name, model, detail)]
    bad = {detail["loc"][0] for detail in details if detail["loc"]}
    if not bad:  # only rules between keys are broken
        return messages, {f"{name}."}, _stand_in(model)
    unsound = {f"{name}.{key}" for key in bad}
    rest = {key: value for key, value in values.items() if key not in bad}
    rest |= {key: _STAND_IN for key in bad if key in model.model_fields and model.model_fields[str(key)].is_required()}
    try:
        return messages, unsound, model.model_validate(rest)
    except ValidationError as error:
        between = [line for detail in error.errors(include_url=False) for line in _say(name, model, detail)]
        messages += [line for line in between if not _mentions(line, unsound)]
        return messages, {f"{name}."}, _stand_in(model)


def _stand_in(model: type[Section]) -> Section:
    """Return a section of defaults, whose own rules nobody will look at."""
    required = {name: _STAND_IN for name, field in model.model_fields.items() if field.is_required()}
    return model.model_construct(None, **required)


def _say(section: str, model: type[BaseModel], detail: Any) -> list[str]:
    """Say one pydantic error; a rule between keys may take several lines."""
    kind, value = detail["type"], detail["input"]
    location = (section, *detail["loc"]) if section else tuple(detail["loc"])
    if kind == "value_error":
        return str(detail["ctx"]["error"]).splitlines()
    owner: type[BaseModel] = model
    field: FieldInfo | None = None  # the innermost setting that the location leads to; `owner` has it
    for depth, part in enumerate(detail["loc"]):
        inner = _inner_model(field) if field is not None else None
        if field is not None and inner is None:
            location = location[
                : depth + 1 + bool(section)
            ]  # one key into a list or table; deeper parts are pydantic's own
            break
        if isinstance(part, str) and (field is None or inner is not None):
            owner = inner or owner
            field = owner.model_fields.get(part)
    if kind == "extra_forbidden" or field is None:
        return [_unknown(location, value, owner)]
    rule, key = _extra(field, "rule"), _dotted(location)
    if kind == "missing":
        return [f"{key} must be {rule}, got nothing: it is required. {_remedy(field)}"]
    return [f"{key} must be {rule}, got {_spell(value)}. {_remedy(field)}"]


def _unknown(location: Sequence[int | str], value: Any, owner: type[BaseModel] = RunSettings) -> str:
    name, known = str(location[-1]), list(owner.model_fields)
    close = difflib.get_close_matches(name, known, n=1)
    elsewhere = [
        f"{section}.{name}"
        for section, field in RunSettings.model_fields.items()
        if name in getattr(field.annotation, "model_fields", {})
    ]
    if close:
        remedy = f"Did you mean {_dotted((*location[:-1], close[0]))}?"
    elif elsewhere:
        remedy = f"Did you mean {' or '.join(elsewhere)}?"
    else:
        remedy = f"The known names there are {', '.join(known)}."
    what = "section" if len(location) == 1 else "setting"
    came = f"an unknown name with value {_spell(value)}"
    return f"{_dotted(location)} must be a known {what}, got {came}. {remedy}"


def _inner_model(field: FieldInfo) -> type[BaseModel] | None:
    """Return the model of the tables in a list of tables, such as `reward.terms`."""
    for kind in get_args(field.annotation):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def _mentions(line: str, keys: set[str]) -> bool:
    return any(key in line for key in keys)


def _dotted(location: Sequence[int | str]) -> str:
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _spell(value: Any) -> str:
    try:
        text = toml_value(value)
    except ConfigError:  # a value that TOML cannot write, such as a date: Python's spelling has to do
        text = str(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _extra(field: FieldInfo, key: str) -> str:
    extra = field.json_schema_extra
    return str(extra.get(key, "")) if isinstance(extra, dict) else ""


def _remedy(field: FieldInfo) -> str:
    remedy = _extra(field, "remedy")
    if remedy or field.is_required():
        return remedy
    return f"Leave it out for the default, {_spell(field.get_default(call_default_factory=True))}."
