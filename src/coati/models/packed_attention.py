"""Attention over rows packed end to end in one sequence: each token attends to the tokens before it in its own row.

Registered with transformers as `coati_packed`, which is `sdpa` unless a call passes `cu_seq_lens_q`, the row starts.

    CUDA, half precision    torch's variable-length flash kernel, where torch has one
    everything else         batches of rows of similar length, one call for each power of two of the length

Tokens that rows share are computed once (`coati.models.packing`) and expanded to whole rows here. In the second case
rows are padded on the right, where the causal mask hides the padding.
"""

import functools
import inspect
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from coati.models.tiles import active_tile, padded_length

PACKED_ATTENTION = "coati_packed"  # value of `config._attn_implementation` for models that can take packed rows

_LARGEST_FLASH_HEAD = 256
_MIN_BUCKET_LENGTH = 64


def packed_attention_forward(
    module: nn.Module,
    query: Tensor,  # [1, H, T, D]
    key: Tensor,  # [1, K, T, D]
    value: Tensor,  # [1, K, T, D]
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,  # [rows + 1] int32
    max_length_q: int | None = None,
    row_owners: Tensor | None = None,  # [T] if rows share tokens: index of each computed token among all N
    row_slots: Tensor | None = None,  # [N] index of each token among the T computed ones
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Implement the interface of transformers' attention functions; the result is `[1, T, H, D]`."""
    if cu_seq_lens_q is None:
        kwargs |= {"dropout": dropout, "scaling": scaling, "sliding_window": sliding_window}
        plain: Tensor = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)[0]
        return plain, None
    device_type = query.device.type
    dtype = query.dtype
    if torch.is_autocast_enabled(device_type) and dtype != torch.float64:
        # Under autocast, rotary embeddings return float32 but values do not; torch's own attention casts both down.
        dtype = torch.get_autocast_dtype(device_type)
    heads = _Heads(*(part[0].transpose(0, 1).to(dtype) for part in (query, key, value)))  # [T, H or K, D]
    if row_owners is not None and row_slots is not None:
        # Every row needs the shared keys and values. A shared query is used in one row and is zero in the others.
        keys, values = (take_repeated(part, row_slots) for part in (heads.key, heads.value))
        heads = _Heads(scatter(heads.query, row_owners, len(row_slots)), keys, values)  # [N, H or K, D]
    if _FLASH is not None and not dropout and _supports_flash(heads.query):
        assert max_length_q is not None
        mixed = _FLASH(heads, cu_seq_lens_q, max_length_q, scaling, sliding_window)
    else:
        mixed = _by_starts(heads, cu_seq_lens_q, scale=scaling, window=sliding_window, dropout=dropout)
    if row_owners is not None:
        mixed = take(mixed, row_owners)
    return mixed.unsqueeze(0), None


def attend_rows(
    query: Tensor,  # [T, H, D]
    key: Tensor,  # [T, K, D]
    value: Tensor,  # [T, K, D]
    starts: Tensor,  # [rows + 1] int32
    lengths: tuple[int, ...],
    *,
    scale: float | None,
    window: int | None = None,
) -> Tensor:
    """Compute attention within each row, [T, H, D], without gradients; batch-invariant on a CPU."""
    heads = _Heads(query, key, value)
    if _FLASH is not None and _supports_flash(query):
        return _FLASH(heads, starts, max(lengths), scale, window)
    is_tiled = query.device.type == "cpu" or active_tile() > 0
    return _by_length(heads, lengths, scale=scale, window=window, is_tiled=is_tiled)


def _supports_flash(query: Tensor) -> bool:
    is_half = query.dtype in (torch.float16, torch.bfloat16)
    return query.device.type == "cuda" and is_half and query.shape[-1] <= _LARGEST_FLASH_HEAD


class _Heads(NamedTuple):
    """Query, key and value heads of T tokens, packed end to end."""

    query: Tensor  # [T, H, D]
    key: Tensor  # [T, K, D]
    value: Tensor  # [T, K, D]


_Flash = Callable[[_Heads, Tensor, int, float | None, int | None], Tensor]


