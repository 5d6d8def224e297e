"""A reward function in a child process, which is killed with all its descendants if it takes too long, and restarted.

The child is a pair of processes. The guard forks the worker, which imports the function and calls it. When the worker
ends, the maker is gone, or the maker sends SIGTERM, the guard kills everything that the worker has started:

    maker ── requests (pickle) ──► worker ◄── forks, kills ── guard
          ◄── answers (JSON) ─────

Answers are JSON because the maker must not unpickle data from a function. Functions are called on the worker's main
thread, where signals can interrupt them.
"""

import contextlib
import ctypes
import functools
import json
import logging
import os
import pickle
import resource
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from pydantic import BaseModel, ValidationError

from coati.background import run_in_background
from coati.errors import ConfigError
from coati.rewards.calling import CallFailed, Verdict, call_function, describe_exception, load_reward_function

if TYPE_CHECKING:
    from coati.config.reward import RewardSettings

logger = logging.getLogger(__name__)

# The only environment variables that a child gets, besides those in `reward.environment`.
_ENVIRONMENT = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "OMP_NUM_THREADS")
_PROGRAM = """import json, sys
sys.path[:] = json.loads(sys.argv[1])
from coati.rewards.process import main_of_child
main_of_child(int(sys.argv[2]))"""
START_SECONDS = 120.0  # deadline for starting a child, which includes the import of the function
_END_SECONDS = 5.0
_ANSWER_BYTES = 1 << 20  # without verdicts
_VERDICT_BYTES = 1 << 16
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_KILL_SECONDS = 4.0


class _Answer(BaseModel, strict=True):
    number: int = 0
    verdicts: list[Verdict] = []
    error: str = ""
    remedy: str = ""
    has_network: bool = False


class RewardProcess:
    """A reward function in a child process, which is started at once and kept between calls.

    `function` is a name, with `options`, or a function at the top level of a module. ConfigError if not importable.
    """

    def __init__(
        self,
        function: str | Callable[..., Any],
        settings: "RewardSettings",
        *,
        options: Mapping[str, Any] | None = None,
        search_paths: Sequence[Path] = (),
    ) -> None:
        self._label = function if isinstance(function, str) else _importable_name(function)
        paths = [Path(path).resolve() for path in search_paths]
        self._setup = (self._label, dict(options or {}), paths, settings.memory_mib << 20, settings.network)
        self._variables = (*_ENVIRONMENT, *settings.environment)
        self._process: subprocess.Popen[bytes] | None = None
        self._num_calls = 0
        try:
            has_network = self.start()
        except CallFailed as error:
            raise ConfigError(
                f"Reward function {self._label!r} could not be loaded in its process: {error.what}"
            ) from None
        if has_network and not settings.network:
            logger.warning(
                "reward function %s can use the network: the kernel does not permit network namespaces", self._label
            )

    def start(self) -> bool:
        """Start the child if it is not running, and wait until it has imported the function.

        Return whether a newly started child can use the network. Raises CallFailed if the import fails.
        """
        if self._process is not None:
            return False
        self._connection, theirs = Pipe()
        # -I: the child ignores PYTHON* variables and the working directory; it gets `sys.path` as an argument.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-c", _PROGRAM, json.dumps(list(map(str, sys.path))), str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=2,  # output of the function goes to the maker's log
            env={name: os.environ[name] for name in self._variables if name in os.environ},
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()
        setup = run_in_background(lambda: self._exchange(self._setup, _ANSWER_BYTES), name="reward-start")
        try:
            answer = setup.result(START_SECONDS)
        except FutureTimeout:
            self.kill()
            raise CallFailed(f"its import took more than {START_SECONDS:g} s") from None
        if answer.error:
            self.kill()
            raise CallFailed(answer.error)
        return answer.has_network

    def call(self, arguments: Mapping[str, Any], expected: int) -> list[Verdict]:
        """Call the function in the running child. To enforce a deadline, call `kill` from another thread.

        Raises CallFailed, as `call_function` does, and also if the function raised or the process did not answer.
        """
        self._num_calls += 1
        number = self._num_calls
        answer = self._exchange((number, dict(arguments), expected), _ANSWER_BYTES + _VERDICT_BYTES * expected)
        if answer.number != number or (len(answer.verdicts) != expected and not answer.error):
            self.kill()
            raise CallFailed("corrupted the pipe of its process")
        if answer.error:
            raise CallFailed(answer.error, answer.remedy)
        return answer.verdicts

    def kill(self) -> None:
        """Kill the child and all its descendants. Call `start` before the next call."""
        if self._process is not None:
            self._end(self._process)

    def _end(self, process: subprocess.Popen[bytes]) -> int:
        if self._process is process:
            self._process = None
        # On SIGTERM, the guard kills all others. A killed process may not end at once, for example on a stuck disk.
        for end in (process.terminate, functools.partial(os.killpg, process.pid, signal.SIGKILL)):
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                end()
                process.wait(_END_SECONDS)
        return -signal.SIGKILL if process.returncode is None else process.returncode

    def _exchange(self, message: Any, max_bytes: int) -> _Answer:
        process, connection = self._process, self._connection
        assert process is not None
        try:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.send_bytes(pickle.dumps(message))
            return _Answer.model_validate_json(connection.recv_bytes(max_bytes))
        except (EOFError, ConnectionResetError):  # the worker has ended, and the guard will
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_SECONDS)
            raise CallFailed(_description(self._end(process))) from None
        except (OSError, ValidationError):
            self._end(process)
            raise CallFailed("corrupted the pipe of its process") from None

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.kill()


