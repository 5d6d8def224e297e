"""`coati train run.toml`."""

import logging
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any, Self

from rich.console import Console
from rich.markup import escape

from coati import entry
from coati.config import RunSettings, plan_lines
from coati.counting import counted
from coati.entry import RunResult
from coati.errors import RunStopped
from coati.monitor.live import LiveView
from coati.monitor.progress import RunSnapshot
from coati.resume import choose_start
from coati.run_folder import check_run_folder

EXIT_STOPPED = 130  # what shells use for "ended by SIGINT"


def run_train(
    path: Path | None,
    *,
    resume: Path | None,
    overrides: list[str],
    address: str | None,
    sync: bool,
    dry_run: bool,
    overwrite: bool,
    verbose: bool,
) -> None:
    """Check, plan, and (unless it is a dry run) train."""
    console = Console()
    is_resumed = resume is not None
    config = entry.prepare(path, resume=resume, overrides=overrides, sync=sync, address=address)
    plan = "\n".join([f"Plan of run {config.run.name!r}", *(f"  {line}" for line in plan_lines(config))])
    console.print(plan, highlight=False, markup=False, soft_wrap=True)
    if dry_run:
        check_run_folder(config, overwrite=overwrite or is_resumed)
        if is_resumed:
            found = choose_start(config).checkpoint
            console.print(f"It would continue from {found}.", highlight=False)
        quiet_libraries(verbose)
        from coati.build import check_inputs

        skipped = check_inputs(config).survey()
        if skipped:
            reasons = ", ".join(f"{count:,} {reason}" for reason, count in skipped.items())
            console.print(f"[yellow]Prompts that will be skipped[/]: {reasons}.", highlight=False)
        console.print("[green]Config OK.[/] Run again without --dry-run to train.")
        return
    options = {"is_resumed": is_resumed, "overwrite": overwrite, "sync": sync, "address": address}
    outcome = execute(config, console, verbose=verbose, **options)
    rewards, account, folder = outcome.rewards, outcome.account, outcome.folder
    console.print(
        f"{'Stopped' if outcome.was_stopped else 'Done'} after {outcome.seconds:.0f} s. "
        f"{counted(account.num_made, 'sample')} made, {account.num_trained:,} trained on."
        + (f" Mean reward {rewards[0][1]:.3f} → {rewards[-1][1]:.3f}." if rewards else "")
    )
    if outcome.stop_reason:
        console.print(f"[yellow]Stopped early[/]: {outcome.stop_reason}.", highlight=False)
    if sum(outcome.num_restarts.values()):
        counts = " and ".join(counted(number, kind[:-1]) for kind, number in outcome.num_restarts.items() if number)
        console.print(f"[yellow]Actors died and were started again[/]: {counts}.")
    for fate, reason, groups, samples in account.table():
        if fate in ("dropped", "quarantined"):
            size = f"{counted(groups, 'group')} of {counted(samples // groups, 'sample')}"
            console.print(f"[yellow]{fate.capitalize()}[/]: {size}: {escape(reason)}", highlight=False)
    console.print(f"Model:       {outcome.model}", highlight=False)
    if (best := folder / "best").is_dir():
        console.print(f"Best model:  {best}", highlight=False)
    console.print(f"Metrics:     {folder / 'metrics.jsonl'}", highlight=False)
    console.print(f"Samples:     {folder / 'samples.jsonl'}", highlight=False)
    if (failures := folder / "quarantine.jsonl").exists():
        console.print(f"Failures:    {failures}, the samples on which the reward failed", highlight=False)
    console.print(f"Account:     coati audit {folder}", highlight=False)
    console.print(f"Report:      coati report {folder}", highlight=False)
    if config.logging.writes_tensorboard:
        console.print(f"TensorBoard: tensorboard --logdir {folder / 'tensorboard'}", highlight=False)
    if outcome.was_stopped:
        console.print(f"Continue:    coati train --resume {folder}", highlight=False)
        raise SystemExit(EXIT_STOPPED)


def execute(config: RunSettings, console: Console, *, verbose: bool, **options: Any) -> RunResult:
    """Run to the end, or to a stop signal, with a live view; `options` are those of `coati.entry.execute`."""
    if config.logging.tensorboard and not config.logging.writes_tensorboard:
        console.print(
            "TensorBoard is not installed; metrics.jsonl has the metrics. To install it: pip install tensorboard"
        )
    quiet_libraries(verbose)
    with StopSignal(console) as stop, LiveView(console) as view:

        def show(snapshot: RunSnapshot) -> None:
            stop.seconds_per_step = snapshot.seconds_per_step
            view.show(snapshot)

        try:
            return entry.execute(
                config, on_begin=stop.begin, on_progress=show, should_stop=stop, log_to_driver=verbose, **options
            )
        except KeyboardInterrupt:
            if stop.has_begun:
                raise
            raise RunStopped("stopped before training began; there was nothing to save.") from None


class StopSignal:
    """The first SIGINT or SIGTERM asks a run that trains to stop and save; a second, or one before that, ends it."""

    def __init__(self, console: Console) -> None:
        self.has_begun = False
        self.seconds_per_step: float | None = None
        self._console = console
        self._is_set = False
        self._previous: dict[int, Any] = {}

    def begin(self) -> None:
        """Training begins: from now on there is something to save."""
        self.has_begun = True

    def __call__(self) -> bool:
        """Whether a stop was requested."""
        return self._is_set

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        is_second, self._is_set = self._is_set, True
        if is_second or not self.has_begun:
            raise KeyboardInterrupt
        pace = "" if self.seconds_per_step is None else f" (a step takes about {self.seconds_per_step:.2g} s)"
        self._console.print(
            f"[yellow]Stopping: finishing the current batch{pace} and saving. Press Ctrl-C again to quit now.[/]"
        )


def quiet_libraries(verbose: bool) -> None:
    """Keep the progress bars and hints of libraries out of the live view, in actors too."""
    if verbose:
        logging.getLogger().setLevel(logging.INFO)
        if os.environ.get("NO_COLOR") or not (sys.stdout.isatty() and sys.stderr.isatty()):
            os.environ.setdefault("RAY_COLOR_PREFIX", "0")  # Ray colours what it relays, even into files
        return
    for name in ("HF_DATASETS_DISABLE_PROGRESS_BARS", "HF_HUB_DISABLE_PROGRESS_BARS"):
        os.environ.setdefault(name, "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if "transformers" in sys.modules:  # has read the variables already; importing it takes seconds
        from transformers.utils import logging as transformers_logging

        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()
