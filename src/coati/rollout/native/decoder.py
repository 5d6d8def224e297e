"""The forward pass of a Llama-shaped decoder over a cache of slots.

It calls the model's own linear layers, so it computes with the weights as they are at that moment: adapters count, and
a weight update is seen by the next token. Around them it does no more than the model's definition asks for: no masks
are built, no caches are grown, and grouped queries read their key-value heads as they lie in memory.

Shapes: N slots, T tokens of each, H query heads in K groups (key-value heads) of G, D dimensions of a head, L
positions.
"""

import dataclasses
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from coati.models.actor import unwrap
from coati.rollout.native.fused import FusedLinear

# Rotary embeddings that depend on nothing but the position. Others change with the length of the text.
_STATIC_ROPE = ("default", "linear", "llama3")
_SHAPES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "MistralForCausalLM")


def unsupported_reason(model: nn.Module) -> str:
    """Why the native engine cannot run this model; empty if it can."""
    base = _base_of(model)
    name = type(base).__name__
    if name not in _SHAPES:
        return f"{name} is not one of {', '.join(_SHAPES)}"
    config = base.config
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope not in _STATIC_ROPE:
        return (
            f"its rotary embedding is {rope!r}, and only {', '.join(_STATIC_ROPE)} depend on nothing but the position"
        )
    if any(kind != "full_attention" for kind in getattr(config, "layer_types", None) or ()):
        return "some of its layers attend to a sliding window only"
    window = getattr(config, "sliding_window", None)
    if name == "MistralForCausalLM" and window is not None and window < config.max_position_embeddings:
        return f"it attends to a sliding window of {window} tokens only"
    if getattr(config, "pretraining_tp", 1) != 1:
        return "its layers are split (pretraining_tp)"
    return ""


