"""`coati report RUN_FOLDER`."""

from pathlib import Path

from rich.console import Console
from rich.table import Table

from coati.errors import ConfigError
from coati.monitor.report import headline, read_run, render_page
from coati.monitor.time_use import RunTimes, run_times


def run_report(folder: Path, *, html: Path | None) -> None:
    """Print where the time went, and write the page."""
    console = Console()
    run = read_run(folder)
    times = run_times(run.spans)
    console.print(f"[bold]{run.name}[/]", highlight=False)
    for name, value in headline(run, times):
        console.print(f"  {name}: {value}", highlight=False, markup=False)
    if times is None:
        console.print("The run wrote no spans, so there is no table of times.")
    else:
        console.print(time_table(times))
        console.print(times.verdict(), highlight=False, markup=False)
    page = html if html is not None else folder / "report.html"
    _write(page, render_page(run, times))
    console.print(f"Page:  {page}", highlight=False, soft_wrap=True)


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


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise ConfigError(f"{str(path)!r} cannot be written: {error}. Choose another file.") from None
