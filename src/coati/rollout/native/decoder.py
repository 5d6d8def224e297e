"""The forward pass of a Llama-shaped decoder over a paged cache.

It calls the model's own linear layers, so it computes with the weights as they are at that moment: adapters count, and
a weight update is seen by the next token. Around them it does no more than the model's definition asks for: no masks
are built, no caches are grown, and grouped queries read their key-value heads as they lie in memory.

Shapes: n slots, T tokens, H query heads in K groups (key-value heads) of G, D dimensions of a head, L positions.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from coati.models.actor import unwrap
from coati.models.packed_attention import attend_rows, drop_flash_on_old_gpus
from coati.models.packing import base_of
from coati.models.tiles import same_in_any_company, tiled_linear
from coati.rollout.native.cache import PagedCache
from coati.rollout.native.operations import Geometry, operations_for, rms_norm, split_heads
from coati.rollout.native.reading import Reading

# Slots that are computed together on a CPU, where rows are multiplied so many at a time; see `coati.models.tiles`.
SLOT_TILE = 32
# Any but cuDNN's, which plans for each new shape of a batch: 47 ms on the host of an H200.
_PREFILL_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


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

    def new_cache(self) -> PagedCache:
        """A cache without pages, where the model is now."""
        if self.weight.is_cuda:
            drop_flash_on_old_gpus(self.weight.device)
        self.operations = operations_for(self.weight, self._geometry)
        return PagedCache(len(self._layers), self._geometry.num_kv_heads, self._geometry.head_dim, self.weight)

    @sdpa_kernel(_PREFILL_KERNELS)
    def prefill(self, reading: Reading, cache: PagedCache, *, num_positions: int) -> Tensor:
        """Read texts into the cache; logits of the token after the text of each sample, [samples, vocabulary].

        `num_positions` is one past the largest position that a text in the cache can have.
        """
        cos, sin = (table[reading.positions].unsqueeze(1) for table in self._rotation(num_positions))  # [T, 1, D]
        hidden = self._embedding(reading.tokens)  # [T, d]
        for index, layer in enumerate(self._layers):
            projected = layer.projections(rms_norm(layer.module.input_layernorm, hidden))
            queries, keys, values = split_heads(projected, layer.module.self_attn, self._geometry, cos, sin)
            cache.keys[index][reading.pages, :, reading.offsets] = keys[reading.sources]
            cache.values[index][reading.pages, :, reading.offsets] = values[reading.sources]
            if reading.num_past:
                mixed = self._attend_with_past(queries, cache.keys[index], cache.values[index], reading)
            else:
                mixed = attend_rows(queries, keys, values, reading.starts, reading.lengths, scale=self._geometry.scale)
            hidden = hidden + _product(layer.module.self_attn.o_proj, mixed.flatten(1))
            both = layer.gate_and_up(rms_norm(layer.module.post_attention_layernorm, hidden))
            hidden = hidden + _product(layer.module.mlp.down_proj, self.operations.gated(both, layer.module.mlp.act_fn))
        last = hidden[reading.starts[1:].long() - 1]
        logits: Tensor = _product(self._head, rms_norm(self._final_norm, last))
        return logits[reading.which]

    def _attend_with_past(self, queries: Tensor, keys: Tensor, values: Tensor, reading: Reading) -> Tensor:
        """Attention of a single text's last T tokens to all of it, which the cache holds by now; [T, H, D]."""
        positions, end = reading.positions, reading.num_past + len(reading.positions)
        keys, values = (
            cached[reading.past].transpose(0, 1).flatten(1, 2)[None, :, :end] for cached in (keys, values)
        )  # [1, K, L, D]
        mixed = F.scaled_dot_product_attention(
            queries.transpose(0, 1).unsqueeze(0),
            keys,
            values,
            attn_mask=torch.arange(end, device=positions.device) <= positions[:, None],  # [T, L]
            scale=self._geometry.scale,
            enable_gqa=self._geometry.group > 1,
        )
        return mixed[0].transpose(0, 1)

    def decode(self, tokens: Tensor, positions: Tensor, pages: Tensor, cache: PagedCache, num_positions: int) -> Tensor:
        """Append one token to each of n texts; logits of the next, [n, vocabulary].

        `tokens` and `positions` are [n], `pages` [n, M] where each text is; `num_positions` is one past the largest
        position, so that no more of the cache is read than holds anything.
        """
        run = self.operations
        angles = self._rotation(pages.shape[1] * cache.page_size)
        attend = run.attention(positions, pages, cache.page_size, num_positions, angles)
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


def config_of(model: nn.Module) -> dict[str, Any]:
    """What `config.json` of a model holds."""
    base = base_of(unwrap(model))
    config = base.config.to_dict() if hasattr(base, "config") else {}
    return {**config, "architectures": [type(base).__name__]}
