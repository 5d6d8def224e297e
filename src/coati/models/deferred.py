"""Models that are built as shapes first and get their weights later, a few at a time, when they are sharded.

A model that is to be spread over many ranks may not fit one of them whole. Inside `weights_come_later()`, which the
sharding strategies' `model_init_context` enters, `Actor` and `Critic` build their networks without memory for
parameters and note where the values of each come from: a safetensors file, or a fresh draw. Buffers are real from
the start; they are small, and no file has those that are computed.

A checkpoint that cannot be read tensor by tensor under the names the model has (a hub name, another file format,
weights that transformers converts while it loads) is loaded whole, with a warning.
"""

import contextlib
import contextvars
import copy
import json
import logging
import math
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel

from coati.errors import ConfigError
from coati.models.lora import plain_name

logger = logging.getLogger(__name__)

_come_later: contextvars.ContextVar[bool] = contextvars.ContextVar("weights_come_later", default=False)
_Model = TypeVar("_Model", bound=nn.Module)
_HEAD_NAMES = ("score", "classifier", "v_head", "value_head")


@contextlib.contextmanager
def weights_come_later() -> Iterator[None]:
    """Make `Actor` and `Critic` in here without weights, until a strategy prepares them. Other models are as usual."""
    token = _come_later.set(True)
    try:
        yield
    finally:
        _come_later.reset(token)


class DeferredWeights:
    """Where the values of a model's parameters come from.

    Args:
        places: for parameters that are in a file, the file and the name there; all others are drawn.
        seed: of those draws; ranks must agree on it.
    """

    def __init__(self, places: Mapping[str, tuple[Path, str]], *, seed: int) -> None:
        self.seed = seed
        self._places = places

    def fill(
        self, model: nn.Module, part: nn.Module | None = None, *, skip: frozenset[nn.Module] = frozenset()
    ) -> None:
        """Give the parameters of the model, or of a part of it, their values, but not those in modules to `skip`.

        Tied parameters stay tied. What has values is left alone.
        """
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        made: dict[int, nn.Parameter] = {}
        opened: dict[Path, Any] = {}
        with torch.random.fork_rng(devices=[]), contextlib.ExitStack() as stack:

            def read(path: Path, key: str) -> Tensor:
                if path not in opened:
                    opened[path] = stack.enter_context(safe_open(path, framework="pt"))
                values: Tensor = opened[path].get_tensor(key)
                return values

            for layer in _modules_but(model if part is None else part, skip):
                for key, parameter in layer._parameters.items():
                    if parameter is None or not parameter.is_meta:
                        continue
                    if id(parameter) not in made:
                        name = names[id(parameter)]
                        place = self._places.get(name)
                        values = self._draw(model, layer, key, name) if place is None else read(*place)
                        # A copy: what was read may still be the file, which others can write to.
                        values = values.to(parameter.dtype, copy=place is not None)
                        made[id(parameter)] = nn.Parameter(values, parameter.requires_grad)
                    layer._parameters[key] = made[id(parameter)]

    @torch.no_grad()
    def _draw(self, model: nn.Module, layer: nn.Module, key: str, name: str) -> Tensor:
        """A fresh value by the model's own rule, worked out on a copy of the one layer."""
        # Keyed by name, so that ranks agree whatever they filled before.
        torch.default_generator.manual_seed(zlib.crc32(f"{self.seed} {name}".encode()))
        parameter = layer._parameters[key]
        assert parameter is not None
        fresh = _fresh(name, parameter)
        if fresh is not None:
            return fresh
        lone = copy.copy(layer)
        lone._parameters = {
            other_key: None if other is None else nn.Parameter(torch.full(other.shape, math.nan, dtype=other.dtype))
            for other_key, other in layer._parameters.items()
        }
        owner = next(child for child in model.modules() if isinstance(child, PreTrainedModel))
        owner._init_weights(lone)
        drawn = lone._parameters[key]
        assert drawn is not None
        if bool(drawn.isnan().any()):
            raise ConfigError(
                f"{name} of {type(owner).__name__} must have an initialisation that works on one layer, and "
                f"{type(layer).__name__} has none. Build the model outside of model_init_context()."
            )
        return drawn.detach()


def deferred_weights(module: nn.Module) -> DeferredWeights | None:
    """Where a model's weights are to come from, or None if it has them."""
    found = getattr(module, "deferred_weights", None)
    return found if isinstance(found, DeferredWeights) else None


def with_weights(model: nn.Module) -> nn.Module:
    """Give a model that was built without weights all of them, as inference needs it."""
    deferred = deferred_weights(model)
    if deferred is not None:
        deferred.fill(model)
        del model.deferred_weights
    return model


