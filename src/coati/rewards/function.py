"""A Python function as a reward. It runs on a thread or in a child process, so it cannot block a run if it hangs."""

import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from functools import partial
from pathlib import Path
from threading import TIMEOUT_MAX
from typing import Any

from torch import nn

from coati.background import run_in_background
from coati.config.reward import RewardSettings, RewardTerm
from coati.errors import RewardError, RewardFailed
from coati.rewards.base import ModelReward, Reward, RewardRequest, WeightedSum
from coati.rewards.calling import CallFailed, Verdict, call_function, describe_exception, load_reward_function
from coati.rewards.library import isolation_of
from coati.rewards.process import RewardProcess

# A reward of a program: a function, or functions whose scores are added up.
GivenReward = Callable[..., Any] | Sequence[Callable[..., Any]]

# Errors of a function that expects chat messages and gets a string.
_READS_MESSAGES = re.compile(
    r"raised (TypeError: string indices|IndexError: string index|AttributeError: 'str' object has no attribute 'get')"
)


class FunctionReward(Reward):
    """Scores text with a function that is called as in TRL: by keyword, with lists of equal length.

    Of `prompts`, `completions`, `completion_ids` and the dataset's columns, it gets those that its signature names, or
    all of them if it takes `**kwargs`. `columns` maps a parameter to a column of another name. With `messages`, each
    text is a list with one chat message. For return values, see `call_function`.

    A call that misses its deadline raises RewardFailed. Its thread cannot be ended; a `RewardProcess` can be killed.

    Example:
        >>> def brevity(completions):
        ...     return [-len(text) for text in completions]
        >>> reward = FunctionReward(brevity, timeout_seconds=5)
        >>> reward.name
        'brevity'
    """

    def __init__(
        self,
        function: Callable[..., Any] | RewardProcess,
        *,
        name: str = "",
        timeout_seconds: float = 120.0,
        columns: Mapping[str, str] | None = None,
        messages: bool = False,
    ) -> None:
        self.name = name or getattr(function, "__name__", type(function).__name__)
        self.timeout_seconds = timeout_seconds
        # A function that uses a model on the GPU sets this to False, so that it does not run beside other models.
        self.is_host_work = bool(getattr(function, "is_host_work", True))
        self._columns, self._messages = dict(columns or {}), messages
        self._process: RewardProcess | None = None
        if isinstance(function, RewardProcess):
            self._process, self._function = function, function.call
        else:
            self._function = partial(call_function, function)

    def score(self, request: RewardRequest) -> list[Verdict]:
        """Return the function's verdict on each sample."""
        verdicts = self._call(self._arguments(request), request)
        return [one._replace(error=self._message(one.error)) if one.error else one for one in verdicts]

    def _arguments(self, request: RewardRequest) -> dict[str, Any]:
        offered: dict[str, Any] = {**request.columns}
        for parameter, column in self._columns.items():
            if column not in request.columns:
                known = ", ".join(request.columns) or "none"
                what = f"takes {parameter!r} from the column {column!r}, but the columns are {known}"
                raise RewardError(self._message(what, "Correct reward.columns"))
            offered[parameter] = request.columns[column]
        for key, role, texts in (
            ("prompts", "user", request.prompts),
            ("completions", "assistant", request.completions),
        ):
            offered[key] = [[{"role": role, "content": text}] for text in texts] if self._messages else texts
        if request.completion_ids is not None:
            offered["completion_ids"] = request.completion_ids
        return offered | {"timeout_seconds": min(self.timeout_seconds, request.timeout_seconds, TIMEOUT_MAX)}

    def _call(self, offered: Mapping[str, Any], request: RewardRequest) -> list[Verdict]:
        """Call the function on a daemon thread, and wait until it returns or the deadline passes."""
        seconds = offered["timeout_seconds"]
        try:
            if self._process is not None:
                self._process.start()
        except CallFailed as error:
            what = self._message(f"could not be restarted: {error.what}", "See the maker's log")
            raise RewardError(what) from error
        call = run_in_background(lambda: self._function(offered, len(request)), name=f"reward-{self.name}")
        if not wait([call], timeout=seconds).done:
            if self._process is not None:
                self._process.kill()
            limit = "" if seconds == self.timeout_seconds else "its share of "
            what = f"did not return within {limit}{self.timeout_seconds:g} s"
            raise RewardFailed(self._message(what, "Make it faster, or raise reward.timeout_seconds"))
        if (fault := call.exception()) is None:
            return call.result()
        if isinstance(fault, CallFailed) and fault.remedy:
            raise RewardError(self._message(fault.what, fault.remedy)) from None
        what = fault.what if isinstance(fault, CallFailed) else describe_exception(fault)
        raise RewardFailed(self._message(what)) from fault

    def _message(self, what: str, remedy: str = "") -> str:
        if not self._messages and _READS_MESSAGES.match(what):
            remedy = "If it expects chat messages, as in TRL, set messages = true next to function in the settings"
        return f"Reward function {self.name!r} {what}." + f" {remedy}." * bool(remedy)


def build_reward(
    settings: RewardSettings,
    *,
    load_model: Callable[[str], nn.Module],
    search_paths: Sequence[Path] = (),
    given: GivenReward | None = None,
) -> Reward:
    """Build the reward that `[reward]` describes, of `given` functions if any. ConfigError if it cannot be loaded.

    `load_model` takes a path or hub name and returns a module that is called as `model(sequences, attention_mask)`.
    """

    def build(part: RewardTerm, function: Callable[..., Any] | None) -> Reward:
        if part.model and function is None:
            return ModelReward(load_model(part.model), part.label)
        called: Callable[..., Any] | RewardProcess
        if isolation_of("" if function else part.function, settings.isolation) == "process":
            called = RewardProcess(function or part.function, settings, options=part.options, search_paths=search_paths)
        else:
            called = function or load_reward_function(part.function, search_paths, part.options)
        return FunctionReward(
            called,
            name=part.label,
            timeout_seconds=settings.timeout_seconds,
            columns=part.columns,
            messages=part.messages,
        )

    if callable(given) or (given is None and not settings.terms):
        return build(settings.parts[0], given)
    functions: Sequence[Any] = given or [None] * len(settings.terms)
    return WeightedSum([(build(term, one), term.weight) for term, one in zip(settings.parts, functions, strict=True)])
