"""Folders that appear whole or not at all, on one machine or on every node of a job."""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Callable, Collection
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError

from coati.errors import CheckpointError

_PIECE_BYTES = 64 * 2**20


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
    except Exception as error:  # the tokenizers library has no class of its own for a full disk
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


def copy_to_other_nodes(path: Path, *, rank: int, device: torch.device, markers: Collection[str]) -> None:
    """Give every node whose file system lacks rank 0's folder its own copy; all ranks must call this.

    A rank cannot tell who else shares its disk, so it asks the disk: the first of those that do not see rank 0's
    folder to claim the copy receives it. A node that sees rank 0's folder (a shared file system) writes nothing.
    """
    path = Path(os.path.realpath(path))
    receives, failure = False, None
    token = [uuid.uuid4().hex]
    if rank == 0:
        try:
            _beside(path, token[0], "seen").touch()
        except OSError as error:
            token, failure = [""], error
    dist.broadcast_object_list(token, src=0, device=device)
    if not token[0]:  # nobody can know who sees rank 0's folder
        if failure is not None:
            raise CheckpointError(f"could not write beside {path}: {failure}. Check free space and permissions there.")
        return
    beacon, claim = _beside(path, token[0], "seen"), _beside(path, token[0], "claim")
    try:
        receives = not beacon.exists() and _is_first(claim)
    except OSError as error:
        failure = error
    needed = torch.tensor([int(receives)], device=device)
    dist.all_reduce(needed)  # every rank has looked for the beacon and the claim once this returns
    with contextlib.suppress(OSError):  # at worst an empty file stays; the others wait for what comes next
        if rank == 0:
            beacon.unlink(missing_ok=True)
        if receives:
            claim.unlink(missing_ok=True)
    if needed.item():
        _copy_from_rank0(path, receives=receives, is_source=rank == 0, device=device, markers=markers)
    if failure is not None:
        raise CheckpointError(f"could not write {path}: {failure}. Check free space and permissions there.")


def _beside(path: Path, token: str, end: str) -> Path:
    return path.with_name(f".{path.name}.{token}.{end}")


def _is_first(claim: Path) -> bool:
    claim.parent.mkdir(parents=True, exist_ok=True)
    try:
        claim.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _copy_from_rank0(
    path: Path, *, receives: bool, is_source: bool, device: torch.device, markers: Collection[str]
) -> None:
    has_streamed = False

    def receive(folder: Path) -> None:
        nonlocal has_streamed
        has_streamed = True
        _stream_files(path, folder, is_source=False, device=device)

    try:
        if receives:
            replace_folder(path, receive, markers=markers)
    finally:
        if not has_streamed:  # also one that may not write takes part in the broadcasts, or the others would hang
            _stream_files(path, None, is_source=is_source, device=device)


def _stream_files(path: Path, target: Path | None, *, is_source: bool, device: torch.device) -> None:
    """Broadcast the files of rank 0's `path`; write them under `target` where one is given."""
    listing: list[list[tuple[str, int]]] = [[]]
    if is_source:
        files = sorted(file for file in path.rglob("*") if file.is_file())
        listing = [[(str(file.relative_to(path)), file.stat().st_size) for file in files]]
    dist.broadcast_object_list(listing, src=0, device=device)
    failure: OSError | None = None
    for name, size in listing[0]:
        for start in range(0, size, _PIECE_BYTES):
            length = min(_PIECE_BYTES, size - start)
            piece = _read_piece(path / name, start, length) if is_source else torch.empty(length, dtype=torch.uint8)
            piece = piece.to(device)
            dist.broadcast(piece, src=0)
            # After a failed write this rank still takes part in the broadcasts, or the others would hang.
            if target is not None and failure is None:
                try:
                    _append_piece(target / name, piece)
                except OSError as error:
                    failure = error
    if failure is not None:
        raise failure


def _read_piece(file: Path, start: int, length: int) -> torch.Tensor:
    with file.open("rb") as stream:
        stream.seek(start)
        return torch.frombuffer(bytearray(stream.read(length)), dtype=torch.uint8)


def _append_piece(file: Path, piece: torch.Tensor) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("ab") as stream:
        stream.write(piece.cpu().numpy().tobytes())
