"""Folders that appear whole or not at all, on rank 0's disk and on those of other nodes."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import uuid
import zlib
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash

from coati import faults
from coati.errors import CheckpointError
from coati.trainer.strategies.ranks import Ranks

MANIFEST = "manifest.json"
"""Lists the digest of every other file of a folder that we wrote."""

_PIECE = 1 << 26


def replace_folder(path: Path, write: Callable[[Path], None], *, markers: Collection[str]) -> None:
    """Let `write` fill a temporary sibling folder, then move it to `path`.

    A folder that is already there is replaced, all of it, if it is empty or holds one of the file names in
    `markers`; anything else is refused. If writing fails, what was there stays there. A manifest is added.
    """
    path = Path(os.path.realpath(path))
    _refuse_foreign(path, markers)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    replaced = temporary.with_suffix(".old")
    try:
        temporary.mkdir(parents=True)
        write(temporary)
        if not (temporary / MANIFEST).exists():  # a copy has the original's
            write_manifest(temporary)
        for place in (*temporary.rglob("*"), temporary):
            _sync(place)
        faults.reach("checkpoint.before_rename")
        if path.exists():
            os.replace(path, replaced)
        try:
            os.replace(temporary, path)
        except OSError:
            if replaced.exists():
                os.replace(replaced, path)
            raise
        _sync(path.parent)
    except CheckpointError:
        raise
    except Exception as error:  # safetensors and tokenizers have classes of their own for a full disk, or none
        raise CheckpointError(
            f"could not write {path}: {error}. Check free space and permissions there; what was saved before is intact."
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(replaced, ignore_errors=True)


def write_manifest(folder: Path) -> None:
    """List the digests of all files in a folder and in those below it."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    digests = {file.relative_to(folder).as_posix(): _digest(file) for file in files}
    (folder / MANIFEST).write_text(_manifest_text({"xxh3_64": digests}))


def _manifest_text(content: Any) -> str:
    return json.dumps(content, indent=1)


def _sync(place: Path) -> None:
    """Wait until a file or a folder's list of files is on the disk."""
    number = os.open(place, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def check_files(path: Path, *, suffix: str = "") -> None:
    """Hold the files of a folder, or those with a suffix, against its manifest. Raises CheckpointError."""
    file = path / MANIFEST
    try:
        text = file.read_bytes().decode()
        content = json.loads(text)
        if text != _manifest_text(content):  # every byte of it counts
            raise ValueError("it is not as it was written")
        for name, digest in content["xxh3_64"].items():
            file = path / name
            if file.suffix == suffix or not suffix:
                found = _digest(file)
                if found != digest:
                    raise CheckpointError(
                        f"{file} must have the digest in {MANIFEST}, {digest}, got {found}. It was damaged, changed or "
                        "comes from another checkpoint: use another. Nothing was loaded."
                    )
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{file} is missing or unreadable: {error!r}. Use another checkpoint. Nothing was loaded."
        ) from error


def _digest(file: Path) -> str:
    digest = xxhash.xxh3_64()
    with file.open("rb") as stream:
        while block := stream.read(2**20):
            digest.update(block)
    return digest.hexdigest()


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


def copy_to_other_disks(path: Path, ranks: Ranks, *, markers: Collection[str]) -> None:
    """Copy the folder that rank 0 wrote to nodes that do not see it: one rank of each writes. All ranks must call."""
    if ranks.world_size == 1:
        return
    written_at = path.stat().st_mtime_ns if path.is_dir() else 0
    rows = ranks.all_gather(torch.tensor([written_at, zlib.crc32(platform.node().encode())]))
    lacking = [rank for rank, row in enumerate(rows.tolist()) if row[0] != rows[0, 0]]
    if not lacking:
        return
    on_my_node = [rank for rank in lacking if rows[rank, 1] == rows[ranks.rank, 1]]
    pieces = _pieces(path, ranks)

    def write(folder: Path) -> None:
        for name, piece in pieces:
            with (folder / name).open("ab") as file:
                file.write(piece.cpu().numpy().data)

    def work() -> None:
        try:
            if ranks.rank in on_my_node[:1]:
                replace_folder(path, write, markers=markers)
        finally:
            for _ in pieces:  # also after a failure: the other ranks wait for the next piece
                pass

    ranks.run_on_all(work, f"save to {path}")


def _pieces(path: Path, ranks: Ranks) -> Iterator[tuple[str, torch.Tensor]]:
    """The files of rank 0's folder as bytes, on every rank."""
    sizes: list[Any] = [{file.name: file.stat().st_size for file in path.iterdir()} if ranks.rank == 0 else {}]
    dist.broadcast_object_list(sizes, src=0)
    for name, size in sizes[0].items():
        with (path / name).open("rb") if ranks.rank == 0 else contextlib.nullcontext() as file:
            for start in range(0, max(size, 1), _PIECE):
                piece = torch.empty(min(_PIECE, size - start), dtype=torch.uint8)
                if file is not None:
                    file.readinto(piece.numpy())
                yield name, ranks.from_rank0(piece) if size else piece
