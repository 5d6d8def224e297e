"""A model's weights on disk: safetensors, names and shapes checked before a single weight is touched."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from coati.errors import CheckpointError
from coati.models.memory import laid_out_like, local_part, state_tensors, tied_names
from coati.trainer.strategies.folders import MANIFEST, check_files

_WEIGHTS_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
_ADAPTER_FILE = "adapter_model.safetensors"
MODEL_MARKERS = (_WEIGHTS_FILE, _INDEX_FILE, "config.json", "adapter_config.json")
"""A folder that holds one of these is a model folder."""

Places = Mapping[str, tuple[Any, str]]
"""For each tensor of a module, the open file that holds it and its name there."""


def names_to_save(module: nn.Module) -> set[str] | None:
    """Names of the tensors that belong on disk: with adapters, those that are trained; None for all."""
    if not any(isinstance(child, PeftModel) for child in (module, *module.children())):
        return None
    return {name for name, parameter in module.named_parameters() if parameter.requires_grad}


def write_model(module: nn.Module, state: Mapping[str, Tensor], tied: Mapping[str, str], folder: Path) -> None:
    """Write a model folder: by the module's `save_pretrained`, if it has one, or as one safetensors file.

    `tied` are the module's `tied_names`. They come from outside because this may run beside training: asking a sharded
    module for its state makes FSDP2 shard it again, in the middle of a pass.
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


def find_tensors(module: nn.Module, path: Path, stack: ExitStack) -> Places:
    """Find each of the module's tensors in a folder (or safetensors file) that holds just what the module needs.

    The main weights may carry the names of the module or of the transformers model that it wraps; a file
    `CHILD.safetensors` carries those of that child. A peft folder has the adapters and nothing else. The files stay
    open as long as `stack`.
    """
    if (path / MANIFEST).is_file():  # there is none in a folder from elsewhere
        check_files(path, suffix=".safetensors")
    target = state_tensors(module)
    is_adapter = (path / _ADAPTER_FILE).is_file()
    # A peft file leaves the adapter's name out of its tensors' names.
    adapters = {name.replace(".default", ""): name for name in target if ".lora_" in name} if is_adapter else {}
    try:
        main = _open_all(_main_files(path), stack)
        body = _body_of(module)
        prefix = f"{body}." if body and not main.keys() & target.keys() else ""
        places = {adapters.get(prefix + key, prefix + key): place for key, place in main.items()}
        for child, _ in module.named_children():
            if child != "model" and (path / f"{child}.safetensors").is_file():
                opened = _open_all([path / f"{child}.safetensors"], stack)
                places |= {f"{child}.{key}": place for key, place in opened.items()}
        shapes = {name: tuple(file.get_slice(key).get_shape()) for name, (file, key) in places.items()}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"the weights in {path} are unreadable: {error}. The file is torn; use another copy."
        ) from error
    tied = tied_names(module)
    required = set(adapters.values()) if is_adapter else set(target)
    _check(path, shapes, target, required=required - set(tied), tied=tied)
    return places


@torch.no_grad()
def copy_into(module: nn.Module, places: Places, path: Path) -> None:
    """Copy what `find_tensors` found into the module."""
    target = state_tensors(module)
    try:
        for name, (file, key) in places.items():
            local_part(target[name]).copy_(local_part(laid_out_like(file.get_tensor(key), target[name])))
    except (OSError, SafetensorError) as error:  # it was whole a moment ago
        raise CheckpointError(
            f"could not read {path} to its end: {error}. Part of it is loaded; load it again, or another, before "
            "the model is used."
        ) from error


def _open_all(files: Iterable[Path], stack: ExitStack) -> dict[str, tuple[Any, str]]:
    opened = [stack.enter_context(safe_open(file, framework="pt")) for file in files]
    return {key: (file, key) for file in opened for key in file.keys()}  # noqa: SIM118


def _main_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    files = [path / (_ADAPTER_FILE if (path / _ADAPTER_FILE).is_file() else _WEIGHTS_FILE)]
    if (path / _INDEX_FILE).is_file():
        try:
            index = json.loads((path / _INDEX_FILE).read_text())
            files = [path / name for name in sorted(set(index["weight_map"].values()))]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{path / _INDEX_FILE} must map the name of each weight to its file in weight_map, and does not: "
                f"{error!r}. Use another copy of the model."
            ) from error
    for file in files:
        if not file.is_file():
            raise CheckpointError(f"{file} does not exist, so there is no model to load from {path}.")
    return files


def _check(
    path: Path, shapes: Mapping[str, Any], target: Mapping[str, Tensor], *, required: set[str], tied: Mapping[str, str]
) -> None:
    missing = sorted(required - {tied.get(name, name) for name in shapes})
    expected = {name: tuple(tensor.shape) for name, tensor in target.items()}
    wrong = [
        f"{name} {shape}, not {expected.get(name)}" for name, shape in shapes.items() if shape != expected.get(name)
    ]
    if missing or wrong:
        raise CheckpointError(
            f"the weights in {path} belong to another model: {len(missing)} are missing ({', '.join(missing[:5])}), "
            f"{len(wrong)} are unexpected or have another shape ({', '.join(wrong[:5])}). Nothing was loaded."
        )
