"""Declare and validate settings. Error messages have the key, the rule, the value and the remedy."""

import difflib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo

from coati.errors import ConfigError

# Names of common settings in TRL, verl and OpenRLHF; docs/from-trl.md lists more of TRL's.
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
# Names of options, and parts of addresses, that hold secrets, which must not be written to files.
SECRET_NAME = r"api_?key$|(^|_)(access|api|auth|bearer)_?token$|^authorization$|secret|password"
_SECRET_IN_ADDRESS = re.compile(r"://[^/\s]*@|[?&]\w*(token|key|secret|password)=", re.IGNORECASE)
# Strings that are valid without their quotes, by the type of the pydantic error.
_UNQUOTED = {"int_type": r"-?\d+", "float_type": r"-?\d+(\.\d+)?(e-?\d+)?", "bool_type": "true|false"}
_CLOSE = 0.75  # similarity from which one name counts as a misspelling of another


def secrets_in(options: Mapping[Any, Any], path: str, names: str = SECRET_NAME) -> Iterator[str]:
    """Yield the keys of nested options that hold a secret by their name, or whose value is an address with one."""
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from secrets_in(value, f"{path}.{name}", names)
        elif re.search(names, name, re.IGNORECASE) or _SECRET_IN_ADDRESS.search(str(value)):
            yield f"{path}.{name}"


def setting(default: Any = ..., about: str = "", *, rule: str = "", remedy: str = "", **constraints: Any) -> Any:
    """Declare a field. In errors, `rule` replaces pydantic's description of valid values, and `remedy` is the fix."""
    return Field(default, description=about, json_schema_extra={"rule": rule, "remedy": remedy}, **constraints)


class Section(BaseModel):
    """Base class of sections: frozen, no unknown keys, no implicit conversion (`"5"` is not 5), no NaN or infinity."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    section: ClassVar[str] = ""  # name of the section in a file; empty for classes that are not a section

    def __init_subclass__(cls, section: str = "", **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.section = section
        if section:
            _SECTIONS[section] = cls

    def __init__(self, **values: Any) -> None:
        """Take settings by keyword. Raises ConfigError with one line per problem."""
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError("\n".join(describe(type(self), error))) from None

    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]  # so that validating a table skips it

    def with_arguments(self, where: str, **arguments: tuple[str, Any, Any]) -> Self:
        """Return these settings with arguments of a function, given as (field, value, default of the argument).

        An argument sets a field that is unset here. Raises ConfigError, naming the section as `where`, if a non-default
        argument contradicts a field that is set.
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
        """Yield conflicts between keys of this section: the key, the rule ("must be ..."), the value and the remedy."""
        yield from ()

    @model_validator(mode="after")
    def _check_conflicts(self) -> Self:
        if found := list(self._conflicts()):
            raise ValueError(found)
        return self


_SECTIONS: dict[str, type[Section]] = {}


def describe(model: type[Section], error: ValidationError) -> list[str]:
    """Return a complete message for each problem in a pydantic error."""
    return [line for detail in error.errors(include_url=False) for line in _messages(model, detail)]


def spell(value: Any) -> str:
    """Return a value as written in TOML, but floats as in Python."""
    return str(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False, default=str)


def _messages(model: type[Section], detail: Any) -> list[str]:
    """Return the messages for one pydantic error. A section's validator may have found several problems."""
    location: list[int | str] = [model.section] if model.section else []
    owner: type[BaseModel] = model
    table: type[BaseModel] | None = model  # the model that has the next part of the location as a key, if any
    field: FieldInfo | None = None
    is_inside = False  # inside the value of a setting
    for part in detail["loc"]:
        if part == "[key]":  # marks that the name before it is invalid
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
        return [_unknown_key(location, owner)]
    remedy = _extra(field, "remedy")
    rule = "" if is_inside else _extra(field, "rule")
    names = re.findall(r"'([^']+)'", detail["ctx"]["expected"]) if kind == "literal_error" else []
    given = str(detail["input"])
    if close := difflib.get_close_matches(given, names, n=1):
        nearest = difflib.SequenceMatcher(None, close[0], given).ratio()
        close = difflib.get_close_matches(given, names, n=2, cutoff=nearest - 0.05)  # include a near tie
        remedy = f"Did you mean {' or '.join(close)}?"
    elif kind in _UNQUOTED and re.fullmatch(_UNQUOTED[kind], given):
        remedy = f"Write {given} without quotes."
    if kind == "tuple_type":
        rule = rule or "a list of strings"
    elif kind == "model_type":
        rule, remedy = "a table of settings", remedy or f"Write its keys under [{key}]."
    if not remedy and not field.is_required():
        remedy = f"Remove it to use the default, {_short(field.get_default(call_default_factory=True))}."
    if kind == "missing":
        return [f"{key} is required. {remedy}"]
    # Without a rule, use pydantic's message, such as "Input should be greater than or equal to 1".
    must = f"must be {rule}" if rule else re.sub(r"^\w+ should", "must", detail["msg"])
    must = must.replace("greater than or equal to", "at least").replace("less than or equal to", "at most")
    return [f"{key} {must}, got {_short(detail['input'])}. {remedy}"]


def _unknown_key(location: Sequence[int | str], owner: type[BaseModel]) -> str:
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
        remedy = f"[{_dotted(location[:-1])}] has {', '.join(known)}; docs/from-trl.md lists TRL's names."
    return f"Unknown {'section' if len(location) == 1 else 'setting'} {key}. {remedy}"


def _extra(field: FieldInfo, name: str) -> str:
    return str(field.json_schema_extra.get(name, "")) if isinstance(field.json_schema_extra, dict) else ""


def _inner_model(field: FieldInfo) -> type[BaseModel] | None:
    """Return the model of a section, or of the tables in a list such as `reward.terms`."""
    kinds = (field.annotation, *get_args(field.annotation))
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


def _dotted(location: Sequence[int | str]) -> str:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location if part != "")
    return text.removeprefix(".")


def _short(value: Any) -> str:
    text = spell(value)
    return text if len(text) <= 80 else text[:77] + "..."
