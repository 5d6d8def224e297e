"""The forward pass of a Llama-shaped decoder over a cache of slots.

It calls the model's own linear layers, so it computes with the weights as they are at that moment: adapters count, and
a weight update is seen by the next token. Around them it does no more than the model's definition asks for: no masks
are built, no caches are grown, and grouped queries read their key-value heads as they lie in memory.

Shapes: N slots, T tokens of each, H query heads in K groups (key-value heads) of G, D dimensions of a head, L
positions.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from coati.models.actor import unwrap
from coati.models.packing import base_of
from coati.models.tiles import same_in_any_company, tiled_linear
from coati.rollout.native.operations import Geometry, operations_for, rms_norm, split_heads

# Slots that are computed together on a CPU, where rows are multiplied so many at a time; see `coati.models.tiles`.
SLOT_TILE = 32
# Any but cuDNN's, which plans for each new shape of a batch: 47 ms on the host of an H200.
_PREFILL_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def enlarged(tensor: Tensor, *shape: int) -> Tensor:
    """A tensor of this shape with the old one in its corner, and zeros elsewhere."""
    larger = tensor.new_zeros(shape)
    larger[tuple(map(slice, tensor.shape))] = tensor
    return larger


@dataclasses.dataclass
class SlotCache:
    """Keys and values of every layer, [N, K, L, D] each."""

    keys: list[Tensor]
    values: list[Tensor]

    @property
    def num_positions(self) -> int:
        """L."""
        return int(self.keys[0].shape[2])

    def enlarge(self, num_slots: int, num_positions: int) -> None:
        """Make room for more slots and positions, a layer at a time."""
        for tensors in (self.keys, self.values):
            for index, (_, num_heads, _, head_dim) in enumerate([tensor.shape for tensor in tensors]):
                tensors[index] = enlarged(tensors[index], num_slots, num_heads, num_positions, head_dim)


class FusedLinear:
    """`torch.cat([layer(x) for layer in layers], dim=-1)`, in one product where the layers allow it.

    The layers' weights are moved, once, into one matrix of which each is a block of rows. So a weight update that is
    written into the model is written into the matrix, and nothing is held twice. Layers that are more than a matrix
    (LoRA adapters) are called one by one.

    >>> layers = [nn.Linear(4, 2), nn.Linear(4, 3)]
    >>> FusedLinear(layers)(torch.zeros(1, 4)).shape
    torch.Size([1, 5])
    """

    def __init__(self, layers: Sequence[Any]) -> None:
        self._layers = list(layers)
        self._weight: Tensor | None = None
        self._bias: Tensor | None = None
        self._pointers: tuple[int, ...] = ()

    def __call__(self, inputs: Tensor) -> Tensor:
        """Outputs of all layers, side by side."""
        if not self.join():
            return torch.cat([_product(layer, inputs) for layer in self._layers], dim=-1)
        assert self._weight is not None
        return _linear(inputs, self._weight, self._bias)

    def join(self) -> bool:
        """Join the weights, unless they are; False if these layers cannot be joined."""
        if not self._is_plain():
            return False
        if self._pointers != self._addresses():  # first use, or the model was moved or loaded again
            self._join()
        return True

    def _is_plain(self) -> bool:
        has_bias = self._layers[0].bias is not None if type(self._layers[0]) is nn.Linear else False
        return all(type(layer) is nn.Linear and (layer.bias is not None) == has_bias for layer in self._layers)

    def _addresses(self) -> tuple[int, ...]:
        return tuple(layer.weight.data_ptr() for layer in self._layers)

    @torch.no_grad()
    def _join(self) -> None:
        self._weight = _joined([layer.weight for layer in self._layers])
        has_bias = self._layers[0].bias is not None
        self._bias = _joined([layer.bias for layer in self._layers]) if has_bias else None
        self._pointers = self._addresses()


def _product(layer: Any, inputs: Tensor) -> Tensor:
    """What a linear layer, with adapters or without, makes of its inputs."""
    if type(layer) is nn.Linear:
        return _linear(inputs, layer.weight, layer.bias)
    with same_in_any_company(layer, inputs, tile=SLOT_TILE):
        result: Tensor = layer(inputs)
    return result


def _linear(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if inputs.device.type == "cpu":
        return tiled_linear(inputs, weight, bias, tile=SLOT_TILE)
    return F.linear(inputs, weight, bias)


def _joined(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Move parameters into one tensor, of which they are parts from then on."""
    whole = torch.cat([parameter.detach() for parameter in parameters])
    for parameter, part in zip(
        parameters, torch.split(whole, [len(parameter) for parameter in parameters]), strict=True
    ):
        parameter.data = part
    return whole


class _Layer(NamedTuple):
    """A layer of the model, with the products of one input joined."""

    module: Any
    projections: FusedLinear
    gate_and_up: FusedLinear

    @classmethod
    def of(cls, module: Any) -> "_Layer":
        attention, mlp = module.self_attn, module.mlp
        return cls(
            module,
            FusedLinear([attention.q_proj, attention.k_proj, attention.v_proj]),
            FusedLinear([mlp.gate_proj, mlp.up_proj]),
        )