def _importable_name(function: Callable[..., Any]) -> str:
    module, name = getattr(function, "__module__", "__main__"), getattr(function, "__qualname__", "")
    if module == "__main__" or not name.isidentifier():
        raise ConfigError(
            'reward.isolation = "process" needs a function that a child process can import, got '
            f"{name or function!r} in {module}. Move it to the top level of a module."
        )
    return f"{module}:{name}"


def _description(code: int) -> str:
    number = -code if code < 0 else code - 128  # signal of the guard itself, or of the worker as reported by the guard
    if number not in set(signal.Signals):
        return f"ended its process with exit code {code}"
    name = signal.Signals(number).name
    return f"was killed by {name}{' (out of memory?)' if number == signal.SIGKILL else ''}"


def main_of_child(fd: int) -> None:
    """Fork the worker, which reads its setup from the socket `fd`, and guard it."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # orphans of the worker become children of the guard
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    status = 0
    try:
        worker = os.fork()
        if worker == 0:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            try:
                _serve(Connection(fd), libc)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        poll = select.poll()
        poll.register(os.pidfd_open(worker), select.POLLIN)
        poll.register(fd, 0)  # reports only that the maker has closed it or is gone
        poll.poll()
        if (ended := os.waitpid(worker, os.WNOHANG))[0]:
            status = ended[1]
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        _kill_descendants()
        code = os.waitstatus_to_exitcode(status)
        os._exit(code if code >= 0 else 128 - code)  # as shells report a signal


def _kill_descendants() -> None:
    deadline = time.monotonic() + _KILL_SECONDS
    while (running := psutil.Process().children(recursive=True)) and time.monotonic() < deadline:
        for process in running:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(running, timeout=0.1)


def _serve(maker: "Connection[Any, Any]", libc: ctypes.CDLL) -> None:
    """Load the function and answer requests until the maker closes its end of the socket."""
    own_pid = os.getpid()

    def answer(**fields: Any) -> None:
        if os.getpid() != own_pid:  # the function forked, and the copy returned here too
            os._exit(0)
        maker.send_bytes(json.dumps(fields).encode())

    name, options, search_paths, memory_bytes, network = pickle.loads(maker.recv_bytes())
    has_network = network or not _leave_network(libc)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # if the guard is killed
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if memory_bytes and (hard == resource.RLIM_INFINITY or memory_bytes < hard):
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    try:
        function = load_reward_function(name, search_paths, options)
    except BaseException as error:
        answer(error=str(error) if isinstance(error, ConfigError) else describe_exception(error))
        return
    answer(has_network=has_network)
    with contextlib.suppress(EOFError):
        while True:
            number, arguments, expected = pickle.loads(maker.recv_bytes())
            try:
                answer(number=number, verdicts=call_function(function, arguments, expected))
            except CallFailed as fault:
                answer(number=number, error=fault.what, remedy=fault.remedy)
            except BaseException as error:  # SystemExit too
                traceback.clear_frames(error.__traceback__)  # they may hold all the memory
                answer(number=number, error=describe_exception(error))


def _leave_network(libc: ctypes.CDLL) -> bool:
    """Enter an empty network namespace; return False if the kernel does not permit it."""
    uid, gid = os.getuid(), os.getgid()
    if libc.unshare(_CLONE_NEWNET) == 0:
        return True
    if libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET) != 0:
        return False
    with contextlib.suppress(OSError):  # without the mapping, only the user name is unknown
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    return True
