"""An optimizer's state on disk: whole tensors keyed by parameter index, settings as JSON, no pickle.

Because what is written is whole, a run may continue under another strategy or with another number of ranks.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.optim import Adam, Optimizer

from coati.errors import CheckpointError
from coati.models.memory import laid_out_like, whole_tensor
from coati.trainer.strategies.folders import MANIFEST, check_files

_SETTINGS_FILE = "optimizer.json"
_STATE_FILE = "optimizer.safetensors"
_FORMAT = 5
OPTIMIZER_MARKERS = (_SETTINGS_FILE,)
"""A folder that holds one of these is an optimizer folder."""


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
    return {"format": _FORMAT, "layout": _layout(optimizer), "groups": groups}


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
    if settings["format"] != _FORMAT:
        raise CheckpointError(
            f"{file} must be an optimizer of format {_FORMAT}, got {settings['format']}. Use the coati that wrote it, "
            "or start with a fresh optimizer."
        )
    return settings