def build_deferred(
    build: Callable[[], _Model], *, weights_of: str | Path | None, options: Iterable[str] = ()
) -> _Model | None:
    """The model without its weights, if they are to come later and can; else None, and the caller loads it whole.

    `weights_of` is the folder with the weights, or None for fresh ones. `options` are what the caller would load with;
    only a dtype and the kind of attention mean the same without weights.
    """
    if not _come_later.get():
        return None
    unknown = set(options) - {"dtype", "attn_implementation", "trust_remote_code"}
    if unknown:
        _warn_whole(weights_of, f"the options {', '.join(sorted(unknown))} need the weights at once")
        return None
    seed = int(torch.randint(2**31, ()))
    with _parameters_on_meta():
        model = build()
    places: dict[str, tuple[Path, str]] = {}
    if weights_of is not None:
        folder = Path(weights_of)
        shapes = _saved_shapes(folder)
        if not shapes:
            _warn_whole(weights_of, "it is no local folder with readable safetensors")
            return None
        places = _find_places(model, shapes)
        lost = [
            name
            for name, parameter in model.named_parameters()
            if name not in places and _fresh(name, parameter) is None
        ]
        if lost:
            _warn_whole(weights_of, f"{len(lost)} parameters have other names or shapes there, such as {lost[0]}")
            return None
    model.deferred_weights = DeferredWeights(places, seed=seed)  # type: ignore[assignment]
    return model


def _warn_whole(weights_of: str | Path | None, reason: str) -> None:
    logger.warning("%s is loaded whole by every rank before it is sharded: %s", weights_of or "a fresh model", reason)


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Take the memory from parameters that this thread registers, at once; buffers keep theirs."""
    original = nn.Module.register_parameter
    thread = threading.get_ident()

    def register(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        # One that is on the meta device already stays the same object, so that tied weights stay tied.
        if param is not None and not param.is_meta and threading.get_ident() == thread:
            param = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
        original(module, name, param)

    nn.Module.register_parameter = register  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]


def _saved_shapes(folder: Path) -> dict[tuple[Path, str], tuple[int, ...]]:
    """Every tensor in the folder's safetensors files, and its shape; empty where they cannot be read."""
    index = folder / "model.safetensors.index.json"
    try:
        if index.is_file():
            files = {folder / name for name in json.loads(index.read_text())["weight_map"].values()}
        else:
            files = {folder / "model.safetensors"}
        head = folder / "value_head.safetensors"
        shapes: dict[tuple[Path, str], tuple[int, ...]] = {}
        for file in sorted(files | ({head} if head.is_file() else set())):
            with safe_open(file, framework="pt") as opened:
                for key in list(opened.keys()):
                    shapes[file, key] = tuple(opened.get_slice(key).get_shape())
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError):
        return {}
    return shapes


def _find_places(model: nn.Module, shapes: Mapping[tuple[Path, str], tuple[int, ...]]) -> dict[str, tuple[Path, str]]:
    """The file and the name there of each parameter that a file has, in the right shape."""
    by_name: dict[str, tuple[Path, str]] = {}
    for file, key in shapes:
        # A critic's head lies in its own file, under the names that it has by itself.
        by_name[f"value_head.{key}" if file.stem == "value_head" else key] = (file, key)
    prefixes = {child.base_model_prefix for child in model.modules() if isinstance(child, PreTrainedModel)}
    places = {}
    for name, parameter in model.named_parameters():
        for candidate in _names_in_files(name, prefixes):
            place = by_name.get(candidate)
            if place is not None and shapes[place] == tuple(parameter.shape):
                places[name] = place
                break
    return places


def _names_in_files(name: str, prefixes: set[str]) -> Iterator[str]:
    """What a parameter of ours may be called in a folder that transformers, or a critic, wrote."""
    plain = plain_name(name)
    child, _, rest = plain.partition(".")
    yield rest if child in ("model", "body") else plain
    for prefix in sorted(prefixes):
        yield f"{prefix}.{rest}"
    if child == "value_head":
        yield from (f"{head}.{rest}" for head in _HEAD_NAMES)


def _fresh(name: str, parameter: Tensor) -> Tensor | None:
    """What a file need not have: a critic's new head and an adapter's B start at zero; A is drawn as peft does."""
    if name.startswith("value_head.") or ".lora_B." in name:
        return torch.zeros(parameter.shape)
    if ".lora_A." in name:
        return nn.init.kaiming_uniform_(torch.empty(parameter.shape), a=math.sqrt(5))
    return None


def _modules_but(module: nn.Module, skip: frozenset[nn.Module]) -> Iterator[nn.Module]:
    """The module and all below it, without those to skip and what is below them."""
    if module in skip:
        return
    yield module
    for child in module.children():
        yield from _modules_but(child, skip)
