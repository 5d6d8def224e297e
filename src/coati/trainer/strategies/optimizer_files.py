"""An optimizer's state on disk: whole tensors keyed by parameter index, settings as JSON, no pickle.

Because what is written is whole, a run may go on under another strategy or with another number of ranks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Adam, Optimizer

from coati.errors import CheckpointError
from coati.trainer.strategies.sharding import shard_like
from coati.trainer.strategies.state_chunks import whole_tensor

_STATE_FILE = "optimizer.safetensors"
_SETTINGS_FILE = "optimizer.json"
_FORMAT = 1
OPTIMIZER_MARKERS = (_SETTINGS_FILE, _STATE_FILE)
"""A folder that holds one of these is an optimizer folder."""


@dataclass(frozen=True, kw_only=True)
class StateEntry:
    """One value of one parameter's state, such as Adam's `exp_avg`."""

    index: int
    """Number of the parameter, counted over all groups in order."""
    key: str
    """Name of the value in the optimizer's state."""
    value: Any
    """A whole tensor on the CPU, or a plain number."""


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """The optimizer's parameters, in the order that numbers them on disk."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def iter_whole_state(optimizer: Optimizer) -> Iterator[StateEntry]:
    """Every value of the state, gathered from its shards one at a time; all ranks must iterate in step."""
    for index, parameter in enumerate(parameters_of(optimizer)):
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                value = whole_tensor(value).cpu()
            yield StateEntry(index=index, key=key, value=value)


def write_optimizer(
    optimizer: Optimizer, entries: Iterable[StateEntry], folder: Path, *, part_bytes: int | None = None
) -> None:
    """Write settings and state into `folder`; with `part_bytes` in files of that size, one in memory at a time."""
    numbers: dict[str, Any] = {}
    files: list[str] = []
    tensors: dict[str, Tensor] = {}

    def write_file() -> None:
        files.append(_STATE_FILE if part_bytes is None else f"optimizer-{len(files) + 1:05d}.safetensors")
        save_file(tensors, folder / files[-1])
        tensors.clear()

    for entry in entries:
        name = f"{entry.index}.{entry.key}"
        if not isinstance(entry.value, Tensor):
            numbers[name] = entry.value
            continue
        tensors[name] = entry.value.contiguous()
        if part_bytes is not None and sum(tensor.nbytes for tensor in tensors.values()) >= part_bytes:
            write_file()
    if tensors or not files:
        write_file()
    settings = {
        "format": _FORMAT,
        "family": _family(optimizer),
        "shapes": [list(parameter.shape) for parameter in parameters_of(optimizer)],
        "groups": [_plain_group(group) for group in optimizer.param_groups],
        "numbers": numbers,
        "files": files,
    }
    (folder / _SETTINGS_FILE).write_text(json.dumps(settings, indent=1))


def read_optimizer(
    optimizer: Optimizer, path: Path, *, wanted: Callable[[int], bool]
) -> tuple[list[dict[str, Any]], Iterator[StateEntry]]:
    """Groups (settings and parameter indices) and state from `path`, checked against the optimizer.

    State is read one value at a time, and only that of `wanted` parameters.
    """
    settings = _read_settings(path)
    _check_belongs(optimizer, settings, path)
    return settings["groups"], _iter_entries(settings, path, wanted)


def _iter_entries(settings: Mapping[str, Any], path: Path, wanted: Callable[[int], bool]) -> Iterator[StateEntry]:
    for name, value in settings["numbers"].items():
        if wanted(_index_of(name)):
            yield _entry(name, value)
    for file_name in settings.get("files", [_STATE_FILE]):
        try:
            with safe_open(path / file_name, framework="pt") as file:
                for name in list(file.keys()):
                    if wanted(_index_of(name)):
                        yield _entry(name, file.get_tensor(name))
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path / file_name} is missing or torn: {error}. Use another checkpoint.") from error


def place_entry(entry: StateEntry, parameter: Tensor) -> StateEntry:
    """The entry laid out as its parameter is: sharded if the parameter is, else as it came."""
    value = entry.value
    if isinstance(parameter, DTensor) and isinstance(value, Tensor) and value.shape == parameter.shape:
        return StateEntry(index=entry.index, key=entry.key, value=shard_like(value, parameter))
    return entry


def state_dict_of(groups: Iterable[Mapping[str, Any]], entries: Iterable[StateEntry]) -> dict[str, Any]:
    """What `Optimizer.load_state_dict` takes."""
    state: dict[int, dict[str, Any]] = {}
    for entry in entries:
        state.setdefault(entry.index, {})[entry.key] = entry.value
    return {"state": state, "param_groups": [dict(group) for group in groups]}


def _family(optimizer: Optimizer) -> str:
    # Adam, AdamW and HybridAdam keep the same state, so each continues what another began.
    return "Adam" if isinstance(optimizer, Adam) else type(optimizer).__name__


def _plain_group(group: Mapping[str, Any]) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for key, value in group.items():
        if key == "params":
            continue
        if isinstance(value, Tensor):
            value = value.item()
        if not isinstance(value, str | int | float | bool | None | list | tuple):
            raise CheckpointError(
                f"the optimizer setting {key!r} is a {type(value).__name__}, which cannot be saved as JSON. "
                "Use numbers, strings, or lists of them."
            )
        plain[key] = value
    plain["num_params"] = len(group["params"])
    return plain


def _read_settings(path: Path) -> dict[str, Any]:
    try:
        settings: dict[str, Any] = json.loads((path / _SETTINGS_FILE).read_text())
    except FileNotFoundError:
        raise CheckpointError(
            f"{path / _SETTINGS_FILE} does not exist, so there is no optimizer to load from {path}."
        ) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path / _SETTINGS_FILE} is unreadable: {error}.") from error
    if settings.get("format") != _FORMAT:
        raise CheckpointError(
            f"{path / _SETTINGS_FILE} has format {settings.get('format')!r}; this coati reads {_FORMAT}."
        )
    return settings


def _check_belongs(optimizer: Optimizer, settings: dict[str, Any], path: Path) -> None:
    if settings["family"] != _family(optimizer):
        raise CheckpointError(
            f"{path} holds the state of {settings['family']}, but the optimizer is "
            f"{type(optimizer).__name__}. Build the optimizer that was saved."
        )
    shapes = [list(parameter.shape) for parameter in parameters_of(optimizer)]
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    saved_sizes = [group.pop("num_params") for group in settings["groups"]]
    if sizes != saved_sizes or shapes != settings["shapes"]:
        differing = [i for i, (a, b) in enumerate(zip(shapes, settings["shapes"], strict=False)) if a != b]
        detail = ""
        if differing:
            i = differing[0]
            detail = f" Parameter {i} has shape {settings['shapes'][i]} in the file and {shapes[i]} here."
        raise CheckpointError(
            f"{path} holds state for groups of {saved_sizes} parameters, the optimizer has groups of "
            f"{sizes}.{detail} Build the optimizer over the same parameters in the same order."
        )
    start = 0
    for group, size in zip(settings["groups"], sizes, strict=True):
        group["params"] = list(range(start, start + size))
        start += size
        if "betas" in group:  # JSON has no tuples
            group["betas"] = tuple(group["betas"])


def _index_of(name: str) -> int:
    return int(name.partition(".")[0])


def _entry(name: str, value: Any) -> StateEntry:
    index, _, key = name.partition(".")
    return StateEntry(index=int(index), key=key, value=value)
