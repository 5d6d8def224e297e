"""The output folder of a run: ownership and locking, replacing an earlier run, and resuming.

A running process holds a lock on the file `.coati-run` in its run folder. A non-empty folder without that file is never
touched. The files of an earlier run stay until a new run starts to train, which deletes them, and no other files.
"""

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import re
import shlex
import shutil
import socket
import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from coati.config import Overrides, RunSettings, dump_config, load_config, parse_overrides
from coati.config.plan import read_json
from coati.errors import ConfigError, DataError, RunStopped, error_text
from coati.monitor import RunLog, read_jsonl

logger = logging.getLogger(__name__)

MARKER = ".coati-run"
_PARTS = "parts.json"  # names of the parts that a program gave to the run

# The results of a run, which are replaced only with --overwrite.
_RESULTS = ("samples.jsonl", "checkpoints", "model", "model-at-failure", "best")
_RECORDS = (
    *("config.toml", "metrics.jsonl", "spans.jsonl", "quarantine.jsonl", "tensorboard", "trackers", "report.html"),
    *("ledger", "ray-logs", "warnings.log", "evaluations.jsonl", "evaluations", "error.txt", _PARTS),
)
_CONTROL = "control.json"

MAX_MAKERS = 64
_REQUEST = re.compile(rb'\{"makers": ?(\d{1,3})\}\s*')

RUN_FILES = (*_RESULTS, *_RECORDS, _CONTROL)
"""Everything that a run and its report write. A new run deletes these files and no others."""

# Settings that cannot change on a resume: with other values, the steps so far would belong to another run.
_FIXED_SECTIONS = ("prompts", "lora")
_FIXED = (
    "run.name", "run.output", "run.seed", "model.path", "model.tokenizer", "algorithm.name",
    "rollout.samples_per_prompt", "train.batch_size", "train.update_steps", "topology.max_staleness",
)  # fmt: skip


def check_run_folder(config: RunSettings, *, overwrite: bool) -> None:
    """Raise ConfigError if a run could not use its output folder now. Changes nothing."""
    folder = config.output_folder
    if (marker := folder / MARKER).is_file():
        with marker.open(encoding="utf-8") as file:
            _lock(file, folder, fcntl.LOCK_SH)
    elif folder.is_dir() and any(folder.iterdir()):
        raise ConfigError(
            f"run.output {str(folder)!r} is not empty and not a coati run. Choose another folder. To replace a "
            f"run of an older version of coati there, first create the file {str(marker)!r}."
        )
    if not overwrite and any((folder / name).exists() for name in _RESULTS):
        raise ConfigError(
            f"run.output {str(folder)!r} holds an earlier run. Use --overwrite (overwrite=True in Python) to "
            "replace it, or choose another run.output."
        )


def check_inputs_outside(config: RunSettings) -> None:
    """Raise ConfigError if an input of the run lies in the output folder, which the run replaces."""
    folder = config.output_folder
    for key, value in config.input_paths.items():
        is_search_path = key.endswith("]")  # may be a working directory, and so the run folder itself
        if not is_search_path and Path(value).exists() and Path(value).resolve().is_relative_to(folder.resolve()):
            raise ConfigError(
                f"{key} {value!r} lies in run.output {str(folder)!r}, which the run replaces. "
                "Choose another run.output."
            )


