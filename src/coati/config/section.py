"""How settings are declared and checked, and what is wrong with them in words: key, rule, value and remedy."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo

from coati.errors import ConfigError

# What TRL, verl and OpenRLHF call the settings that people change most; docs/from-trl.md has more of TRL's.
_FOREIGN_NAMES = {
    "lr": "train.actor_lr",
    "learning_rate": "train.actor_lr",
    "max_steps": "train.total_steps",
    "per_device_train_batch_size": "train.micro_batch_size",
    "train_batch_size": "train.batch_size",
    "num_generations": "rollout.samples_per_prompt",
    "max_completion_length": "rollout.max_new_tokens",
    "generate_max_len": "rollout.max_new_tokens",
    "beta": "algorithm.kl_coef",
    "kl_loss_coef": "algorithm.kl_coef",
    "clip_ratio": "algorithm.eps_clip",
    "algorithm": "algorithm.name",
    "adv_estimator": "algorithm.name",
    "resume": "coati train --resume RUN",
    "report_to": "logging.trackers",
    "wandb": "logging.trackers.wandb",
}
# Options, and parts of addresses, that hold what must not be in a file.
SECRET_NAME = r"api_?key$|(^|_)(access|api|auth|bearer)_?token$|^authorization$|secret|password"
_SECRET_IN_ADDRESS = re.compile(r"://[^/\s]*@|[?&]\w*(token|key|secret|password)=", re.IGNORECASE)
# Texts that are values of other types but for their quotes, by pydantic's name of the error.
_UNQUOTED = {"int_type": r"-?\d+", "float_type": r"-?\d+(\.\d+)?(e-?\d+)?", "bool_type": "true|false"}
_CLOSE = 0.75  # how much of two names must be alike for one to be a misspelling of the other


def secrets_in(options: Mapping[Any, Any], path: str, names: str = SECRET_NAME) -> Iterator[str]:
    """Yield the keys of options, in tables of any depth, that hold a secret by their names, or an address with one."""
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from secrets_in(value, f"{path}.{name}", names)
        elif re.search(names, name, re.IGNORECASE) or _SECRET_IN_ADDRESS.search(str(value)):
            yield f"{path}.{name}"


def setting(default: Any = ..., about: str = "", *, rule: str = "", remedy: str = "", **constraints: Any) -> Any:
    """Declare a field. `rule` says what it must be where pydantic would not say it well, `remedy` how to correct it."""
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

        One that is not its default, and differs from a field that was set here, is a ConfigError, which says `where`.
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

    def _conflicts(self) -> Iterator[tuple[str, str, Any, str]]:
        """Yield what is wrong between the keys of this section: the key, what it must be, its value and the remedy."""
        yield from ()

    @model_validator(mode="after")
    def _check_conflicts(self) -> Self:
        if found := list(self._conflicts()):
            raise ValueError(found)
        return self


_SECTIONS: dict[str, type[Section]] = {}


def describe(model: type[Section], error: ValidationError) -> list[str]:
    """Put everything that pydantic found wrong with settings into words, one full message per problem."""
    return [line for detail in error.errors(include_url=False) for line in _lines(model, detail)]


def spell(value: Any) -> str:
    """Write one value as a TOML file does; Python's spelling where TOML has none (`nan`)."""
    return str(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False, default=str)


def _lines(model: type[Section], detail: Any) -> list[str]:
    """Say one pydantic error; a validator of a section may have found several problems."""
    location: list[int | str] = [model.section] if model.section else []
    owner: type[BaseModel] = model
    table: type[BaseModel] | None = model  # whose key the next part of the location is, if it is one
    field: FieldInfo | None = None
    is_inside = False  # in something that a setting holds
    for part in detail["loc"]:
        if part == "[key]":  # how pydantic says that the name before it is wrong
            break
        location.append(part)
        is_inside = table is None or isinstance(part, int)
        if table is not None and not is_inside:
            owner, field = table, table.model_fields.get(str(part))
            table = None if field is None else _inner_model(field)
    key, kind = _dotted(location), detail["type"]
    if kind == "value_error" and (found := detail["ctx"]["error"].args):
        return [
            f"{_dotted([*location, at])} must be {rule}, got {_short(got)}. {how}" for at, rule, got, how in found[0]
        ]
    if kind == "extra_forbidden" or field is None:
        return [_unknown(location, owner)]
    remedy = _extra(field, "remedy")
    rule = "" if is_inside else _extra(field, "rule")
    names = re.findall(r"'([^']+)'", detail["ctx"]["expected"]) if kind == "literal_error" else []
    came = str(detail["input"])
    if close := difflib.get_close_matches(came, names, n=1):
        nearest = difflib.SequenceMatcher(None, close[0], came).ratio()
        close = difflib.get_close_matches(came, names, n=2, cutoff=nearest - 0.05)  # another may be as near
        remedy = f"Did you mean {' or '.join(close)}?"
    elif kind in _UNQUOTED and re.fullmatch(_UNQUOTED[kind], came):
        remedy = f"Write {came} without quotes."
    if kind == "tuple_type":
        rule = rule or "a list of strings"
    elif kind == "model_type":
        rule, remedy = "a table of settings", remedy or f"Write its keys under [{key}]."
    if not remedy and not field.is_required():
        remedy = f"Leave it out for the default, {_short(field.get_default(call_default_factory=True))}."
    if kind == "missing":
        return [f"{key} is required. {remedy}"]
    # Else in pydantic's words, such as "Input should be greater than 0".
    must = f"must be {rule}" if rule else re.sub(r"^\w+ should", "must", detail["msg"])
    return [f"{key} {must}, got {_short(detail['input'])}. {remedy}"]


def _unknown(location: Sequence[int | str], owner: type[BaseModel]) -> str:
    key, name, known = _dotted(location), str(location[-1]), list(owner.model_fields)
    elsewhere = [f"{section}.{name}" for section, other in _SECTIONS.items() if name in other.model_fields]
    if name in _FOREIGN_NAMES:
        remedy = f"Did you mean {_FOREIGN_NAMES[name]}?"
    elif close := difflib.get_close_matches(name, known, n=1, cutoff=_CLOSE):
        remedy = f"Did you mean {_dotted((*location[:-1], close[0]))}?"
    elif elsewhere:
        remedy = f"Did you mean {' or '.join(elsewhere)}?"
    elif len(location) == 1:
        remedy = f"The sections are {', '.join(known)}."
    else:
        remedy = f"[{location[0]}] has {', '.join(known)}; docs/from-trl.md has the names that TRL uses."
    return f"Unknown {'section' if len(location) == 1 else 'setting'} {key}. {remedy}"


def _extra(field: FieldInfo, name: str) -> str:
    return str(field.json_schema_extra.get(name, "")) if isinstance(field.json_schema_extra, dict) else ""


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
