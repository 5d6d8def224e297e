"""Checkpoints: everything that a run needs to resume, in a folder that is created atomically.

    version-40/              the actor and its tokenizer, as transformers loads them
        critic/
        optimizers/actor/    and optimizers/critic/
        state.json           version, counters, and the ledger of each rank
        rank-0.safetensors   one per rank: its random state, and samples that were delivered but not trained on
        manifest.json        a digest of every file

The training thread copies everything to host memory; a background thread writes it. If that fails, training continues.
"""

import dataclasses
import json
import logging
import re
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import safetensors.torch
import torch.distributed as dist
from torch import Tensor

from coati.background import run_in_background
from coati.config import Deadlines, TrainSettings
from coati.devices import device_errors_explained
from coati.errors import CheckpointError, DeadlineExceeded, StorageError
from coati.experience_buffer.buffer import LeasedBuffer
from coati.trainer.ppo import PPOLearner
from coati.trainer.strategies.files import MODEL_MARKERS, check_files, replace_folder
from coati.trainer.strategies.ranks import random_state, restore_random_state

logger = logging.getLogger(__name__)

_FORMAT = 1
_STATE_FILE = "state.json"


@dataclasses.dataclass(eq=False)
class Checkpoints:
    """Saves and restores checkpoints of a learner and its buffer. All ranks must call its methods in the same order."""

    folder: Path | None
    learner: PPOLearner
    buffer: LeasedBuffer | None
    _: dataclasses.KW_ONLY
    train: TrainSettings
    tokenizer: Callable[[], Any] | None = None
    write_seconds: float = Deadlines().update_seconds

    def __post_init__(self) -> None:
        self._last = -1  # the last saved version
        self._writing: Future[None] | None = None
        self._host_buffers: dict[str, dict[str, Tensor]] = {}  # reused by every checkpoint

    def is_due(self, version: int, num_fresh: int, *, was_stopped: bool) -> bool:
        """Whether to save this version: every `train.save_every` versions, and when a run is stopped.

        A version that the stop cut short is not saved if the one before was, from which a run continues bit for bit.
        """
        if self.folder is None:
            return False
        if was_stopped:
            is_short = num_fresh % self.train.update_steps > 0
            return version - is_short > self._last
        every = self.train.save_every
        return version != self._last and every > 0 and version % every == 0

    def save(self, version: int, counters: Mapping[str, Any]) -> None:
        """Copy the state to host memory and write it in the background; waits for the previous checkpoint first."""
        self.wait()
        learner, strategy = self.learner, self.learner.strategy
        buffers, writers = self._host_buffers, {}
        for label, model in learner.models.items():
            name = "" if label == "actor" else label
            writers[name] = strategy.model_writer(model, into=buffers.setdefault(name, {}))
        for label, optimizer in learner.optimizers.items():
            name = f"optimizers/{label}"
            writers[name] = strategy.optimizer_writer(optimizer, into=buffers.setdefault(name, {}))
        ranks = [self._rank_state()]
        if strategy.world_size > 1:
            mine, ranks = ranks[0], [ranks[0]] * strategy.world_size
            dist.gather_object(mine, ranks if strategy.rank == 0 else None)
        self._last = version
        state = {"version": version, "counters": counters, "learner": learner.state()}
        text = json.dumps({"format": _FORMAT, **state, "ranks": [of_rank for of_rank, _, _ in ranks]})

        def write(folder: Path) -> None:
            for name, write_part in writers.items():
                (folder / name).mkdir(parents=True, exist_ok=True)
                write_part(folder / name)
            if self.tokenizer is not None:
                self.tokenizer().save_pretrained(folder)
            (folder / _STATE_FILE).write_text(text)
            for rank, (_, data, _) in enumerate(ranks):
                (folder / f"rank-{rank}.safetensors").write_bytes(data)

        if strategy.rank == 0:
            failure = next((failure for _, _, failure in ranks if failure is not None), None)
            self._writing = run_in_background(lambda: self._write(version, write, failure), name="checkpoint")

    def _rank_state(self) -> tuple[dict[str, Any], bytes, StorageError | None]:
        """Return this rank's own state: JSON, the contents of its file, and the error if the buffer has no state."""
        try:
            of_rank, tensors = ({}, {}) if self.buffer is None else self.buffer.state()
        except StorageError as error:
            return {}, b"", error
        return of_rank, safetensors.torch.save({**tensors, **random_state(self.learner.strategy.device)}), None

    def wait(self) -> None:
        """Wait until the last checkpoint is written or failed; DeadlineExceeded after `deadlines.update_seconds`."""
        if self._writing is None:
            return
        try:
            self._writing.result(self.write_seconds)
        except TimeoutError:
            raise DeadlineExceeded(
                f"waited {self.write_seconds:g} s (deadlines.update_seconds) for checkpoint {self._last} to be "
                f"written in {str(self.folder)!r}. Check whether the disk is stuck, or raise the deadline."
            ) from None
        self._writing = None

    def _write(self, version: int, write: Callable[[Path], None], failure: StorageError | None) -> None:
        assert self.folder is not None
        started, path = time.monotonic(), self.folder / f"version-{version}"
        try:
            if failure is not None:
                raise failure
            replace_folder(path, write, markers=MODEL_MARKERS)
            others = [other for other in saved_versions(self.folder) if (other / _STATE_FILE).is_file()]
            for other in [other for other in others if other != path][self.train.checkpoints_kept - 1 :]:
                shutil.rmtree(other)
        except Exception as error:
            logger.error("the checkpoint of version %d failed; training continues without it: %s", version, error)
        else:
            logger.info("checkpoint of version %d written in %.1f s", version, time.monotonic() - started)

    @device_errors_explained(
        "loading a checkpoint",
        "Resume with as much GPU memory as the run had, shard the trainer (train.strategy), or keep optimizer state in "
        "host memory (train.cpu_offload).",
    )
    def restore(self, path: Path) -> dict[str, Any]:
        """Load everything from a checkpoint before training; return its version and counters.

        With a different number of ranks, or after a version that a stop cut short, samples that were not trained on are
        generated again. Raises CheckpointError if the checkpoint is incomplete or damaged.
        """
        learner, strategy = self.learner, self.learner.strategy
        state = strategy.run_on_all(lambda: _read_state(path), f"read {path}")
        for label, model in learner.models.items():
            strategy.load_model(model, path if label == "actor" else path / label)
        learner.load_optimizers(path / "optimizers")
        learner.restore(state["learner"])
        ranks, own = state["ranks"], path / f"rank-{strategy.rank}.safetensors"
        tensors = safetensors.torch.load_file(own) if strategy.rank < len(ranks) else {}
        if tensors:
            restore_random_state(tensors, strategy.device)
        fresh = state["counters"].get("fresh", 0)
        num_missing = -fresh % self.train.update_steps
        if self.buffer is not None and len(ranks) == strategy.world_size and not num_missing:
            self.buffer.restore(ranks[strategy.rank], tensors)
        elif self.buffer is not None:
            self.buffer.take_over(ranks)
        self._last = state["version"]
        return {"version": state["version"], **state["counters"], "fresh": fresh + num_missing}


