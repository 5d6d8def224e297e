"""Continuing a run from its folder: its settings, and which of them may change. Light to import."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from coati.config import RunSettings, load_config
from coati.errors import ConfigError
from coati.monitor import read_jsonl

if TYPE_CHECKING:
    from coati.monitor import RunLog

logger = logging.getLogger(__name__)

# With others, what was trained so far would not be part of the same run.
_FIXED_SECTIONS = ("prompts", "lora")
_FIXED = (
    "run.name", "run.output", "run.seed", "model.path", "model.tokenizer", "algorithm.name",
    "rollout.samples_per_prompt", "train.batch_size", "train.update_steps", "topology.max_staleness",
)  # fmt: skip


def resumed_settings(folder: Path, overrides: Sequence[str], *, sync: bool = False) -> RunSettings:
    """Return the settings of the run in a folder, with overrides; a warning says what has changed.

    One that continues in one process (`sync`) is on-policy, and must have been so: samples that are older may wait.
    Raises ConfigError if there is no run, or what has changed cannot change.
    """
    if not (folder / "config.toml").is_file():
        raise ConfigError(f"--resume takes the output folder of a run, with its config.toml, got {str(folder)!r}.")
    before = _settings(folder, ())
    after = _settings(folder, [*overrides, "topology.max_staleness=0"] if sync else overrides)
    said = changed_settings(before, after)
    fixed = [said[key] for key in said if key in _FIXED or key.partition(".")[0] in _FIXED_SECTIONS]
    if fixed:
        raise ConfigError(
            f"a run that is resumed cannot change these settings: {'; '.join(fixed)}. Leave them as they were, or "
            "start a new run."
            + (" --sync sets topology.max_staleness to 0." if "topology.max_staleness" in said and sync else "")
        )
    if said:
        logger.warning("the run is resumed with other settings: %s", "; ".join(said.values()))
    return after


def changed_settings(before: RunSettings, after: RunSettings) -> dict[str, str]:
    """Tell which settings differ, by key; of evaluation sets only whether they do."""
    sets = {} if before.eval == after.eval else {"eval": "other sets in [[eval]]"}
    return sets | {
        f"{section}.{key}": f"{section}.{key} was {old!r}, is {values[key]!r}"
        for section, values in after.model_dump(exclude={"eval"}).items()
        for key, old in getattr(before, section).model_dump().items()
        if values[key] != old
    }


def _settings(folder: Path, overrides: Sequence[str]) -> RunSettings:
    config = load_config(folder / "config.toml", overrides)
    is_given = any(override.partition("=")[0].strip() == "run.output" for override in overrides)
    if is_given:
        return config
    return config.model_copy(update={"run": config.run.model_copy(update={"output": str(folder)})})  # it may have moved


def check_incomplete(config: RunSettings) -> None:
    """Raise ConfigError if the run has nothing left to train: all steps are done, and the model was saved after."""
    metrics, model = config.output_folder / "metrics.jsonl", config.output_folder / "model"
    if not (metrics.is_file() and model.is_dir()):
        return
    steps, was_saved = config.train.optimizer_steps, model.stat().st_mtime_ns >= metrics.stat().st_mtime_ns
    if was_saved and max((row["step"] for row in read_jsonl(metrics)), default=0) >= steps:
        raise ConfigError(
            f"--resume takes a run that has steps left to train, got {str(config.output_folder)!r}, which is complete: "
            f"all {steps} optimizer steps are done, and its model is {str(model)!r}. To train longer, add "
            "--set train.total_steps=N."
        )


class StartingPoint(NamedTuple):
    """Where a run continues."""

    checkpoint: Path | None = None
    """None: at its beginning."""
    version: int = 0
    step: int = 0
    events: tuple[int, ...] = ()
    """Of each trainer's journal, those that led here."""

    def __str__(self) -> str:
        return f"version {self.version}, after step {self.step}"


def choose_start(config: RunSettings, *, is_restart: bool = False) -> StartingPoint:
    """Return where a run continues: at its newest whole checkpoint. CheckpointError if none can be read.

    `is_restart`: its trainers have died, and if nothing was ever saved they start from the beginning.
    """
    from coati.trainer.checkpoints import find_checkpoint, saved_versions

    folder = config.output_folder.resolve() / "checkpoints"
    if is_restart and not saved_versions(folder):
        logger.error(
            "there is no checkpoint yet (train.save_every is %d), so the run starts again from its beginning: "
            "version 0, with its initial weights. All steps so far are lost.",
            config.train.save_every,
        )
        return StartingPoint()
    path, state = find_checkpoint(folder)
    events = tuple(rank.get("events", 0) for rank in state["ranks"])
    return StartingPoint(path, state["version"], state["counters"]["batches"], events)


def continue_files(config: RunSettings, log: RunLog, start: StartingPoint, *, is_restart: bool = False) -> None:
    """Cut off what the run's files, and its log, hold of later steps, which are made again."""
    from coati import build
    from coati.ledger.redistribution import retire_journals
    from coati.trainer.checkpoints import clear_after

    clear_after(config.output_folder / "checkpoints", start.version)
    events = None if start.checkpoint is None else start.events
    rules, name = build.ledger_rules(config), config.run.name
    retire_journals(config.output_folder.resolve(), rules, run=name, version=start.version, events=events)
    log.continue_from(start.step, start.version, is_restart=is_restart)
    logger.info("the run continues from %s", start)
