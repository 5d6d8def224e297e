"""Models and optimizers on disk: folders that appear whole or not at all, with a digest of every file.

Tensors are in safetensors files, whole, and settings in JSON, so any strategy with any number of ranks loads what
another saved. Names, shapes and digests are checked before a single tensor is touched.
"""

from __future__ import annotations

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

MANIFEST = "manifest.json"
"""Lists the digest of every other file of a folder that we wrote."""
_WEIGHTS_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
_ADAPTER_FILE = "adapter_model.safetensors"
_SETTINGS_FILE = "optimizer.json"
_STATE_FILE = "optimizer.safetensors"
_OPTIMIZER_FORMAT = 5
MODEL_MARKERS = frozenset({_WEIGHTS_FILE, _INDEX_FILE, "config.json", "adapter_config.json"})
"""A folder that holds one of these may be replaced by a model that is saved."""
OPTIMIZER_MARKERS = frozenset({_SETTINGS_FILE})
"""The same for an optimizer."""


def replace_folder(path: Path, write: Callable[[Path], None], *, markers: Collection[str]) -> None:
    """Let `write` fill a temporary sibling folder, then move it to `path`.

    A folder that is there is replaced if it is empty or holds one of the files `markers`, else refused. If writing
    fails, it stays. A manifest is added.
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
        if present and present.isdisjoint(markers):
            raise CheckpointError(
                f"{path} exists and is not something coati saved as such (it has none of "
                f"{', '.join(sorted(markers))}), so it is not replaced. Save to a new or an empty folder."
            )
    elif path.exists():
        raise CheckpointError(f"{path} exists and is a file, but a folder goes there. Choose another path.")


def names_to_save(module: nn.Module) -> set[str] | None:
    """Names of the tensors that belong on disk: with adapters, those that are trained; None for all."""
    if not any(isinstance(child, PeftModel) for child in (module, *module.children())):
        return None
    return {name for name, parameter in module.named_parameters() if parameter.requires_grad}


def write_model(module: nn.Module, state: Mapping[str, Tensor], tied: Mapping[str, str], folder: Path) -> None:
    """Write a model folder: by the module's `save_pretrained`, if it has one, or as one safetensors file.

    `tied`, its `tied_names`, come from outside: asking a sharded module for them in the middle of a pass breaks it.
    """
    for name, tensor in state.items():
        if tensor.is_floating_point() and tensor.numel() and not tensor.norm(math.inf).isfinite():  # in one pass
            raise CheckpointError(
                f"a model must have finite weights to be saved, got NaN or infinity in {name!r}. Training has "
                "diverged; use an earlier checkpoint."
            )
    save_pretrained = getattr(module, "save_pretrained", None)
    if save_pretrained is None:
        save_file({name: tensor.contiguous() for name, tensor in state.items()}, folder / _WEIGHTS_FILE)
        return
    # Tied names too, where the weight they share is there: with adapters the frozen base is not.
    also = {name: state[first] for name, first in tied.items() if first in state}
    save_pretrained(folder, state_dict={**state, **also})


def _body_of(module: nn.Module) -> str:
    """Name of the transformers or peft model that a module wraps; empty if it is one itself, or wraps none."""
    if isinstance(module, PreTrainedModel | PeftModel):
        return ""
    return next((n for n, child in module.named_children() if isinstance(child, PreTrainedModel | PeftModel)), "")


def read_tensors(module: nn.Module, path: Path) -> dict[str, Tensor]:
    """Read the module's tensors from a folder (or safetensors file) that holds just what the module needs.

    Names are those of the module or of the transformers model that it wraps; in a file `CHILD.safetensors`, that
    child's. A peft folder has the adapters and nothing else.
    """
    if (path / MANIFEST).is_file():  # there is none in a folder from elsewhere
        check_files(path, suffix=".safetensors")
    target, tied = state_tensors(module), tied_names(module)
    is_adapter = (path / _ADAPTER_FILE).is_file()
    # A peft file leaves the adapter's name out of its tensors' names.
    adapters = {name.replace(".default", ""): name for name in target if ".lora_" in name} if is_adapter else {}
    try:
        main = {key: tensor for file in _main_files(path) for key, tensor in load_file(file).items()}
        body = _body_of(module)
        prefix = f"{body}." if body and not main.keys() & target.keys() else ""
        found = {adapters.get(prefix + key, prefix + key): tensor for key, tensor in main.items()}
        for child, _ in module.named_children():
            file = path / f"{child}.safetensors"
            if child != "model" and file.is_file():
                found |= {f"{child}.{key}": tensor for key, tensor in load_file(file).items()}
    except (OSError, SafetensorError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"the weights in {path} are unreadable: {error!r}. A file is torn, or an index names no files; use another "
            "copy."
        ) from error
    required = set(adapters.values()) if is_adapter else set(target)
    _check(path, found, target, missing=required - set(tied) - {tied.get(name, name) for name in found})
    return found


@torch.no_grad()
def copy_into(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy what `read_tensors` read into the module."""
    target = state_tensors(module)
    for name, tensor in tensors.items():
        local_part(target[name]).copy_(local_part(laid_out_like(tensor, target[name])))