@contextlib.contextmanager
def open_run_folder(
    config: RunSettings,
    parts: Collection[str] = (),
    *,
    overwrite: bool,
    is_resumed: bool = False,
    is_sync: bool = False,
) -> Iterator[Callable[[], None]]:
    """Create the output folder and lock it for a run inside the `with` block.

    Yields a function to call when training begins. It deletes the files of an earlier run, unless that run is resumed,
    and writes the settings. Raises ConfigError if the folder cannot be used (see `check_run_folder`) or written. An
    exception inside the block is written to `error.txt`, unless it is RunStopped or an earlier run is still there. It
    gets a note with the command that continues the run, if there is a checkpoint; it has to pass `parts` again.
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
            if parts:
                _write_atomically(folder / _PARTS, json.dumps({"parts": [*parts]}))
            if is_resumed:
                if path.read_text(encoding="utf-8") == settings:
                    return
                number = len(list(folder.glob("ledger/config-*.toml")))
                shutil.copyfile(path, folder / "ledger" / f"config-{number}.toml")
            _write_atomically(path, settings)

    with contextlib.ExitStack() as stack:
        with _as_config_error(folder):
            folder.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context((folder / MARKER).open("a+", encoding="utf-8"))
            _lock(file, folder, fcntl.LOCK_EX)
            file.truncate(0)
            json.dump({"pid": os.getpid(), "host": socket.gethostname(), "is_sync": is_sync}, file)
            file.flush()
            _delete(folder, [_CONTROL])
        try:
            yield begin
        except Exception as error:
            if is_own and any(folder.glob("checkpoints/version-*[0-9]")):
                error.add_note(f"To continue from the newest checkpoint: {resume_command(folder, parts)}")
            with contextlib.suppress(OSError):
                if is_own and not isinstance(error, RunStopped):
                    (folder / "error.txt").write_text(error_text(error), encoding="utf-8", errors="replace")
            raise


def resume_command(folder: Path, parts: Collection[str]) -> str:
    """Return the command, or with parts of a program the call, that continues the run in a folder."""
    path = str(folder.resolve())
    given = "".join(f", {part}=..." for part in parts)
    return f"coati.train(resume={path!r}{given})" if parts else f"coati train --resume {shlex.quote(path)}"


def _write_atomically(path: Path, text: str) -> None:
    """Replace a file atomically: if the process is killed, the file holds either the old text or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def save_makers(config: RunSettings, makers: int) -> None:
    """Save the target number of makers in the settings of a running job, so that a resumed run keeps it."""
    config = config.model_copy(update={"topology": config.topology.model_copy(update={"makers": makers})})
    with contextlib.suppress(OSError):  # a full disk must not end the run
        _write_atomically(config.output_folder / "config.toml", dump_config(config))


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


def _lock(file: TextIO, folder: Path, kind: int) -> None:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(
            f"run.output is in use by a running job ({_holder(file)}): {str(folder)!r}. Choose another or stop the job."
        ) from None
    except OSError as error:  # some network file systems have no locks
        logger.warning("%s cannot be locked (%s); make sure that no other run writes there.", folder, error)


def _holder(file: TextIO) -> str:
    try:
        file.seek(0)
        fields = json.load(file)
        return f"pid {fields['pid']} on {fields['host']}"
    except (OSError, ValueError, TypeError, KeyError):  # the holder is still writing it
        return "pid unknown"


# Prompts from memory


def save_prompts(prompts: Any, config: RunSettings) -> RunSettings:
    """Write prompts from memory to a JSONL file beside the output folder, and return settings with its path.

    `prompts` is a list of texts or rows, or an object with `to_list`, such as a `datasets.Dataset`. The file's name
    contains a hash of its content, so a run that is resumed finds the prompts that it started with.
    """
    rows = prompts.to_list() if hasattr(prompts, "to_list") else prompts
    if isinstance(rows, str | bytes) or not isinstance(rows, Sequence) or not rows:
        raise DataError(
            f"prompts must be a list of texts or rows (dicts), or one split of a dataset, and not empty, got "
            f"{prompts if prompts == [] else type(prompts).__name__}. Convert it, or write a file and set prompts.path."
        )
    column, output = config.prompts.column, config.output_folder.resolve()
    try:
        text = "".join(json.dumps(row if isinstance(row, dict) else {column: row}) + "\n" for row in rows)
    except (TypeError, ValueError) as error:
        raise DataError(f"prompts must be texts or dicts of JSON values: {error}. Convert the values.") from None
    path = output.with_name(f"{output.name}-prompts-{hashlib.sha256(text.encode()).hexdigest()[:12]}.jsonl")
    with _as_config_error(output):
        path.parent.mkdir(parents=True, exist_ok=True)
        _write_atomically(path, text)
    return config.model_copy(update={"prompts": config.prompts.model_copy(update={"path": str(path)})})


