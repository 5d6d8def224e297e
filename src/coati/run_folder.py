"""The output folder of a run: whose it is, who may write there, and when an earlier run is deleted.

A run folder has the file `.coati-run`. Nothing is touched in a folder with other content and without that file. The
process that runs holds a lock on it, which ends with the process.

An earlier run lies in the subfolder `.coati-earlier` from the start of a new one until that one trains. A start that
fails puts it back; one that is killed leaves that to the next start. Every change is a rename or a deletion that can
be repeated, so it does not matter when the process is killed.
"""

import contextlib
import fcntl
import json
import logging
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

from coati.config import RunSettings, dump_config
from coati.config.plan import output_files
from coati.errors import ConfigError

logger = logging.getLogger(__name__)

MARKER = ".coati-run"

_EARLIER = ".coati-earlier"  # a whole earlier run, until the new one trains
_MOVING = ".coati-moving"  # the part of an earlier run that is on its way to _EARLIER or back
_DELETED = ".coati-deleted"
_OURS = {MARKER, _EARLIER, _MOVING, _DELETED}

# What a run leaves that ended before its first sample; not worth an error.
_START_FILES = {"config.toml", "metrics.jsonl", "spans.jsonl", "state.json", "control.json", "tensorboard"}


def check_run_folder(config: RunSettings, *, overwrite: bool) -> None:
    """Raise ConfigError if a run could not use its output folder now; change nothing."""
    folder = config.output_folder
    _check_owner(folder)
    if (marker := folder / MARKER).is_file():
        with marker.open(encoding="utf-8") as file:
            _lock(file, folder, fcntl.LOCK_SH)
        _check_replaceable(folder, overwrite=overwrite)


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
def open_run_folder(config: RunSettings, *, overwrite: bool) -> Iterator[Callable[[], None]]:
    """Make the output folder and hold it for a run inside the `with` block.

    Gives a function that deletes the earlier run; call it when training begins. If the block raises before that, the
    earlier run is put back.

    Raises:
        ConfigError: when the folder is not a run's, is in use, cannot be written, or holds a run that `overwrite` does
            not allow to replace.
    """
    folder = config.output_folder
    with contextlib.ExitStack() as stack:
        try:
            _check_owner(folder)
            stack.enter_context(_held(folder))
            _restore(folder)
            _check_replaceable(folder, overwrite=overwrite)
            _set_aside(folder)
            output_files(config).config.write_text(dump_config(config.with_absolute_paths()), encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"run.output {str(folder)!r} cannot be written: {error}. Choose another folder."
            ) from error
        try:
            yield lambda: _delete_earlier(folder)
        except BaseException as error:
            try:
                _restore(folder)
            except OSError as problem:
                error.add_note(f"The earlier run could not be put back ({problem}); the next start tries again.")
            raise
        _delete_earlier(folder)


def _check_owner(folder: Path) -> None:
    if folder.is_dir() and any(folder.iterdir()) and not (folder / MARKER).is_file():
        raise ConfigError(
            f"run.output {str(folder)!r} holds files that are not a coati run's. Choose another folder. If it is a "
            f"run of an older version that may be replaced, create the file {str(folder / MARKER)!r} first."
        )


def _check_replaceable(folder: Path, *, overwrite: bool) -> None:
    is_run = any(path.name not in _START_FILES for path in _entries(folder))
    if not overwrite and (is_run or (folder / _EARLIER).exists() or (folder / _MOVING).exists()):
        raise ConfigError(
            f"run.output {str(folder)!r} holds an earlier run. Give --overwrite (overwrite=True in Python) to "
            "replace it, or choose another run.output."
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


def _set_aside(folder: Path) -> None:
    if not (entries := _entries(folder)):
        return
    moving = folder / _MOVING
    moving.mkdir()
    for path in entries:
        path.rename(moving / path.name)
    moving.rename(folder / _EARLIER)


def _restore(folder: Path) -> None:
    """Undo a start that did not come to train; of this process, or of one that was killed."""
    earlier, moving = folder / _EARLIER, folder / _MOVING
    if earlier.exists():
        for path in _entries(folder):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        earlier.rename(moving)
    if moving.exists():
        for path in list(moving.iterdir()):
            path.rename(folder / path.name)
        moving.rmdir()
    shutil.rmtree(folder / _DELETED, ignore_errors=True)


def _delete_earlier(folder: Path) -> None:
    if (folder / _EARLIER).exists():
        (folder / _EARLIER).rename(folder / _DELETED)
        shutil.rmtree(folder / _DELETED, ignore_errors=True)


def _entries(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.name not in _OURS]
