"""`coati report RUN_FOLDER`."""

from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from coati.monitor.report import chosen_samples, curves, headline, read_run
from coati.monitor.time_use import RunTimes, run_times

_MAX_CHARACTERS = 400


def run_report(folder: Path) -> None:
    """Print the few facts, the course of the metrics, samples, and where the time went."""
    console = Console(highlight=False, markup=False)
    run = read_run(folder)
    times = run_times(run.spans)
    console.print(run.name, style="bold")
    for name, value in headline(run, times):
        console.print(f"  {name}: {value}")
    if found := curves(run):
        table = Table("", "over training steps", "first → last", title="Learning", title_justify="left")
        for row in found:
            table.add_row(*row)
        console.print(table)
    if run.samples:
        table = Table("version", "reward", "prompt and response", title="Samples", title_justify="left")
        for sample in chosen_samples(run.samples):
            text = Text.assemble((_short(sample["prompt"]), "dim"), " ", _short(sample["response"]))
            table.add_row(str(sample["version"]), f"{sample['reward']:.3f}", text)
        console.print(table)
    if times is None:
        console.print("The run wrote no spans (logging.spans_kept), so there is no table of times.")
    else:
        console.print(time_table(times))
        console.print(times.verdict())


def _short(text: str) -> str:
    """The beginning of a text, on one line, without what would steer a terminal."""
    return "".join(letter for letter in " ".join(text.split()) if letter.isprintable())[:_MAX_CHARACTERS]


def time_table(times: RunTimes) -> Table:
    """Lay out the table of times for the terminal."""
    (_, columns), *rows = times.table()
    table = Table(title="Where the time went", title_justify="left")
    for name in columns:
        table.add_column(name, justify="right" if name else "left")
    styles = {"work": None, "idle": "yellow", "total": "bold"}
    for kind, cells in rows:
        if cells[0] == "worked":
            table.add_section()
        table.add_row(*cells, style=styles[kind])
    return table
