"""A Python function as a reward, run on a thread of its own so that a hanging one cannot freeze a run."""

from __future__ import annotations

import inspect
import itertools
import math
import numbers
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from coati.errors import RewardError
from coati.rewards.base import RewardRequest

_EXCERPT_LENGTH = 80


class FunctionReward:
    """Scores text with a function called as TRL calls its own: by keyword, with lists of equal length.

    The function gets `prompts`, `completions` and the dataset's columns, but only those that its signature
    names (all of them if it takes `**kwargs`). It returns one number per sample; None, NaN and infinite ones
    mean "no score". Texts are plain strings, for chat prompts too.

    A call past the deadline raises. Python cannot end the thread, so a function that never returns keeps it
    until the process ends (it is a daemon, and does not hold the process up).

    Example:
        >>> def brevity(completions):
        ...     return [-len(text) for text in completions]
        >>> reward = FunctionReward(brevity, timeout_seconds=5)
        >>> reward.name
        'brevity'
    """

    def __init__(self, function: Callable[..., Any], *, name: str = "", timeout_seconds: float = 120.0) -> None:
        self.name = name or getattr(function, "__name__", type(function).__name__)
        self._function = function
        self.timeout_seconds = timeout_seconds
        # One that asks a model on the card says so: it would get in the way of the models that score beside it.
        self.is_host_work = bool(getattr(function, "is_host_work", True))
        self._parameters = _keyword_parameters(function)

    def score(self, request: RewardRequest) -> Tensor:
        """Return one score per sample, [B] float32 on the CPU.

        Raises:
            RewardError: when the function raises, hangs, or does not return one number per sample.
        """
        result = self._call(self._arguments(request), request)
        if len(result) != len(request):
            raise self._error(
                f"must return {len(request)} scores, one for each completion, got {len(result)}",
                "Return a list as long as completions, with None where there is no score",
                request,
            )
        scores = [self._number(index, value, request) for index, value in enumerate(result)]
        # Judge finiteness as float32: 1e300 is finite in Python and infinite in the tensor.
        tensor = torch.tensor(scores, dtype=torch.float64).to(torch.float32)  # [B]
        return torch.where(tensor.isfinite(), tensor, torch.full_like(tensor, math.nan))

    def _arguments(self, request: RewardRequest) -> dict[str, Any]:
        offered = {**request.columns, "prompts": request.prompts, "completions": request.completions}
        if self._parameters is None:
            return offered
        missing = [name for name, required in self._parameters.items() if required and name not in offered]
        if missing:
            raise self._error(
                f"must only ask for prompts, completions and columns of the dataset, got the parameter "
                f"{missing[0]!r}, which is none of {', '.join(offered)}",
                "Rename the parameter, give it a default, or add the column to the prompts",
                request,
            )
        return {name: value for name, value in offered.items() if name in self._parameters}

    def _call(self, arguments: Mapping[str, Any], request: RewardRequest) -> list[Any]:
        """Run the function on a daemon thread and wait for it, at most until the deadline."""
        outcome: list[Any] = []
        failure: list[BaseException] = []

        def work() -> None:
            try:
                # Listing happens here too: a generator does its work while it is read.
                outcome.append(_listed(self._function(**arguments), len(request)))
            except BaseException as error:  # SystemExit too: on a thread it would pass without a word
                failure.append(error)

        thread = threading.Thread(target=work, name=f"reward-{self.name}", daemon=True)
        thread.start()
        thread.join(self.timeout_seconds)
        if failure:
            error = failure[0]
            place = traceback.extract_tb(error.__traceback__)[-1]
            raise self._error(
                f"must not raise, got {type(error).__name__}: {error} (at {place.filename}:{place.lineno})",
                "Correct the function, or return None for samples that it cannot score",
                request,
            ) from error
        if not outcome:
            raise self._error(
                f"must return within {self.timeout_seconds:g} seconds, got nothing by then",
                "Make it faster, or raise reward.timeout_seconds",
                request,
            )
        if outcome[0] is None:
            raise self._error(
                "must return a list of scores, got something that is not a list of numbers",
                "Return one number for each completion",
                request,
            )
        return list(outcome[0])

    def _number(self, index: int, value: Any, request: RewardRequest) -> float:
        if value is None:
            return math.nan
        if isinstance(value, Tensor) and value.numel() == 1:
            value = value.item()
        # numpy's scalars count as Real; texts that look like numbers do not, on purpose.
        if isinstance(value, numbers.Real):
            try:
                return float(value)
            except OverflowError:  # an int too large for any float is as good as infinite
                return math.inf
        raise self._error(
            f"must return numbers (or None), got {_excerpt(repr(value))} ({type(value).__name__}) as score {index}",
            "Convert the scores to float",
            request,
        )

    def _error(self, what: str, remedy: str, request: RewardRequest) -> RewardError:
        sample = ""
        if len(request):
            prompt, completion = _excerpt(request.prompts[0]), _excerpt(request.completions[0])
            sample = f" First sample: prompt {prompt!r}, completion {completion!r}."
        return RewardError(f"Reward function {self.name!r} {what}. {remedy}.{sample}")


def _listed(result: Any, expected: int) -> list[Any] | None:
    """Turn what a function returned into a list; None when it is no collection of scores."""
    if isinstance(result, Tensor):
        return result.detach().cpu().tolist() if result.dim() == 1 else None
    if isinstance(result, str | bytes | Mapping) or not isinstance(result, Iterable):
        return None
    # One more than expected is enough to know that there are too many, even if the source never ends.
    return list(result) if hasattr(result, "__len__") else list(itertools.islice(result, expected + 1))


def _keyword_parameters(function: Callable[..., Any]) -> dict[str, bool] | None:
    """Return the parameters that can be passed by keyword, with True for required ones; None = takes any."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (
        TypeError,
        ValueError,
    ):  # some compiled functions do not tell: offer the two that every reward knows
        return {"prompts": True, "completions": True}
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return {
        parameter.name: parameter.default is inspect.Parameter.empty
        for parameter in parameters
        if parameter.kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    }


def _excerpt(text: str) -> str:
    return text if len(text) <= _EXCERPT_LENGTH else text[: _EXCERPT_LENGTH - 1] + "…"
