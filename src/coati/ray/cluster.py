"""Starting a private local Ray, or joining a cluster, and checking that a run fits it."""

import contextlib
import logging
import os
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import ray

from coati import run
from coati.config import RunSettings
from coati.counting import counted
from coati.errors import ConfigError, RunStopped
from coati.ray import mps

logger = logging.getLogger(__name__)

_CONNECT_SECONDS = 10.0


@contextlib.contextmanager
def connected(config: RunSettings, *, address: str | None, namespace: str, log_to_driver: bool) -> Iterator[bool]:
    """Connect for the length of a run; yields whether Ray is private, that is, started for this run.

    A private Ray ends with the run; if the run fails, its logs are kept.
    """
    if address is not None:
        _check_address(address)
        try:
            with _own_signal_handlers():
                ray.init(
                    address=address,
                    namespace=namespace,
                    log_to_driver=log_to_driver,
                    logging_level=logging.WARNING,
                )
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ConfigError(
                f"no Ray cluster at --address {address!r}: {str(error).strip().splitlines()[0]}{_token_hint(error)}"
            ) from error
        try:
            _check_resources(config, num_cpus=run.num_actors(config))
            yield False
        finally:
            ray.shutdown()
        return
    side_by_side = mps.daemon() if config.topology.gpu_sharing == "mps" else contextlib.nullcontext()
    with side_by_side, _private_ray(config, namespace=namespace, log_to_driver=log_to_driver):
        yield True


@contextlib.contextmanager
def _private_ray(config: RunSettings, *, namespace: str, log_to_driver: bool) -> Iterator[None]:
    num_actors = run.num_actors(config)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing leaves this machine
    # Ray announces its token authentication on every start. It stays on; the hint is not for our users.
    logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Only we may enter it; Ray opens its own folder inside to everybody. Short: socket paths have a length limit.
    parent = Path(tempfile.mkdtemp(prefix="coati-"))
    folder = parent / "ray"
    try:
        with _own_signal_handlers(), _owner_only_token():
            ray.init(
                address="local",
                namespace=namespace,
                num_cpus=max(os.cpu_count() or 1, num_actors),
                include_dashboard=False,
                log_to_driver=log_to_driver,
                logging_level=logging.WARNING,
                _temp_dir=str(folder),
            )
        _check_resources(config, num_cpus=num_actors)
        yield
    except (RunStopped, KeyboardInterrupt):
        raise
    except BaseException:
        ray.shutdown()
        _keep_logs(folder / "session_latest" / "logs", config.output_folder / "ray-logs")
        raise
    finally:
        ray.shutdown()
        shutil.rmtree(parent, ignore_errors=True)


def _keep_logs(logs: Path, place: Path) -> None:
    """Copy the actors' logs of a failed run to its output folder."""
    try:
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(logs.resolve(), place, ignore_dangling_symlinks=True)
    except OSError as error:
        logger.warning("the logs of the actors could not be kept in %s: %s", place, error)
    else:
        logger.warning("the logs of all actors are in %s", place)


@contextlib.contextmanager
def _owner_only_token() -> Iterator[None]:
    """Ray creates its token file readable by all users; make one that appears inside readable by its owner only."""
    path = Path.home() / ".ray" / "auth_token"
    existed = path.exists()
    yield
    if not existed and path.exists():
        path.chmod(0o600)


@contextlib.contextmanager
def _own_signal_handlers() -> Iterator[None]:
    """Keep the program's signal handlers: Ray replaces SIGTERM's, and would abort where we save the model."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            if callable(handler):
                signal.signal(number, handler)


def _token_hint(error: BaseException | None) -> str:
    """Return a hint for a cluster that wants a token; Ray mentions it only in a nested error."""
    while error is not None:
        if "AuthenticationError" in f"{type(error).__name__} {error}":
            return (
                ". It wants a token: set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN_PATH to the file with the token "
                "that its nodes have"
            )
        error = error.__cause__ or error.__context__
    return ""


def _check_address(address: str) -> None:
    """Check that something listens: Ray itself retries a dead address for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return  # "auto" and the like: Ray fails at once
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_SECONDS).close()
    except OSError as error:
        raise ConfigError(
            f"no Ray cluster at --address {address!r}: {error}. Start one "
            "with 'ray start --head', or leave --address out to start a private Ray."
        ) from error


def _check_resources(config: RunSettings, *, num_cpus: int) -> None:
    """Raise ConfigError if the actors do not fit; Ray would wait for resources without end."""
    topology = config.topology
    have = ray.cluster_resources()
    num_gpus = topology.makers * topology.gpus_per_maker + topology.trainers * topology.gpus_per_trainer
    for kind, need in (("CPU", float(num_cpus)), ("GPU", num_gpus)):
        if need > have.get(kind, 0.0):
            raise ConfigError(
                f"the run needs {counted(need, kind)} ({counted(topology.makers, 'maker')}, "
                f"{counted(topology.trainers, 'trainer')}), "
                f"but the cluster has {have.get(kind, 0.0):g}. Lower topology.makers, topology.trainers "
                f"{'or their gpus_per_… settings, ' if kind == 'GPU' else ''}or add nodes."
            )
