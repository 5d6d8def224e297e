"""An optimizer's state on disk: whole tensors keyed by parameter index, settings as JSON, no pickle.

Because what is written is whole, a run may continue under another strategy or with another number of ranks.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.optim import Adam, Optimizer

from coati.errors import CheckpointError
from coati.models.memory import laid_out_like, whole_tensor
from coati.trainer.strategies.folders import check_files

_SETTINGS_FILE = "optimizer.json"
_STATE_FILE = "optimizer.safetensors"
_FORMAT = 4
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


def optimizer_writer(optimizer: Optimizer, state: Mapping[str, Any]) -> Callable[[Path], None]:
    """Return what writes the settings as they are now, and state as `iter_state` yields it, into a folder."""
    tensors = {name: value.contiguous() for name, value in state.items() if isinstance(value, Tensor)}
    settings = {
        "format": _FORMAT,
        "family": _family(optimizer),
        "shapes": [list(parameter.shape) for parameter in _parameters_of(optimizer)],
        "groups": [_plain_group(group) for group in optimizer.param_groups],
        "numbers": {name: value for name, value in state.items() if name not in tensors},
    }
    text = json.dumps(settings, indent=1)

    def write(folder: Path) -> None:
        save_file(tensors, folder / _STATE_FILE)
        (folder / _SETTINGS_FILE).write_text(text)

    return write


def read_optimizer(optimizer: Optimizer, path: Path) -> dict[str, Any]:
    """Read what `optimizer.load_state_dict` takes, laid out as the parameters are; the optimizer is not touched."""
    settings = _read_settings(path)
    check_files(path)
    groups = _groups_for(optimizer, settings, path)
    parameters = _parameters_of(optimizer)
    state: dict[int, dict[str, Any]] = {}

    def add(name: str, value: Any) -> None:
        index, _, key = name.partition(".")
        parameter = parameters[int(index)]
        if isinstance(value, Tensor) and value.shape == parameter.shape:
            value = laid_out_like(value, parameter)
        elif isinstance(value, Tensor) and isinstance(optimizer, Adam) and key != "step":
            raise CheckpointError(  # a fused step would read beyond its end
                f"{path}: {name} must have the shape of its parameter, {list(parameter.shape)}, got "
                f"{list(value.shape)}. It was wrong when it was saved: use another checkpoint. Nothing was loaded."
            )
        state.setdefault(int(index), {})[key] = value

    for name, value in settings["numbers"].items():
        add(name, value)
    with safe_open(path / _STATE_FILE, framework="pt") as opened:
        for name in opened.keys():  # noqa: SIM118
            add(name, opened.get_tensor(name).clone())  # out of the file, which stays mapped otherwise
    return {"state": dict(sorted(state.items())), "param_groups": groups}


def _family(optimizer: Optimizer) -> str:
    # Adam, AdamW and HybridAdam keep the same state, so each continues what another began.
    return "Adam" if isinstance(optimizer, Adam) else type(optimizer).__name__


def _plain_group(group: Mapping[str, Any]) -> dict[str, Any]:
    plain: dict[str, Any] = {key: value.item() if isinstance(value, Tensor) else value for key, value in group.items()}
    plain["num_params"] = len(plain.pop("params"))
    for key, value in plain.items():
        if not isinstance(value, str | int | float | bool | None | list | tuple):
            raise CheckpointError(
                f"the optimizer setting {key!r} is a {type(value).__name__}, which cannot be saved as JSON. "
                "Use numbers, strings, or lists of them."
            )
    return plain


def _read_settings(path: Path) -> dict[str, Any]:
    file = path / _SETTINGS_FILE
    try:
        settings: dict[str, Any] = json.loads(file.read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{file} does not exist, so there is no optimizer to load from {path}.") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} is unreadable: {error}. Use another checkpoint.") from error
    found = settings.get("format") if isinstance(settings, dict) else None
    if found != _FORMAT:
        raise CheckpointError(
            f"{file} must be an optimizer of format {_FORMAT}, got {found!r}. Use the coati that wrote it, or start "
            "with a fresh optimizer."
        )
    return settings


def _groups_for(optimizer: Optimizer, settings: Mapping[str, Any], path: Path) -> list[dict[str, Any]]:
    """The parameter groups as `load_state_dict` takes them, if they are those of this optimizer."""
    if settings["family"] != _family(optimizer):
        raise CheckpointError(
            f"{path} holds the state of {settings['family']}, but the optimizer is "
            f"{type(optimizer).__name__}. Build the optimizer that was saved."
        )
    shapes = [list(parameter.shape) for parameter in _parameters_of(optimizer)]
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    saved_sizes = [group["num_params"] for group in settings["groups"]]
    if sizes != saved_sizes or shapes != settings["shapes"]:
        pairs = enumerate(zip(settings["shapes"], shapes, strict=False))
        differing = next((f"parameter {i} has shape {a} there and {b} here" for i, (a, b) in pairs if a != b), "")
        raise CheckpointError(
            f"{path} holds state for groups of {saved_sizes} parameters, the optimizer has groups of {sizes}; "
            f"{differing}. Build the optimizer over the same parameters in the same order."
        )
    numbers = iter(range(len(shapes)))
    groups = [{**saved, "params": list(itertools.islice(numbers, saved["num_params"]))} for saved in settings["groups"]]
    for group in groups:
        del group["num_params"]
        if "betas" in group:  # JSON has no tuples
            group["betas"] = tuple(group["betas"])
    return groups
