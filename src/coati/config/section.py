"""How settings are declared and checked, and what is wrong with them in words: key, rule, value and remedy."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo

from coati.errors import ConfigError


def setting(default: Any = ..., about: str = "", *, rule: str = "", remedy: str = "", **constraints: Any) -> Any:
    """Declare a field; `...` as the default makes it required.

    `rule` says what a value must be where pydantic would not say it well, `remedy` how to correct a wrong one.
    """
    return Field(default, description=about, json_schema_extra={"rule": rule, "remedy": remedy}, **constraints)


class Section(BaseModel):
    """Base of all sections: frozen, no unknown keys, no silent conversion (`"5"` is not 5), no NaN."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    section: ClassVar[str] = ""
    """What a file calls it; empty for what is not a section of a file."""

    def __init_subclass__(cls, section: str = "", **kwargs: Any) -> None:
        """Note the name that a file has for this section."""
        super().__init_subclass__(**kwargs)
        cls.section = section
        if section:
            _SECTIONS[section] = cls

    def __init__(self, **values: Any) -> None:
        """Take settings by keyword; ConfigError says what is wrong with them, one line per problem."""
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError("\n".join(describe(type(self), error))) from None

    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]  # validating a table does not go through it

    def with_arguments(self, where: str, **arguments: tuple[str, Any, Any]) -> Self:
        """Put arguments of a signature into these settings: each a field, the value that came and its default.

        An argument at its default does not change a field that was set here. Any other that differs from such a field
        is a ConfigError, which calls the settings `where`.
        """
        changes = {}
        for argument, (field, value, default) in arguments.items():
            mine = getattr(self, field)
            if field not in self.model_fields_set:
                changes[field] = value
            elif value not in (default, mine):
                raise ConfigError(
                    f"{argument} = {value!r} contradicts {where}.{field} = {mine!r}. Pass one of the two."
                )
        return type(self)(**{**self.model_dump(exclude_unset=True), **changes})

    def conflicts(self) -> Iterator[tuple[str, str, Any, str]]:
        """Yield what is wrong between the keys of this section: the key, what it must be, its value and the remedy."""
        yield from ()

    @model_validator(mode="after")
    def _check_conflicts(self) -> Self:
        if found := list(self.conflicts()):
            raise ValueError(found)
        return self


_SECTIONS: dict[str, type[Section]] = {}


def describe(model: type[Section], error: ValidationError) -> list[str]:
    """Put everything that pydantic found wrong with settings into words, one full message per problem."""
    return [line for detail in error.errors(include_url=False) for line in _lines(model, detail)]


def spell(value: Any) -> str:
    """Write one value as a TOML file does; Python's spelling where TOML has none.

    >>> spell(True), spell([1, "x"]), spell(float("nan"))
    ('true', '[1, "x"]', 'nan')
    """
    return str(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False, default=str)


def _lines(model: type[Section], detail: Any) -> list[str]:
    """Say one pydantic error; a validator of a section may have found several problems."""
    owner: type[BaseModel] = model
    field: FieldInfo | None = None
    location: list[int | str] = [model.section] if model.section else []
    for part in detail["loc"]:  # down to the innermost setting; deeper parts are pydantic's own
        inner = None if field is None else _inner_model(field)
        if isinstance(part, str) and (field is None or inner is not None):
            owner = inner or owner
            field = owner.model_fields.get(part)
        elif field is not None and inner is None and len(location) > 2:
            break
        location.append(part)
    key, kind, value = _dotted(location), detail["type"], detail["input"]
    is_table = field is not None and _inner_model(field) is not None
    if kind == "value_error" and (field is None or is_table):
        conflicts = detail["ctx"]["error"].args[0]
        return [must_be(_dotted([*location, inner]), rule, got, remedy) for inner, rule, got, remedy in conflicts]
    if kind == "extra_forbidden" or field is None:
        return [_unknown(location, owner)]
    if is_table and kind in ("model_type", "model_attributes_type"):
        return [must_be(key, "a table of settings", value, f"Write its keys under [{key}].")]
    extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
    # pydantic says "Input should be …", or "String should have at least …".
    rule = extra.get("rule") or detail["msg"].replace("should have", "should be a text of").partition(" should be ")[2]
    remedy = str(extra.get("remedy", ""))
    if not remedy and not field.is_required():
        remedy = f"Leave it out for the default, {_short(field.get_default(call_default_factory=True))}."
    return [f"{key} is required. {remedy}" if kind == "missing" else must_be(key, str(rule), value, remedy)]


def must_be(key: str, rule: str, got: Any, remedy: str) -> str:
    """Word a broken rule."""
    return f"{key} must be {rule}, got {_short(got)}. {remedy}"


def _unknown(location: Sequence[int | str], owner: type[BaseModel]) -> str:
    key, name, known = _dotted(location), str(location[-1]), list(owner.model_fields)
    elsewhere = [f"{section}.{name}" for section, other in _SECTIONS.items() if name in other.model_fields]
    if close := difflib.get_close_matches(name, known, n=1):
        remedy = f"Did you mean {_dotted((*location[:-1], close[0]))}?"
    elif elsewhere:
        remedy = f"Did you mean {' or '.join(elsewhere)}?"
    elif len(location) == 1:
        remedy = f"The sections are {', '.join(known)}."
    else:
        remedy = f"[{location[0]}] has {', '.join(known)}; docs/from-trl.md has the names that TRL uses."
    return f"Unknown {'section' if len(location) == 1 else 'setting'} {key}. {remedy}"


def _inner_model(field: FieldInfo) -> type[BaseModel] | None:
    """Return the model of a section, or of the tables in a list of tables such as `reward.terms`."""
    kinds = (field.annotation, *get_args(field.annotation))
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


def _dotted(location: Sequence[int | str]) -> str:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location if part != "")
    return text.removeprefix(".")


def _short(value: Any) -> str:
    text = spell(value)
    return text if len(text) <= 80 else text[:77] + "..."
