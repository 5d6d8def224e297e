"""`coati audit` and `coati replay`: check the account of a run, and that its journal reproduces its weights."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from coati.errors import ReplayDiffers, counted
from coati.ledger.audit import RunAccount, audit_run, history_of
from coati.monitor.metrics import read_jsonl

_MOST_SHOWN = 100


def audit(
    folder: Annotated[
        Path, typer.Argument(metavar="RUN_FOLDER", help="The output folder of a run, finished or running.")
    ],
    sample: Annotated[
        int | None, typer.Option(metavar="ID", min=0, help="Show the history of one sample instead.")
    ] = None,
) -> None:
    """Show the fate of every prompt group. Exits with status 1 if one was lost, trained on twice or too old."""
    console = Console(highlight=False, markup=False, soft_wrap=True)
    if sample is not None:
        console.print("\n".join(history_of(folder, sample)))
        return
    account = audit_run(folder)
    table = Table("fate", "details", title=f"Account of {folder}", title_justify="left")
    table.add_column("groups", justify="right")
    table.add_column("samples", justify="right")
    *fates, leased = account.table()
    for rows, style in ((fates, None), ([leased], "bold"), (account.repeated(), None)):
        for fate, details, groups, samples in rows:
            table.add_row(fate, details, f"{groups:,}", f"{samples:,}", style=style)
        table.add_section()
    console.print(table)
    console.print(f"Made: {counted(account.num_made, 'sample')} (delivered to a trainer and accepted).")
    if any(fate == "open" for fate, *_ in fates):
        console.print("Open: leased, but not yet trained on, dropped or quarantined.")
    bound = account.trainers[0].rules.max_staleness
    limit = "no limit" if bound is None else f"max_staleness {bound}"
    console.print(f"Oldest group trained on: {counted(account.oldest, 'version')} old ({limit}).")
    if (path := folder / "evaluations.jsonl").is_file():
        made = [row["samples"] for row in read_jsonl(path)]
        console.print(f"Not included: {counted(len(made), 'evaluation')} with {counted(sum(made), 'sample')}.")
    for note in account.notes:
        console.print(f"Note: {note}")
    problems = account.problems
    if not problems:
        console.print("The account balances: every group has exactly one fate.")
        return
    console.print(f"The account does not balance: {counted(len(problems), 'problem')}.")
    for problem in problems[:_MOST_SHOWN]:
        console.print(f"  {problem}")
    if len(problems) > _MOST_SHOWN:
        console.print(f"  … and {len(problems) - _MOST_SHOWN:,} more")
    raise typer.Exit(1)


def show_losses(console: Console, account: RunAccount) -> None:
    """Print the groups that were not trained on, and those that were returned or refused, with the reasons."""
    *fates, (_, _, total, _) = account.table()
    if failed := sum(groups for fate, _, groups, _ in fates if fate == "quarantined"):
        share = f"{failed:,} of {counted(total, 'group')} ({failed / total:.1%})"
        effect = f"{share} were quarantined because the reward failed; training is biased towards the others."
        console.print(effect, style="bold red", markup=False, soft_wrap=True)
    for fate, reason, groups, samples in (*fates, *account.repeated()):
        if fate in ("dropped", "quarantined", "returned", "refused"):
            size = f"{counted(groups, 'group')} of {counted(samples // groups, 'sample')}"
            style = "yellow" if fate in ("dropped", "quarantined") else None
            console.print(f"{fate.capitalize()}: {size}: {reason}", style=style, markup=False)


def replay(
    folder: Annotated[
        Path, typer.Argument(metavar="RUN_FOLDER", help="The output folder of a run on the CPU with one trainer.")
    ],
    until: Annotated[int | None, typer.Option(metavar="VERSION", min=0, help="Stop after this version.")] = None,
) -> None:
    """Re-execute a run from its journal. Exits with status 1 at the first weights or samples that differ."""
    console = Console(highlight=False, markup=False, soft_wrap=True)
    with Progress(console=console) as progress:
        task = progress.add_task("loading libraries", total=None)
        from coati.replay import replay as replay_run

        def show(version: int, last: int) -> None:
            progress.update(task, description=f"version {version} of {last}", completed=version, total=last)

        try:
            result = replay_run(folder, until=until, on_version=show)
        except ReplayDiffers as difference:
            progress.stop()
            console.print(f"The run does not replay: {difference}")
            raise typer.Exit(1) from None
    console.print(
        f"The run replays: all weights up to version {result.version} are identical, and so are the "
        f"{counted(result.num_samples, 'sample')} that they were trained on."
    )
