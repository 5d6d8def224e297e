"""Models and optimizers on disk: folders that are created atomically, with a digest of every file.

Whole tensors are stored in safetensors files and settings in JSON, so any strategy with any number of ranks can load
what another saved. Names, shapes and digests are checked before any tensor is changed.
"""

import hashlib
import itertools
import json
import math
import os
import shutil
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash
from peft import PeftModel
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import Adam, Optimizer
from transformers import PreTrainedModel

from coati import faults
from coati.errors import CheckpointError
from coati.models.memory import laid_out_like, local_part, state_tensors, tied_names, whole_tensor

MANIFEST = "manifest.json"  # lists the digest of every other file in a folder written by coati
_WEIGHTS_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
_ADAPTER_FILE = "adapter_model.safetensors"
_SETTINGS_FILE = "optimizer.json"
_STATE_FILE = "optimizer.safetensors"
_OPTIMIZER_FORMAT = 5
MODEL_MARKERS = frozenset({_WEIGHTS_FILE, _INDEX_FILE, "config.json", "adapter_config.json"})
"""Saving a model may replace a folder that holds one of these files."""
OPTIMIZER_MARKERS = frozenset({_SETTINGS_FILE})
"""Saving an optimizer may replace a folder that holds one of these files."""


def replace_folder(path: Path, write: Callable[[Path], None], *, markers: Collection[str]) -> None:
    """Let `write` fill a temporary sibling folder, add a manifest, and rename the folder to `path`.

    An existing folder is replaced if it is empty or holds one of the files `markers`; otherwise raises CheckpointError.
    If writing fails, the existing folder stays.
    """
    path = Path(os.path.realpath(path))
    _check_replaceable(path, markers)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    replaced = temporary.with_suffix(".old")
    try:
        temporary.mkdir(parents=True)
        write(temporary)
        files = sorted(file for file in temporary.rglob("*") if file.is_file())
        digests = {file.relative_to(temporary).as_posix(): _digest(file) for file in files}
        (temporary / MANIFEST).write_text(_manifest_text({"xxh3_64": digests}))
        for place in (*temporary.rglob("*"), temporary):
            _fsync(place)
        faults.reach("checkpoint.before_rename")
        if path.exists():
            os.replace(path, replaced)
        try:
            os.replace(temporary, path)
        except OSError:
            if replaced.exists():
                os.replace(replaced, path)
            raise
        _fsync(path.parent)
    except CheckpointError:
        raise
    except Exception as error:  # for a full disk, safetensors and tokenizers raise various classes
        raise CheckpointError(
            f"could not write {path}: {error}. Check free space and permissions there. An earlier version is intact."
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(replaced, ignore_errors=True)


def _manifest_text(content: Any) -> str:
    return json.dumps(content, indent=1)


def _fsync(place: Path) -> None:
    """Flush a file, or a folder's list of files, to disk."""
    number = os.open(place, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def check_files(path: Path, *, suffix: str = "") -> None:
    """Verify the files of a folder, or those with a suffix, against its manifest; CheckpointError on a mismatch."""
    file = path / MANIFEST
    try:
        text = file.read_bytes().decode()
        content = json.loads(text)
        if text != _manifest_text(content):  # detects a change of any byte
            raise ValueError("it was changed after it was written")
        for name, digest in content["xxh3_64"].items():
            file = path / name
            if suffix in ("", file.suffix) and (found := _digest(file)) != digest:
                raise CheckpointError(
                    f"{file} must have the digest in {MANIFEST}, {digest}, got {found}. It was damaged or changed, "
                    "or comes from another checkpoint. Use another checkpoint. Nothing was loaded."
                )
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{file} is missing or unreadable: {error!r}. Use another checkpoint. Nothing was loaded."
        ) from error


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, xxhash.xxh3_64).hexdigest()


def _check_replaceable(path: Path, markers: Collection[str]) -> None:
    if path.is_dir():
        present = {entry.name for entry in path.iterdir()}
        if present and present.isdisjoint(markers):
            raise CheckpointError(
                f"{path} exists and is not something coati saved (it has none of {', '.join(sorted(markers))}), so it "
                "is not replaced. Save to a new or an empty folder."
            )
    elif path.exists():
        raise CheckpointError(f"{path} must be a folder, but it exists and is a file. Choose another path.")


