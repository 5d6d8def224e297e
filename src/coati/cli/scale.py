"""`coati scale RUN_FOLDER --makers N`."""

from pathlib import Path

from rich.console import Console

from coati.counting import counted
from coati.monitor.control import ask_for_makers


def run_scale(folder: Path, *, makers: int, timeout: float) -> None:
    """Ask a running job for another number of makers, and wait until it has them."""
    console = Console()
    last = ""

    def show(message: str) -> None:
        nonlocal last
        if message and message != last:
            console.print(message, highlight=False, markup=False)
        last = message

    state = ask_for_makers(folder, makers, deadline_seconds=timeout, on_progress=show)
    console.print(f"The run in {folder} has {counted(state.makers, 'maker')}.")