def find_checkpoint(folder: Path) -> tuple[Path, dict[str, Any]]:
    """Return the newest intact checkpoint in a folder and its state; CheckpointError if there is none."""
    damaged = []
    for path in saved_versions(folder):
        try:
            check_files(path)
            return path, _read_state(path)
        except CheckpointError as error:
            damaged.append(path.name)
            logger.error("%s cannot be used; trying the checkpoint before it: %s", path, error)
    found = f"only damaged ones ({', '.join(damaged)})" if damaged else "none"
    raise CheckpointError(
        f"{str(folder)!r} must hold an intact checkpoint (version-N) to resume from, got {found}. Checkpoints are "
        "written every train.save_every versions, and when a run is stopped. To train from the start instead: coati "
        f"train {folder.parent / 'config.toml'} --overwrite"
    )


def clear_after(folder: Path, version: int) -> None:
    """Rename checkpoints of later versions, which will be trained again, to `.damaged`; delete unfinished ones."""
    for path in folder.glob(".version-*"):
        shutil.rmtree(path, ignore_errors=True)
    for path in saved_versions(folder):
        if _version_of(path) > version:
            aside = path.with_name(f"{path.name}.damaged")
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)


def saved_versions(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, newest first."""
    paths = [path for path in folder.glob("version-*") if re.fullmatch(r"version-\d+", path.name)]
    return sorted(paths, key=_version_of, reverse=True)


def _version_of(path: Path) -> int:
    return int(path.name.removeprefix("version-"))


def _read_state(path: Path) -> dict[str, Any]:
    try:
        state: dict[str, Any] = json.loads((path / _STATE_FILE).read_text())
        found = state["format"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise CheckpointError(
            f"{path / _STATE_FILE} is missing or unreadable: {error!r}. Use another checkpoint."
        ) from error
    if found != _FORMAT:
        raise CheckpointError(f"{path} has format {found!r}, not {_FORMAT}. Use the version of coati that wrote it.")
    return state