def names_to_save(module: nn.Module) -> set[str] | None:
    """Return the names of the tensors to save: with adapters, the trained ones; None for all."""
    if not any(isinstance(child, PeftModel) for child in (module, *module.children())):
        return None
    return {name for name, parameter in module.named_parameters() if parameter.requires_grad}


def write_model(module: nn.Module, state: Mapping[str, Tensor], tied: Mapping[str, str], folder: Path) -> None:
    """Write a model folder, with the module's `save_pretrained` if it has one, or as one safetensors file.

    `tied` are the module's `tied_names`. Computing them here would break a sharded module during a pass.
    """
    for name, tensor in state.items():
        if tensor.is_floating_point() and tensor.numel() and not tensor.norm(math.inf).isfinite():  # needs no copy
            raise CheckpointError(
                f"a model must have finite weights to be saved, got NaN or infinity in {name!r}. Training has "
                "diverged; use an earlier checkpoint."
            )
    save_pretrained = getattr(module, "save_pretrained", None)
    if save_pretrained is None:
        save_file({name: tensor.contiguous() for name, tensor in state.items()}, folder / _WEIGHTS_FILE)
        return
    # Add tied names whose shared weight is in `state`; with adapters the frozen base is not.
    also = {name: state[first] for name, first in tied.items() if first in state}
    save_pretrained(folder, state_dict={**state, **also})


def read_tensors(module: nn.Module, path: Path) -> dict[str, Tensor]:
    """Read the module's tensors from a folder; CheckpointError unless they match exactly.

    Names in the file are those of the module or of the transformers model that it wraps; in `CHILD.safetensors`, those
    of that child. A peft folder holds only the adapters.
    """
    if (path / MANIFEST).is_file():  # folders not written by coati have none
        check_files(path, suffix=".safetensors")
    target, tied = state_tensors(module), tied_names(module)
    is_adapter = (path / _ADAPTER_FILE).is_file()
    # peft omits the adapter's name from the tensor names in its files.
    adapters = {name.replace(".default", ""): name for name in target if ".lora_" in name} if is_adapter else {}
    try:
        main = {key: tensor for file in _main_files(path) for key, tensor in load_file(file).items()}
        children = [] if isinstance(module, PreTrainedModel | PeftModel) else module.named_children()
        body = next((name for name, child in children if isinstance(child, PreTrainedModel | PeftModel)), "")
        prefix = f"{body}." if body and not main.keys() & target.keys() else ""
        found = {adapters.get(prefix + key, prefix + key): tensor for key, tensor in main.items()}
        for child, _ in module.named_children():
            file = path / f"{child}.safetensors"
            if child != "model" and file.is_file():
                found |= {f"{child}.{key}": tensor for key, tensor in load_file(file).items()}
    except (OSError, SafetensorError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"the weights in {path} are unreadable: {error!r}. A file or an index is damaged. Use another copy."
        ) from error
    required = set(adapters.values()) if is_adapter else set(target)
    _check(path, found, target, missing=required - set(tied) - {tied.get(name, name) for name in found})
    return found