class Decoder:
    """Prefill and decode for one model."""

    def __init__(self, model: nn.Module) -> None:
        base: Any = base_of(unwrap(model))
        config = base.config
        self._embedding: nn.Module = base.get_input_embeddings()
        self._layers = [_Layer.of(module) for module in base.model.layers]
        self._final_norm: Any = base.model.norm
        self._head: nn.Module = base.get_output_embeddings()
        self._rotary: Any = base.model.rotary_emb
        attention = base.model.layers[0].self_attn
        num_kv_heads = int(config.num_key_value_heads)
        self._geometry = Geometry(
            head_dim=int(attention.head_dim),
            num_kv_heads=num_kv_heads,
            group=int(config.num_attention_heads) // num_kv_heads,
            scale=float(attention.scaling),
        )
        self.operations = operations_for(self.weight, self._geometry)
        self._parameters = list(base.parameters())
        self._angles: tuple[Tensor, Tensor] | None = None  # [L, D] each: see `_rotation`

    @property
    def weight(self) -> Tensor:
        """Any of the weights, for its device and dtype."""
        weight: Tensor = self._final_norm.weight
        return weight

    def join_weights(self) -> tuple[int, ...]:
        """Put weights that are multiplied together side by side, now and not in the first use; where they lie then.

        A recorded graph reads the memory that it was recorded with. It is good while these addresses stay.
        """
        for layer in self._layers:
            layer.projections.join()
            layer.gate_and_up.join()
        return tuple(parameter.data_ptr() for parameter in self._parameters)

    def new_cache(self, num_slots: int, num_positions: int) -> SlotCache:
        """Room for so many slots of so many positions, where the model is now."""
        self.operations = operations_for(self.weight, self._geometry)
        shape = (num_slots, self._geometry.num_kv_heads, num_positions, self._geometry.head_dim)
        like = self.weight
        return SlotCache(
            keys=[torch.zeros(shape, dtype=like.dtype, device=like.device) for _ in self._layers],
            values=[torch.zeros(shape, dtype=like.dtype, device=like.device) for _ in self._layers],
        )

    @sdpa_kernel(_PREFILL_KERNELS)
    def prefill(
        self, tokens: Tensor, lengths: Tensor, cache: SlotCache, slots: Tensor, rows: Tensor, *, past: int = 0
    ) -> Tensor:
        """Read prompts and fill slots with them; logits of the token after each prompt, [n, vocabulary].

        `tokens` [U, T] are different prompts, padded on the right, `lengths` [U]; slot `slots[i]` gets prompt
        `rows[i]`. Several slots may share a prompt, which is then computed once. What padding leaves in a slot lies
        behind the prompt, where nothing attends before it is written over. With `past`, a single text is read into a
        single slot, behind so many tokens that it holds.
        """
        num_prompts, width = tokens.shape
        end = past + width
        cos, sin = self._rotation(cache.num_positions)
        cos, sin = cos[past:end, None], sin[past:end, None]  # [T, 1, D]
        mask = None
        if past:
            places = torch.arange(end, device=tokens.device)
            mask = places <= places[past:, None]  # [T, L]
        hidden = self._embedding(tokens)  # [U, T, d]
        for index, layer in enumerate(self._layers):
            projected = layer.projections(rms_norm(layer.module.input_layernorm, hidden))
            heads = split_heads(projected, layer.module.self_attn, self._geometry, cos, sin)  # [U, T, H or K, D]
            queries, keys, values = (part.transpose(1, 2) for part in heads)
            cache.keys[index][slots, :, past:end] = keys[rows]
            cache.values[index][slots, :, past:end] = values[rows]
            if past:
                keys, values = (cached[index][slots, :, :end] for cached in (cache.keys, cache.values))
            # A prompt ends before its padding, so causality is all the masking there is.
            mixed = F.scaled_dot_product_attention(
                queries,
                keys,
                values,
                attn_mask=mask,
                is_causal=mask is None,
                scale=self._geometry.scale,
                enable_gqa=self._geometry.group > 1,
            )
            hidden = hidden + _product(
                layer.module.self_attn.o_proj, mixed.transpose(1, 2).reshape(num_prompts, width, -1)
            )
            both = layer.gate_and_up(rms_norm(layer.module.post_attention_layernorm, hidden))
            hidden = hidden + _product(layer.module.mlp.down_proj, self.operations.gated(both, layer.module.mlp.act_fn))
        last = hidden[torch.arange(num_prompts, device=tokens.device), lengths - 1]
        logits: Tensor = _product(self._head, rms_norm(self._final_norm, last))
        return logits[rows]

    def decode(self, tokens: Tensor, positions: Tensor, cache: SlotCache, num_positions: int) -> Tensor:
        """Append one token to each of the first n slots; logits of the next, [n, vocabulary].

        `tokens` and `positions` are [n]; `num_positions` is one past the largest position, so that no more of the
        cache is read than holds anything.
        """
        run = self.operations
        attend = run.attention(positions, num_positions, self._rotation(cache.num_positions))
        hidden = self._embedding(tokens)  # [n, d]
        delta = None  # what the last product adds to it
        for index, layer in enumerate(self._layers):
            attention, mlp = layer.module.self_attn, layer.module.mlp
            hidden, normed = run.add_norm(hidden, delta, layer.module.input_layernorm)
            mixed = attend(layer.projections(normed), attention, cache.keys[index], cache.values[index])
            hidden, normed = run.add_norm(
                hidden, _product(attention.o_proj, mixed), layer.module.post_attention_layernorm
            )
            delta = _product(mlp.down_proj, run.gated(layer.gate_and_up(normed), mlp.act_fn))
        logits: Tensor = _product(self._head, run.add_norm(hidden, delta, self._final_norm)[1])
        return logits

    def _rotation(self, num_positions: int) -> tuple[Tensor, Tensor]:
        """cos and signed sin of every position, [L, D] each, from the model's own rotary embedding."""
        like = self.weight
        if self._angles is None or self._angles[0].shape[0] < num_positions or self._angles[0].device != like.device:
            positions = torch.arange(num_positions, device=like.device).unsqueeze(0)
            cos, sin = self._rotary(like[None, None], positions)
            half = sin.shape[-1] // 2
            self._angles = (cos[0], torch.cat([-sin[0, :, :half], sin[0, :, half:]], dim=-1))
        return self._angles