# Scaling a running job


def ask_for_makers(folder: Path, makers: int) -> None:
    """Request a new number of makers from the run that is training in `folder`. ConfigError if there is none."""
    if not _is_running(folder):
        raise ConfigError(
            f"RUN_FOLDER must be the output folder (run.output) of a run that is training, got {str(folder)!r}, where "
            "none is alive."
        )
    if (read_json(folder / MARKER) or {}).get("is_sync"):
        raise ConfigError(
            f"The run in {str(folder)!r} was started with --sync, so it has exactly one maker. To change the number of "
            "makers of a run, start it without --sync."
        )
    _write_atomically(folder / _CONTROL, json.dumps({"makers": makers}))


def target_makers(folder: Path) -> int:
    """Return the target number of makers of the run in `folder`. ConfigError if its settings are not saved yet."""
    path = folder / "config.toml"
    if not path.is_file():
        if _is_running(folder):
            raise ConfigError(f"The run in {str(folder)!r} is still starting. Try again when it trains.")
        raise ConfigError(
            f"RUN_FOLDER must be the output folder of a run, which has a config.toml, got {str(folder)!r}."
        )
    return load_config(path).topology.makers


def asked_makers(folder: Path) -> int | None:
    """Return the number of makers requested for the run in `folder` since the last call; None if there is no request.

    Only a regular file owned by this user is read. An invalid request is refused with a warning.
    """
    claimed, request = folder / f".{_CONTROL}.taken", None
    try:
        (folder / _CONTROL).replace(claimed)  # the next request creates a new file
    except OSError:  # no request
        return None
    # Do not follow links or block on pipes, and check the opened file itself rather than its path.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
    with contextlib.suppress(OSError), open(os.open(claimed, flags), "rb") as file:
        found = os.fstat(file.fileno())
        if stat.S_ISREG(found.st_mode) and found.st_uid == os.getuid():
            request = _REQUEST.fullmatch(file.read(100))
    with contextlib.suppress(OSError):
        claimed.unlink()
    if request is None or not 1 <= (makers := int(request[1])) <= MAX_MAKERS:
        logger.warning(
            "Request refused; training continues. %s must be owned by the user who started the run and contain "
            '{"makers": N}, with N from 1 to %d. Use coati scale to write it.',
            _CONTROL,
            MAX_MAKERS,
        )
        return None
    return makers


