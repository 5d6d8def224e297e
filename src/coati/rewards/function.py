"""A Python function as a reward, on a thread or in a child process: one that hangs cannot freeze a run.

And rewards from settings: functions by name, models through a loader, weighted sums of both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from coati.background import run_in_background
from coati.config.checks import load_reward_function
from coati.config.sections import RewardSettings, reward_label
from coati.errors import RewardError, RewardFailed
from coati.reward_worker import WrongScores, call_function, excerpt, raised
from coati.rewards.base import ModelReward, Reward, RewardRequest, WeightedSum
from coati.rewards.isolation import FunctionFailed, RewardProcess


class FunctionReward(Reward):
    """Scores text with a function called as TRL calls its own: by keyword, with lists of equal length.

    The function gets `prompts`, `completions` and the dataset's columns, but only those that its signature
    names (all of them if it takes `**kwargs`). It returns one number per sample; None, NaN and infinite ones
    mean "no score". Texts are plain strings, for chat prompts too. It may be `async`: every batch then has its
    own event loop.

    A call past the deadline raises. Python cannot end the thread, so a function that never returns keeps it
    until the process ends, which does not wait for it. Give a `RewardProcess` to have it killed.

    Example:
        >>> def brevity(completions):
        ...     return [-len(text) for text in completions]
        >>> reward = FunctionReward(brevity, timeout_seconds=5)
        >>> reward.name
        'brevity'
    """

    def __init__(
        self, function: Callable[..., Any] | RewardProcess, *, name: str = "", timeout_seconds: float = 120.0
    ) -> None:
        self.name = name or getattr(function, "__name__", type(function).__name__)
        self.timeout_seconds = timeout_seconds
        # A function that asks a model on the GPU sets this to False: it would get in the way of the other models.
        self.is_host_work = bool(getattr(function, "is_host_work", True))
        self._process: RewardProcess | None = None
        if isinstance(function, RewardProcess):
            self._process, self._function = function, function.call
        else:
            self._function = partial(call_function, function)

    def score(self, request: RewardRequest) -> Tensor:
        """Return one score per sample, [B] float32 on the CPU.

        Raises:
            RewardFailed: when the function raises, hangs, or ends its process.
            RewardError: when it does not return one number per sample.
        """
        offered = {**request.columns, "prompts": request.prompts, "completions": request.completions}
        scores = self._call(offered, request)
        # Judge finiteness as float32: 1e300 is finite in Python and infinite in the tensor.
        tensor = torch.tensor(scores, dtype=torch.float64).to(torch.float32)  # [B]
        return torch.where(tensor.isfinite(), tensor, torch.full_like(tensor, math.nan))

    def _call(self, offered: Mapping[str, Any], request: RewardRequest) -> list[float]:
        """Call the function on a daemon thread and wait for it, at most until the deadline."""
        seconds = min(self.timeout_seconds, request.timeout_seconds)
        try:
            if self._process is not None:
                self._process.start()
        except FunctionFailed as error:
            raise self._error(f"could not be started again: {error}", "See the maker's log", request) from error
        call = run_in_background(lambda: self._function(offered, len(request)), name=f"reward-{self.name}")
        try:
            return call.result(seconds)
        except BaseException as error:  # SystemExit too, which a function may raise
            if isinstance(error, FutureTimeout) and not call.done():
                if self._process is not None:
                    self._process.kill()
                is_share = seconds < self.timeout_seconds
                what = f"did not return within {'its share of ' * is_share}{self.timeout_seconds:g} s"
                remedy = "Make it faster, or raise reward.timeout_seconds"
                raise self._error(what, remedy, request, RewardFailed) from None
            if not call.done():  # ours, for example Ctrl-C
                raise
            if isinstance(error, WrongScores):
                what, remedy = error.args
                raise self._error(what, remedy, request) from None
            what = str(error) if isinstance(error, FunctionFailed) else raised(error)
            remedy = "Correct the function, or return None for samples that it cannot score"
            raise self._error(what, remedy, request, RewardFailed) from error

    def _error(
        self, what: str, remedy: str, request: RewardRequest, kind: type[RewardError] = RewardError
    ) -> RewardError:
        sample = ""
        if len(request):
            prompt, completion = excerpt(request.prompts[0]), excerpt(request.completions[0])
            sample = f" First sample: prompt {prompt!r}, completion {completion!r}."
        return kind(f"Reward function {self.name!r} {what}. {remedy}.{sample}")


def build_reward(
    settings: RewardSettings,
    *,
    load_model: Callable[[str], nn.Module],
    search_paths: Sequence[Path] = (),
    function: Callable[..., Any] | None = None,
) -> Reward:
    """Make the reward that `[reward]` describes, or that of a `function` which a program brings.

    `load_model` turns a path or hub name into a module called as `model(sequences, attention_mask)`. Functions run
    where `settings.isolation` says. ConfigError if one cannot be loaded.
    """

    def build(function: str | Callable[..., Any], model: str, name: str) -> Reward:
        if model:
            return ModelReward(load_model(model), name)
        called: Callable[..., Any] | RewardProcess
        if settings.isolation == "process":
            called = RewardProcess(function, settings, search_paths=search_paths)
        else:
            called = load_reward_function(function, search_paths) if isinstance(function, str) else function
        return FunctionReward(called, name=name, timeout_seconds=settings.timeout_seconds)

    if settings.terms and function is None:
        return WeightedSum([(build(term.function, term.model, term.label), term.weight) for term in settings.terms])
    label = reward_label(settings.function, settings.model)
    return build(function or settings.function, "" if function else settings.model, label)
