"""A reward function in a child process: killed with all that it has started when it takes too long, then restarted."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from typing import Any

from coati.background import run_in_background
from coati.config.sections import RewardSettings
from coati.errors import ConfigError
from coati.reward_worker import WorkerOrder, WrongScores, raised

logger = logging.getLogger(__name__)

# What a child needs to find its programs, files and language. Nothing else of the environment reaches it.
_ENVIRONMENT = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "OMP_NUM_THREADS")
_PROGRAM = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from coati.reward_worker import main; main()"
_START_SECONDS = 120.0
_END_SECONDS = 5.0
_ANSWER_BYTES = 1 << 20  # besides those of the scores


class FunctionFailed(Exception):
    """What a function in a child process did instead of returning scores, in words."""


class RewardProcess:
    """A reward function that runs in a child process (see `coati.reward_worker`), started when it is made and kept.

    `function` is "module:function", or a function that can be pickled. ConfigError if the child cannot import it.
    """

    def __init__(
        self, function: str | Callable[..., Any], settings: RewardSettings, *, search_paths: Sequence[Path] = ()
    ) -> None:
        self._label = function if isinstance(function, str) else getattr(function, "__qualname__", repr(function))
        self._order = WorkerOrder(
            function if isinstance(function, str) else self._pickled(function),
            tuple(Path(path).resolve() for path in search_paths),
            memory_bytes=settings.memory_mib << 20,
            cpu_seconds=settings.cpu_seconds,
            open_files=settings.open_files,
            network=settings.network,
        )
        self._variables = (*_ENVIRONMENT, *settings.environment)
        self._process: subprocess.Popen[bytes] | None = None
        self._num_calls = 0
        self.parameters: dict[str, bool] | None = None
        """As `keyword_parameters` returns them."""
        self.is_host_work = True
        try:
            hello = self.start()
        except FunctionFailed as error:
            raise ConfigError(f"Reward function {self._label!r} could not be loaded in its process: {error}") from None
        if hello["has_network"] and not settings.network:
            logger.warning("reward function %s can use the network: the kernel permits no namespaces", self._label)

    def start(self) -> dict[str, Any]:
        """Start the child, unless it is there, and wait until it has imported the function. FunctionFailed if not."""
        if self._process is not None:
            return {}
        # Isolated (-I): the child must not read PYTHON* variables or the current folder, only the path it is given.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-c", _PROGRAM, json.dumps([str(entry) for entry in sys.path])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env={name: os.environ[name] for name in self._variables if name in os.environ},
            start_new_session=True,
        )
        assert self._process.stdout is not None
        self._answers = io.BufferedReader(self._process.stdout)  # type: ignore[type-var]
        hello = run_in_background(lambda: self._exchange(tuple(self._order), _ANSWER_BYTES), name="reward-start")
        try:
            answer = hello.result(_START_SECONDS)
        except FutureTimeout:
            self.kill()
            raise FunctionFailed(f"its import took more than {_START_SECONDS:g} s") from None
        if "error" in answer:
            self.kill()
            raise FunctionFailed(str(answer["error"]))
        self.parameters, self.is_host_work = answer["parameters"], answer["is_host_work"]
        return answer

    def call(self, arguments: Mapping[str, Any], expected: int) -> list[float]:
        """Call the function in the child that was started; a deadline is kept by calling `kill` meanwhile.

        Raises WrongScores, as `call_function` does, or FunctionFailed.
        """
        self._num_calls += 1
        number = self._num_calls
        answer = self._exchange((number, dict(arguments), expected), _ANSWER_BYTES + 32 * expected)
        if answer.get("number") == number and isinstance(answer.get("error"), str):
            raise FunctionFailed(answer["error"])
        if answer.get("number") == number and "wrong" in answer:
            raise WrongScores(*answer["wrong"])
        scores = answer.get("scores")
        is_ours = answer.get("number") == number and isinstance(scores, list) and len(scores) == expected
        if not is_ours or not all(isinstance(score, float) for score in scores or ()):
            self.kill()
            raise FunctionFailed("wrote to the pipe of its process")
        return list(scores or ())

    def kill(self) -> None:
        """End the child and all that it has started. The next call needs another."""
        if self._process is not None:
            self._end(self._process)

    def _end(self, process: subprocess.Popen[bytes]) -> int:
        """Returns its exit code, negative for a signal."""
        if self._process is process:
            self._process = None
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_SECONDS)
        with contextlib.suppress(ProcessLookupError):  # the guard has killed all others
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # the kernel may hold a killed process, on a stuck disk
            process.wait(_END_SECONDS)
        return -signal.SIGKILL if process.returncode is None else process.returncode

    def _exchange(self, message: Any, most: int) -> dict[str, Any]:
        process, answers = self._process, self._answers
        assert process is not None
        assert process.stdin is not None
        try:
            rest = memoryview(pickle.dumps(message))
            with contextlib.suppress(BrokenPipeError):
                while rest:
                    rest = rest[process.stdin.write(rest) :]
            line = answers.readline(most)
            if line.endswith(b"\n"):
                return dict(json.loads(line))
        except ValueError:
            line = b"?"
        if not line:  # it has ended, and its guard will
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_SECONDS)
        code = self._end(process)
        raise FunctionFailed(_description(code) if not line else "wrote to the pipe of its process")

    def _pickled(self, function: Callable[..., Any]) -> bytes:
        if getattr(function, "__module__", "") == "__main__":
            raise ConfigError(
                f'reward.isolation = "process" needs a function that a child process can import, got {self._label!r} '
                "of the main program. Move it to a module."
            )
        try:
            return pickle.dumps(function)
        except Exception as error:
            raise ConfigError(
                f'reward.isolation = "process" needs a function that can be pickled, got {self._label!r}, which '
                f"{raised(error)}. Move it to the top level of a module."
            ) from error

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.kill()


def _description(code: int) -> str:
    if code >= 0:
        return f"ended its process with exit code {code}"
    hints = {signal.SIGKILL: " (out of memory?)", signal.SIGXCPU: ": it used more CPU time than reward.cpu_seconds"}
    return f"was killed by {signal.Signals(-code).name}{hints.get(signal.Signals(-code), '')}"
