"""The output folder of a run: whose it is, who may write there, and when an earlier run is replaced.

A run folder has the file `.coati-run`. Nothing is touched in a folder with other content and without that file. The
process that runs holds a lock on it, which ends with the process.

An earlier run stays as it is until a new one trains. Then the files that runs write are deleted, and no others.
"""

import contextlib
import fcntl
import json
import logging
import os
import shutil
import socket
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TextIO

from coati.config import RunSettings, dump_config
from coati.errors import ConfigError

logger = logging.getLogger(__name__)

MARKER = ".coati-run"

# What takes a run to make, and is replaced only if the user says so.
_RESULTS = ("samples.jsonl", "checkpoints", "model", "model-at-failure", "best")
_RECORDS = (
    *("config.toml", "metrics.jsonl", "spans.jsonl", "quarantine.jsonl", "tensorboard", "trackers", "report.html"),
    *("ledger", "ray-logs", "warnings.log", "evaluations.jsonl", "evaluations"),
)
# Of the latest start, even if it failed.
_CONTROL_FILES = ("state.json", "control.json")

RUN_FILES = (*_RESULTS, *_RECORDS, *_CONTROL_FILES)
"""Everything that a run and its report write; a new run deletes these and nothing else."""


def check_run_folder(config: RunSettings, *, overwrite: bool) -> None:
    """Raise ConfigError if a run could not use its output folder now; change nothing."""
    folder = config.output_folder
    _check_owner(folder)
    if (marker := folder / MARKER).is_file():
        with marker.open(encoding="utf-8") as file:
            _lock(file, folder, fcntl.LOCK_SH)
    if not overwrite and any((folder / name).exists() for name in _RESULTS):
        raise ConfigError(
            f"run.output {str(folder)!r} holds an earlier run. Give --overwrite (overwrite=True in Python) to "
            "replace it, or choose another run.output."
        )


def check_inputs_outside(config: RunSettings) -> None:
    """Raise ConfigError if the run reads something that lies in the folder that it replaces."""
    folder = config.output_folder
    folders = {f"reward.search_paths[{index}]": path for index, path in enumerate(config.reward.search_paths)}
    for key, value in (config.input_paths | folders).items():
        if Path(value).exists() and Path(value).resolve().is_relative_to(folder.resolve()):
            raise ConfigError(
                f"{key} {value!r} lies in run.output {str(folder)!r}, which the run replaces. "
                "Choose another run.output."
            )


@contextlib.contextmanager
def open_run_folder(config: RunSettings, *, overwrite: bool, is_resumed: bool = False) -> Iterator[Callable[[], None]]:
    """Make the output folder and hold it for a run inside the `with` block.

    Gives a function to call when training begins: it deletes what an earlier run wrote, unless that one is resumed, and
    writes the settings. ConfigError if the folder is not a run's, is in use, cannot be written, or holds a run that
    `overwrite` does not allow to replace.
    """
    folder = config.output_folder
    check_run_folder(config, overwrite=overwrite or is_resumed)
    with contextlib.ExitStack() as stack:
        with _as_config_error(folder):
            stack.enter_context(_held(folder))
            _delete(folder, _CONTROL_FILES)
        yield lambda: _begin(config, is_resumed=is_resumed)


def _begin(config: RunSettings, *, is_resumed: bool) -> None:
    folder = config.output_folder
    with _as_config_error(folder):
        path, settings = folder / "config.toml", dump_config(config.with_absolute_paths())
        if not is_resumed:
            _delete(folder, _RESULTS + _RECORDS)
        elif path.read_text(encoding="utf-8") == settings:
            return
        else:
            shutil.copyfile(path, folder / "ledger" / f"config-{len(earlier_settings(folder))}.toml")
        written = path.with_name(".config.toml")
        written.write_text(settings, encoding="utf-8")
        written.replace(path)  # a kill leaves the old settings or the new ones


def earlier_settings(folder: Path) -> list[Path]:
    """The settings that a run had before it was resumed with others."""
    return sorted(folder.glob("ledger/config-*.toml"))


def _delete(folder: Path, names: Iterable[str]) -> None:
    for path in (folder / name for name in names):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def _as_config_error(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"run.output {str(folder)!r} cannot be written: {error}. Choose another folder.") from error


def _check_owner(folder: Path) -> None:
    if folder.is_dir() and any(folder.iterdir()) and not (folder / MARKER).is_file():
        raise ConfigError(
            f"run.output {str(folder)!r} holds files that are not a coati run's. Choose another folder. If it is a "
            f"run of an older version that may be replaced, create the file {str(folder / MARKER)!r} first."
        )


@contextlib.contextmanager
def _held(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / MARKER).open("a+", encoding="utf-8") as file:
        _lock(file, folder, fcntl.LOCK_EX)
        file.truncate(0)
        json.dump({"pid": os.getpid(), "host": socket.gethostname()}, file)
        file.flush()
        yield


def _lock(file: TextIO, folder: Path, kind: int) -> None:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(
            f"run.output is in use by a running job ({_holder(file)}): {str(folder)!r}. Choose another folder, or stop "
            "that job first."
        ) from None
    except OSError as error:  # some network file systems have no locks
        logger.warning("%s cannot be locked (%s); make sure that no other run writes there.", folder, error)


def _holder(file: TextIO) -> str:
    try:
        file.seek(0)
        fields = json.load(file)
        return f"pid {fields['pid']} on {fields['host']}"
    except (OSError, ValueError, TypeError, KeyError):  # it is being written
        return "pid unknown"
