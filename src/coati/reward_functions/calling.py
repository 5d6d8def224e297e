"""How a reward function is called, and what it may return."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import json
import math
import numbers
import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from coati.counting import counted
from coati.reward_functions.loading import bound_options, keyword_parameters

OFFERED = ("prompts", "completions", "completion_ids", "timeout_seconds")
"""What a function can take besides the dataset's columns."""
_EXCERPT_LENGTH = 80
_DETAIL_CHARACTERS = 1000
_MOST_DETAILS = 8
_ONLY_IF_NAMED = ("timeout_seconds",)  # all others are lists, one value for each sample


class WrongScores(Exception):
    """A function cannot be called, or did not return one score for each sample: what it did, and the remedy."""


class Verdict(NamedTuple):
    """What a function says of one sample."""

    score: float = math.nan
    """NaN = no score."""
    details: dict[str, Any] | None = None
    """Written down with the sample."""
    error: str = ""
    """What it did instead, in words: it failed on this sample."""


def call_function(function: Callable[..., Any], offered: Mapping[str, Any], expected: int) -> list[Verdict]:
    """Call a reward function with those of the offered arguments that it takes.

    It returns a number for each sample; None for no score; a table with `score` and details of any name; or an
    exception, or a table with `error`, where it failed on that sample. Raises WrongScores if it takes other arguments,
    or does not return `expected` of these; and what the function raises.
    """
    named, takes_others = keyword_parameters(function)
    if missing := [name for name, is_required in named.items() if is_required and name not in offered]:
        raise WrongScores(
            f"has the parameter {missing[0]!r}, but it can only be called with {', '.join(offered)}",
            "Rename the parameter, give it a default, name its column in reward.columns, or add the column",
        )
    if takes_others:
        named |= dict.fromkeys(offered.keys() - bound_options(function) - set(_ONLY_IF_NAMED), False)
    returned = function(**{name: value for name, value in offered.items() if name in named})
    if inspect.isawaitable(returned):
        returned = asyncio.run(_awaited(returned))
    return read_verdicts(returned, expected)


def read_verdicts(returned: Any, expected: int) -> list[Verdict]:
    """Turn what a function, or a server, returned for a batch into verdicts; see `call_function`."""
    scores = _listed(returned, expected)  # a generator does its work while it is read
    if scores is None:
        raise WrongScores("did not return a list of scores", "Return one number for each completion")
    if len(scores) != expected:
        raise WrongScores(
            f"returned {counted(len(scores), 'score')} for {counted(expected, 'completion')}",
            "Return a list as long as completions, with None where there is no score",
        )
    return [_verdict(index, value) for index, value in enumerate(scores)]


def raised(error: BaseException) -> str:
    """What a function raised, and where."""
    places = traceback.extract_tb(error.__traceback__)[-1:]
    return f"raised {type(error).__name__}: {error}" + "".join(f" (at {at.filename}:{at.lineno})" for at in places)


def excerpt(text: str) -> str:
    """The beginning of a text, for messages."""
    return text if len(text) <= _EXCERPT_LENGTH else text[: _EXCERPT_LENGTH - 1] + "…"


def recorded(value: Any) -> Any:
    """A value as JSON has it; of a long one the beginning, as text."""
    try:
        text = json.dumps(value, default=str, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):  # NaN, or what contains itself or too much else
        return str(value) if isinstance(value, float) else type(value).__name__
    return json.loads(text) if len(text) <= _DETAIL_CHARACTERS else text[:_DETAIL_CHARACTERS]


async def _awaited(returned: Any) -> Any:
    return await returned


def _listed(returned: Any, expected: int) -> list[Any] | None:
    """Turn what a function returned into a list; None when it is no collection of scores."""
    if hasattr(returned, "detach"):  # a tensor
        return list(returned.detach().cpu().tolist()) if returned.dim() == 1 else None
    if isinstance(returned, str | bytes | Mapping) or not isinstance(returned, Iterable):
        return None
    # One more than expected is enough to know that there are too many, even if the source never ends.
    return list(returned) if hasattr(returned, "__len__") else list(itertools.islice(returned, expected + 1))


def _verdict(index: int, value: Any) -> Verdict:
    if isinstance(value, Verdict):
        return value
    if isinstance(value, Exception):
        return Verdict(error=raised(value))
    if not isinstance(value, Mapping):
        return Verdict(_number(index, value))
    keys = [key for key in value if key not in ("score", "error")][:_MOST_DETAILS]
    details = {str(key): recorded(value[key]) for key in keys}
    if value.get("error") is not None:
        return Verdict(math.nan, details, f"returned an error: {value['error']}"[:_DETAIL_CHARACTERS])
    if "score" not in value:
        raise WrongScores(f"returned a table without score for completion {index}", "Add the key score")
    return Verdict(_number(index, value["score"]), details)


def _number(index: int, value: Any) -> float:
    if value is None:
        return math.nan
    if hasattr(value, "detach") and value.numel() == 1:
        value = value.item()
    # numpy's scalars count as Real; texts that look like numbers do not, on purpose.
    if isinstance(value, numbers.Real):
        try:
            return float(value)
        except OverflowError:  # an int too large for any float is as good as infinite
            return math.inf
    raise WrongScores(
        f"returned {excerpt(repr(value))} ({type(value).__name__}) as score {index}, which is not a number",
        "Convert the scores to float",
    )
