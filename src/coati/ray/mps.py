"""NVIDIA's MPS, with which kernels of several processes run on one card at the same time.

Its daemon belongs to a machine. A run on a private Ray starts one and ends it; on a cluster you start it with the
nodes. A daemon that is running already is used as it is.
"""

import contextlib
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from coati.errors import ConfigError

logger = logging.getLogger(__name__)

_CONTROL = "nvidia-cuda-mps-control"
_PIPES = "CUDA_MPS_PIPE_DIRECTORY"
_LOGS = "CUDA_MPS_LOG_DIRECTORY"
_DEFAULT_PIPES = "/tmp/nvidia-mps"  # where CUDA looks unless told otherwise
_NOT_RUNNING = "Cannot find MPS control daemon"  # what the control program answers for a dead daemon's pipe
_SECONDS = 20.0


def is_running() -> bool:
    """Whether a daemon listens where this process's CUDA looks for one.

    A daemon that was killed leaves its pipe behind, so it is asked if the control program is installed.
    """
    if not (Path(os.environ.get(_PIPES, _DEFAULT_PIPES)) / "control").exists():
        return False
    if shutil.which(_CONTROL) is None:
        return True
    try:
        return _NOT_RUNNING not in _tell([], "get_server_list\n")[1]
    except ConfigError:  # no answer
        return False


@contextlib.contextmanager
def daemon() -> Iterator[None]:
    """Run a daemon for the processes that are started inside; use one that is running already."""
    if is_running():
        logger.info("using the MPS daemon that is running")
        yield
        return
    if shutil.which(_CONTROL) is None:
        raise ConfigError(
            f'topology.gpu_sharing = "mps" needs {_CONTROL}, which comes with NVIDIA\'s driver, on the PATH, got none. '
            'Install it, or set it to "slices".'
        )
    before = {name: os.environ.get(name) for name in (_PIPES, _LOGS)}
    folder = tempfile.mkdtemp(prefix="coati-mps-")
    os.environ |= {_PIPES: folder, _LOGS: folder}
    try:
        status, answer = _tell(["-d"])
        if status != 0:
            raise ConfigError(_refused(answer or f"exit status {status}"))
        yield
    finally:
        with contextlib.suppress(ConfigError):  # an error here must not hide how the run ended
            _tell([], "quit -t 10\n")
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        shutil.rmtree(folder, ignore_errors=True)


def _tell(arguments: list[str], text: str = "") -> tuple[int, str]:
    """Return exit status and output of the control program. Raises ConfigError if it does not end."""
    command = [_CONTROL, *arguments]
    # The daemon serves all cards; with CUDA_VISIBLE_DEVICES it would renumber them.
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    try:
        done = subprocess.run(
            command, input=text, capture_output=True, text=True, timeout=_SECONDS, check=False, env=environment
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(_refused(f"no answer in {_SECONDS:g} s")) from error
    return done.returncode, (done.stderr + done.stdout).strip()


def _refused(answer: str) -> str:
    return (
        f'topology.gpu_sharing = "mps" needs a daemon that {_CONTROL} starts, got: {answer}. Look for one of another '
        'user on this card, or set it to "slices".'
    )
