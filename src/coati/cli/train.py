"""`coati train run.toml`."""

import logging
import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from coati import entry
from coati.cli.audit import show_losses
from coati.config import RunSettings, plan_lines
from coati.entry import RunResult
from coati.errors import ConfigError, RunStopped, counted
from coati.monitor.live import LiveView, StopSignal
from coati.monitor.report import first_and_last, held_out_scores
from coati.run_folder import check_run_folder

EXIT_STOPPED = 130  # the shell's status for a process ended by SIGINT

Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Also show the log messages of the actors.")]


def train(
    config: Annotated[
        Path | None, typer.Argument(metavar="CONFIG", help="TOML file with the settings of the run.")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a setting. May be repeated.")
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(metavar="RUN_FOLDER", help="Continue this run from its latest checkpoint, in place of CONFIG."),
    ] = None,
    address: Annotated[
        str | None, typer.Option(help="Join this Ray cluster (e.g. auto) instead of starting a private one.")
    ] = None,
    sync: Annotated[
        bool, typer.Option("--sync", help="Run in one process, without Ray. Useful for debugging.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check settings, models and prompts, print the plan and exit.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an earlier run in the output folder.")
    ] = False,
    verbose: Verbose = False,
) -> None:
    """Train a model with the settings of a TOML file."""
    console, is_resumed = Console(highlight=False), resume is not None
    show_messages(verbose)
    if config is not None and resume is not None:
        raise ConfigError(f"--resume takes its settings from the run. Remove {config}; change settings with --set.")
    settings = entry.choose_settings(config, resume=resume, overrides=overrides or [], sync=sync)
    options: dict[str, Any] = {"overwrite": overwrite, "sync": sync, "address": address}
    with console.status("checking settings, models and prompts"):
        start = entry.check_run(settings, {}, is_resumed=is_resumed, **options | {"overwrite": overwrite or dry_run})
    plan = "\n".join([f"Plan of run {settings.run.name!r}", *(f"  {line}" for line in plan_lines(settings))])
    console.print(plan, markup=False, soft_wrap=True)
    if dry_run:
        if start is not None:
            console.print(f"The run would continue from {start.checkpoint}.", markup=False, soft_wrap=True)
        _show_lost_prompts(console, settings)
        advice = "Run again without --dry-run to train."
        try:
            check_run_folder(settings, overwrite=overwrite or is_resumed)
        except ConfigError:  # `check_run` has excluded all other problems of the folder
            advice = f"Run again with --overwrite, or with another run.output: {settings.output_folder} holds a run."
        console.print("[green]Config OK.[/]", escape(advice), soft_wrap=True)
        return
    result = execute(settings, console, verbose=verbose, start=start, **options)
    _show_result(console, result)
    if result.was_stopped:
        raise SystemExit(EXIT_STOPPED)


def _show_lost_prompts(console: Console, config: RunSettings) -> None:
    from coati.build import make_prompts
    from coati.prompts.stream import CUT_SHORT

    evaluated = [(f"[[eval]] {one.name}", config.for_evaluation(one), one.max_prompts) for one in config.eval]
    for name, own, most in [("[prompts]", config, 0), *evaluated]:
        lost = make_prompts(own).survey(most)
        cut = lost.pop(CUT_SHORT, 0)
        messages = [f"{counted(count, 'prompt')} {reason} will be skipped" for reason, count in lost.items()]
        if cut:
            messages.append(f"responses to {counted(cut, 'prompt')} have less room in the context than max_new_tokens")
        if messages:
            console.print(f"{name}: {'; '.join(messages)}.", style="yellow", markup=False, soft_wrap=True)


def _show_result(console: Console, result: RunResult) -> None:
    rewards, account, folder = [reward for _, reward in result.rewards], result.account, result.folder
    console.print(
        f"{'Stopped' if result.was_stopped else 'Done'} after {result.seconds:.0f} s. "
        f"{counted(account.num_made, 'sample')} made, {account.num_trained:,} trained on."
    )
    if rewards:
        console.print("Mean reward {:.3f} → {:.3f}.".format(*first_and_last(rewards)))
    for line in held_out_scores(folder):
        console.print(line, markup=False, soft_wrap=True)
    if result.stop_reason:
        console.print(f"[yellow]Stopped early[/]: {result.stop_reason}.")
    if sum(result.num_restarts.values()):
        counts = " and ".join(counted(number, kind[:-1]) for kind, number in result.num_restarts.items() if number)
        console.print(f"[yellow]Actors died and were restarted[/]: {counts}.")
    show_losses(console, account)
    places = {
        "Model": result.model,
        "Best model": folder / "best",
        "Metrics": folder / "metrics.jsonl",
        "Samples": folder / "samples.jsonl",
        "Failures": folder / "quarantine.jsonl",
    }
    commands = {
        "Account": f"coati audit {folder}",
        "Report": f"coati report {folder}",
        "TensorBoard": f"tensorboard --logdir {folder / 'tensorboard'}" * result.config.logging.writes_tensorboard,
        "Continue": f"coati train --resume {folder}" * result.was_stopped,
    }
    existing = {label: str(path) for label, path in places.items() if path.exists()}
    for label, value in (existing | commands).items():
        if value:
            console.print(f"{label + ':':<13}{value}", markup=False, soft_wrap=True)


def execute(config: RunSettings, console: Console, *, verbose: bool, **options: Any) -> RunResult:
    """Train until the end or a stop signal, with a live view. `options` are those of `coati.entry.execute`."""
    view = LiveView(console)
    with StopSignal(view, signal.SIGINT, signal.SIGTERM) as stop, view:
        try:
            return entry.execute(
                config, on_begin=stop.begin, on_progress=view.show, should_stop=stop, log_to_driver=verbose, **options
            )
        except KeyboardInterrupt:
            if stop.has_begun:
                raise
            raise RunStopped("stopped before training began; there was nothing to save.") from None


def show_messages(verbose: bool) -> None:
    """Show INFO log messages if `verbose`."""
    if verbose:
        logging.getLogger().setLevel(logging.INFO)
        if os.environ.get("NO_COLOR") or not (sys.stdout.isatty() and sys.stderr.isatty()):
            os.environ.setdefault("RAY_COLOR_PREFIX", "0")  # Ray colours the log messages that it relays, even in files
