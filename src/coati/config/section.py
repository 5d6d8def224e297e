"""How a setting is declared, and the base of all sections."""

from __future__ import annotations

from typing import Any, Literal, Self, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo

from coati.errors import ConfigError


def setting(default: Any = ..., about: str = "", *, rule: str = "", remedy: str = "", **constraints: Any) -> Any:
    """Declare a field; `...` as the default makes it required.

    `rule` says what a value must be where type and constraints do not say it all, `remedy` how to correct a wrong one.
    """
    return Field(default, description=about, json_schema_extra={"rule": rule, "remedy": remedy}, **constraints)


def rule_of(field: FieldInfo) -> str:
    """Say in words what a setting must be: its own rule, or what its type and bounds say.

    >>> rule_of(FieldInfo.from_annotated_attribute(int, setting(1, ge=1)))
    'a whole number, 1 or more'
    """
    extra = field.json_schema_extra
    if isinstance(extra, dict) and extra["rule"]:
        return str(extra["rule"])
    if get_origin(field.annotation) is Literal:
        *names, last = (f'"{name}"' for name in get_args(field.annotation))
        return f"{', '.join(names)} or {last}"
    if field.annotation in (bool, str):
        return "true or false" if field.annotation is bool else "a text in quotes"
    bounds = {
        key: getattr(bound, key) for bound in field.metadata for key in ("ge", "gt", "le", "lt") if hasattr(bound, key)
    }
    low, high = bounds.get("ge", bounds.get("gt")), bounds.get("le", bounds.get("lt"))
    words = {"ge": f", {low} or more", "gt": f" above {low}", "le": f" and at most {high}", "lt": f" and below {high}"}
    if "ge" in bounds and high is not None:
        words = {"ge": f" from {low}", "le": f" to {high}", "lt": f" to below {high}"}
    noun = "a whole number" if field.annotation is int else "a number"
    return noun + "".join(word for key, word in words.items() if key in bounds)


class Section(BaseModel):
    """Base of all sections: frozen, no unknown keys, no silent conversion (`"5"` is not 5), no NaN.

    A section's name in the file is the key of `RunSettings` that holds it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    def __init__(self, **values: Any) -> None:
        """Take settings by keyword; ConfigError says what is wrong with them, one line per problem."""
        try:
            super().__init__(**values)
        except ValidationError as error:
            from coati.config.problems import describe  # it needs all the sections, which need this

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

    def problems(self) -> list[str]:
        """Find what is wrong between the keys of this section: one full message each."""
        return []

    @model_validator(mode="after")
    def _check_problems(self) -> Self:
        problems = self.problems()
        if problems:
            raise ValueError("\n".join(problems))
        return self
