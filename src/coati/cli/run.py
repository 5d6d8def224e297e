"""Runs a config from the terminal: folders, trackers, live view, and the run itself."""

import dataclasses
import logging
import os
import sys
import time
from collections.abc import Callable

from rich.console import Console

from coati.cli.live import LiveView, StopSignal
from coati.config import RunSettings
from coati.config.plan import OutputFiles, output_files
from coati.monitor import RunLog, TensorBoardTracker

EXIT_STOPPED = 130  # what shells use for "ended by SIGINT"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOutcome:
    """What a run left behind."""

    files: OutputFiles
    log: RunLog
    seconds: float
    was_stopped: bool


def execute(
    config: RunSettings,
    console: Console,
    *,
    sync: bool,
    address: str | None,
    verbose: bool,
    on_begin: Callable[[], None] = lambda: None,
) -> RunOutcome:
    """Run to the end (or to a stop signal) in a folder that is there, and save the model.

    `on_begin` is called when everything is loaded and training begins.
    """
    files = output_files(config)
    if config.logging.tensorboard and files.tensorboard is None:
        console.print(
            "TensorBoard is not installed; metrics.jsonl has the metrics. To install it: pip install tensorboard"
        )
    quiet_libraries(verbose)
    started = time.monotonic()
    log = RunLog(
        config.output_folder,
        total_steps=config.train.total_steps * config.train.epochs,
        trackers=[] if files.tensorboard is None else [TensorBoardTracker(files.tensorboard)],
        samples_every_versions=config.logging.samples_every_versions,
        max_spans=config.logging.spans_kept,
        on_begin=on_begin,
    )
    try:
        with StopSignal(console) as should_stop, LiveView(console) as view:
            log.message = "loading libraries"
            view.show(log.snapshot())
            from coati import assembly

            assembly.check_inputs(config)
            if sync:
                _run_synchronously(config, log, view, should_stop, str(files.model))
            else:
                from coati.ray.launcher import DetachedRun

                DetachedRun(
                    config,
                    log,
                    address=address,
                    on_progress=view.show,
                    should_stop=should_stop,
                    log_to_driver=verbose,
                ).run(str(files.model.resolve()))
            was_stopped = should_stop()
    finally:
        log.close()
    return RunOutcome(files=files, log=log, seconds=time.monotonic() - started, was_stopped=was_stopped)


def _run_synchronously(config: RunSettings, log: RunLog, view: LiveView, should_stop: StopSignal, path: str) -> None:
    from coati import assembly
    from coati.synchronous import SynchronousRun

    def save(folder: str) -> None:
        run.save(folder)
        assembly.load_tokenizer(config).save_pretrained(folder)

    run = SynchronousRun(config, log, on_progress=view.show, should_stop=should_stop)
    log.message = ""
    try:
        run.run()
    except Exception as error:
        if (step := log.snapshot().step) > 0:
            _save_after_failure(error, save, path + "-at-failure", step)
        raise
    log.flush()
    view.show(log.snapshot())
    save(path)


def _save_after_failure(error: Exception, save: Callable[[str], None], path: str, step: int) -> None:
    try:
        save(path)
    except Exception as problem:  # the run's own error is the one to report
        error.add_note(f"The model after step {step} could not be saved to {path}: {problem}")
    else:
        error.add_note(f"The model after step {step} was saved to {path}")


def quiet_libraries(verbose: bool) -> None:
    """Keep other people's progress bars and hints out of our live view."""
    if verbose:
        logging.getLogger().setLevel(logging.INFO)
        if os.environ.get("NO_COLOR") or not (sys.stdout.isatty() and sys.stderr.isatty()):
            os.environ.setdefault("RAY_COLOR_PREFIX", "0")  # Ray colours what it relays, even into files
        return
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