def _flash_kernel() -> _Flash | None:
    """Return torch's variable-length attention, whose arguments differ between releases; None if it lacks ours."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    known = inspect.signature(varlen_attn).parameters
    if not {"window_size", "scale"} <= known.keys():
        return None
    supports_gqa, supports_splits = "enable_gqa" in known, "num_splits" in known

    def flash(heads: _Heads, starts: Tensor, max_length: int, scale: float | None, window: int | None) -> Tensor:
        options: dict[str, Any] = {"scale": scale, "window_size": (-1 if window is None else window - 1, 0)}
        if supports_gqa:
            options["enable_gqa"] = heads.query.shape[1] != heads.key.shape[1]
        if supports_splits and active_tile():
            options["num_splits"] = 1  # otherwise the longest row decides
        mixed = varlen_attn(*heads, starts, starts, max_length, max_length, **options)
        assert isinstance(mixed, Tensor)  # it returns more only on request
        return mixed

    return flash


_FLASH = _flash_kernel()


def drop_flash_on_old_gpus(device: torch.device) -> None:
    """Disable the variable-length kernel on a GPU older than Ampere; call this before anything is compiled."""
    global _FLASH
    if torch.cuda.get_device_capability(device) < (8, 0):
        _FLASH = None


@torch.compiler.disable  # type: ignore[untyped-decorator]  # reads lengths on the host, which a compiled block cannot
def _by_starts(heads: _Heads, starts: Tensor, **options: Any) -> Tensor:
    """Compute attention within each row, given the start of each row and the end of the last, [rows + 1]."""
    lengths = tuple(end - start for start, end in itertools.pairwise(starts.tolist()))
    return _by_length(heads, lengths, is_tiled=active_tile() > 0, **options)


def _by_length(
    heads: _Heads,
    lengths: tuple[int, ...],
    *,
    scale: float | None,
    window: int | None,
    dropout: float = 0.0,
    is_tiled: bool = False,
) -> Tensor:
    """Compute attention within each row, [T, H, D], with one call per bucket."""
    num_tokens, device = len(heads.query), heads.query.device
    stream = torch.cuda.current_stream(device).stream_id if device.type == "cuda" else 0
    buckets = _buckets(lengths, device, stream, torch.is_inference_mode_enabled(), is_tiled)
    parts = []
    for bucket in buckets:
        query, key, value = (
            bucket.pad(part if len(buckets) == 1 else take(part, bucket.tokens)).transpose(1, 2) for part in heads
        )  # [n, H or K, width, D]
        mask = _window_mask(bucket.width, window, device)
        mixed = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            dropout_p=dropout,
            is_causal=mask is None,
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        parts.append(bucket.unpad(mixed.transpose(1, 2)))  # [tokens of these rows, H, D]
    if len(parts) == 1:
        return parts[0]
    return scatter(torch.cat(parts), torch.cat([bucket.tokens for bucket in buckets]), num_tokens)


class _Bucket(NamedTuple):
    """Rows of similar length, which one call computes as a batch."""

    num_rows: int
    width: int
    tokens: Tensor  # [t] indices of their tokens in the sequence
    indices: Tensor  # [t] indices of these tokens in the flattened batch, [num_rows · width]

    @property
    def is_full(self) -> bool:
        return len(self.indices) == self.num_rows * self.width

    def pad(self, values: Tensor) -> Tensor:
        """Pad [t, H, D] to [num_rows, width, H, D]."""
        wide = values if self.is_full else scatter(values, self.indices, self.num_rows * self.width)
        return wide.reshape(self.num_rows, self.width, *values.shape[1:])

    def unpad(self, values: Tensor) -> Tensor:
        """Remove padding: [num_rows, width, H, D] to [t, H, D]."""
        flat = values.flatten(0, 1)
        return flat if self.is_full else take(flat, self.indices)


@functools.lru_cache(maxsize=8)  # all layers of a pass, and of actor and critic, make the same call
def _buckets(
    lengths: tuple[int, ...], device: torch.device, _stream: int, _in_inference: bool, is_tiled: bool
) -> list[_Bucket]:
    """Group rows by the power of two of their length, short ones together, so that less than half of a call is padding.

    Stream and inference mode are part of the cache key, because tensors created under one are not safe under another.
    With `is_tiled` the padded width of a row does not depend on other rows.
    """
    starts = [0, *itertools.accumulate(lengths)]
    members: dict[int, list[int]] = {}
    for row, length in enumerate(lengths):
        key = padded_length(length, 32) if is_tiled else max(length, _MIN_BUCKET_LENGTH).bit_length()
        members.setdefault(key, []).append(row)
    buckets = []
    for key, rows in members.items():
        width = key if is_tiled else max(lengths[row] for row in rows)
        columns = torch.arange(width)
        is_real = columns < torch.tensor([lengths[row] for row in rows]).unsqueeze(1)  # [n, width]
        tokens = (torch.tensor([starts[row] for row in rows]).unsqueeze(1) + columns)[is_real]
        indices = is_real.flatten().nonzero().squeeze(1)
        buckets.append(_Bucket(len(rows), width, tokens.to(device), indices.to(device)))
    return buckets


def _window_mask(width: int, window: int | None, device: torch.device) -> Tensor | None:
    """Return a causal sliding-window mask, [width, width]; None if the window covers the whole width."""
    if window is None or width <= window:
        return None
    columns = torch.arange(width, device=device)
    distance = columns.unsqueeze(1) - columns
    return (distance >= 0) & (distance < window)


def take(values: Tensor, at: Tensor) -> Tensor:
    """Return `values[at]` along the first dimension for unique indices: the gradient is a copy, not a sum."""
    taken: Tensor = _Take.apply(values, at, True)  # type: ignore[no-untyped-call]
    return taken


def take_repeated(values: Tensor, at: Tensor) -> Tensor:
    """Return `values[at]` along the first dimension for repeated indices: gradients add up, in float32 at least."""
    taken: Tensor = _Take.apply(values, at, False)  # type: ignore[no-untyped-call]
    return taken


def scatter(values: Tensor, at: Tensor, length: int) -> Tensor:
    """Return zeros of `length` along the first dimension, with `values` at the unique indices `at`."""
    return values.new_zeros(length, *values.shape[1:]).index_copy(0, at, values)


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, at: Tensor, is_unique: bool) -> Tensor:
        ctx.save_for_backward(at)
        ctx.length, ctx.is_unique = values.shape[0], is_unique
        return values.index_select(0, at)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (at,) = ctx.saved_tensors
        if ctx.is_unique:
            return scatter(gradient, at, ctx.length), None, None
        precise = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
        summed = precise.new_zeros(ctx.length, *gradient.shape[1:]).index_add_(0, at, precise)
        return summed.to(gradient.dtype), None, None


AttentionInterface.register(PACKED_ATTENTION, packed_attention_forward)
AttentionMaskInterface.register(PACKED_ATTENTION, sdpa_mask)