def _main_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
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
    """Yield every value of the state as `INDEX.KEY` and a whole tensor or a plain number.

    Shards are gathered one at a time, so all ranks must iterate in step.
    """
    for index, parameter in enumerate(_parameters_of(optimizer)):
        for key, value in optimizer.state.get(parameter, {}).items():
            yield f"{index}.{key}", whole_tensor(value) if isinstance(value, Tensor) else value


def optimizer_settings(optimizer: Optimizer) -> dict[str, Any]:
    """What belongs on disk besides the state: the settings of the parameter groups, and whose state it is."""
    groups = [
        {key: value.item() if isinstance(value, Tensor) else value for key, value in group.items()}
        for group in optimizer.state_dict()["param_groups"]  # with the numbers of their parameters
    ]
    return {"format": _OPTIMIZER_FORMAT, "layout": _layout(optimizer), "groups": groups}


def write_optimizer(settings: Mapping[str, Any], state: Mapping[str, Any], folder: Path) -> None:
    """Write `optimizer_settings`, and state as `iter_state` yields it, into a folder."""
    tensors = {name: value.contiguous() for name, value in state.items() if isinstance(value, Tensor)}
    numbers = {name: value for name, value in state.items() if name not in tensors}
    save_file(tensors, folder / _STATE_FILE)
    (folder / _SETTINGS_FILE).write_text(json.dumps({**settings, "numbers": numbers}, indent=1))


def read_optimizer(optimizer: Optimizer, path: Path) -> dict[str, Any]:
    """Read what `optimizer.load_state_dict` takes, laid out as the parameters are; the optimizer is not touched."""
    settings = _read_settings(path)
    for there, here in itertools.zip_longest(settings["layout"], _layout(optimizer)):
        if there != here:
            raise CheckpointError(
                f"{path} holds the state of another optimizer, with {there}, not {here}. Build the optimizer that was "
                "saved, over the same parameters in the same order."
            )
    for group in settings["groups"]:
        if "betas" in group:  # JSON has no tuples
            group["betas"] = tuple(group["betas"])
    parameters = _parameters_of(optimizer)
    state: dict[int, dict[str, Any]] = {}
    for name, value in (*settings["numbers"].items(), *load_file(path / _STATE_FILE).items()):
        index, _, key = name.partition(".")
        parameter = parameters[int(index)]
        if isinstance(value, Tensor):
            value = value.clone()  # out of the file, which stays mapped otherwise
            if value.shape == parameter.shape:
                value = laid_out_like(value, parameter)
            elif isinstance(optimizer, Adam) and key != "step":
                raise CheckpointError(  # a fused step would read beyond its end
                    f"{path}: {name} must have the shape of its parameter, {list(parameter.shape)}, got "
                    f"{list(value.shape)}. It was wrong when it was saved: use another checkpoint. Nothing was loaded."
                )
        state.setdefault(int(index), {})[key] = value
    return {"state": dict(sorted(state.items())), "param_groups": settings["groups"]}


def _layout(optimizer: Optimizer) -> list[str]:
    """What must be the same to continue: the optimizer's family, its groups and the shapes of its parameters."""
    # Adam, AdamW and HybridAdam keep the same state, so each continues what another began.
    family = "Adam" if isinstance(optimizer, Adam) else type(optimizer).__name__
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    shapes = [f"{list(parameter.shape)} as parameter {i}" for i, parameter in enumerate(_parameters_of(optimizer))]
    return [family, f"groups of {sizes} parameters", *shapes]


def _read_settings(path: Path) -> dict[str, Any]:
    file = path / _SETTINGS_FILE
    if not file.is_file():
        raise CheckpointError(f"{file} does not exist, so there is no optimizer to load from {path}.")
    if (path / MANIFEST).is_file():  # else the folder is part of a checkpoint, which has one
        check_files(path)
    settings: dict[str, Any] = json.loads(file.read_text())
    if settings["format"] != _OPTIMIZER_FORMAT:
        raise CheckpointError(
            f"{file} must be an optimizer of format {_OPTIMIZER_FORMAT}, got {settings['format']}. Use the coati that "
            "wrote it, or start with a fresh optimizer."
        )
    return settings
