"""`coati train run.toml`."""

from pathlib import Path

from rich.console import Console

from coati.cli.run import EXIT_STOPPED, execute
from coati.config import RunSettings, load_config, make_plan, preflight
from coati.config.hub import avoid_hub_without_network
from coati.errors import ConfigError
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
    config = load_config(path, overrides)
    if problems := preflight(config):
        raise ConfigError("\n".join(problems))
    avoid_hub_without_network(config)
    _check_sync(config, sync=sync, address=address)
    _check_device(config, sync=sync)
    if sync:  # one process takes turns, so every sample comes from the newest weights
        on_policy = {"max_staleness": 0, "staleness_control": "fixed", "min_staleness": 0}
        config = config.model_copy(update={"topology": config.topology.model_copy(update=on_policy)})
    console.print(make_plan(config).render(), highlight=False, markup=False, soft_wrap=True)
    check_inputs_outside(config)
    if dry_run:
        check_run_folder(config, overwrite=overwrite)
        console.print("[green]Config OK.[/] Run again without --dry-run to train.")
        return
    with open_run_folder(config, overwrite=overwrite) as delete_earlier:
        outcome = execute(config, console, sync=sync, address=address, verbose=verbose, on_begin=delete_earlier)
    rewards = outcome.log.rewards
    console.print(
        f"{'Stopped' if outcome.was_stopped else 'Done'} after {outcome.seconds:.0f} s and "
        f"{outcome.log.num_samples:,} samples."
        + (f" Mean reward {rewards[0][1]:.3f} → {rewards[-1][1]:.3f}." if rewards else "")
    )
    if outcome.log.num_dropped:
        console.print(
            f"[yellow]{outcome.log.num_dropped:,} samples were dropped[/] because their prompt did not fit or their "
            "reward was not a finite number. Run with --verbose for details."
        )
    if outcome.log.num_skipped_prompts:
        console.print(f"[yellow]Prompts were skipped {outcome.log.num_skipped_prompts:,} times[/]: they do not fit.")
    console.print(f"Model:       {outcome.files.model}", highlight=False)
    console.print(f"Metrics:     {outcome.files.metrics}", highlight=False)
    console.print(f"Samples:     {outcome.files.samples}", highlight=False)
    console.print(f"Report:      coati report {config.output_folder}", highlight=False)
    if outcome.files.tensorboard is not None:
        console.print(f"TensorBoard: tensorboard --logdir {outcome.files.tensorboard}", highlight=False)
    if outcome.was_stopped:
        raise SystemExit(EXIT_STOPPED)


def _check_device(config: RunSettings, *, sync: bool) -> None:
    """Ray hides a machine's GPUs from actors that have no share of one."""
    topology = config.topology
    if sync or not config.model.device.startswith("cuda"):
        return
    for name in ("gpus_per_trainer", "gpus_per_maker"):
        if getattr(topology, name) == 0:
            raise ConfigError(
                f"topology.{name} must be above 0 while model.device is {config.model.device!r}, got 0. Set it, to 0.5 "
                'where maker and trainer share a card, or model.device to "cpu".'
            )


def _check_sync(config: RunSettings, *, sync: bool, address: str | None) -> None:
    if not sync:
        return
    if address is not None:
        raise ConfigError("--sync runs in one process without Ray, so --address cannot be used with it.")
    if (config.topology.makers, config.topology.trainers) != (1, 1):
        raise ConfigError(
            f"--sync needs topology.makers = 1 and topology.trainers = 1, got {config.topology.makers} and "
            f"{config.topology.trainers}. Leave --sync out, or add --set topology.makers=1 --set topology.trainers=1."
        )