def _is_running(folder: Path) -> bool:
    """Return whether a run is alive in a folder; True if the file system has no locks."""
    try:
        with (folder / MARKER).open(encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (BlockingIOError, FileNotFoundError, NotADirectoryError) as error:
        return isinstance(error, BlockingIOError)
    except OSError:  # some network file systems have no locks
        return True
    return False


# Resuming a run


def resumed_settings(folder: Path, overrides: Overrides) -> RunSettings:
    """Return the settings of the run in a folder, with overrides. Warn about changes; ConfigError for some."""
    if not (folder / "config.toml").is_file():
        raise ConfigError(f"--resume must be the output folder of a run, which has a config.toml, got {str(folder)!r}.")
    before, after = (_settings(folder, some) for some in ((), overrides))
    changes = _changed_settings(before, after)
    fixed = [changes[key] for key in changes if key in _FIXED or key.partition(".")[0] in _FIXED_SECTIONS]
    if fixed:
        raise ConfigError(
            f"A resumed run cannot change these settings: {'; '.join(fixed)}. Keep their values, or start a new run."
            + " --sync sets topology.max_staleness to 0." * ("topology.max_staleness" in changes)
        )
    if changes:
        logger.warning("resuming with changed settings: %s", "; ".join(changes.values()))
    return after


def _changed_settings(before: RunSettings, after: RunSettings) -> dict[str, str]:
    """Describe the settings that differ, by key. Evaluation sets are compared as a whole."""
    sets = {} if before.eval == after.eval else {"eval": "[[eval]] differs"}
    return sets | {
        f"{section}.{key}": f"{section}.{key} was {old!r}, is now {values[key]!r}"
        for section, values in after.model_dump(exclude={"eval"}).items()
        for key, old in getattr(before, section).model_dump().items()
        if values[key] != old
    }


def _settings(folder: Path, overrides: Overrides) -> RunSettings:
    config = load_config(folder / "config.toml", overrides)
    if "run.output" in parse_overrides(overrides):
        return config
    run = config.run.model_copy(update={"output": str(folder)})  # the folder may have moved
    return config.model_copy(update={"run": run})


def check_resumable(config: RunSettings, parts: Collection[str] = ()) -> None:
    """Raise ConfigError if the run is complete, or was given a learner or maker that is not among `parts`."""
    had = (read_json(config.output_folder / _PARTS) or {}).get("parts", [])
    if not set(had) <= {*parts, "reward"}:
        raise ConfigError(
            f"The run in {str(config.output_folder)!r} has parts of a program, which are not saved. Continue it with "
            f"{resume_command(config.output_folder, had)}."
        )
    metrics, model = config.output_folder / "metrics.jsonl", config.output_folder / "model"
    if not (metrics.is_file() and model.is_dir()):
        return
    steps, was_saved = config.train.optimizer_steps, model.stat().st_mtime_ns >= metrics.stat().st_mtime_ns
    if was_saved and max((row["step"] for row in read_jsonl(metrics)), default=0) >= steps:
        raise ConfigError(
            f"--resume must be a run with steps left to train, got {str(config.output_folder)!r}, which is complete: "
            f"all {steps} optimizer steps are done, and the model is in {str(model)!r}. To train longer, add "
            "--set train.total_steps=N."
        )


class StartingPoint(NamedTuple):
    """Where a resumed or restarted run continues."""

    checkpoint: Path | None = None  # None = from the beginning
    version: int = 0
    step: int = 0
    events: tuple[int, ...] = ()  # number of events up to here in each trainer's journal

    def __str__(self) -> str:
        return f"version {self.version}, after step {self.step}"


def choose_start(config: RunSettings, *, is_restart: bool = False) -> StartingPoint:
    """Return the newest complete checkpoint as the starting point. CheckpointError if none can be read.

    With `is_restart` (the trainers have died), start from the beginning if no checkpoint was ever saved.
    """
    from coati.trainer.checkpoints import find_checkpoint, saved_versions

    folder = config.output_folder.resolve() / "checkpoints"
    if is_restart and not saved_versions(folder):
        logger.error(
            "no checkpoint has been saved yet (train.save_every is %d), so the run restarts from its beginning: "
            "version 0, with the initial weights. All steps so far are lost.",
            config.train.save_every,
        )
        return StartingPoint()
    path, state = find_checkpoint(folder)
    events = tuple(rank.get("events", 0) for rank in state["ranks"])
    return StartingPoint(path, state["version"], state["counters"]["batches"], events)


def continue_files(config: RunSettings, log: RunLog, start: StartingPoint, *, is_restart: bool = False) -> None:
    """Remove all steps after `start` from the run's files and its log: the run repeats them."""
    from coati import build
    from coati.ledger.journal import retire_journals
    from coati.trainer.checkpoints import clear_after

    clear_after(config.output_folder / "checkpoints", start.version)
    events = None if start.checkpoint is None else start.events
    rules, name = build.ledger_rules(config), config.run.name
    retire_journals(config.output_folder.resolve(), rules, run=name, version=start.version, events=events)
    log.continue_from(start.step, start.version, is_restart=is_restart)
    logger.info("the run continues from %s", start)