@dataclasses.dataclass
class SlotCache:
    """Keys and values of every layer, [N, K, L, D] each, allocated once."""

    keys: list[Tensor]
    values: list[Tensor]

    @property
    def num_slots(self) -> int:
        """N."""
        return int(self.keys[0].shape[0])

    @property
    def num_positions(self) -> int:
        """L."""
        return int(self.keys[0].shape[2])


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
        base = _base_of(model)
        config = base.config
        self._embedding: nn.Module = base.get_input_embeddings()
        self._layers = [_Layer.of(module) for module in base.model.layers]
        self._final_norm: Any = base.model.norm
        self._head: nn.Module = base.get_output_embeddings()
        self._rotary: Any = base.model.rotary_emb
        attention = base.model.layers[0].self_attn
        self._head_dim = int(attention.head_dim)
        self._num_kv_heads = int(config.num_key_value_heads)
        self._group = int(config.num_attention_heads) // self._num_kv_heads
        self._scale = float(attention.scaling)
        self._parameters = list(base.parameters())
        self._angles: tuple[Tensor, Tensor] | None = None  # [L, D] each: see `_rotated`

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
        """Room for so many slots of so many positions."""
        shape = (num_slots, self._num_kv_heads, num_positions, self._head_dim)
        like = self.weight
        return SlotCache(
            keys=[torch.zeros(shape, dtype=like.dtype, device=like.device) for _ in self._layers],
            values=[torch.zeros(shape, dtype=like.dtype, device=like.device) for _ in self._layers],
        )

    def prefill(self, tokens: Tensor, lengths: Tensor, cache: SlotCache, slots: Tensor, rows: Tensor) -> Tensor:
        """Read prompts and fill slots with them; logits of the token after each prompt, [n, vocabulary].

        `tokens` [U, T] are different prompts, padded on the right, `lengths` [U]; slot `slots[i]` gets prompt
        `rows[i]`. Several slots may share a prompt, which is then computed once. What padding leaves in a slot lies
        behind the prompt, where nothing attends before it is written over.
        """
        num_prompts, width = tokens.shape
        cos, sin = self._rotation(cache.num_positions)
        cos, sin = cos[:width, None], sin[:width, None]  # [T, 1, D]
        hidden = self._embedding(tokens)  # [U, T, d]
        for index, layer in enumerate(self._layers):
            heads = self._heads(layer, hidden, cos, sin)  # [U, T, H or K, D]
            queries, keys, values = (part.transpose(1, 2) for part in heads)
            cache.keys[index][slots, :, :width] = keys[rows]
            cache.values[index][slots, :, :width] = values[rows]
            # A prompt ends before its padding, so causality is all the masking there is.
            mixed = F.scaled_dot_product_attention(
                queries, keys, values, is_causal=True, scale=self._scale, enable_gqa=self._group > 1
            )
            hidden = self._rest_of(layer, hidden, mixed.transpose(1, 2).reshape(num_prompts, width, -1))
        last = hidden[torch.arange(num_prompts, device=tokens.device), lengths - 1]
        return self._logits(last)[rows]

    def decode(self, tokens: Tensor, positions: Tensor, cache: SlotCache, num_positions: int) -> Tensor:
        """Append one token to each of the first n slots; logits of the next, [n, vocabulary].

        `tokens` and `positions` are [n]; `num_positions` is one past the largest position, so that no more of the
        cache is read than holds anything.
        """
        count = len(tokens)
        cos, sin = (table[positions].unsqueeze(1) for table in self._rotation(cache.num_positions))  # [n, 1, D]
        slots = torch.arange(count, device=tokens.device)
        visible = torch.arange(num_positions, device=tokens.device) <= positions.unsqueeze(1)  # [n, L]
        mask = visible[:, None, None]
        hidden = self._embedding(tokens)  # [n, d]
        for index, layer in enumerate(self._layers):
            queries, keys, values = self._heads(layer, hidden, cos, sin)  # [n, H or K, D]
            cache.keys[index][slots, :, positions] = keys
            cache.values[index][slots, :, positions] = values
            # The G queries of a group stand where several tokens of one head would, so keys are read once and as
            # they are: no copies of them for each query head.
            mixed = F.scaled_dot_product_attention(
                queries.reshape(count, self._num_kv_heads, self._group, self._head_dim),
                cache.keys[index][:count, :, :num_positions],
                cache.values[index][:count, :, :num_positions],
                attn_mask=mask,
                scale=self._scale,
            )  # [n, K, G, D]
            hidden = self._rest_of(layer, hidden, mixed.reshape(count, -1))
        return self._logits(hidden)

    def _heads(self, layer: "_Layer", hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [..., H, D], keys and values [..., K, D] of a layer, rotated."""
        normed = _rms_norm(layer.module.input_layernorm, hidden)
        heads = layer.projections(normed).view(*hidden.shape[:-1], -1, self._head_dim)  # [..., H + 2K, D]
        num_rotated = heads.shape[-2] - self._num_kv_heads
        values = heads[..., num_rotated:, :]
        rotated = _rotated(self._normed(layer.module.self_attn, heads[..., :num_rotated, :]), cos, sin)
        num_queries = num_rotated - self._num_kv_heads
        return rotated[..., :num_queries, :], rotated[..., num_queries:, :], values

    def _normed(self, attention: Any, heads: Tensor) -> Tensor:
        """Qwen3 normalises each head, queries and keys with weights of their own; the others do not."""
        if not hasattr(attention, "q_norm"):
            return heads
        queries, keys = torch.split(heads, [heads.shape[-2] - self._num_kv_heads, self._num_kv_heads], dim=-2)
        return torch.cat([_rms_norm(attention.q_norm, queries), _rms_norm(attention.k_norm, keys)], dim=-2)

    def _rest_of(self, layer: "_Layer", hidden: Tensor, mixed: Tensor) -> Tensor:
        """The layer after its attention: output projection, feed-forward, and the two residuals."""
        hidden = hidden + layer.module.self_attn.o_proj(mixed)
        mlp = layer.module.mlp
        gate, up = layer.gate_and_up(_rms_norm(layer.module.post_attention_layernorm, hidden)).chunk(2, dim=-1)
        result: Tensor = hidden + mlp.down_proj(mlp.act_fn(gate) * up)
        return result

    def _logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self._head(_rms_norm(self._final_norm, hidden))
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


def _rms_norm(norm: Any, hidden: Tensor) -> Tensor:
    return F.rms_norm(hidden, (hidden.shape[-1],), norm.weight, norm.variance_epsilon)


def _rotated(heads: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """Rotary positions: each half of a head times cos, plus the other half times sin, minus in the first half."""
    return torch.addcmul(heads * cos, heads.roll(heads.shape[-1] // 2, dims=-1), signed_sin)


def _base_of(model: nn.Module) -> Any:
    inner: Any = unwrap(model)
    return inner.get_base_model() if hasattr(inner, "get_base_model") else inner
