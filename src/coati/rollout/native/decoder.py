"""The forward pass of a decoder with a paged KV cache.

It calls the model's own linear layers, so it always uses the current weights, including adapters, and a weight update
affects the next token. Around these layers it does only what the model's definition requires: it builds no masks, grows
no caches, and does not copy key-value heads for grouped queries.

Shapes: n slots, T tokens, H query heads in K groups (key-value heads) of G, D dimensions of a head, L positions.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from coati.errors import ConfigError, GenerateOptionError
from coati.models.actor import unwrap
from coati.models.calls import context_length_of
from coati.models.packed_attention import attend_rows, drop_flash_on_old_gpus
from coati.models.packing import base_of
from coati.models.tiles import is_batch_invariant
from coati.rollout.native import columns
from coati.rollout.native.blocks import Block, Body, product
from coati.rollout.native.cache import PagedCache
from coati.rollout.native.columns import ColumnOperations, Columns, Floats, Integers
from coati.rollout.native.operations import Angles, Attention, Geometry, TritonOperations, operations_for, visible
from coati.rollout.native.prefill import PrefillBatch

# All but cuDNN's, which plans for each new batch shape: 47 ms on the host of an H200.
_PREFILL_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class Decoder:
    """Prefill and decode for one model."""

    def __init__(self, model: nn.Module) -> None:
        base: Any = base_of(unwrap(model))
        config = base.config
        self._context = context_length_of(base)
        self.is_invariant = is_batch_invariant(model)
        self._embedding: Any = base.get_input_embeddings()
        self._embedding_scale: float | None = None
        if config.model_type.startswith("gemma") and not hasattr(self._embedding, "embed_scale"):
            self._embedding_scale = config.hidden_size**0.5  # older transformers: the body scales
        self._body = body = Body.of(base)
        self._head: nn.Module = base.get_output_embeddings()
        self._logit_cap: float | None = getattr(config, "final_logit_softcapping", None)
        # Where the parameters are looked up, because other tensors may take their place.
        self._owners = [(module._parameters, name) for module in base.modules() for name in module._parameters]
        num_kv_heads = int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
        self._geometry = Geometry(
            head_dim=int(body.attention.head_dim),
            num_kv_heads=num_kv_heads,
            group=int(config.num_attention_heads) // num_kv_heads,
            scale=float(body.attention.scaling),
            rotary_dim=self._cos_sin(1, body.rotations[0])[0].shape[-1],
        )
        self.operations = operations_for(self.weight, self._geometry)
        self._columns: ColumnOperations | None = None  # see `join_weights`
        self._addresses: tuple[int, ...] = ()
        self._angles: Angles = {}  # see `_rotation`; with the device and dtype of the weights at `new_cache`
        self._angle_columns: dict[str, Floats] = {}  # the same as columns

    @property
    def _parameters(self) -> list[Tensor]:
        return [parameter for owner, name in self._owners if (parameter := owner.get(name)) is not None]

    @property
    def weight(self) -> Tensor:
        """One of the weights, for its device and dtype."""
        return self._parameters[0]

    @property
    def uses_columns(self) -> bool:
        """Whether decode steps are those of `columns`."""
        dtypes = {(parameter.dtype, parameter.device.type) for parameter in self._parameters}
        is_plain = dtypes in ({(torch.float32, "cpu")}, {(torch.float64, "cpu")})
        is_short = self._context is not None and self._context <= columns.MAX_CONTEXT
        is_small = sum(map(torch.numel, {*self._parameters})) <= columns.MAX_WEIGHTS
        is_rotated = self._geometry.rotary_dim == self._geometry.head_dim
        return is_plain and is_short and is_small and is_rotated and all(one.is_like_llama for one in self._body.blocks)

    def check_length(self, num_tokens: int) -> None:
        """Raise GenerateOptionError for texts longer than the learned positions; a GPU would fail beyond them."""
        if (learned := self._body.positions) is None:
            return
        if num_tokens > (known := len(learned.weight) - getattr(learned, "offset", 0)):
            raise GenerateOptionError(
                f"A prompt and its response must fit in the model's {known} positions, got {num_tokens} tokens. "
                "Use a smaller max_new_tokens, or shorter prompts."
            )

    def join_weights(self) -> tuple[int, ...]:
        """Fuse weights now instead of at first use, and return the addresses of all parameters.

        A captured graph and the operations of columns stay valid as long as these addresses do not change.
        """
        addresses = tuple(parameter.data_ptr() for parameter in self._parameters)
        if addresses != self._addresses:
            for block in self._body.blocks:  # this moves weights
                block.projections.join()
                block.up.join()
            addresses = self._addresses = tuple(parameter.data_ptr() for parameter in self._parameters)
            self._columns = ColumnOperations(self._geometry, self.weight.dtype) if self.uses_columns else None
        return addresses

    def new_cache(self) -> PagedCache:
        """Return a cache without pages, on the model's current device."""
        if self.weight.is_cuda:
            drop_flash_on_old_gpus(self.weight.device)
        self.operations, self._angles, self._addresses = operations_for(self.weight, self._geometry), {}, ()
        if self.weight.is_cuda and self.is_invariant and self.weight.dtype not in (torch.bfloat16, torch.float16):
            raise ConfigError(
                f'rollout.batch_invariant needs model.dtype = "bfloat16" on a GPU, got {self.weight.dtype}. Set '
                "that, or rollout.batch_invariant = false."
            )
        if self.weight.is_cuda and self.is_invariant and not isinstance(self.operations, TritonOperations):
            raise ConfigError(
                "rollout.batch_invariant needs the Triton kernels, which cannot run this model on this GPU (a warning "
                "above says why). Set rollout.batch_invariant = false."
            )
        shape = len(self._body.blocks), self._geometry.num_kv_heads, self._geometry.head_dim
        return PagedCache(*shape, self.weight, are_columns=self.uses_columns)

    @sdpa_kernel(_PREFILL_KERNELS)
    def prefill(self, batch: PrefillBatch, cache: PagedCache, *, num_positions: int) -> Tensor:
        """Prefill texts into the cache; return the logits of each sample's next token, [samples, vocabulary].

        `num_positions` is one past the largest position that a text in the cache can have.
        """
        attend = self._prefill_attention(batch, self._rotation(num_positions))
        embedded = self._embedded(batch.tokens, batch.positions)
        hidden, delta = self._run(self.operations, embedded, attend, cache.layers())  # [T, d] each
        last = batch.starts[1:].long() - 1
        return self._logits(hidden[last], delta[last])[batch.which]

    def decode(self, tokens: Tensor, positions: Tensor, pages: Tensor, cache: PagedCache, num_positions: int) -> Tensor:
        """Append one token to each of n texts; return the logits of the next tokens, [n, vocabulary].

        `tokens` and `positions` are [n], `pages` [n, M] is the page table. `num_positions` is one past the largest
        position, and bounds how much of the cache is read.
        """
        angles = self._rotation(pages.shape[1] * cache.page_size)
        attend = self.operations.attention(positions, pages, cache.page_size, num_positions, angles)
        return self._logits(*self._run(self.operations, self._embedded(tokens, positions), attend, cache.layers()))

    def decode_columns(
        self, tokens: Integers, positions: Integers, used: Integers, cache: PagedCache, num_positions: int
    ) -> Tensor:
        """Do the same for whole tiles of slots if `uses_columns`, with the text of slot i in page i + 1.

        Only the slots `used` write to the cache. `num_positions` is one past their largest position.
        """
        run = self._columns
        assert run is not None, "the model's dtype changed while samples were in progress"
        self._rotation(cache.page_size)
        rows = self._embedded(*map(torch.from_numpy, (tokens, positions)))
        embedded = Columns(rows.t().contiguous())
        with np.errstate(all="ignore"):  # weights may be NaN, which the learner reports
            attend = run.attention(positions, used, num_positions, self._angle_columns)
            hidden, delta = self._run(run, embedded, attend, ((cached,) for cached in cache.columns))
            logits = run.product(self._head, run.add_norm(hidden, delta, self._body.norm)[1])
        return self._capped(logits.tensor.t())

    def _run(self, run: Any, hidden: Any, attend: Any, cached: Iterable[tuple[Any, ...]]) -> tuple[Any, Any]:
        """Run all blocks; return the hidden states before the last addition, and the output that it would add.

        They are rows in a tensor or, with `ColumnOperations`, `Columns`. `cached` is the cache of each layer.
        """
        delta = None
        for block, of_layer in zip(self._body.blocks, cached, strict=True):
            hidden, normed = run.add_norm(hidden, delta, block.norm)
            mixed = run.product(block.output, attend(run.product(block.projections, normed), block, *of_layer))
            if block.output_norm is not None:
                mixed = run.add_norm(mixed, None, block.output_norm)[1]
            if block.mlp_norm is not None:
                hidden, normed = run.add_norm(hidden, mixed, block.mlp_norm)
            activate = run.gated if block.is_gated else run.activated
            activated = activate(run.product(block.up, normed), block.activation)
            delta = run.product(block.down, activated)
            if block.down_norm is not None:
                delta = run.add_norm(delta, None, block.down_norm)[1]
            if block.mlp_norm is None:
                delta = mixed + delta
        return hidden, delta

    def _embedded(self, tokens: Tensor, positions: Tensor) -> Tensor:
        is_plain = type(self._embedding) is nn.Embedding
        hidden: Tensor = self._embedding.weight.index_select(0, tokens) if is_plain else self._embedding(tokens)
        if self._embedding_scale is not None:
            hidden = hidden * torch.tensor(self._embedding_scale, dtype=hidden.dtype)
        if (learned := self._body.positions) is not None:
            hidden = hidden + F.embedding(positions + getattr(learned, "offset", 0), learned.weight)
        return hidden

    def _logits(self, hidden: Tensor, delta: Tensor) -> Tensor:
        return self._capped(product(self._head, self.operations.add_norm(hidden, delta, self._body.norm)[1]))

    def _capped(self, logits: Tensor) -> Tensor:
        return logits if self._logit_cap is None else torch.tanh(logits / self._logit_cap) * self._logit_cap

    def _prefill_attention(self, batch: PrefillBatch, angles: Angles) -> Attention:
        """Return the attention of all layers for one prefill pass."""
        geometry = self._geometry
        split = self.operations.head_split(batch.positions, angles)

        def attend(projected: Tensor, block: Block, keys: Tensor, values: Tensor) -> Tensor:
            queries, new_keys, new_values = split(projected, block)
            keys[batch.pages, :, batch.offsets] = new_keys[batch.sources]
            values[batch.pages, :, batch.offsets] = new_values[batch.sources]
            if batch.num_past:
                return self._attend_with_past(queries, keys, values, batch, block.window)
            options: dict[str, Any] = {"scale": geometry.scale, "window": block.window}
            return attend_rows(queries, new_keys, new_values, batch.starts, batch.lengths, **options).flatten(1)

        return attend

    def _attend_with_past(
        self, queries: Tensor, keys: Tensor, values: Tensor, batch: PrefillBatch, window: int | None
    ) -> Tensor:
        """Compute attention of a single text's last T tokens to the whole text, which is in the cache; [T, H·D]."""
        positions, end = batch.positions, batch.num_past + len(batch.positions)
        keys, values = (
            cached[batch.past].transpose(0, 1).flatten(1, 2)[None, :, :end] for cached in (keys, values)
        )  # [1, K, L, D]
        mixed = F.scaled_dot_product_attention(
            queries.transpose(0, 1).unsqueeze(0),
            keys,
            values,
            attn_mask=visible(positions, end, window),  # [T, L]
            scale=self._geometry.scale,
            enable_gqa=self._geometry.group > 1,
        )
        return mixed[0].transpose(0, 1).flatten(1)

    def _rotation(self, num_positions: int) -> Angles:
        """Return cos and signed sin of every position, [L, D] each, by layer type; unrotated dimensions have cos 1."""
        known = next(iter(self._angles.values()), None)
        if known is None or len(known[0]) < num_positions:
            self._angles = {}
            for kind in self._body.rotations:
                cos, sin = self._cos_sin(num_positions, kind)
                half, rest = sin.shape[-1] // 2, self._geometry.head_dim - sin.shape[-1]
                signed = torch.cat([-sin[:, :half], sin[:, half:]], dim=-1)
                self._angles[kind] = both = F.pad(cos, (0, rest), value=1.0), F.pad(signed, (0, rest))
                if self.uses_columns:
                    self._angle_columns[kind] = torch.cat(both, dim=1).t().contiguous().numpy()
        return self._angles

    def _cos_sin(self, num_positions: int, kind: str) -> tuple[Tensor, Tensor]:
        """Return cos and sin from the model's own rotary embedding, [L, rotary dimensions] each."""
        like, rotary = self.weight, self._body.rotary
        if rotary is None:
            return like.new_zeros(num_positions, 0), like.new_zeros(num_positions, 0)
        positions = torch.arange(num_positions, device=like.device).unsqueeze(0)
        cos, sin = rotary(like[None], positions, *([kind] if kind else []))
        return cos[0], sin[0]


def config_of(model: nn.Module) -> dict[str, Any]:
    """Return what `config.json` of a model contains."""
    base = base_of(unwrap(model))
    config = base.config.to_dict() if hasattr(base, "config") else {}
    return {**config, "architectures": [type(base).__name__]}
