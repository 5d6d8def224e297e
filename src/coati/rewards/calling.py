"""Loads reward functions by name, calls them, and checks what they return. Does not import torch."""

import asyncio
import difflib
import functools
import importlib
import inspect
import itertools
import json
import math
import numbers
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ConfigDict, ValidationError, validate_call

from coati.errors import ConfigError, counted
from coati.rewards.library import LIBRARY

OFFERED = ("prompts", "completions", "completion_ids", "timeout_seconds")
"""Arguments that every function can take, besides the dataset's columns."""
_EXCERPT_LENGTH = 80
_DETAIL_CHARACTERS = 1000
_MAX_DETAILS = 8
_ONLY_IF_NAMED = ("timeout_seconds",)  # not passed to **kwargs, which get only lists with one value per sample


class CallFailed(Exception):
    """A call returned no usable scores; `what` says what the function or its process did.

    With a `remedy`, the function itself is wrong, so a retry is pointless.
    """

    def __init__(self, what: str, remedy: str = "") -> None:
        super().__init__(what, remedy)
        self.what, self.remedy = what, remedy


class Verdict(NamedTuple):
    """The result for one sample: a score (NaN means none), details, and a description of the error if it failed."""

    score: float = math.nan
    details: dict[str, Any] | None = None
    error: str = ""


def load_reward_function(
    name: str, search_paths: Sequence[Path] = (), options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """Return the reward function of this name from the library, or import "module:function".

    `options` configure a function of the library. For any other function, they are keyword arguments of every call.
    Raises ConfigError if the function cannot be loaded.

    >>> load_reward_function("length", options={"maximum": 3, "unit": "words"})(["so short", "not so short now"])
    [1.0, 0.0]
    """
    options, in_library = options or {}, name in LIBRARY
    function = _imported(f"{__package__}.library.{LIBRARY[name]}" if in_library else name, search_paths)
    if not (in_library or options):
        return function
    signature = inspect.signature(function)
    try:
        (signature.bind if in_library else signature.bind_partial)(**options)
    except TypeError as error:
        known = ", ".join(signature.parameters)
        raise ConfigError(f"Reward {name!r}: {error}. Its options are {known} (docs/rewards.md).") from None
    if not in_library:
        return functools.partial(function, **options)
    try:
        return validate_call(config=ConfigDict(strict=True))(function)(**options)  # type: ignore[no-any-return]
    except ValidationError as error:
        wrong = error.errors(include_url=False)[0]
        key, got = ".".join(map(str, wrong["loc"])), excerpt(repr(wrong["input"]))
        raise ConfigError(
            f"Reward {name!r}: option {key!r}: {wrong['msg']}, got {got}. Correct reward.options."
        ) from None


def needed_package(name: str, extra: str = "rewards") -> Any:
    """Import a package that a library reward needs. ConfigError if it is not installed."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"The package {error.name} is not installed. Run pip install '.[{extra}]' in your clone of coati."
        ) from None


def require(name: str, is_met: bool, rule: str) -> None:
    """Raise ConfigError if the options of a reward break a rule."""
    if not is_met:
        raise ConfigError(f"Reward {name!r} needs {rule}. Correct reward.options.")


def keyword_parameters(function: Callable[..., Any]) -> tuple[dict[str, bool], bool]:
    """Return the parameters that `options` leave open, True for required ones, and whether there is **kwargs."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some compiled functions have no signature
        return {"prompts": True, "completions": True}, False
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    named = {
        parameter.name: parameter.default is inspect.Parameter.empty
        for parameter in parameters
        if parameter.kind in kinds and parameter.name not in bound_options(function)
    }
    return named, any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)


def bound_options(function: Callable[..., Any]) -> Mapping[str, Any]:
    """Return the arguments that `options` set; columns do not override them."""
    return function.keywords if isinstance(function, functools.partial) else {}


def call_function(function: Callable[..., Any], offered: Mapping[str, Any], expected: int) -> list[Verdict]:
    """Call a reward function with those of the `offered` arguments that it takes.

    For each sample it returns a number; None for no score; a dict with `score` and any details; or, if it failed on
    this sample, an exception or a dict with `error`. Raises CallFailed if it requires other arguments, or does not
    return `expected` such entries, and passes on what the function raises.
    """
    named, takes_others = keyword_parameters(function)
    if missing := [name for name, is_required in named.items() if is_required and name not in offered]:
        what = f"has the parameter {missing[0]!r}, but it can only be called with {', '.join(offered)}"
        if missing[0] == "completion_ids":  # only `coati reward check` has none
            remedy = "Set model.path to a folder with a tokenizer (--set model.path=FOLDER), or reward.options.unit"
            raise CallFailed(what, f"{remedy} to words")
        raise CallFailed(what, "Rename it, give it a default, name its column in reward.columns, or add the column")
    if takes_others:
        named |= dict.fromkeys(offered.keys() - bound_options(function) - set(_ONLY_IF_NAMED), False)
    returned = function(**{name: value for name, value in offered.items() if name in named})

    async def result() -> Any:
        return await returned

    return read_verdicts(asyncio.run(result()) if inspect.isawaitable(returned) else returned, expected)


def read_verdicts(returned: Any, expected: int) -> list[Verdict]:
    """Turn what a function or a server returned for a batch into verdicts; see `call_function`."""
    scores = _as_list(returned, expected)  # a generator does its work here
    if scores is None:
        raise CallFailed("did not return a list of scores", "Return one number for each completion")
    if len(scores) != expected:
        raise CallFailed(
            f"returned {counted(len(scores), 'score')} for {counted(expected, 'completion')}",
            "Return a list as long as completions",
        )
    return [_verdict(index, value) for index, value in enumerate(scores)]


