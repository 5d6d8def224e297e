"""Reward functions that misbehave as the completions say; imported by child processes."""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time


def obey(completions, pid_file="", **columns):
    """Do what the completions say; score by length."""
    for completion in completions:
        action = _ACTIONS.get(completion)
        if action is not None:
            action()
    return [float(len(completion)) for completion in completions]


def writes_pids(completions, path):
    """Start one process outside the group and one inside, write the process ids, then do what the completions say."""
    away = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    near = subprocess.Popen(["sleep", "1000"])
    with open(path[0], "w") as file:
        file.write(f"{os.getpid()} {away.pid} {near.pid}")
    return obey(completions)


def _daemonize():
    """Fork twice, so that the grandchild is an orphan that holds every pipe open."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(1000)
        os._exit(0)
    os._exit(7)


def _exhaust():
    held = []
    while True:
        held.append(bytearray(16 << 20))


def _spin():
    while True:
        pass


_AHEAD = b'{"number": 1000, "scores": [9.0]}'  # for a later call

_ACTIONS = {
    "raise": lambda: {}["no such word"],
    "exit": lambda: os._exit(3),
    "sys.exit": lambda: sys.exit(3),
    "hang": lambda: time.sleep(1000),
    "hang in C": lambda: ctypes.PyDLL(None).sleep(1000),  # holds the GIL
    "spin": _spin,
    "fork": os.fork,  # both processes return scores
    "daemonize": _daemonize,
    "exhaust": _exhaust,
    "abort": os.abort,
    "kill the guard": lambda: (os.kill(os.getppid(), signal.SIGKILL), time.sleep(1000)),
    "print": lambda: print('{"number": 1, "scores": [9.0]}', flush=True),
    "scribble": lambda: _write_to_pipes(b"nonsense\n"),
    "answer ahead": lambda: _write_to_pipes(len(_AHEAD).to_bytes(4, "big") + _AHEAD),
}


def _write_to_pipes(data):
    for fd in range(3, 256):
        if _is_pipe_to_write(fd):
            os.write(fd, data)


def _is_pipe_to_write(fd):
    try:
        return os.readlink(f"/proc/self/fd/{fd}").startswith("socket:") and os.write(fd, b"") == 0
    except OSError:
        return False


def returns(completions, value):
    return {"nan": [float("nan")] * len(completions), "short": [1.0], "text": ["1"] * len(completions)}[value[0]]


def numpy_scores(completions):
    import numpy as np  # imported here, because it dominates the start of a process

    return np.array([1.5, 2.5])


async def waits(completions):
    return [1.0] * len(completions)


def environment(completions):
    return [float("SECRET_TOKEN" in os.environ), float("PASSED_ON" in os.environ)]


def connects(completions):
    """Score 1 if the local port in the completion accepts a connection."""
    try:
        socket.create_connection(("127.0.0.1", int(completions[0])), timeout=5).close()
    except OSError:
        return [0.0]
    return [1.0]
