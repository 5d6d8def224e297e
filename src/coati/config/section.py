"""How one setting is written down: a field with its default, its rule and the way out when it is broken.

A setting states its rule once. The description and the error both come from that one place, so they cannot
drift apart from each other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from coati.errors import ConfigError


def setting(
    default: Any = ...,
    about: str = "",
    *,
    rule: str,
    remedy: str = "",
    factory: Callable[[], Any] | None = None,
    **constraints: Any,
) -> Any:
    """Declare a field whose rule and remedy are data, so that an error can quote them.

    `...` as the default makes the setting required; `factory` builds a default that must not be shared.
    """
    if factory is None:
        constraints["default"] = default
    else:
        constraints["default_factory"] = factory
    description = f"{about} Must be {rule}."
    return Field(description=description, json_schema_extra={"rule": rule, "remedy": remedy}, **constraints)


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
