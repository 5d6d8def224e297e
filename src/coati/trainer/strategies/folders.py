"""Folders that appear whole or not at all, with a digest of every file."""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import xxhash

from coati import faults
from coati.errors import CheckpointError

MANIFEST = "manifest.json"
"""Lists the digest of every other file of a folder that we wrote."""


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
        _write_manifest(temporary)
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


def _write_manifest(folder: Path) -> None:
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
