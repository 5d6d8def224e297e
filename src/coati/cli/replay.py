"""`coati replay RUN_FOLDER`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from coati.cli.train import quiet_libraries
from coati.counting import counted
from coati.errors import ReplayDiffers


def replay(
    folder: Annotated[
        Path, typer.Argument(metavar="RUN_FOLDER", help="The output folder of a run on the CPU with one trainer.")
    ],
    until: Annotated[int | None, typer.Option(metavar="VERSION", help="Stop after this version.")] = None,
) -> None:
    """Re-execute a run from its journal. Exit with 1 at the first weights or samples that differ."""
    console = Console(highlight=False, markup=False, soft_wrap=True)
    with Progress(console=console) as progress:
        task = progress.add_task("loading libraries", total=None)
        from coati.replay import replay as replay_run

        quiet_libraries(verbose=False)

        def show(version: int, last: int) -> None:
            progress.update(task, description=f"version {version} of {last}", completed=version, total=last)

        try:
            result = replay_run(folder, until=until, on_version=show)
        except ReplayDiffers as difference:
            progress.stop()
            console.print(f"The run does not replay: {difference}")
            raise typer.Exit(1) from None
    console.print(
        f"The run replays: all weights up to version {result.version} are the same, and so are the "
        f"{counted(result.num_samples, 'sample')} that made them."
    )
