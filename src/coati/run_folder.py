"""The output folder of a run: whose it is, who may write there, when an earlier run is replaced, and how one continues.

A run folder has the file `.coati-run`, on which the process that runs holds a lock; in a folder with other content and
without that file nothing is touched. An earlier run stays until a new one trains. Then the files that runs write are
deleted, and no others. Light to import.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import re
import shutil
import socket
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TextIO

from coati.config import Overrides, RunSettings, dump_config, load_config, parse_overrides
from coati.config.plan import read_json
from coati.errors import ConfigError, RunStopped, error_text
from coati.monitor import read_jsonl

if TYPE_CHECKING:
    from coati.monitor import RunLog

logger = logging.getLogger(__name__)

MARKER = ".coati-run"

# What takes a run to make, and is replaced only if the user says so.
_RESULTS = ("samples.jsonl", "checkpoints", "model", "model-at-failure", "best")
_RECORDS = (
    *("config.toml", "metrics.jsonl", "spans.jsonl", "quarantine.jsonl", "tensorboard", "trackers", "report.html"),
    *("ledger", "ray-logs", "warnings.log", "evaluations.jsonl", "evaluations", "error.txt"),
)
_CONTROL = "control.json"

MAX_MAKERS = 64
_REQUEST = re.compile(rb'\{"makers": ?(\d{1,3})\}\s*')

RUN_FILES = (*_RESULTS, *_RECORDS, _CONTROL)
"""Everything that a run and its report write; a new run deletes these and nothing else."""

# With others, what was trained so far would not be part of the same run.
_FIXED_SECTIONS = ("prompts", "lora")
_FIXED = (
    "run.name", "run.output", "run.seed", "model.path", "model.tokenizer", "algorithm.name",
    "rollout.samples_per_prompt", "train.batch_size", "train.update_steps", "topology.max_staleness",
)  # fmt: skip


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
    for key, value in config.input_paths.items():
        is_search_path = key.endswith("]")  # the folder that a command was given in, which may be the run's
        if not is_search_path and Path(value).exists() and Path(value).resolve().is_relative_to(folder.resolve()):
            raise ConfigError(
                f"{key} {value!r} lies in run.output {str(folder)!r}, which the run replaces. "
                "Choose another run.output."
            )


@contextlib.contextmanager
def open_run_folder(
    config: RunSettings, *, overwrite: bool, is_resumed: bool = False, is_sync: bool = False
) -> Iterator[Callable[[], None]]:
    """Make the output folder and hold it for a run inside the `with` block.

    Gives a function to call when training begins: it deletes what an earlier run wrote, unless that one is resumed, and
    writes the settings. ConfigError if the folder cannot be used (see `check_run_folder`) or written. What ends the
    block is written to `error.txt`, unless the folder still holds an earlier run.
    """
    folder = config.output_folder
    check_run_folder(config, overwrite=overwrite or is_resumed)
    is_own = is_resumed or not any((folder / name).exists() for name in _RESULTS)

    def begin() -> None:
        nonlocal is_own
        with _as_config_error(folder):
            path, settings = folder / "config.toml", dump_config(config.with_absolute_paths())
            is_own = True
            _delete(folder, ("error.txt",) if is_resumed else _RESULTS + _RECORDS)
            if is_resumed:
                if path.read_text(encoding="utf-8") == settings:
                    return
                shutil.copyfile(path, folder / "ledger" / f"config-{len(earlier_settings(folder))}.toml")
            _write_whole(path, settings)

    with contextlib.ExitStack() as stack:
        with _as_config_error(folder):
            stack.enter_context(_held(folder, is_sync=is_sync))
            _delete(folder, [_CONTROL])
        try:
            yield begin
        except Exception as error:
            with contextlib.suppress(OSError):
                if is_own and not isinstance(error, RunStopped):
                    (folder / "error.txt").write_text(error_text(error), encoding="utf-8", errors="replace")
            raise


def _write_whole(path: Path, text: str) -> None:
    """Replace a file; a kill leaves the old text or the new one."""
    written = path.with_name(f".{path.name}.{os.getpid()}")
    written.write_text(text, encoding="utf-8")
    written.replace(path)


def save_makers(config: RunSettings, makers: int) -> None:
    """Write a number of makers into the settings of a run that trains, for when it is resumed."""
    config = config.model_copy(update={"topology": config.topology.model_copy(update={"makers": makers})})
    with contextlib.suppress(OSError):  # a full disk ends no run
        _write_whole(config.output_folder / "config.toml", dump_config(config))


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
def _held(folder: Path, *, is_sync: bool) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / MARKER).open("a+", encoding="utf-8") as file:
        _lock(file, folder, fcntl.LOCK_EX)
        file.truncate(0)
        json.dump({"pid": os.getpid(), "host": socket.gethostname(), "is_sync": is_sync}, file)
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


# Asking a run for makers


def ask_for_makers(folder: Path, makers: int) -> None:
    """Ask the run that trains in `folder` for so many makers. ConfigError if none does."""
    if not _is_held(folder):
        raise ConfigError(
            f"RUN_FOLDER must be the output folder (run.output) of a run that is training, got {str(folder)!r}, where "
            "none is alive."
        )
    if (read_json(folder / MARKER) or {}).get("is_sync"):
        raise ConfigError(
            f"the run in {str(folder)!r} was started with --sync and has one maker, in its own process. Start runs "
            "whose number of makers may change without --sync."
        )
    _write_whole(folder / _CONTROL, json.dumps({"makers": makers}))


def asked_makers(folder: Path) -> int | None:
    """Return the makers that the run in `folder` was asked for since the last call.

    Only a regular file of this user's is followed; what is no request is refused with a warning.
    """
    taken, request = folder / f".{_CONTROL}.taken", None
    try:
        (folder / _CONTROL).replace(taken)  # so that the next request is another file
    except OSError:  # there is none
        return None
    # Neither a link nor a pipe is followed or waited for, and what is checked is what is read.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
    with contextlib.suppress(OSError), open(os.open(taken, flags), "rb") as file:
        found = os.fstat(file.fileno())
        if stat.S_ISREG(found.st_mode) and found.st_uid == os.getuid():
            request = _REQUEST.fullmatch(file.read(100))
    with contextlib.suppress(OSError):
        taken.unlink()
    if request is None or not 1 <= (makers := int(request[1])) <= MAX_MAKERS:
        logger.warning(
            'Request refused; training continues. %s must be a file of the user who started the run, with {"makers": '
            "N}, N from 1 to %d. Write it with coati scale.",
            _CONTROL,
            MAX_MAKERS,
        )
        return None
    return makers


def _is_held(folder: Path) -> bool:
    """Whether a run is alive in a folder; also where no lock can tell."""
    try:
        with (folder / MARKER).open(encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (BlockingIOError, FileNotFoundError, NotADirectoryError) as error:
        return isinstance(error, BlockingIOError)
    except OSError:  # some network file systems have no locks
        return True
    return False


# Continuing a run


def resumed_settings(folder: Path, overrides: Overrides) -> RunSettings:
    """Return the settings of the run in a folder, with overrides. Warns of changes; ConfigError for some."""
    if not (folder / "config.toml").is_file():
        raise ConfigError(f"--resume takes the output folder of a run, with its config.toml, got {str(folder)!r}.")
    before, after = (_settings(folder, some) for some in ((), overrides))
    said = changed_settings(before, after)
    fixed = [said[key] for key in said if key in _FIXED or key.partition(".")[0] in _FIXED_SECTIONS]
    if fixed:
        raise ConfigError(
            f"a run that is resumed cannot change these settings: {'; '.join(fixed)}. Leave them as they were, or "
            "start a new run." + " --sync sets topology.max_staleness to 0." * ("topology.max_staleness" in said)
        )
    if said:
        logger.warning("the run is resumed with other settings: %s", "; ".join(said.values()))
    return after


def changed_settings(before: RunSettings, after: RunSettings) -> dict[str, str]:
    """Tell which settings differ, by key; of evaluation sets only whether they do."""
    sets = {} if before.eval == after.eval else {"eval": "other sets in [[eval]]"}
    return sets | {
        f"{section}.{key}": f"{section}.{key} was {old!r}, is {values[key]!r}"
        for section, values in after.model_dump(exclude={"eval"}).items()
        for key, old in getattr(before, section).model_dump().items()
        if values[key] != old
    }


def _settings(folder: Path, overrides: Overrides) -> RunSettings:
    config = load_config(folder / "config.toml", overrides)
    if "run.output" in parse_overrides(overrides):
        return config
    return config.model_copy(update={"run": config.run.model_copy(update={"output": str(folder)})})  # it may have moved


def check_incomplete(config: RunSettings) -> None:
    """Raise ConfigError if the run has nothing left to train: all steps are done, and the model was saved after."""
    metrics, model = config.output_folder / "metrics.jsonl", config.output_folder / "model"
    if not (metrics.is_file() and model.is_dir()):
        return
    steps, was_saved = config.train.optimizer_steps, model.stat().st_mtime_ns >= metrics.stat().st_mtime_ns
    if was_saved and max((row["step"] for row in read_jsonl(metrics)), default=0) >= steps:
        raise ConfigError(
            f"--resume takes a run that has steps left to train, got {str(config.output_folder)!r}, which is complete: "
            f"all {steps} optimizer steps are done, and its model is {str(model)!r}. To train longer, add "
            "--set train.total_steps=N."
        )


class StartingPoint(NamedTuple):
    """Where a run continues."""

    checkpoint: Path | None = None  # none: at its beginning
    version: int = 0
    step: int = 0
    events: tuple[int, ...] = ()  # of each trainer's journal, those that led here

    def __str__(self) -> str:
        return f"version {self.version}, after step {self.step}"


def choose_start(config: RunSettings, *, is_restart: bool = False) -> StartingPoint:
    """Return where a run continues: at its newest whole checkpoint. CheckpointError if none can be read.

    `is_restart`: its trainers have died, and if nothing was ever saved they start from the beginning.
    """
    from coati.trainer.checkpoints import find_checkpoint, saved_versions

    folder = config.output_folder.resolve() / "checkpoints"
    if is_restart and not saved_versions(folder):
        logger.error(
            "there is no checkpoint yet (train.save_every is %d), so the run starts again from its beginning: "
            "version 0, with its initial weights. All steps so far are lost.",
            config.train.save_every,
        )
        return StartingPoint()
    path, state = find_checkpoint(folder)
    events = tuple(rank.get("events", 0) for rank in state["ranks"])
    return StartingPoint(path, state["version"], state["counters"]["batches"], events)


def continue_files(config: RunSettings, log: RunLog, start: StartingPoint, *, is_restart: bool = False) -> None:
    """Cut off what the run's files, and its log, hold of later steps, which are made again."""
    from coati import build
    from coati.ledger.journal import retire_journals
    from coati.trainer.checkpoints import clear_after

    clear_after(config.output_folder / "checkpoints", start.version)
    events = None if start.checkpoint is None else start.events
    rules, name = build.ledger_rules(config), config.run.name
    retire_journals(config.output_folder.resolve(), rules, run=name, version=start.version, events=events)
    log.continue_from(start.step, start.version, is_restart=is_restart)
    logger.info("the run continues from %s", start)
