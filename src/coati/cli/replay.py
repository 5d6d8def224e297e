"""`coati replay RUN_FOLDER`."""

from pathlib import Path

import typer
from rich.console import Console
from rich.progress import Progress

from coati.counting import counted
from coati.errors import ReplayDiffers


def run_replay(folder: Path, *, until: int | None) -> None:
    """Re-execute a run, and say whether it came out the same; exit with 1 if it did not."""
    console = Console(highlight=False, markup=False, soft_wrap=True)
    with Progress(console=console) as progress:
        task = progress.add_task("loading libraries", total=None)
        from coati.cli.train import quiet_libraries
        from coati.replay import replay

        quiet_libraries(verbose=False)

        def show(version: int, last: int) -> None:
            progress.update(task, description=f"version {version} of {last}", completed=version, total=last)

        try:
            result = replay(folder, until=until, on_version=show)
        except ReplayDiffers as difference:
            progress.stop()
            console.print(f"The run does not replay: {difference}")
            raise typer.Exit(1) from None
    console.print(
        f"The run replays: all weights up to version {result.version} are the same, and so are the "
        f"{counted(result.num_samples, 'sample')} that made them."
    )