def describe_exception(error: BaseException) -> str:
    """Describe an exception that a function raised, with its location."""
    places = traceback.extract_tb(error.__traceback__)[-1:]
    return f"raised {type(error).__name__}: {error}" + "".join(f" (at {at.filename}:{at.lineno})" for at in places)


def excerpt(text: str) -> str:
    """Return the beginning of a text, for messages."""
    return text if len(text) <= _EXCERPT_LENGTH else text[: _EXCERPT_LENGTH - 1] + "…"


def to_json_value(value: Any) -> Any:
    """Return a value in a form that JSON can represent; a long one as truncated text."""
    try:
        text = json.dumps(value, default=str, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):  # NaN, a cycle, or nested too deeply
        return str(value) if isinstance(value, float) else type(value).__name__
    return json.loads(text) if len(text) <= _DETAIL_CHARACTERS else text[:_DETAIL_CHARACTERS]


def _as_list(returned: Any, expected: int) -> list[Any] | None:
    """Return the result of a function as a list; None if it is not a collection of scores."""
    if hasattr(returned, "detach"):  # a tensor
        return list(returned.detach().cpu().tolist()) if returned.dim() == 1 else None
    if isinstance(returned, str | bytes | Mapping) or not isinstance(returned, Iterable):
        return None
    # One more than expected shows that there are too many, even if the generator never ends.
    return list(returned) if hasattr(returned, "__len__") else list(itertools.islice(returned, expected + 1))


def _verdict(index: int, value: Any) -> Verdict:
    if isinstance(value, Verdict):
        return value
    if isinstance(value, Exception):
        return Verdict(error=describe_exception(value))
    if not isinstance(value, Mapping):
        return Verdict(_number(index, value))
    keys = [key for key in value if key not in ("score", "error")][:_MAX_DETAILS]
    details = {str(key): to_json_value(value[key]) for key in keys}
    if value.get("error") is not None:
        return Verdict(math.nan, details, f"returned an error: {value['error']}"[:_DETAIL_CHARACTERS])
    if "score" not in value:
        raise CallFailed(f"returned a dict without 'score' for completion {index}", "Add the key")
    return Verdict(_number(index, value["score"]), details)


def _number(index: int, value: Any) -> float:
    if value is None:
        return math.nan
    if hasattr(value, "detach") and value.numel() == 1:
        value = value.item()
    # numpy scalars are Real. Strings that look like numbers are rejected on purpose.
    if isinstance(value, numbers.Real):
        try:
            return float(value)
        except OverflowError:  # an int that is too large for a float
            return math.inf
    raise CallFailed(
        f"returned {excerpt(repr(value))} ({type(value).__name__}) as score {index}, which is not a number",
        "Convert the scores to float",
    )


def _imported(name: str, search_paths: Sequence[Path]) -> Callable[..., Any]:
    """Import "module:function", with the search paths first in `sys.path`, and last afterwards, for later imports."""
    module_name, _, attribute = name.partition(":")
    if not all(map(str.isidentifier, (attribute, *module_name.split(".")))):
        close = difflib.get_close_matches(name, LIBRARY, n=1)
        hint = f"Did you mean {close[0]!r}?" if close else 'For praise() in rewards.py write "rewards:praise".'
        known = ", ".join(LIBRARY)
        raise ConfigError(f'A reward function must be one of {known}, or "module:function", got {name!r}. {hint}')
    paths = list(dict.fromkeys(str(Path(path).resolve()) for path in search_paths))
    sys.path[:0] = paths
    importlib.invalidate_caches()  # the file may be new
    package = module_name.partition(".")[0]
    spec, loaded = PathFinder.find_spec(package), getattr(sys.modules.get(package), "__file__", None)
    where, problem = spec.origin if spec is not None and spec.has_location else None, ""
    try:
        if where is not None and loaded not in (None, where):
            raise ImportError(f"{package!r} is already imported from {loaded}; rename your module")
        module = importlib.import_module(module_name)
        if not callable(function := getattr(module, attribute, None)):
            if module_name != "__main__":
                sys.modules.pop(module_name)  # so that a corrected file is read again
            public = {key: value for key, value in vars(module).items() if not key.startswith("_")}
            own = [key for key, value in public.items() if getattr(value, "__module__", "") == module_name]
            problem = f"because {where or module_name} has no function {attribute!r}"
            problem += f". It defines: {', '.join(own)}" * bool(own)
            raise AttributeError(problem)
    except Exception as error:  # a module may raise anything
        if module_name == "__main__" or attribute == "_lambda_":
            raise ConfigError(
                f"Function {name!r} was passed by a program and cannot be loaded by name. To continue the run, use "
                "coati.train(resume=..., reward=...); to replay it, coati.replay.replay(folder, "
                "parts=coati.build.Parts(reward=...)). Or move the function into a module and set reward.function."
            ) from error
        remedy = "Check the name and reward.search_paths."
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and not f"{module_name}.".startswith(f"{missing}."):
            remedy = f"Install {missing}, which {module_name} imports, or add its folder to reward.search_paths."
        source = where or ", ".join(paths) or "the installed packages"
        problem = problem or f"from {source}: {type(error).__name__}: {error}"
        raise ConfigError(f"Function {name!r} cannot be loaded {problem}. {remedy}") from error
    finally:
        for path in paths:
            sys.path.remove(path)
        sys.path.extend(path for path in paths if path not in sys.path)
    return function  # type: ignore[no-any-return]
