"""`coati train run.toml`."""

from pathlib import Path

from rich.console import Console

from coati.cli.run import EXIT_STOPPED, execute
from coati.config import load_config, make_plan
from coati.entry import checked
from coati.run_folder import check_inputs_outside, check_run_folder, open_run_folder


def run_train(
    path: Path,
    *,
    overrides: list[str],
    address: str | None,
    sync: bool,
    dry_run: bool,
    overwrite: bool,
    verbose: bool,
) -> None:
    """Check, plan, and (unless it is a dry run) train."""
    console = Console()
    config = checked(load_config(path, overrides), sync=sync, address=address)
    console.print(make_plan(config).render(), highlight=False, markup=False, soft_wrap=True)
    check_inputs_outside(config)
    if dry_run:
        check_run_folder(config, overwrite=overwrite)
        console.print("[green]Config OK.[/] Run again without --dry-run to train.")
        return
    with open_run_folder(config, overwrite=overwrite) as delete_earlier:
        outcome = execute(config, console, sync=sync, address=address, verbose=verbose, on_begin=delete_earlier)
    rewards = outcome.rewards
    console.print(
        f"{'Stopped' if outcome.was_stopped else 'Done'} after {outcome.seconds:.0f} s and "
        f"{outcome.num_samples:,} samples."
        + (f" Mean reward {rewards[0][1]:.3f} → {rewards[-1][1]:.3f}." if rewards else "")
    )
    if outcome.num_dropped:
        console.print(
            f"[yellow]{outcome.num_dropped:,} samples were dropped[/] because their prompt did not fit or their "
            "reward was not a finite number. Run with --verbose for details."
        )
    if outcome.num_skipped_prompts:
        console.print(f"[yellow]Prompts were skipped {outcome.num_skipped_prompts:,} times[/]: they do not fit.")
    console.print(f"Model:       {outcome.files.model}", highlight=False)
    console.print(f"Metrics:     {outcome.files.metrics}", highlight=False)
    console.print(f"Samples:     {outcome.files.samples}", highlight=False)
    console.print(f"Report:      coati report {config.output_folder}", highlight=False)
    if outcome.files.tensorboard is not None:
        console.print(f"TensorBoard: tensorboard --logdir {outcome.files.tensorboard}", highlight=False)
    if outcome.was_stopped:
        raise SystemExit(EXIT_STOPPED)
