"""An optimizer's state on disk: whole tensors keyed by parameter index, settings as JSON, no pickle.

Because what is written is whole, a run may go on under another strategy or with another number of ranks. The JSON lists
every tensor of every file with shape, dtype and checksum, and carries a checksum of itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Adam, Optimizer

from coati.errors import CheckpointError
from coati.trainer.strategies.sharding import shard_like
from coati.trainer.strategies.state_chunks import whole_tensor
from coati.weights.checksum import bytes_checksum

_STATE_FILE = "optimizer.safetensors"
_SETTINGS_FILE = "optimizer.json"
_FORMAT = 2  # format 1 had no checksums, and no list of what must be there
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
    files: dict[str, dict[str, Any]] = {}
    tensors: dict[str, Tensor] = {}

    def write_file() -> None:
        file_name = _STATE_FILE if part_bytes is None else f"optimizer-{len(files) + 1:05d}.safetensors"
        save_file(tensors, folder / file_name)
        files[file_name] = {name: _describe(tensor) for name, tensor in tensors.items()}
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
    (folder / _SETTINGS_FILE).write_text(json.dumps({**settings, "checksum": _json_checksum(settings)}, indent=1))


def read_optimizer(optimizer: Optimizer, path: Path, *, wanted: Callable[[int], bool]) -> dict[str, Any]:
    """What `optimizer.load_state_dict` takes, from `path`; the optimizer is read but not touched.

    State is read one value at a time, and only that of `wanted` parameters; it is laid out as its parameter is. What
    is read is checked, so if every parameter is wanted by some rank and none of them raises, all of it is sound.
    """
    settings = _read_settings(path)
    _check_belongs(optimizer, settings, path)
    parameters = parameters_of(optimizer)
    state: dict[int, dict[str, Any]] = {}
    for entry in _iter_entries(settings, path, wanted):
        if isinstance(optimizer, Adam) and isinstance(entry.value, Tensor) and entry.key != "step":
            _check_shape(entry, parameters[entry.index], path)
        state.setdefault(entry.index, {})[entry.key] = _placed(entry.value, parameters[entry.index])
    return {"state": state, "param_groups": settings["groups"]}


def _iter_entries(settings: Mapping[str, Any], path: Path, wanted: Callable[[int], bool]) -> Iterator[StateEntry]:
    for name, value in settings["numbers"].items():
        if wanted(_index_of(name)):
            yield _entry(name, value)
    for file, expected in ((path / name, expected) for name, expected in settings["files"].items()):
        try:
            with safe_open(file, framework="pt") as opened:
                _check_names(file, set(opened.keys()), set(expected))
                for name in expected:
                    if wanted(_index_of(name)):
                        tensor = opened.get_tensor(name).clone()  # out of the file, which stays mapped otherwise
                        _check_tensor(file, name, _describe(tensor), expected[name])
                        yield _entry(name, tensor)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{file} is missing or torn: {error}. Use another checkpoint.") from error


def _placed(value: Any, parameter: Tensor) -> Any:
    """A value laid out as its parameter is: sharded if the parameter is, else as it came."""
    if isinstance(parameter, DTensor) and isinstance(value, Tensor) and value.shape == parameter.shape:
        return shard_like(value, parameter)
    return value


def _describe(tensor: Tensor) -> dict[str, Any]:
    """What must be found again; the checksum is XXH3 over the bytes, as for weights on their way."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    checksum = bytes_checksum(tensor.contiguous().view(-1).view(torch.uint8))
    return {"shape": list(tensor.shape), "dtype": dtype, "checksum": f"{checksum:016x}"}


def _json_checksum(settings: Mapping[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(settings, sort_keys=True).encode())


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
    """The JSON, which is as it was written: nothing in it needs to be looked at twice."""
    file = path / _SETTINGS_FILE
    try:
        settings = json.loads(file.read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{file} does not exist, so there is no optimizer to load from {path}.") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} is unreadable: {error}. Use another checkpoint.") from error
    if not isinstance(settings, dict) or "format" not in settings:
        raise CheckpointError(
            f"{file} must hold a JSON object with a format, as save_optimizer writes it, got {str(settings)[:80]!r}. "
            "Use another checkpoint."
        )
    if settings["format"] != _FORMAT:
        raise CheckpointError(
            f"{file} has format {settings['format']!r}; this coati reads {_FORMAT}, which can be checked whole. "
            "Go on with the coati that wrote it, or start with a fresh optimizer."
        )
    noted = settings.pop("checksum", None)
    found = _json_checksum(settings)
    if noted != found:
        raise CheckpointError(
            f"{file} must be as it was written: its checksum there is {noted!r}, but what it holds gives {found!r}. "
            "Use another checkpoint; to change a setting, set it in optimizer.param_groups after loading."
        )
    return settings


def _check_names(file: Path, names: set[str], expected: set[str]) -> None:
    if names != expected:
        missing, unexpected = sorted(expected - names), sorted(names - expected)
        raise CheckpointError(
            f"{file} must hold the {len(expected)} tensors that {_SETTINGS_FILE} lists. Missing: "
            f"{', '.join(missing[:5]) or 'none'}; unexpected: {', '.join(unexpected[:5]) or 'none'}. "
            "The files belong to different checkpoints, or one was damaged: use another. Nothing was loaded."
        )


def _check_tensor(file: Path, name: str, found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    for what in ("shape", "dtype", "checksum"):
        if found[what] != expected[what]:
            raise CheckpointError(
                f"{file}: the {what} of {name} must be {expected[what]}, as {_SETTINGS_FILE} says, got {found[what]}. "
                "The file was damaged or comes from elsewhere: use another checkpoint. Nothing was loaded."
            )


def _check_shape(entry: StateEntry, parameter: Tensor, path: Path) -> None:
    if entry.value.shape != parameter.shape:  # a fused step would read beyond its end
        raise CheckpointError(
            f"{path}: {entry.index}.{entry.key} must have the shape of its parameter, {list(parameter.shape)}, got "
            f"{list(entry.value.shape)}. It was wrong when it was saved: use another checkpoint. Nothing was loaded."
        )


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
