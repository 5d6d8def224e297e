"""The output folder of a run: what may be replaced there, and when it is."""

import contextlib
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from coati.config import RunConfig, dump_config
from coati.config.plan import OutputFiles, output_files
from coati.errors import ConfigError
from coati.monitor.control import living_run


def check_output(config: RunConfig, *, overwrite: bool) -> None:
    """Raise ConfigError if the output folder holds something that must not be lost.

    What a run left that ended before it made a sample is nothing, and may be replaced.
    """
    files = output_files(config)
    folder = config.output_folder
    if not folder.exists() or not any(folder.iterdir()):
        return
    if not files.config.exists():
        raise ConfigError(
            f"run.output must be a new folder or one of an earlier run, got {str(folder)!r}, which holds other "
            "files. Choose another folder."
        )
    if (state := living_run(folder)) is not None:
        raise ConfigError(
            f"run.output must not be that of a run that is still going, got {str(folder)!r}, where process {state.pid} "
            f"on {state.host} is at work. Choose another folder, or stop that run first."
        )
    results = (files.model, files.samples, folder / "checkpoints")
    if not overwrite and any(path.exists() for path in results):
        raise ConfigError(
            f"run.output {str(folder)!r} holds an earlier run. Give --overwrite to replace it, or --set run.output=…"
        )


def check_inputs_stay(config: RunConfig) -> None:
    """Raise ConfigError if the run reads something that lies in the folder that it replaces."""
    folder = config.output_folder
    for key, value in _inputs(config):
        if Path(value).exists() and Path(value).resolve().is_relative_to(folder.resolve()):
            raise ConfigError(
                f"{key} must not lie in the folder that the run replaces, run.output {str(folder)!r}, got {value!r}. "
                "Choose another run.output."
            )


@contextlib.contextmanager
def new_output(config: RunConfig, *, overwrite: bool) -> Iterator[Callable[[], None]]:
    """Make the output folder, for a run inside; an earlier run there is an error, or replaced if asked for.

    Gives what is to be called when the new run has come so far that the earlier one may go. If it fails before that,
    the earlier one is there as it was.
    """
    check_output(config, overwrite=overwrite)
    files = output_files(config)
    folder = config.output_folder
    place = Path(os.path.realpath(folder))
    earlier = place.with_name(f".{place.name}.{uuid.uuid4().hex[:8]}.earlier")
    try:
        if place.exists():
            place.rename(earlier)
        place.mkdir(parents=True, exist_ok=True)
        files.config.write_text(dump_config(config), encoding="utf-8")
    except OSError as error:
        _bring_back(earlier, place)
        raise ConfigError(f"run.output {str(folder)!r} cannot be written: {error}. Choose another folder.") from error
    is_forgotten = False

    def forget_earlier() -> None:
        nonlocal is_forgotten
        is_forgotten = True
        shutil.rmtree(earlier, ignore_errors=True)

    try:
        yield forget_earlier
    except BaseException:
        if not is_forgotten:
            _bring_back(earlier, place)
        raise
    forget_earlier()


def prepare_output(config: RunConfig, *, overwrite: bool) -> OutputFiles:
    """Make the output folder, and forget what was there at once."""
    with new_output(config, overwrite=overwrite):
        return output_files(config)


def _bring_back(earlier: Path, place: Path) -> None:
    """Nothing to do if there was none."""
    if earlier.exists():
        shutil.rmtree(place, ignore_errors=True)
        earlier.rename(place)


def _inputs(config: RunConfig) -> list[tuple[str, str]]:
    """What the run reads, by setting."""
    model, reward = config.model, config.reward
    named = {
        "model.path": model.path,
        "model.reference": model.reference,
        "model.tokenizer": model.tokenizer,
        "model.critic": "" if model.critic == "actor" else model.critic,
        "prompts.path": config.prompts.path,
        "reward.model": reward.model,
        **{f"reward.terms[{index}].model": term.model for index, term in enumerate(reward.terms)},
        **{f"reward.search_paths[{index}]": path for index, path in enumerate(reward.search_paths)},
    }
    return [(key, value) for key, value in named.items() if value]