@torch.no_grad()
def copy_into(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy the result of `read_tensors` into the module."""
    target = state_tensors(module)
    for name, tensor in tensors.items():
        local_part(target[name]).copy_(local_part(laid_out_like(tensor, target[name])))


def _main_files(path: Path) -> list[Path]:
    files = [path / (_ADAPTER_FILE if (path / _ADAPTER_FILE).is_file() else _WEIGHTS_FILE)]
    if (path / _INDEX_FILE).is_file():
        index = json.loads((path / _INDEX_FILE).read_text())
        files = [path / name for name in sorted(set(index["weight_map"].values()))]
    for file in files:
        if not file.is_file():
            raise CheckpointError(f"{file} does not exist, so there is no model to load from {path}.")
    return files


def _check(path: Path, found: Mapping[str, Tensor], target: Mapping[str, Tensor], missing: Collection[str]) -> None:
    shapes, expected = ({name: tuple(t.shape) for name, t in tensors.items()} for tensors in (found, target))
    wrong = [f"{name} {shape}, not {expected.get(name)}" for name, shape in shapes.items() - expected.items()]
    if missing or wrong:
        raise CheckpointError(
            f"the weights in {path} belong to another model: {len(missing)} are missing "
            f"({', '.join(sorted(missing)[:5])}), {len(wrong)} are unexpected or have another shape "
            f"({', '.join(sorted(wrong)[:5])}). Nothing was loaded."
        )


def _parameters_of(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def iter_state(optimizer: Optimizer) -> Iterator[tuple[str, Any]]:
    """Yield every value of an optimizer's state as (`INDEX.KEY`, whole tensor or plain number).

    Gathers shards one at a time, so all ranks must iterate together.
    """
    for index, parameter in enumerate(_parameters_of(optimizer)):
        for key, value in optimizer.state.get(parameter, {}).items():
            yield f"{index}.{key}", whole_tensor(value) if isinstance(value, Tensor) else value


def optimizer_settings(optimizer: Optimizer) -> dict[str, Any]:
    """Return what is saved besides the state: the parameter groups' settings, and the optimizer's layout."""
    groups = [
        {key: value.item() if isinstance(value, Tensor) else value for key, value in group.items()}
        for group in optimizer.state_dict()["param_groups"]  # parameters are given by index
    ]
    return {"format": _OPTIMIZER_FORMAT, "layout": _layout(optimizer), "groups": groups}


def write_optimizer(settings: Mapping[str, Any], state: Mapping[str, Any], folder: Path) -> None:
    """Write the results of `optimizer_settings` and `iter_state` into a folder."""
    tensors = {name: value.contiguous() for name, value in state.items() if isinstance(value, Tensor)}
    numbers = {name: value for name, value in state.items() if name not in tensors}
    save_file(tensors, folder / _STATE_FILE)
    (folder / _SETTINGS_FILE).write_text(json.dumps({**settings, "numbers": numbers}, indent=1))


def read_optimizer(optimizer: Optimizer, path: Path) -> dict[str, Any]:
    """Read a state dict for `optimizer.load_state_dict`, sharded like the parameters; does not change the optimizer."""
    settings = _read_settings(path)
    for there, here in itertools.zip_longest(settings["layout"], _layout(optimizer)):
        if there != here:
            raise CheckpointError(
                f"{path} holds the state of another optimizer, with {there}, not {here}. Create the optimizer that was "
                "saved, for the same parameters in the same order."
            )
    parameters = _parameters_of(optimizer)
    state: dict[int, dict[str, Any]] = {}
    for name, value in (*settings["numbers"].items(), *load_file(path / _STATE_FILE).items()):
        index, _, key = name.partition(".")
        parameter = parameters[int(index)]
        if isinstance(value, Tensor):
            value = value.clone()  # otherwise the file stays mapped
            if value.shape == parameter.shape:
                value = laid_out_like(value, parameter)
            elif isinstance(optimizer, Adam) and key != "step":
                raise CheckpointError(  # a fused step would read past the tensor's end
                    f"{path}: {name} must have the shape of its parameter, {list(parameter.shape)}, got "
                    f"{list(value.shape)}. It was saved wrong. Use another checkpoint. Nothing was loaded."
                )
        state.setdefault(int(index), {})[key] = value
    return {"state": dict(sorted(state.items())), "param_groups": settings["groups"]}


def _layout(optimizer: Optimizer) -> list[str]:
    """Return what must match to load the state: the optimizer's family, its groups and its parameters' shapes."""
    # Adam, AdamW and HybridAdam have the same state, so each can load that of another.
    family = "Adam" if isinstance(optimizer, Adam) else type(optimizer).__name__
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    shapes = [f"{list(parameter.shape)} as parameter {i}" for i, parameter in enumerate(_parameters_of(optimizer))]
    return [family, f"groups of {sizes} parameters", *shapes]


def _read_settings(path: Path) -> dict[str, Any]:
    file = path / _SETTINGS_FILE
    if not file.is_file():
        raise CheckpointError(f"{file} does not exist, so there is no optimizer to load from {path}.")
    if (path / MANIFEST).is_file():  # otherwise the manifest of the whole checkpoint covers this folder
        check_files(path)
    settings: dict[str, Any] = json.loads(file.read_text())
    if settings["format"] != _OPTIMIZER_FORMAT:
        raise CheckpointError(
            f"{file} must be an optimizer of format {_OPTIMIZER_FORMAT}, got {settings['format']}. Use the version of "
            "coati that wrote it, or start with a new optimizer."
        )
    return settings
