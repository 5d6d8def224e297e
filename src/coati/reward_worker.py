"""Calls a reward function and checks what it returns: on a thread of the maker, or in a child process.

The child is two processes. The guard runs only what is here. It forks the worker, which imports the function and calls
it, and waits until the worker has ended, or the maker is gone or says so (SIGTERM). Then it kills everything that the
worker has started, and nothing is left:

    maker ── requests (pickle) ──► worker ◄── forks, kills ── guard
          ◄── answers (JSON) ─────

Answers are JSON because the maker must not unpickle what a function wrote. Without torch, so that a child is up in a
second; `coati.rewards.isolation` starts it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import inspect
import itertools
import json
import math
import numbers
import os
import pickle
import resource
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from coati.config.checks import keyword_parameters, load_reward_function
from coati.counting import counted
from coati.errors import ConfigError

_EXCERPT_LENGTH = 80
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_KILL_SECONDS = 4.0


class WrongScores(Exception):
    """A function cannot be called, or did not return one number for each sample: what it did, and the remedy."""


def call_function(function: Callable[..., Any], offered: Mapping[str, Any], expected: int) -> list[float]:
    """Call a reward function with those of the offered arguments that it takes; return its scores, NaN for none.

    Raises WrongScores if it takes others, or does not return `expected` numbers; and what the function raises.
    """
    parameters = keyword_parameters(function)
    if missing := [name for name, is_required in (parameters or {}).items() if is_required and name not in offered]:
        raise WrongScores(
            f"has the parameter {missing[0]!r}, but it can only be called with {', '.join(offered)}",
            "Rename the parameter, give it a default, or add the column to the prompts",
        )
    returned = function(**{name: offered[name] for name in offered if parameters is None or name in parameters})
    if inspect.isawaitable(returned):
        returned = asyncio.run(_awaited(returned))
    scores = _listed(returned, expected)  # a generator does its work while it is read
    if scores is None:
        raise WrongScores("did not return a list of scores", "Return one number for each completion")
    if len(scores) != expected:
        raise WrongScores(
            f"returned {counted(len(scores), 'score')} for {counted(expected, 'completion')}",
            "Return a list as long as completions, with None where there is no score",
        )
    return [_number(index, value) for index, value in enumerate(scores)]


def raised(error: BaseException) -> str:
    """What a function raised, and where."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"raised {type(error).__name__}: {error} (at {place.filename}:{place.lineno})"


def excerpt(text: str) -> str:
    """The beginning of a text, for messages."""
    return text if len(text) <= _EXCERPT_LENGTH else text[: _EXCERPT_LENGTH - 1] + "…"


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


class WorkerOrder(NamedTuple):
    """What a child process is to run, and what it may use. Sent first, pickled."""

    function: str | bytes
    """ "module:function", or a pickled function."""
    search_paths: tuple[Path, ...]
    memory_bytes: int
    """Address space; 0 = unlimited."""
    network: bool


def main(fd: int) -> None:
    """Fork the worker, which reads its order from the socket `fd`, and guard it."""
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
        poll.register(fd, 0)  # tells only that the maker has closed it, or is gone
        poll.poll()
        if (ended := os.waitpid(worker, os.WNOHANG))[0]:
            status = ended[1]
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        _kill_descendants()
        code = os.waitstatus_to_exitcode(status)
        os._exit(code if code >= 0 else 128 - code)  # as shells tell of a signal


def _kill_descendants() -> None:
    deadline = time.monotonic() + _KILL_SECONDS
    while (pids := _descendants(os.getpid())) and time.monotonic() < deadline:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.001)


def _descendants(pid: int) -> list[int]:
    parents = {}
    for entry in os.listdir("/proc"):
        with contextlib.suppress(OSError, ValueError):
            fields = Path("/proc", entry, "stat").read_text(errors="replace").rpartition(")")[2].split()
            parents[int(entry)] = int(fields[1])
    found = [pid]
    for one in found:  # grows meanwhile
        found += [child for child, parent in parents.items() if parent == one]
    return found[1:]


def _serve(maker: Connection[Any, Any], libc: ctypes.CDLL) -> None:
    """Load the function, and answer requests; ends with the maker's end of the socket."""
    own_pid = os.getpid()

    def answer(**fields: Any) -> None:
        if os.getpid() != own_pid:  # a function forked, and its copy came back here too
            os._exit(0)
        maker.send_bytes(json.dumps(fields).encode())

    order = WorkerOrder(*pickle.loads(maker.recv_bytes()))
    has_network = order.network or not _leave_network(libc)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # if the guard is killed
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if order.memory_bytes and (hard == resource.RLIM_INFINITY or order.memory_bytes < hard):
        resource.setrlimit(resource.RLIMIT_AS, (order.memory_bytes, order.memory_bytes))
    try:
        if isinstance(order.function, str):
            function = load_reward_function(order.function, order.search_paths)
        else:
            function = pickle.loads(order.function)
    except BaseException as error:
        answer(error=str(error) if isinstance(error, ConfigError) else raised(error))
        return
    answer(has_network=has_network)
    with contextlib.suppress(EOFError):
        while True:
            number, arguments, expected = pickle.loads(maker.recv_bytes())
            try:
                answer(number=number, scores=call_function(function, arguments, expected))
            except WrongScores as fault:
                what, remedy = fault.args
                answer(number=number, error=what, remedy=remedy)
            except BaseException as error:  # SystemExit too
                traceback.clear_frames(error.__traceback__)  # they may hold all the memory there is
                answer(number=number, error=raised(error))


def _leave_network(libc: ctypes.CDLL) -> bool:
    """Leave the machine's network for an empty one; False where the kernel does not permit it."""
    uid, gid = os.getuid(), os.getgid()
    if libc.unshare(_CLONE_NEWNET) == 0:
        return True
    if libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET) != 0:
        return False
    with contextlib.suppress(OSError):  # then it is nobody; files are still its user's
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    return True
