"""`coati report RUN_FOLDER`."""

import contextlib
import io
from html import escape
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from coati.cli.audit import show_losses
from coati.errors import CheckpointError, ConfigError
from coati.ledger.audit import audit_run
from coati.monitor.report import (
    TOTALS,
    RunFolder,
    RunTimes,
    chart,
    chosen_samples,
    curves,
    headline,
    read_run,
    run_times,
    sparkline,
)
from coati.monitor.timeline import ACTIVITIES, is_idle, label_of

_MAX_CHARACTERS = 400
_PAGE_WIDTH = 120
_HEAD = """<!DOCTYPE html>
<meta charset="utf-8"><title>{title}</title>
<style>pre {{ font: 13px/1.25 Menlo, monospace; white-space: pre-wrap; overflow-wrap: anywhere }}</style>
"""
_SHOWN_SHARE = 0.005  # smallest share shown of an activity, in at least one actor


def report(
    folder: Annotated[
        Path, typer.Argument(metavar="RUN_FOLDER", help="The output folder of a run, finished or running.")
    ],
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Path of the HTML page. Default: report.html in the run folder.")
    ] = None,
) -> None:
    """Show what a run learned, a few samples and where its time went. Also writes an HTML page."""
    console, run = Console(highlight=False, markup=False), read_run(folder)
    show_outcome(console, run)
    if found := curves(run):
        table = Table("", "over training steps", "first → last", title="Learning", title_justify="left")
        for title, (points, ends) in found.items():
            table.add_row(title, sparkline([value for _, value in points]), ends)
        console.print(table)
    show_details(console, run)
    page = write_page(run, html or folder / "report.html")
    console.print(f"Page: {page}", soft_wrap=True)


def write_page(run: RunFolder, path: Path) -> Path:
    """Write a report with charts as a self-contained HTML file: it fetches nothing, and text is escaped."""
    console = Console(record=True, file=io.StringIO(), width=_PAGE_WIDTH, highlight=False, markup=False)
    sections = []
    for show in (show_outcome, show_details):
        show(console, run)
        sections.append(f"<pre>{console.export_html(code_format='{code}', inline_styles=True)}</pre>")
    charts = (chart(f"{title}: {ends}", points) for title, (points, ends) in curves(run).items())
    page = [_HEAD.format(title=escape(f"{run.path.resolve().name} - coati report")), sections[0], *charts, sections[1]]
    try:
        path.write_text("\n".join(page), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{str(path)!r} cannot be written: {error}. Choose another file.") from None
    return path


def show_outcome(console: Console, run: RunFolder) -> None:
    """Print the key figures and what limited the run."""
    times = run_times(run.spans)
    console.print(run.path.resolve().name, style="bold")
    if run.error:
        console.print(f"  failed (error.txt): {_short(run.error)}", style="red", soft_wrap=True)
    for name, value in headline(run, times):
        console.print(f"  {name}: {value}")
    with contextlib.suppress(CheckpointError):  # there is no journal (yet)
        account = audit_run(run.path)
        rate = f" ({account.num_made / times.elapsed:,.1f}/s)" if times is not None and times.elapsed > 0 else ""
        console.print(f"  samples: {account.num_made:,} made{rate}, {account.num_trained:,} trained on")
        show_losses(console, account)
    if times is not None:
        console.print(times.verdict(is_sync=run.is_sync), style="bold")
    elif run.metrics:
        console.print("No table of times: the run wrote no spans (logging.spans_kept).")


def show_details(console: Console, run: RunFolder) -> None:
    """Print samples and where the time went."""
    if run.samples:
        table = Table("version", "reward", "prompt and response", title="Samples", title_justify="left")
        for sample in chosen_samples(run.samples):
            text = Text.assemble((_short(sample["prompt"]), "dim"), " ", _short(sample["response"]))
            table.add_row(str(sample["version"]), f"{sample['reward']:.3f}", text)
        console.print(table)
    if (times := run_times(run.spans)) is not None:
        console.print(time_table(times))


def _short(text: str) -> str:
    """Return the beginning of a text on one line, without terminal control characters."""
    return "".join(letter for letter in " ".join(text.split()) if letter.isprintable())[:_MAX_CHARACTERS]


def time_table(times: RunTimes) -> Table:
    """Return a table of where the time went, with a column per actor. Omits activities that took almost no time."""
    columns = times.columns()
    table = Table(title="Where the time went", title_justify="left")
    for name in ("", *columns):
        table.add_column(name, justify="right" if name else "left")
    for what in sorted(ACTIVITIES, key=is_idle):
        shares = [shares.get(what, 0.0) for shares in columns.values()]
        if max(shares) >= _SHOWN_SHARE:
            cells = (f"{share:.0%}" if share > 0 else "" for share in shares)
            table.add_row(label_of(what), *cells, style="yellow" if is_idle(what) else None)
    table.add_section()
    for what in TOTALS:
        table.add_row(what, *(f"{shares[what]:.0%}" for shares in columns.values()), style="bold")
    return table
