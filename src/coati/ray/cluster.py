"""Starts a private local Ray or joins a cluster, and checks that the run fits."""

import contextlib
import logging
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from types import FrameType

import ray
from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]
from ray.exceptions import AuthenticationError

from coati import build
from coati.config import RunSettings
from coati.errors import ConfigError, HeadLost, RunStopped, counted
from coati.ray import warden

logger = logging.getLogger(__name__)

_CONNECT_SECONDS = 10.0
_HEALTH_CHECK_SECONDS = 60.0
_PROBE_SECONDS = 2.0
_LOST_SECONDS = 10.0
_WARDEN_SECONDS = 30.0  # for the warden to kill leftover processes and delete the folder
_LOOPBACK = "127.0.0.2"  # Ray would replace 127.0.0.1 by an address that other machines can reach

PASSED_ON = (
    "PATH HOME USER LOGNAME SHELL TERM COLUMNS NO_COLOR LANG LC_* TZ TMPDIR XDG_* LD_* DYLD_* PYTHON* VIRTUAL_ENV "
    "CONDA_* CC CXX MALLOC_* COVERAGE_* COATI_* RAY_* CUDA_* CUBLAS_* NVIDIA_* HIP_* NCCL_* GLOO_* TORCH* PYTORCH_* "
    "TRITON_* OMP_* MKL_* KMP_* OPENBLAS_* HF_* TRANSFORMERS_* TOKENIZERS_* VLLM_* *_PROXY *_proxy SSL_CERT_* "
    "REQUESTS_CA_BUNDLE"
)
"""Patterns of the variables that a private Ray's actors inherit from the driver; HF_TOKEN included, to load models."""


def allowed_environment(environment: Mapping[str, str], more: Iterable[str] = ()) -> dict[str, str]:
    """Return the variables that actors may inherit: those that match `PASSED_ON` or one of the patterns `more`.

    >>> allowed_environment({"HOME": "/root", "BANK_KEY": "1", "JUDGE_KEY": "2"}, ["JUDGE_KEY"])
    {'HOME': '/root', 'JUDGE_KEY': '2'}
    """
    patterns = (*PASSED_ON.split(), *more)
    return {
        name: value for name, value in environment.items() if any(fnmatchcase(name, pattern) for pattern in patterns)
    }


@contextlib.contextmanager
def connected(config: RunSettings, *, address: str | None, namespace: str, log_to_driver: bool) -> Iterator[bool]:
    """Connect to Ray for the duration of a run; yields whether Ray is private, that is, was started for this run."""
    if ray.is_initialized():  # its owner would lose its actors when the run ends
        raise ConfigError(
            "this process is already connected to Ray, but a run needs a connection of its own. Call ray.shutdown() "
            "first, or train in another process."
        )
    if address is not None:
        _check_address(address)
        try:
            with _own_signal_handlers():
                options = {"log_to_driver": log_to_driver, "logging_level": logging.WARNING}
                ray.init(address=address, namespace=namespace, **options)
        except (AuthenticationError, ConnectionError, RuntimeError, ValueError) as error:
            raise ConfigError(
                f"no Ray cluster at --address {address!r}: {str(error).strip().splitlines()[0]} If it requires a "
                "token, set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN_PATH to the file with the token of its nodes."
            ) from error
        try:
            if not config.topology.allow_open_cluster:
                _check_authentication(address)
            _check_resources(config)
            yield False
        finally:
            ray.shutdown()
        return
    with _private_ray(config, namespace=namespace, log_to_driver=log_to_driver):
        yield True


@contextlib.contextmanager
def _private_ray(config: RunSettings, *, namespace: str, log_to_driver: bool) -> Iterator[None]:
    # Ray announces its token authentication on every start, which our users need not see.
    logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)
    # A short path, because socket paths have a length limit.
    parent = Path(tempfile.gettempdir()) / f"coati-{secrets.token_urlsafe(6)}"
    folder = parent / "ray"
    with _warden(parent):
        parent.mkdir(mode=0o700)  # for this user only: Ray makes its own folder inside accessible to everyone
        token = parent / "token"
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32))
        try:
            with _own_signal_handlers(), _environment_of_actors(config, token):
                ray.init(
                    address="local",
                    namespace=namespace,
                    num_cpus=max(os.cpu_count() or 1, build.num_actors(config)),
                    include_dashboard=False,
                    log_to_driver=log_to_driver,
                    logging_level=logging.WARNING,
                    _temp_dir=str(folder),
                    _node_ip_address=_LOOPBACK if sys.platform == "linux" else None,
                )
            _check_resources(config)
            yield
        except (RunStopped, KeyboardInterrupt):
            raise
        except BaseException:
            ray.shutdown()
            _copy_logs(folder / "session_latest" / "logs", config.output_folder / "ray-logs")
            raise
        finally:
            ray.shutdown()
            AuthenticationTokenLoader.instance().reset_cache()  # the next Ray in this process has another token


@contextlib.contextmanager
def _warden(folder: Path) -> Iterator[None]:
    """Run the warden, which outlives this process, kills what remains of a private Ray and deletes its folder."""
    command = [sys.executable, "-I", "-S", warden.__file__, str(folder)]
    # In its own session, so that Ctrl-C in the terminal does not end it.
    process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    try:
        yield
    finally:
        assert process.stdin is not None
        process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):  # it exits by itself later
            process.wait(_WARDEN_SECONDS)


