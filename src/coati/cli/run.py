"""Runs a config from the terminal: stop signals, the live view, and quiet libraries around the run itself."""

import logging
import os
import sys
from collections.abc import Callable

from rich.console import Console

from coati import entry
from coati.cli.live import LiveView, StopSignal
from coati.config import RunSettings
from coati.config.plan import output_files
from coati.entry import RunResult

EXIT_STOPPED = 130  # what shells use for "ended by SIGINT"


def execute(
    config: RunSettings,
    console: Console,
    *,
    sync: bool,
    address: str | None,
    verbose: bool,
    on_begin: Callable[[], None] = lambda: None,
) -> RunResult:
    """Run to the end (or to a stop signal) in a folder that is there, and save the model.

    `on_begin` is called when everything is loaded and training begins.
    """
    if config.logging.tensorboard and output_files(config).tensorboard is None:
        console.print(
            "TensorBoard is not installed; metrics.jsonl has the metrics. To install it: pip install tensorboard"
        )
    quiet_libraries(verbose)
    with StopSignal(console) as should_stop, LiveView(console) as view:
        return entry.execute(
            config,
            sync=sync,
            address=address,
            on_begin=on_begin,
            on_progress=view.show,
            should_stop=should_stop,
            log_to_driver=verbose,
        )


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
