"""`coati report RUN_FOLDER`."""

import json
import operator
from pathlib import Path

from rich.console import Console
from rich.table import Table

from coati.errors import ConfigError
from coati.monitor.report import ActorTime, RunTimes, read_run, render_page, run_times, trace_events
from coati.monitor.report.summary import headline
from coati.monitor.report.time_use import TOTALS, is_idle, label_of, mean_share
from coati.monitor.timeline import ACTIVITIES

MAX_COLUMNS = 6
# Somebody who was there for less of the run has joined late or left early; the rest is start-up.
_WAS_THERE = 0.9


def run_report(folder: Path, *, html: Path | None, trace: Path | None) -> None:
    """Print where the time went, and write the page (and the trace, if asked for)."""
    console = Console()
    run = read_run(folder)
    times = run_times(run.spans)
    if trace is not None and not run.spans:
        raise ConfigError(
            f"--trace needs spans, but {str(folder)!r} has no spans.jsonl. Train with logging.spans_kept above 0."
        )
    console.print(f"[bold]{run.name}[/]", highlight=False)
    for name, value in headline(run, times):
        console.print(f"  {name}: {value}", highlight=False, markup=False)
    if times is None:
        console.print("No spans were written, so there is no timeline.")
    else:
        console.print(time_table(times))
        console.print(times.verdict(), highlight=False, markup=False)
    page = html if html is not None else folder / "report.html"
    _write(page, render_page(run, times))
    console.print(f"Page:  {page}", highlight=False, soft_wrap=True)
    if trace is not None:
        _write(trace, json.dumps(trace_events(run)))
        console.print(
            f"Trace: {trace} (open it in ui.perfetto.dev or chrome://tracing)", highlight=False, soft_wrap=True
        )


def time_table(times: RunTimes) -> Table:
    """One row for each activity and one column for each actor, or for each kind of actor where there are many."""
    columns = _columns(times)
    table = Table(title="Where the time went", title_justify="left")
    table.add_column("")
    for name in columns:
        table.add_column(name, justify="right")
    for is_wait in (False, True):
        for what in ACTIVITIES:
            if is_idle(what) == is_wait and any(what in actor.seconds for actor in times.actors):
                shares = [mean_share(actors, operator.methodcaller("share", what)) for actors in columns.values()]
                cells = (f"{share:.0%}" if share > 0 else "" for share in shares)
                table.add_row(label_of(what), *cells, style="yellow" if is_wait else None)
    table.add_section()
    for label, share in TOTALS.items():
        table.add_row(label, *(f"{mean_share(actors, share):.0%}" for actors in columns.values()), style="bold")
    if any(actor.elapsed < _WAS_THERE * times.elapsed for actor in times.actors):
        presence = [sum(actor.elapsed for actor in actors) / len(actors) / times.elapsed for actors in columns.values()]
        table.add_row("was there", *(f"{share:.0%}" for share in presence))
    return table


def _columns(times: RunTimes) -> dict[str, list[ActorTime]]:
    if len(times.actors) <= MAX_COLUMNS:
        return {actor.actor: [actor] for actor in times.actors}
    kinds: dict[str, list[ActorTime]] = {}
    for actor in times.actors:
        kinds.setdefault(actor.actor.rstrip("0123456789").rstrip("-"), []).append(actor)
    return {f"{kind}, mean of {len(actors)}": actors for kind, actors in kinds.items()}


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise ConfigError(f"{str(path)!r} cannot be written: {error}. Choose another file.") from None
