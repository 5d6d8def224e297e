"""A small process that outlives a run, kills processes that its private Ray left behind, and deletes Ray's folder.

    python warden.py FOLDER

It acts when its standard input closes: at the end of a run, or because the driver was killed. Without it, Ray's agents
survive a killed driver by a minute. Every process of a private Ray has open files in the folder, or names the folder in
its environment. Without `/proc` (macOS) the warden only deletes the folder. It imports only the standard library.
"""

import contextlib
import os
import select
import shutil
import signal
import sys
import time

_POLL_SECONDS = 1.0
_KILL_SECONDS = 10.0


def main(folder: str) -> None:
    """Wait until the parent process ends; then kill all processes that use `folder`, and delete it."""
    parent = os.getppid()
    # A forked child of the driver may keep the pipe open, so watch the parent process too.
    while not select.select([sys.stdin], [], [], _POLL_SECONDS)[0] and os.getppid() == parent:
        pass
    deadline = time.monotonic() + _KILL_SECONDS
    while True:
        left = processes_of(folder, exclude={os.getpid(), parent})
        for process in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)
        if time.monotonic() >= deadline or not (left or os.path.exists(folder)):
            return
        time.sleep(0.1)


def processes_of(folder: str, *, exclude: set[int]) -> list[int]:
    """Return the ids of this user's processes that have open files in `folder`, or whose environment names it."""
    mark, found = folder.encode(), []
    for process in [name for name in os.listdir("/proc") if name.isdigit()] if os.path.isdir("/proc") else []:
        with contextlib.suppress(OSError), open(f"/proc/{process}/environ", "rb") as environment:
            files = f"/proc/{process}/fd"
            if int(process) not in exclude and (
                mark in environment.read() or any(_points_into(folder, f"{files}/{name}") for name in os.listdir(files))
            ):
                found.append(int(process))
    return found


def _points_into(folder: str, link: str) -> bool:
    try:
        return os.readlink(link).startswith(folder + os.sep)
    except OSError:  # closed in the meantime
        return False


if __name__ == "__main__":
    main(sys.argv[1])
