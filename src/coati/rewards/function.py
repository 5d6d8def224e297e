"""A Python function as a reward, called on a thread so that a hanging one cannot freeze a run."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import math
import numbers
import traceback
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

import torch
from torch import Tensor

from coati.background import run_in_background
from coati.config.checks import keyword_parameters
from coati.counting import counted
from coati.errors import RewardError
from coati.rewards.base import Reward, RewardRequest

_EXCERPT_LENGTH = 80


class FunctionReward(Reward):
    """Scores text with a function called as TRL calls its own: by keyword, with lists of equal length.

    The function gets `prompts`, `completions` and the dataset's columns, but only those that its signature
    names (all of them if it takes `**kwargs`). It returns one number per sample; None, NaN and infinite ones
    mean "no score". Texts are plain strings, for chat prompts too. It may be `async`: every batch then has its
    own event loop.

    A call past the deadline raises. Python cannot end the thread, so a function that never returns keeps it
    until the process ends, which does not wait for it.

    Example:
        >>> def brevity(completions):
        ...     return [-len(text) for text in completions]
        >>> reward = FunctionReward(brevity, timeout_seconds=5)
        >>> reward.name
        'brevity'
    """

    def __init__(self, function: Callable[..., Any], *, name: str = "", timeout_seconds: float = 120.0) -> None:
        self.name = name or getattr(function, "__name__", type(function).__name__)
        self.timeout_seconds = timeout_seconds
        # A function that asks a model on the GPU sets this to False: it would get in the way of the other models.
        self.is_host_work = bool(getattr(function, "is_host_work", True))
        self._function = function
        self._parameters = keyword_parameters(function)

    def score(self, request: RewardRequest) -> Tensor:
        """Return one score per sample, [B] float32 on the CPU.

        Raises:
            RewardError: when the function raises, hangs, or does not return one number per sample.
        """
        returned = self._call(self._arguments(request), request)
        if len(returned) != len(request):
            raise self._error(
                f"returned {counted(len(returned), 'score')} for {counted(len(request), 'completion')}",
                "Return a list as long as completions, with None where there is no score",
                request,
            )
        scores = [self._number(index, value, request) for index, value in enumerate(returned)]
        # Judge finiteness as float32: 1e300 is finite in Python and infinite in the tensor.
        tensor = torch.tensor(scores, dtype=torch.float64).to(torch.float32)  # [B]
        return torch.where(tensor.isfinite(), tensor, torch.full_like(tensor, math.nan))

    def _arguments(self, request: RewardRequest) -> dict[str, Any]:
        offered = {**request.columns, "prompts": request.prompts, "completions": request.completions}
        if self._parameters is None:
            return offered
        missing = [name for name, is_required in self._parameters.items() if is_required and name not in offered]
        if missing:
            raise self._error(
                f"has the parameter {missing[0]!r}, but it can only be called with {', '.join(offered)}",
                "Rename the parameter, give it a default, or add the column to the prompts",
                request,
            )
        return {name: value for name, value in offered.items() if name in self._parameters}

    def _call(self, arguments: Mapping[str, Any], request: RewardRequest) -> list[Any]:
        """Call the function on a daemon thread and wait for it, at most until the deadline."""

        def work() -> list[Any] | None:
            returned = self._function(**arguments)
            if inspect.isawaitable(returned):
                returned = asyncio.run(_awaited(returned))
            return _listed(returned, len(request))  # a generator does its work while it is read

        call = run_in_background(work, name=f"reward-{self.name}")
        try:
            returned = call.result(self.timeout_seconds)
        except BaseException as error:  # SystemExit too, which a function may raise
            if isinstance(error, FutureTimeout) and not call.done():
                raise self._error(
                    f"did not return within {self.timeout_seconds:g} s",
                    "Make it faster, or raise reward.timeout_seconds",
                    request,
                ) from None
            if not call.done():  # ours, for example Ctrl-C
                raise
            place = traceback.extract_tb(error.__traceback__)[-1]
            raise self._error(
                f"raised {type(error).__name__}: {error} (at {place.filename}:{place.lineno})",
                "Correct the function, or return None for samples that it cannot score",
                request,
            ) from error
        if returned is None:
            raise self._error("did not return a list of scores", "Return one number for each completion", request)
        return returned

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
            f"returned {_excerpt(repr(value))} ({type(value).__name__}) as score {index}, which is not a number",
            "Convert the scores to float",
            request,
        )

    def _error(self, what: str, remedy: str, request: RewardRequest) -> RewardError:
        sample = ""
        if len(request):
            prompt, completion = _excerpt(request.prompts[0]), _excerpt(request.completions[0])
            sample = f" First sample: prompt {prompt!r}, completion {completion!r}."
        return RewardError(f"Reward function {self.name!r} {what}. {remedy}.{sample}")


async def _awaited(returned: Any) -> Any:
    return await returned


def _listed(returned: Any, expected: int) -> list[Any] | None:
    """Turn what a function returned into a list; None when it is no collection of scores."""
    if isinstance(returned, Tensor):
        return returned.detach().cpu().tolist() if returned.dim() == 1 else None
    if isinstance(returned, str | bytes | Mapping) or not isinstance(returned, Iterable):
        return None
    # One more than expected is enough to know that there are too many, even if the source never ends.
    return list(returned) if hasattr(returned, "__len__") else list(itertools.islice(returned, expected + 1))


def _excerpt(text: str) -> str:
    return text if len(text) <= _EXCERPT_LENGTH else text[: _EXCERPT_LENGTH - 1] + "…"
