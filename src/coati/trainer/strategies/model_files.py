"""A model's weights on disk: safetensors, names and shapes checked before a single weight is touched."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from peft import PeftModel
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
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


def read_tensors(module: nn.Module, path: Path) -> dict[str, Tensor]:
    """Read the module's tensors from a folder (or safetensors file) that holds just what the module needs.

    The main weights may carry the names of the module or of the transformers model that it wraps; a file
    `CHILD.safetensors` carries those of that child. A peft folder has the adapters and nothing else. The tensors stay
    in their files, which are mapped into memory.
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
