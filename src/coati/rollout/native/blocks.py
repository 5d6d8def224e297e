"""A decoder as the native engine sees it: the parts of its blocks, read from transformers modules.

All supported architectures share one description: norms of several kinds, linear layers that are or can be fused,
rotary or learned positions, gated or plain MLPs. Parts that a model does not have are None.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from coati.models.tiles import active_tile, batch_invariant, tiled_linear

SLOT_TILE = 32  # slots per matrix product on a CPU; see `coati.models.tiles`


def tiled(num_slots: int) -> int:
    """Return the number of slots that a CPU computes for `num_slots`: whole tiles."""
    return -(-num_slots // SLOT_TILE) * SLOT_TILE


class FusedLinear:
    """`torch.cat([layer(x) for layer in layers], dim=-1)`, in one product where the layers allow it.

    The weights of the layers are moved once into one matrix, and become views of its rows. So an in-place weight update
    of the model also updates the matrix, and no weight is stored twice. Other layers (LoRA) are called one by one.

    >>> layers = [nn.Linear(4, 2), nn.Linear(4, 3)]
    >>> product(FusedLinear(layers), torch.zeros(1, 4)).shape
    torch.Size([1, 5])
    """

    def __init__(self, layers: Sequence[Any]) -> None:
        self.layers = list(layers)
        self._weight: Tensor | None = None
        self._bias: Tensor | None = None
        self._pointers: list[int] = []

    def matrix(self) -> tuple[Tensor, Tensor | None] | None:
        """Return the weight and bias of all layers in one; None if they cannot be fused."""
        if self.join():
            assert self._weight is not None
            return self._weight, self._bias
        return matrix_of(self.layers[0]) if len(self.layers) == 1 else None

    def join(self) -> bool:
        """Fuse the weights unless they already are; return False for a single layer, or layers that cannot be fused."""
        layers = self.layers
        if len(layers) < 2 or not all(type(layer) is nn.Linear for layer in layers):
            return False
        if len({layer.bias is None for layer in layers}) > 1:
            return False
        if self._pointers != [layer.weight.data_ptr() for layer in layers]:  # first use, or the model was moved
            self._weight = _joined([layer.weight for layer in layers])
            self._bias = None if layers[0].bias is None else _joined([layer.bias for layer in layers])
            self._pointers = [layer.weight.data_ptr() for layer in layers]
        return True


def matrix_of(layer: Any) -> tuple[Tensor, Tensor | None] | None:
    """Return the weight [outputs, inputs] and bias of a layer; None for one that must be called (LoRA)."""
    if isinstance(layer, FusedLinear):
        return layer.matrix()
    if type(layer) is nn.Linear:
        return layer.weight, layer.bias
    return (layer.weight.t(), layer.bias) if type(layer) is Conv1D else None


def product(layer: Any, inputs: Tensor) -> Tensor:
    """Apply a linear layer, with or without adapters, or a `FusedLinear`, to rows [n, inputs]."""
    tile = active_tile() or (SLOT_TILE if inputs.device.type == "cpu" else 0)
    if (matrix := matrix_of(layer)) is not None:
        return tiled_linear(inputs, *matrix, tile=tile) if tile else F.linear(inputs, *matrix)
    parts = []
    for one in layer.layers if isinstance(layer, FusedLinear) else [layer]:
        with batch_invariant(one, inputs, tile=tile or len(inputs)):
            parts.append(one(inputs))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def _joined(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Move parameters into one tensor and make them views of it."""
    whole = torch.cat([parameter.detach() for parameter in parameters])
    parts = torch.split(whole, [len(parameter) for parameter in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.data = part
    return whole


class Block(NamedTuple):
    """One decoder block: attention and MLP."""

    norm: Any
    projections: FusedLinear  # queries, keys and values
    head_norms: tuple[Any, Any] | None  # norms of the query heads and the key heads (Qwen3, Gemma 3)
    rotation: str  # name of its rotary embedding, one of `Body.rotations`
    window: int | None  # number of tokens that attention sees, including the current one; None for all
    output: Any
    output_norm: Any | None  # norm of the attention output (Gemma 3)
    mlp_norm: Any | None  # None if the MLP has the same input as attention (Phi)
    up: FusedLinear
    is_gated: bool  # whether `up` returns gate and up, concatenated
    activation: Any
    down: Any
    down_norm: Any | None

    @property
    def is_like_llama(self) -> bool:
        """Whether it has RMS norms before attention and a gated MLP with SiLU, and nothing besides."""
        others = self.head_norms, self.window, self.output_norm, self.down_norm
        norms = all(hasattr(norm, "variance_epsilon") for norm in (self.norm, self.mlp_norm))
        return norms and others == (None,) * 4 and self.is_gated and is_silu(self.activation)

    @classmethod
    def of(cls, layer: Any, config: Any, *, rotation: str) -> "Block":
        """Read a layer of a model."""
        attention = _any(layer, "self_attn", "attn")
        mlp = _any(layer, "mlp") or layer  # OPT has no module for it
        window = getattr(config, "sliding_window", None) if config.model_type in ("mistral", "phi3") else None
        gate, query_norm = _any(mlp, "gate_proj"), _any(attention, "q_norm", "q_layernorm")
        has_norms_behind = hasattr(layer, "pre_feedforward_layernorm")
        after_attention = _any(layer, "post_attention_layernorm", "ln_2", "final_layer_norm")
        return cls(
            norm=_any(layer, "input_layernorm", "ln_1", "self_attn_layer_norm"),
            projections=_joinable(attention, ("qkv_proj", "c_attn"), ("q_proj", "k_proj", "v_proj")),
            head_norms=None if query_norm is None else (query_norm, _any(attention, "k_norm", "k_layernorm")),
            rotation=rotation,
            window=getattr(attention, "sliding_window", window),
            output=_any(attention, "o_proj", "out_proj", "c_proj", "dense"),
            output_norm=after_attention if has_norms_behind else None,
            mlp_norm=layer.pre_feedforward_layernorm if has_norms_behind else after_attention,
            up=_joinable(mlp, ("gate_up_proj", "fc1", "c_fc"), ("gate_proj", "up_proj")),
            is_gated=gate is not None or hasattr(mlp, "gate_up_proj"),
            activation=_any(mlp, "act_fn", "activation_fn", "act"),
            down=_any(mlp, "down_proj", "fc2", "c_proj"),
            down_norm=layer.post_feedforward_layernorm if has_norms_behind else None,
        )


class Body(NamedTuple):
    """A decoder without its token embedding and output head."""

    positions: Any | None  # learned position embeddings (GPT-2, OPT)
    rotary: Any | None
    rotations: tuple[str, ...]
    """Layer types with different rotary embeddings (Gemma 3), else one empty name for all layers."""
    blocks: list[Block]
    norm: Any
    attention: Any  # attention module of the first layer; all layers have the same head geometry

    @classmethod
    def of(cls, model: Any) -> "Body":
        """Read a causal LM for which `native_engine_problem` returns None."""
        body = _any(model.base_model, "decoder") or model.base_model
        layers, rotary = _any(body, "layers", "h"), _any(body, "rotary_emb")
        kinds = [""] * len(layers)
        if hasattr(rotary, "layer_types"):
            kinds = list(model.config.layer_types)
        return cls(
            positions=_any(body, "wpe", "embed_positions"),
            rotary=rotary,
            rotations=tuple(dict.fromkeys(kinds)),
            blocks=[Block.of(one, model.config, rotation=kind) for one, kind in zip(layers, kinds, strict=True)],
            norm=_any(body, "norm", "final_layernorm", "ln_f", "final_layer_norm"),
            attention=_any(layers[0], "self_attn", "attn"),
        )


def is_silu(activation: nn.Module) -> bool:
    """Return whether this is SiLU, torch's or that of transformers."""
    return isinstance(activation, nn.SiLU) or type(activation).__name__ == "SiLUActivation"


def _any(module: Any, *names: str) -> Any:
    """Return the first of these attributes that a module has; None if it has none."""
    return next((part for name in names if (part := getattr(module, name, None)) is not None), None)


def _joinable(module: Any, joined: Sequence[str], parts: Sequence[str]) -> FusedLinear:
    """Return a projection of a module: one layer with any of these names, or several layers with the same input."""
    whole = _any(module, *joined)
    return FusedLinear([getattr(module, part) for part in parts] if whole is None else [whole])