@contextlib.contextmanager
def _environment_of_actors(config: RunSettings, token: Path) -> Iterator[None]:
    """Reduce this process's environment to what a private Ray and its actors may inherit; restore it on exit."""
    before = dict(os.environ)
    os.environ.clear()
    keys = [key for reward in (config.reward, *(one.reward for one in config.eval)) for key in reward.secrets]
    os.environ.update(allowed_environment(before, (*config.topology.environment, *keys)))
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):  # Ray enables tokens by default
        os.environ.pop(name, None)
    os.environ |= {"RAY_AUTH_TOKEN_PATH": str(token), "RAY_USAGE_STATS_ENABLED": "0"}  # send no usage statistics
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Without a dashboard nothing reads the history of calls, which grew the head's memory by 10 MB per minute.
    os.environ.setdefault("RAY_task_events_report_interval_ms", "0")
    AuthenticationTokenLoader.instance().reset_cache()  # an earlier Ray in this process had another token
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _copy_logs(logs: Path, place: Path) -> None:
    try:
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(logs.resolve(), place, ignore_dangling_symlinks=True)
    except OSError as error:
        logger.warning("could not copy the actors' logs to %s: %s", place, error)
    else:
        logger.warning("the logs of all actors are in %s", place)


@contextlib.contextmanager
def _own_signal_handlers() -> Iterator[None]:
    """Keep the program's signal handlers, and call them at the end: Ray can crash if its start is interrupted.

    A second signal is handled at once. Ray's SIGTERM handler would exit the process instead of saving the model.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    found = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    before = {int(number): handler for number, handler in found.items() if callable(handler)}
    received: list[int] = []

    def defer(number: int, frame: FrameType | None) -> None:
        if received:
            before[number](number, frame)
        received.append(number)

    for number in before:
        signal.signal(number, defer)
    try:
        yield
    except SystemExit:  # raised by Ray's handler
        raise KeyboardInterrupt from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if received:
        signal.raise_signal(received[0])


def _check_authentication(address: str) -> None:
    """Raise ConfigError if the cluster accepts a process without a token."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "health-check", "--address"]
    try:
        asked = subprocess.run(
            [*command, ray.get_runtime_context().gcs_address],
            env={**os.environ, "RAY_AUTH_MODE": "disabled"},
            capture_output=True,
            text=True,
            timeout=_HEALTH_CHECK_SECONDS,
        )
        is_open, said = asked.returncode == 0, asked.stdout + asked.stderr
    except subprocess.TimeoutExpired:
        is_open, said = False, f"no answer within {_HEALTH_CHECK_SECONDS:g} s"
    if is_open or not any(name in said for name in ("AuthenticationError", "InvalidAuthToken", "Unauthenticated")):
        finding = "has no token authentication" if is_open else f"did not show whether it uses tokens ({said.strip()})"
        raise ConfigError(
            f"the Ray cluster at --address {address!r} {finding}. Anyone who can reach an open cluster can run code as "
            "you. Start it with RAY_AUTH_MODE=token and a token (docs/cluster.md), or set "
            "topology.allow_open_cluster = true on a network that you trust."
        )


class HeadWatch:
    """Detects that Ray's head (its GCS) is gone, before Ray kills this process a minute later without saving."""

    def __init__(self) -> None:
        self._address = ray.get_runtime_context().gcs_address if ray.is_initialized() else ""
        self._last_probe = self._last_seen = time.monotonic()

    def check(self) -> None:
        """Raise HeadLost if the head's address has not accepted a connection for ten seconds."""
        now = time.monotonic()
        if not self._address or now - self._last_probe < _PROBE_SECONDS:
            return
        self._last_probe = now
        try:
            _probe_port(self._address, _PROBE_SECONDS)
            self._last_seen = time.monotonic()
        except OSError as error:
            if now - self._last_seen >= _LOST_SECONDS:
                raise HeadLost(
                    f"Ray's head at {self._address} (the process gcs_server) is gone: {error}. Ray cannot continue "
                    "without it. Check whether it was killed or ran out of memory, and start the run again."
                ) from None


def _check_address(address: str) -> None:
    """Raise ConfigError if nothing listens at the address; Ray itself would retry for minutes."""
    try:
        _probe_port(address.removeprefix("ray://"), _CONNECT_SECONDS)
    except OSError as error:
        raise ConfigError(
            f"no Ray cluster at --address {address!r}: {error}. Start one "
            "with 'ray start --head', or omit --address to start a private Ray."
        ) from error


def _probe_port(address: str, seconds: float) -> None:
    """Raise OSError if nothing listens at host:port; other forms, such as "auto", are left to Ray."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=seconds).close()


def _check_resources(config: RunSettings) -> None:
    """Raise ConfigError if the actors do not fit; Ray would wait for resources forever."""
    topology = config.topology
    have = ray.cluster_resources()
    num_gpus = topology.makers * topology.gpus_per_maker + topology.trainers * topology.gpus_per_trainer
    for kind, need in (("CPU", float(build.num_actors(config))), ("GPU", num_gpus)):
        if need > have.get(kind, 0.0):
            raise ConfigError(
                f"the run needs {counted(need, kind)} ({counted(topology.makers, 'maker')}, "
                f"{counted(topology.trainers, 'trainer')}), but the cluster has {have.get(kind, 0.0):g}. Lower "
                f"topology.makers, topology.trainers{' or their gpus_per_… settings' * (kind == 'GPU')}, or add nodes."
            )
