"""A model's weights on disk: safetensors, names and shapes checked before a single weight is touched."""

from __future__ import annotations

import copy
import json
from collections.abc import Collection, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from coati.errors import CheckpointError
from coati.models.tied_weights import tied_names
from coati.trainer.strategies.sharding import copy_whole_into

WEIGHTS_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
_ADAPTER_FILE = "adapter_model.safetensors"
MODEL_MARKERS = (WEIGHTS_FILE, _INDEX_FILE, "config.json", "adapter_config.json")
"""A folder that holds one of these is a model folder."""


def write_model(module: nn.Module, state: Mapping[str, Tensor], folder: Path) -> None:
    """Write `state` (whole, on the CPU, tied weights once) the module's own way, else as safetensors.

    A module with `save_pretrained` gets tied names too, where the weight they share is in `state`: with adapters the
    frozen base, tied embeddings included, is not.
    """
    save_pretrained = getattr(module, "save_pretrained", None)
    if save_pretrained is None:
        save_file({name: tensor.contiguous() for name, tensor in state.items()}, folder / WEIGHTS_FILE)
        return
    tied = {name: state[first] for name, first in tied_names(module).items() if first in state}
    save_pretrained(folder, state_dict={**state, **tied})


def write_model_in_parts(module: nn.Module, chunks: Iterable[Mapping[str, Tensor]], folder: Path) -> None:
    """Write a file for each chunk, and an index: a folder that transformers and `load_model_files` both read.

    A module around a transformers model writes that one under its own names, and its other children beside it.
    """
    body = next((name for name, child in module.named_children() if hasattr(child, "save_pretrained")), None)
    inner: Any = module if body is None else getattr(module, body)
    beside: dict[str, dict[str, Tensor]] = {}
    parts: list[list[str]] = []
    for chunk in chunks:
        part: dict[str, Tensor] = {}
        for name, tensor in chunk.items():
            child, _, rest = name.partition(".")
            if body is None or child == body:
                part[name if body is None else rest] = tensor.contiguous()
            else:
                beside.setdefault(child, {})[rest] = tensor.contiguous()
        if part:
            parts.append(list(part))
            save_file(part, folder / f"part-{len(parts)}", metadata={"format": "pt"})
            part.clear()  # before the next chunk is gathered
    weight_map: dict[str, str] = {}
    for number, names in enumerate(parts, 1):
        file = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        (folder / f"part-{number}").rename(folder / file)
        weight_map |= dict.fromkeys(names, file)
    total = sum((folder / file).stat().st_size for file in set(weight_map.values()))
    (folder / _INDEX_FILE).write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=1)
    )
    for child, state in beside.items():
        save_file(state, folder / f"{child}.safetensors")
    if hasattr(inner, "config"):
        _write_config(inner, folder)


def _write_config(model: Any, folder: Path) -> None:
    """What transformers needs beside the weights."""
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__.removeprefix("FSDP")]  # the prefix that sharding gives a class
    config.dtype = next((parameter.dtype for parameter in model.parameters()), None)
    config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)


def saves_adapters(module: nn.Module) -> bool:
    """Whether peft saves this module, or what it wraps: then its adapters are all there is to save."""
    return any(hasattr(child, "peft_config") for child in (module, *module.children()))


@torch.no_grad()
def load_model_files(module: nn.Module, path: Path) -> None:
    """Load a model folder (or one safetensors file) into the module, all of it or nothing.

    What `save_model` wrote loads again, also for a module that wraps a transformers model and saves it under
    the wrapped model's own names: the main weights may carry the names of the module or of one of its
    children, and a file `CHILD.safetensors` beside them those of that child. A peft folder sets the adapters
    and nothing else.
    """
    with ExitStack() as stack:
        saved = _open_checked(path, module, stack)
        target = module.state_dict(keep_vars=True)
        try:
            for name, (file, key) in saved.items():
                copy_whole_into(target[name], file.get_tensor(key))
        except (OSError, SafetensorError) as error:  # it was whole a moment ago
            raise CheckpointError(
                f"could not read {path} to its end: {error}. Part of it is loaded; load it again, or another, before "
                "the model is used."
            ) from error


def check_model_files(module: nn.Module, path: Path) -> None:
    """Raise what `load_model_files` would, without loading anything."""
    with ExitStack() as stack:
        _open_checked(path, module, stack)


def _open_checked(path: Path, module: nn.Module, stack: ExitStack) -> dict[str, tuple[Any, str]]:
    """As `_open_all`, of files that hold just what the module needs."""
    try:
        saved = _open_all(path, module, stack)
        shapes = {name: tuple(file.get_slice(key).get_shape()) for name, (file, key) in saved.items()}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"the weights in {path} are unreadable: {error}. The file is torn; use another copy."
        ) from error
    target = module.state_dict(keep_vars=True)
    tied = tied_names(module)
    required = set(_adapter_names(target).values()) if _is_adapter_folder(path) else set(target)
    _check(path, shapes, target, required=required - set(tied), tied=tied)
    return saved


def _open_all(path: Path, module: nn.Module, stack: ExitStack) -> dict[str, tuple[Any, str]]:
    """Where each of the module's tensors is: its name in the module -> (open file, its name there)."""
    target = module.state_dict(keep_vars=True)
    renamed = _adapter_names(target) if _is_adapter_folder(path) else {}
    main: dict[str, tuple[Any, str]] = {}
    for file in _main_files(path):
        opened = stack.enter_context(safe_open(file, framework="pt"))
        main.update((key, (opened, key)) for key in list(opened.keys()))
    children = [name for name, _ in module.named_children()]
    beside: dict[str, tuple[Any, str]] = {}
    for child in children:
        if path.is_dir() and (path / f"{child}.safetensors").is_file() and child != "model":
            opened = stack.enter_context(safe_open(path / f"{child}.safetensors", framework="pt"))
            beside.update((f"{child}.{key}", (opened, key)) for key in list(opened.keys()))
    best: dict[str, tuple[Any, str]] = {}
    for prefix in ("", *(f"{child}." for child in children)):
        named = {renamed.get(prefix + key, prefix + key): place for key, place in main.items()}
        # Strictly more names than with the prefixes before: on a tie the plain names explain an error best.
        if not best or len(named.keys() & target.keys()) > len(best.keys() & target.keys()):
            best = named
    return {**best, **beside}


def _is_adapter_folder(path: Path) -> bool:
    return (path / _ADAPTER_FILE).is_file()


def _adapter_names(target: Iterable[str]) -> dict[str, str]:
    """A peft file leaves the adapter's name out of its tensors' names; here is where each belongs."""
    return {name.replace(".default", ""): name for name in target if ".lora_" in name}


def _main_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if _is_adapter_folder(path):
        return [path / _ADAPTER_FILE]
    files = [path / WEIGHTS_FILE]
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
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    target: Mapping[str, Any],
    *,
    required: Collection[str],
    tied: Mapping[str, str],
) -> None:
    present = {tied.get(name, name) for name in shapes}
    missing = sorted(set(required) - present)
    unexpected = sorted(set(shapes) - set(target))
    wrong = [
        f"{name} {shape} instead of {tuple(target[name].shape)}"
        for name, shape in shapes.items()
        if name in target and shape != tuple(target[name].shape)
    ]
    problems = [
        f"{label} {_shorten(names)}"
        for label, names in (("missing:", missing), ("unexpected:", unexpected), ("wrong shape:", wrong))
        if names
    ]
    if problems:
        raise CheckpointError(
            f"the weights in {path} belong to another model. {'; '.join(problems)}. Nothing was loaded."
        )


def _shorten(names: list[str], limit: int = 5) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
