"""LoRA through peft: adds adapters to a model, and merges received adapters into plain weights."""

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from coati.config import LoRASettings
from coati.errors import ConfigError, WeightUpdateError

_ADAPTER_NAME = re.compile(r"^(?P<layer>.+)\.lora_(?P<matrix>[AB])\.(?P<adapter>[^.]+)\.weight$")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerLoRA:
    """Adapter settings of a layer, which are sent along with its A and B."""

    scale: float
    is_transposed: bool = False  # the layer stores its weight as [in, out], like GPT-2's


def add_lora(model: PreTrainedModel | nn.Module, settings: LoRASettings | None, *, task: str) -> Any:
    """Add peft adapters to a model and freeze the rest; without settings, or with rank 0, return it unchanged."""
    if settings is None or not settings.rank:
        return model
    from peft import LoraConfig, get_peft_model

    names = [f".{name}" for name, _ in model.named_modules()]
    missing = [target for target in settings.target_modules if not any(name.endswith(f".{target}") for name in names)]
    if missing and task == "CAUSAL_LM":  # a critic has the layers of the policy's body, but not its head
        raise ConfigError(
            f"lora.target_modules must name layers of the model, got {missing[0]!r}. Leave the list empty to adapt all "
            "linear layers except the output head."
        )
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        target_modules=list(settings.target_modules) or "all-linear",
        task_type=task,
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
    )
    return get_peft_model(model, config)


def plain_name(name: str) -> str:
    """Return the name that a weight has in the same model without peft.

    >>> plain_name("body.base_model.model.layers.0.q_proj.base_layer.weight")
    'body.layers.0.q_proj.weight'
    """
    return name.replace("base_model.model.", "", 1).replace(".base_layer.", ".")


def has_adapters(names: Iterable[str]) -> bool:
    """Return whether any of these weight names belongs to an adapter."""
    return any(_ADAPTER_NAME.match(name) for name in names)


def as_layer_lora(value: Any) -> LayerLoRA:
    """Convert adapter settings to `LayerLoRA`: an instance of it, or a mapping or object with peft's names.

    >>> as_layer_lora({"r": 2, "lora_alpha": 8}).scale
    4.0
    """
    if isinstance(value, LayerLoRA):
        return value
    given = value if isinstance(value, Mapping) else getattr(value, "__dict__", {})
    rank, alpha = given.get("r"), given.get("lora_alpha", 1.0)
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, int | float):
        raise WeightUpdateError(
            f"LoRA settings of a layer must have a rank (r) of at least 1 and a numeric lora_alpha, got {value!r}."
        )
    return LayerLoRA(scale=alpha / rank, is_transposed=bool(given.get("fan_in_fan_out", False)))


class LoRAConstructor:
    """Builds the weights of a model without adapters from the state dict of a model with adapters.

    A weight is `W = W₀ + scale·B·A`, always from the same W₀, so errors do not accumulate over updates.

    >>> base = {"layer.weight": torch.zeros(2, 2)}
    >>> adapters = {"layer.lora_A.default.weight": torch.ones(1, 2), "layer.lora_B.default.weight": torch.ones(2, 1)}
    >>> settings = {"layer": LayerLoRA(scale=2.0)}
    >>> LoRAConstructor().reconstruct(adapters, settings, base.get)["layer.weight"].tolist()
    [[2.0, 2.0], [2.0, 2.0]]
    """

    def __init__(self) -> None:
        self._base: dict[str, Tensor] = {}  # W₀ of layers that have had an adapter
        self._staged: dict[str, Tensor] = {}  # W₀ from the last update, until it is accepted

    @staticmethod
    def extract_lora_config(model: nn.Module) -> dict[str, LayerLoRA]:
        """Return the settings of every adapted layer, by the layer's plain name; empty without adapters."""
        found: dict[str, LayerLoRA] = {}
        for name, module in model.named_modules():
            adapters = getattr(module, "lora_A", None)
            if isinstance(adapters, nn.ModuleDict) and adapters:
                scale, is_transposed = module.scaling[next(iter(adapters))], getattr(module, "fan_in_fan_out", False)
                layer = plain_name(f"{name}.").removesuffix(".")
                found[layer] = LayerLoRA(scale=float(scale), is_transposed=bool(is_transposed))
        return found

    @torch.no_grad()
    def reconstruct(
        self,
        state_dict: Mapping[str, Tensor],
        lora_config_dict: Mapping[str, LayerLoRA],
        own_weight: Callable[[str], Tensor | None],
    ) -> dict[str, Tensor]:
        """Return weights under plain names: adapted layers as W₀ + scale·B·A, everything else unchanged.

        W₀ is the base weight in this update, or in an earlier update that `adopt` accepted, else the receiver's own.
        """
        is_adapted = has_adapters(state_dict)
        halves: dict[str, dict[str, Tensor]] = {}
        weights: dict[str, Tensor] = {}
        for name, tensor in state_dict.items():
            match = _ADAPTER_NAME.match(name)
            if match is None:
                weights[plain_name(name) if is_adapted else name] = tensor
            else:
                halves.setdefault(plain_name(f"{match['layer']}."), {})[match["matrix"]] = tensor
        known = self._base.keys() | {f"{dotted}weight" for dotted in halves}
        self._staged = {name: weights[name].detach().clone() for name in known & weights.keys()}
        for dotted, pair in halves.items():
            layer, weight_name = dotted.removesuffix("."), f"{dotted}weight"
            settings = lora_config_dict.get(layer)
            if settings is None or set(pair) != {"A", "B"}:
                raise WeightUpdateError(
                    f"the adapter of layer {layer!r} is incomplete: it needs A, B and its settings, got "
                    f"{', '.join(sorted(pair))} {'without' if settings is None else 'with'} settings. Update rejected."
                )
            base = self._staged.get(weight_name, self._base.get(weight_name))
            if base is None and (own := own_weight(weight_name)) is not None:
                base = self._base[weight_name] = own.detach().clone()
            weights[weight_name] = _adapted(weight_name, base, pair["A"], pair["B"], settings)
        return weights

    def adopt(self) -> None:
        """Accept the last update: base weights that it contained are W₀ from now on."""
        self._base.update(self._staged)
        self._staged = {}


def _adapted(name: str, base: Tensor | None, a: Tensor, b: Tensor, settings: LayerLoRA) -> Tensor:
    delta = settings.scale * (b.float() @ a.float())
    if settings.is_transposed:
        delta = delta.T
    if base is None or delta.shape != base.shape:
        found = "this maker's model does not have" if base is None else f"has the shape {list(base.shape)} here"
        raise WeightUpdateError(
            f"received an adapter of shape {list(delta.shape)} for {name!r}, which {found}. Update rejected; use the "
            "same model on both sides."
        )
    return (base.float() + delta.to(base.device)).to(base.dtype)
