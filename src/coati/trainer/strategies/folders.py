"""Folders that appear whole or not at all, on one machine or on every node of a job."""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Callable, Collection
from pathlib import Path

import torch
from safetensors import SafetensorError

from coati.errors import CheckpointError
from coati.trainer.strategies.ranks import Ranks


def replace_folder(path: Path, write: Callable[[Path], None], *, markers: Collection[str]) -> None:
    """Let `write` fill a temporary sibling folder, then move it to `path`.

    A folder that is already there is replaced, all of it, if it is empty or holds one of the file names in
    `markers`; anything else is refused. If writing fails, what was there stays there.
    """
    path = Path(os.path.realpath(path))
    _refuse_foreign(path, markers)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    replaced = temporary.with_suffix(".old")
    try:
        temporary.mkdir(parents=True)
        write(temporary)
        if path.exists():
            os.replace(path, replaced)
        try:
            os.replace(temporary, path)
        except OSError:
            if replaced.exists():
                os.replace(replaced, path)
            raise
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"could not write {path}: {error}. Check free space and permissions there; what was saved before is intact."
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(replaced, ignore_errors=True)


def add_tokenizer(folder: Path, save: Callable[[Path], object]) -> None:
    """Put a tokenizer into a model folder: `save` writes it elsewhere, and its files are moved in whole.

    `tokenizer_config.json` comes last, so a folder that has it has all of them.
    """
    temporary = folder / f".tokenizer.{uuid.uuid4().hex}.tmp"
    try:
        temporary.mkdir()
        save(temporary)
        for file in sorted(temporary.iterdir(), key=lambda file: file.name == "tokenizer_config.json"):
            os.replace(file, folder / file.name)
    except Exception as error:  # the tokenizers library has no class for a full disk
        raise CheckpointError(f"could not write the tokenizer to {folder}: {error}. Check free space there.") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _refuse_foreign(path: Path, markers: Collection[str]) -> None:
    if path.is_dir():
        present = {entry.name for entry in path.iterdir()}
        if present and not present & set(markers):
            raise CheckpointError(
                f"{path} exists and is not something coati saved (it has none of "
                f"{', '.join(sorted(markers))}), so it is not replaced. Save to a new or an empty folder."
            )
    elif path.exists():
        raise CheckpointError(f"{path} exists and is a file, but a folder goes there. Choose another path.")


def writes_folder(path: Path, ranks: Ranks, *, only_rank0: bool) -> bool:
    """Decide whether this rank writes `path`: rank 0 does, and one rank of each node that does not see rank 0's disk.

    A rank cannot tell which others share its disk, so it asks the disk: it looks for a file that rank 0 has put next to
    `path`, and the first to claim a disk without it writes there. All ranks must call this.
    """
    if only_rank0 or ranks.world_size == 1:
        return ranks.rank == 0
    token = int(ranks.all_gather(torch.tensor([uuid.uuid4().int >> 66]))[0])  # rank 0's
    beacon, claim = (path.with_name(f".{path.name}.{token:x}.{end}") for end in ("seen", "claim"))

    def claims(file: Path) -> bool:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                file.touch(exist_ok=False)
                return True
        except OSError as error:
            raise CheckpointError(f"could not write next to {path}: {error}. Check free space there.") from error
        return False

    made: list[Path] = []
    try:
        if ranks.run_on_all(lambda: ranks.rank == 0 and claims(beacon), f"save to {path}"):
            made.append(beacon)
        if ranks.run_on_all(lambda: not beacon.exists() and claims(claim), f"save to {path}"):
            made.append(claim)
        return bool(made)
    finally:
        for file in made:
            file.unlink(missing_ok=True)
