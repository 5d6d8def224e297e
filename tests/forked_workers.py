"""Ray workers that are forked from a process which has imported torch, transformers and coati already.

Importing them is most of what a short run costs: six seconds of a core for each actor. Inside `forked_workers` a Ray
that this process starts has its workers made in milliseconds, and none of the processes that scale clusters, relay logs
and serve the dashboard, which take two seconds of a core; a Ray of another process is as users have it.

This file is also what the raylet starts in place of Ray's own setup_worker.py, and the server that forks:

    raylet -> client: its arguments, environment and streams -> server: fork -> child: Ray's default_worker.py
"""

import contextlib
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

NOT_STARTED = ("start_monitor", "start_log_monitor", "start_api_server")  # methods of Ray's Node
# Without Ray itself, which reads its worker's environment when it is imported.
PRELOADED = (
    "coati.actors.maker",
    "coati.actors.ppo",
    "jsonschema",
    "requests",
    "transformers.models.llama.modeling_llama",
)
RUNTIME_ENV = "--serialized-runtime-env-context="
LENGTH = struct.Struct("!I")


@contextlib.contextmanager
def forked_workers():
    """Start the server; until the end, Rays that this process starts ask it for their workers. On Linux only."""
    if sys.platform != "linux":
        yield
        return
    from unittest import mock  # not above, because it takes longer than all else that the client does

    from ray._private import node, ray_constants

    folder = Path(tempfile.mkdtemp(prefix="ct-"))
    client = shutil.copy(__file__, folder / "fork_worker.py")  # the raylet leaves out what is called setup_worker.py
    # At the end of its standard input, when this process is gone, the server ends with all that it forked.
    server = subprocess.Popen(
        [sys.executable, client, "serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    before = ray_constants.SETUP_WORKER_FILENAME
    try:
        assert server.stdout.readline() == b"ready\n"
        ray_constants.SETUP_WORKER_FILENAME = str(client)  # joined to Ray's folder, which an absolute path overrides
        with contextlib.ExitStack() as stack:
            for name in NOT_STARTED:
                stack.enter_context(mock.patch.object(node.Node, name))
            yield
    finally:
        ray_constants.SETUP_WORKER_FILENAME = before
        with server:
            server.stdin.close()
        shutil.rmtree(folder)


def address():
    return str(Path(__file__).with_name("socket"))


def ask_for_a_fork(arguments):
    """As the raylet's child: hand everything to the server. The worker registers with a number of its own."""
    context = next((json.loads(a.removeprefix(RUNTIME_ENV)) for a in arguments if a.startswith(RUNTIME_ENV)), {})
    assert not context.get("command_prefix")
    environ = dict(os.environ) | context.get("env_vars", {})
    arguments = [a for a in arguments if not a.startswith((RUNTIME_ENV, "--language="))]
    request = json.dumps([arguments, environ, os.getcwd()]).encode()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address())
        socket.send_fds(connection, [LENGTH.pack(len(request))], [0, 1, 2])
        connection.sendall(request)
        connection.recv(1)  # the end: it was forked


def serve():
    import gc
    import importlib
    import select
    import signal

    for name in PRELOADED:
        importlib.import_module(name)
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address())
        listener.listen()
        print("ready", flush=True)
        while sys.stdin.fileno() not in (ready := select.select([sys.stdin.fileno(), listener], [], [])[0]):
            assert ready
            connection, _ = listener.accept()
            with connection:
                head, streams, _, _ = socket.recv_fds(connection, LENGTH.size, 3)
                with connection.makefile("rb") as file:
                    request = json.loads(file.read(*LENGTH.unpack(head)))
                if os.fork() == 0:
                    listener.close()
                    connection.close()
                    become_worker(request, streams)
            for stream in streams:
                os.close(stream)


def become_worker(request, streams):
    import atexit
    import ctypes
    import importlib
    import runpy
    import signal

    import coati.faults

    os.setpgid(0, 0)  # when a worker has ended, the raylet kills the rest of its group
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end with the server
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    (script, *arguments), environ, folder = request
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environ)
    importlib.reload(coati.faults)  # which looks for its schedule in the environment
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).parent)
    code = 1
    try:
        runpy.run_path(script, run_name="__main__")
        code = 0
    finally:
        atexit._run_exitfuncs()
        os._exit(code)


if __name__ == "__main__":
    serve() if sys.argv[1:] == ["serve"] else ask_for_a_fork(sys.argv[1:])
