"""The `coati` command. Fast to start: only the commands that need torch and Ray import them."""

import logging
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from coati import __version__
from coati.cli.audit import audit, replay
from coati.cli.demo import demo
from coati.cli.eval import evaluate
from coati.cli.report import report
from coati.cli.reward import check
from coati.cli.train import EXIT_STOPPED, train
from coati.errors import CoatiError, RunStopped, counted, error_text
from coati.run_folder import MAX_MAKERS, ask_for_makers, target_makers

app = typer.Typer(
    name="coati",
    help="Train language models with reinforcement learning. Makers and trainers run concurrently, as Ray actors.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
reward_app = typer.Typer(help="Test reward functions.", no_args_is_help=True)
reward_app.command()(check)
for command in (demo, train, report, audit, replay):
    app.command()(command)
app.command("eval")(evaluate)
app.add_typer(reward_app, name="reward")


def _show_version(value: bool) -> None:
    if value:
        typer.echo(f"coati {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Declare the options of `coati` itself."""


@app.command()
def scale(
    folder: Annotated[Path, typer.Argument(metavar="RUN_FOLDER", help="The output folder of a run that is training.")],
    makers: Annotated[
        int | None, typer.Option(min=1, max=MAX_MAKERS, help="New target. Default: show the current one.")
    ] = None,
) -> None:
    """Change the number of makers of a running job. Makers join and leave while it trains."""
    if makers is not None:
        ask_for_makers(folder, makers)
        typer.echo(f"Requested {counted(makers, 'maker')} for the run in {folder}.")
    else:
        typer.echo(f"The target of the run in {folder} is {counted(target_makers(folder), 'maker')}.")


def main() -> None:
    """Run the command. Print a CoatiError as a message without a traceback, and exit with status 2."""
    for name in ("HF_DATASETS_DISABLE_PROGRESS_BARS", "HF_HUB_DISABLE_PROGRESS_BARS"):
        os.environ.setdefault(name, "1")  # must be set before the libraries are imported
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("huggingface_hub").propagate = False  # it has a handler of its own
    try:
        app()
    except RunStopped as stop:
        typer.echo(f"coati: {error_text(stop)}", err=True)
        sys.exit(EXIT_STOPPED)
    except CoatiError as error:
        typer.secho("error: ", fg=typer.colors.RED, bold=True, nl=False, err=True)
        typer.echo(error_text(error), err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
