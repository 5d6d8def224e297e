"""The `coati` command. Light: heavy modules are imported by the command that needs them."""

import logging
import sys
from pathlib import Path
from typing import Annotated

import typer

from coati import __version__
from coati.errors import CoatiError, RunStopped

app = typer.Typer(
    name="coati",
    help="Train language models with reinforcement learning. Experience makers and trainers run at the same time, in "
    "separate Ray actors.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Show the actors' log messages too.")]


def _show_version(value: bool) -> None:
    if value:
        typer.echo(f"coati {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    """Options of the command."""


@app.command()
def demo(
    seed: Annotated[int, typer.Option(help="Seed of the run.")] = 0,
    output: Annotated[Path, typer.Option(help="Folder for the results. An earlier demo there is replaced.")] = Path(
        "runs/demo"
    ),
    sync: Annotated[bool, typer.Option("--sync", help="Run in one process, without Ray.")] = False,
    verbose: Verbose = False,
) -> None:
    """Watch a small language model learn to write kind film reviews, on this machine."""
    from coati.cli.demo import run_demo

    run_demo(seed=seed, output=output, sync=sync, verbose=verbose)


@app.command()
def train(
    config: Annotated[Path | None, typer.Argument(help="The run's settings, a TOML file.")] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a setting; may be repeated."),
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(metavar="RUN_FOLDER", help="Continue the run in this folder from its last checkpoint instead."),
    ] = None,
    address: Annotated[
        str | None, typer.Option(help="Join this Ray cluster (e.g. auto) instead of starting a private one.")
    ] = None,
    sync: Annotated[
        bool,
        typer.Option("--sync", help="Run in one process, without Ray; useful for debugging."),
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, print the plan, and stop.")] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an earlier run in the output folder.")
    ] = False,
    verbose: Verbose = False,
) -> None:
    """Train from a TOML file."""
    from coati.cli.train import run_train

    run_train(
        config,
        resume=resume,
        overrides=overrides or [],
        address=address,
        sync=sync,
        dry_run=dry_run,
        overwrite=overwrite,
        verbose=verbose,
    )


@app.command()
def scale(
    folder: Annotated[Path, typer.Argument(metavar="RUN_FOLDER", help="The output folder of a run that is training.")],
    makers: Annotated[int, typer.Option(help="Target number of makers.")],
) -> None:
    """Change the number of makers of a running job. Its progress shows when they have joined or left."""
    from coati.counting import counted
    from coati.monitor.control import ask_for_makers

    state = ask_for_makers(folder, makers)
    typer.echo(f"Asked the run in {folder}, which has {counted(state.makers, 'maker')}, for {makers}.")


@app.command(name="eval")
def evaluate(
    target: Annotated[
        str,
        typer.Argument(metavar="MODEL_OR_RUN", help="A run's folder (for its model), a model's folder, or a hub name."),
    ],
    config: Annotated[
        Path | None, typer.Option(help="Settings with [[eval]] sets. Default: those of the run that the model is of.")
    ] = None,
    base: Annotated[
        str | None, typer.Option(help="Compare with this model; none = no other. Default: model.path.")
    ] = None,
    show: Annotated[int, typer.Option(help="Prompts of each set whose samples are printed.")] = 4,
    output: Annotated[Path | None, typer.Option(metavar="FILE", help="Write numbers and samples as JSON.")] = None,
    verbose: Verbose = False,
) -> None:
    """Measure a model on evaluation sets, beside the model that its training began with."""
    from coati.cli.eval import run_eval

    run_eval(target, settings=config, base=base, num_shown=show, output=output, verbose=verbose)


@app.command()
def report(
    folder: Annotated[
        Path, typer.Argument(metavar="RUN_FOLDER", help="The output folder of a run, finished or running.")
    ],
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where to write the page. Default: report.html in the folder.")
    ] = None,
) -> None:
    """Show what a run learned, a few samples, and where its time went; also as a page."""
    from coati.cli.report import run_report

    run_report(folder, html=html)


reward_app = typer.Typer(help="Try rewards.", no_args_is_help=True)
app.add_typer(reward_app, name="reward")


@reward_app.command("check")
def reward_check(
    source: Annotated[
        str, typer.Argument(metavar="REWARD", help="A run's TOML file, a reward of the library, or module:function.")
    ],
    rows: Annotated[
        Path, typer.Option(metavar="FILE", help="Rows with prompt, completion and columns; samples.jsonl, for example.")
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a setting, such as reward.options.pattern."),
    ] = None,
    show: Annotated[int, typer.Option(help="Rows to show; those that failed come first.")] = 20,
) -> None:
    """Score rows with a reward, without a model, and show what it says. Exit with 1 if it fails on one."""
    from coati.cli.reward import run_reward_check

    run_reward_check(source, rows, overrides=overrides or [], show=show)


@app.command()
def audit(
    folder: Annotated[
        Path, typer.Argument(metavar="RUN_FOLDER", help="The output folder of a run, finished or running.")
    ],
) -> None:
    """Show what became of every prompt group. Exit with 1 if one is lost, trained on twice, or too old."""
    from coati.cli.audit import run_audit

    run_audit(folder)


@app.command()
def replay(
    folder: Annotated[
        Path, typer.Argument(metavar="RUN_FOLDER", help="The output folder of a run on the CPU with one trainer.")
    ],
    until: Annotated[int | None, typer.Option(metavar="VERSION", help="Stop after this version.")] = None,
) -> None:
    """Re-execute a run from its journal. Exit with 1 at the first weights or samples that differ."""
    from coati.cli.replay import run_replay

    run_replay(folder, until=until)


def main() -> None:
    """Run the command; an error of ours is one message and exit code 2, not a traceback."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        app()
    except RunStopped as stop:
        typer.echo(f"coati: {stop}", err=True)
        sys.exit(130)
    except CoatiError as error:
        notes = "".join(f"\n  {note}" for note in getattr(error, "__notes__", ()))
        typer.secho("error: ", fg=typer.colors.RED, bold=True, nl=False, err=True)
        typer.echo(f"{error}{notes}", err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
