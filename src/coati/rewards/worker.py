"""The child process of a reward function, which `coati.rewards.process` starts.

It is two processes. The guard runs only what is here. It forks the worker, which imports the function and calls it, and
waits until the worker has ended, or the maker is gone or says so (SIGTERM). Then it kills everything that the worker
has started, and nothing is left:

    maker ── requests (pickle) ──► worker ◄── forks, kills ── guard
          ◄── answers (JSON) ─────

Answers are JSON because the maker must not unpickle what a function wrote. Functions are called on the worker's main
thread, where signals can end what takes too long.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import pickle
import resource
import select
import signal
import sys
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from coati.errors import ConfigError
from coati.rewards.calling import CallFailed, call_function, load_reward_function, raised

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_KILL_SECONDS = 4.0


class WorkerOrder(NamedTuple):
    """What a child process is to run, and what it may use. Sent first, pickled."""

    function: str
    options: dict[str, Any]
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
        function = load_reward_function(order.function, order.search_paths, order.options)
    except BaseException as error:
        answer(error=str(error) if isinstance(error, ConfigError) else raised(error))
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
                traceback.clear_frames(error.__traceback__)  # they may hold all the memory there is
                answer(number=number, error=raised(error))


def _leave_network(libc: ctypes.CDLL) -> bool:
    """Leave the machine's network for an empty one; False where the kernel does not permit it."""
    uid, gid = os.getuid(), os.getgid()
    if libc.unshare(_CLONE_NEWNET) == 0:
        return True
    if libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET) != 0:
        return False
    with contextlib.suppress(OSError):  # then it has no user name; files are still its user's
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    return True
