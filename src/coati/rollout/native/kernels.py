"""Triton kernels for the small operations of a decode step: on a GPU their number costs time, not their work.

With one new token per slot, the matrix products of a layer take microseconds, and so would every norm, rotation, copy
and mask between them. Here everything between two products is one kernel, equal to `operations.py` up to rounding.

Only imported on a machine with a GPU and Triton.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_DRAW_BLOCK = 2048  # vocabulary entries per program when a token is drawn
_KEY_BLOCK = 64  # cache positions per step of attention. The page size is a multiple of it.
# Maximum number of parts that a text is read in, and the minimum number of positions per part (few texts, many texts).
_MOST_PARTS = 8
_LEAST_PART, _LEAST_PART_OF_MANY = 256, 1024


@triton.jit
def _weighted(normed, weight, dtype: tl.constexpr, IS_SHIFTED: tl.constexpr):
    """Multiply by the weights of an RMS norm; shifted weights are offsets from 1, and the product is rounded once."""
    if IS_SHIFTED:  # noqa: SIM108 (Triton compiles one branch of an `if`)
        result = (normed * (1.0 + weight.to(tl.float32))).to(dtype)
    else:
        result = normed.to(dtype) * weight
    return result


@triton.jit
def _add_norm_kernel(
    hidden, delta, weight, total, normed, width, eps,
    HAS_DELTA: tl.constexpr, IS_SHIFTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    x = tl.load(hidden + row * width + columns, mask=inside, other=0.0)
    if HAS_DELTA:
        x = x + tl.load(delta + row * width + columns, mask=inside, other=0.0)  # rounded, like the model's addition
        tl.store(total + row * width + columns, x, mask=inside)
    wide = x.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, axis=0) / width + eps)
    w = tl.load(weight + columns, mask=inside, other=0.0)
    tl.store(normed + row * width + columns, _weighted(wide * scale, w, x.dtype, IS_SHIFTED), mask=inside)


def add_norm(
    hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float, is_shifted: bool = False
) -> tuple[Tensor, Tensor]:
    """Return `hidden + delta` and its RMS norm, [n, d] each; shifted weights are offsets from 1."""
    width = hidden.shape[-1]
    total = hidden if delta is None else torch.empty_like(hidden)
    normed = torch.empty_like(hidden)
    added = hidden if delta is None else delta
    sizes = {"HAS_DELTA": delta is not None, "IS_SHIFTED": is_shifted, "BLOCK": triton.next_power_of_2(width)}
    _add_norm_kernel[(len(hidden),)](hidden, added, weight, total, normed, width, eps, **sizes)
    return total, normed


@triton.jit
def _gated_kernel(both, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate = tl.load(both + row * 2 * width + columns, mask=inside, other=0.0)
    up = tl.load(both + row * 2 * width + width + columns, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    tl.store(out + row * width + columns, (wide * tl.sigmoid(wide)).to(gate.dtype) * up, mask=inside)


def gated(both: Tensor) -> Tensor:
    """Return `silu(gate) * up` of [..., gate and up]."""
    width = both.shape[-1] // 2
    rows = both.reshape(-1, 2 * width)
    out = both.new_empty(*both.shape[:-1], width)
    _gated_kernel[(len(rows), triton.cdiv(width, 1024))](rows, out, width, BLOCK=1024)
    return out


@triton.jit
def _rotated(
    base, rows, columns, cos, sin, norm, eps, inside,
    DIM: tl.constexpr, ROTARY: tl.constexpr, HAS_NORM: tl.constexpr, IS_SHIFTED: tl.constexpr,
):  # fmt: skip
    """Load heads [R, D] at `base`, normalise them if the model does so, and rotate them to their position."""
    other = (columns + ROTARY // 2) % ROTARY
    if ROTARY < DIM:
        other = tl.where(columns < ROTARY, other, columns)  # their sin is 0
    x = tl.load(base + rows * DIM + columns, mask=inside, other=0.0)
    y = tl.load(base + rows * DIM + other, mask=inside, other=0.0)
    dtype = x.dtype
    if HAS_NORM:
        wide = x.to(tl.float32)
        scale = 1.0 / tl.sqrt(tl.sum(wide * wide, axis=1) / DIM + eps)
        x = _weighted(wide * scale[:, None], tl.load(norm + columns), dtype, IS_SHIFTED)
        y = _weighted(y.to(tl.float32) * scale[:, None], tl.load(norm + other), dtype, IS_SHIFTED)
    return (x.to(tl.float32) * cos + y.to(tl.float32) * sin).to(dtype)


@triton.jit
def _rotate_kernel(
    heads, positions, cos_table, sin_table, query_norm, key_norm, out, eps,
    QUERIES: tl.constexpr, KV_HEADS: tl.constexpr, PADDED: tl.constexpr, PADDED_KV: tl.constexpr, DIM: tl.constexpr,
    ROTARY: tl.constexpr, HAS_NORM: tl.constexpr, IS_SHIFTED: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + token)
    dims = tl.arange(0, DIM)[None, :]
    cos = tl.load(cos_table + position * DIM + dims).to(tl.float32)
    sin = tl.load(sin_table + position * DIM + dims).to(tl.float32)
    base = heads + token * (QUERIES + 2 * KV_HEADS) * DIM
    target = out + token * (QUERIES + KV_HEADS) * DIM + dims
    rows = tl.arange(0, PADDED)[:, None]
    kept = rows < QUERIES
    query = _rotated(base, rows, dims, cos, sin, query_norm, eps, kept, DIM, ROTARY, HAS_NORM, IS_SHIFTED)
    tl.store(target + rows * DIM, query, mask=kept)
    kv_rows = QUERIES + tl.arange(0, PADDED_KV)[:, None]
    kv_kept = kv_rows < QUERIES + KV_HEADS
    key = _rotated(base, kv_rows, dims, cos, sin, key_norm, eps, kv_kept, DIM, ROTARY, HAS_NORM, IS_SHIFTED)
    tl.store(target + kv_rows * DIM, key, mask=kv_kept)


def rotate(heads: Tensor, positions: Tensor, angles: tuple[Tensor, Tensor], *, geometry: Any, norms: Any) -> Tensor:
    """Return queries and keys [T, H + K, D] of projected heads [T, (H + 2K)·D], rotated to their positions [T]."""
    num_kv_heads, dim = geometry.num_kv_heads, geometry.head_dim
    num_queries = geometry.group * num_kv_heads
    out = heads.new_empty(len(heads), num_queries + num_kv_heads, dim)
    query_norm, key_norm, eps, is_shifted = norms or (*angles, 0.0, False)
    _rotate_kernel[(len(heads),)](
        heads, positions, *angles, query_norm, key_norm, out, eps, QUERIES=num_queries, KV_HEADS=num_kv_heads,
        PADDED=triton.next_power_of_2(num_queries), PADDED_KV=triton.next_power_of_2(num_kv_heads), DIM=dim,
        ROTARY=geometry.rotary_dim or dim, HAS_NORM=norms is not None, IS_SHIFTED=is_shifted, num_warps=2,
    )  # fmt: skip
    return out


@triton.jit
def _attend_kernel(
    heads, positions, pages, keys, values, cos_table, sin_table, query_norm, key_norm, out, mixtures, weights, arrived,
    scale, eps, num_pages,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, PADDED: tl.constexpr, DIM: tl.constexpr, ROTARY: tl.constexpr,
    PAGE: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, LEAST: tl.constexpr, WINDOW: tl.constexpr,
    HAS_NORM: tl.constexpr, IS_SHIFTED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One slot, one key-value head, one part of the text: rotate queries and key, store key and value, attend.

    A long text has several parts; the last program to finish combines their results.
    """
    slot = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    part = tl.program_id(2)
    position = tl.load(positions + slot)
    low = position * 0
    if WINDOW > 0:  # start of the block with the first visible position
        low = tl.maximum(position + 1 - WINDOW, 0) // BLOCK * BLOCK
    part_length = tl.maximum(tl.cdiv(tl.cdiv(position - low, PARTS), BLOCK) * BLOCK, LEAST)
    num_parts = tl.maximum(tl.cdiv(position - low, part_length), 1)
    if part >= num_parts:
        return
    # Load pages first, because addresses depend on them: the page of the new token, and the one that is read first.
    own_pages = pages + slot * num_pages
    new_page = tl.load(own_pages + position // PAGE)
    first = low + part * part_length
    page = tl.load(own_pages + first // PAGE)
    dims = tl.arange(0, DIM)[None, :]
    cos = tl.load(cos_table + position * DIM + dims).to(tl.float32)
    sin = tl.load(sin_table + position * DIM + dims).to(tl.float32)

    base = heads + slot * (GROUP + 2) * KV_HEADS * DIM
    members = tl.arange(0, PADDED)[:, None]
    is_member = members < GROUP
    query = _rotated(
        base, kv_head * GROUP + members, dims, cos, sin, query_norm, eps, is_member, DIM, ROTARY, HAS_NORM, IS_SHIFTED
    )  # [PADDED, D]
    one = tl.zeros((1, 1), dtype=tl.int32)
    own_row = one + GROUP * KV_HEADS + kv_head
    key = _rotated(base, own_row, dims, cos, sin, key_norm, eps, one == 0, DIM, ROTARY, HAS_NORM, IS_SHIFTED)
    value = tl.load(base + (one + (GROUP + 1) * KV_HEADS + kv_head) * DIM + dims)  # [1, D]
    is_first = part == 0
    place = ((new_page * KV_HEADS + kv_head) * PAGE + position % PAGE) * DIM
    if is_first:
        tl.store(keys + place + dims, key)
        tl.store(values + place + dims, value)

    # The first part starts with the new token, which is in registers and never masked.
    score = tl.sum(query.to(tl.float32) * key.to(tl.float32), axis=1) * scale  # [PADDED]
    largest = tl.where(is_first, score, float("-inf"))
    weight_sum = tl.where(is_first, tl.full((PADDED,), 1.0, tl.float32), 0.0)
    mixed = tl.where(is_first, tl.zeros((PADDED, DIM), tl.float32) + value.to(tl.float32), 0.0)
    places = tl.arange(0, BLOCK)
    end = tl.minimum(first + part_length, position)
    for start in tl.range(first, end, BLOCK, num_stages=3):
        is_before = start + places < end
        if WINDOW > 0:
            is_before = is_before & (start + places > position - WINDOW)
        offsets = ((page * KV_HEADS + kv_head) * PAGE + start % PAGE + places)[:, None] * DIM + dims
        page = tl.load(own_pages + tl.minimum(start + BLOCK, position) // PAGE)  # of the next block
        k = tl.load(keys + offsets, mask=is_before[:, None], other=0.0)  # [BLOCK, D]
        v = tl.load(values + offsets, mask=is_before[:, None], other=0.0)
        scores = tl.dot(query, tl.trans(k), input_precision=PRECISION) * scale
        scores = tl.where(is_before[None, :], scores, float("-inf"))
        newest = tl.maximum(largest, tl.max(scores, axis=1))
        shrink = tl.exp(largest - newest)
        shares = tl.exp(scores - newest[:, None])
        weight_sum = weight_sum * shrink + tl.sum(shares, axis=1)
        mixed = mixed * shrink[:, None] + tl.dot(shares.to(v.dtype), v, input_precision=PRECISION)
        largest = newest

    target = out + (slot * KV_HEADS + kv_head) * GROUP * DIM + members * DIM + dims
    if num_parts == 1:
        tl.store(target, (mixed / weight_sum[:, None]).to(query.dtype), mask=is_member)
    else:
        pair = slot * KV_HEADS + kv_head
        rows = tl.arange(0, PADDED)
        own = pair * PARTS + part
        tl.store(mixtures + (own * PADDED + members) * DIM + dims, mixed)
        tl.store(weights + own * 2 * PADDED + rows, largest)
        tl.store(weights + (own * 2 + 1) * PADDED + rows, weight_sum)
        tl.debug_barrier()  # all threads must have stored before the count goes up
        if tl.atomic_add(arrived + pair, 1, sem="acq_rel") == num_parts - 1:
            tl.debug_barrier()
            tl.store(arrived + pair, 0)
            largest = tl.full((PADDED,), float("-inf"), tl.float32)
            weight_sum = tl.zeros((PADDED,), tl.float32)
            mixed = tl.zeros((PADDED, DIM), tl.float32)
            for number in tl.static_range(PARTS):  # unrolled, so that all loads are issued at once
                is_part = number < num_parts
                there = weights + (pair * PARTS + number) * 2 * PADDED + rows
                spots = mixtures + ((pair * PARTS + number) * PADDED + members) * DIM + dims
                theirs = tl.load(there, mask=is_part, other=-1e30, cache_modifier=".cg")
                their_sum = tl.load(there + PADDED, mask=is_part, other=0.0, cache_modifier=".cg")
                their_mixed = tl.load(spots, mask=is_part, other=0.0, cache_modifier=".cg")
                newest = tl.maximum(largest, theirs)
                shrink, share = tl.exp(largest - newest), tl.exp(theirs - newest)
                weight_sum = weight_sum * shrink + their_sum * share
                mixed = mixed * shrink[:, None] + their_mixed * share[:, None]
                largest = newest
            tl.store(target, (mixed / weight_sum[:, None]).to(query.dtype), mask=is_member)


class Parts:
    """The parts that n texts are read in: their number, and buffers for their results until these are combined."""

    def __init__(self, positions: Tensor, num_positions: int, geometry: Any) -> None:
        pairs, self.padded = len(positions) * geometry.num_kv_heads, max(16, triton.next_power_of_2(geometry.group))
        # Few texts need many parts to keep the GPU busy. With many, each part costs more than it gains; but in one part
        # each, the longest would still run when the others are done.
        self.least = min(max(_LEAST_PART, triton.next_power_of_2(4 * pairs)), _LEAST_PART_OF_MANY)
        wanted = _MOST_PARTS if pairs <= 64 else min(4, triton.cdiv(2048, pairs))
        self.count = min(wanted, triton.cdiv(num_positions, max(2 * _LEAST_PART, self.least)))
        sums = positions.new_empty(pairs * self.count * self.padded, geometry.head_dim + 2, dtype=torch.float32)
        mixtures, weights = sums.view(-1).split([sums[:, 2:].numel(), 2 * len(sums)])
        self.tensors = (mixtures, weights, positions.new_zeros(pairs, dtype=torch.int32))


def attend(
    heads: Tensor,  # [n, (H + 2K)·D]: queries, keys, values, not yet rotated
    positions: Tensor,  # [n]
    pages: Tensor,  # [n, M]
    keys: Tensor,  # [P, K, S, D]
    values: Tensor,
    angles: tuple[Tensor, Tensor],  # [L, D] each: cos and signed sin
    parts: Parts,
    *,
    geometry: Any,
    norms: tuple[Tensor, Tensor, float, bool] | None,
    window: int | None,
) -> Tensor:
    """Store the new keys and values in the cache and attend; returns [n, H·D]."""
    _, num_kv_heads, page_size, dim = keys.shape
    out = heads.new_empty(len(heads), geometry.group * num_kv_heads * dim)
    query_norm, key_norm, eps, is_shifted = norms or (*angles, 0.0, False)
    _attend_kernel[(len(heads), num_kv_heads, parts.count)](
        heads, positions, pages, keys, values, *angles, query_norm, key_norm, out, *parts.tensors,
        geometry.scale, eps, pages.stride(0),
        KV_HEADS=num_kv_heads, GROUP=geometry.group, PADDED=parts.padded, DIM=dim, ROTARY=geometry.rotary_dim or dim,
        PAGE=page_size, BLOCK=min(_KEY_BLOCK if dim <= 128 else _KEY_BLOCK // 2, page_size), PARTS=parts.count,
        LEAST=parts.least, WINDOW=window or 0, HAS_NORM=norms is not None, IS_SHIFTED=is_shifted,
        PRECISION="ieee" if heads.dtype == torch.float32 else "tf32", num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _block_sums_kernel(logits, maxima, sums, vocabulary, num_blocks, inverse_temperature, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * vocabulary + columns, mask=columns < vocabulary, other=float("-inf"))
    x = x.to(tl.float32) * inverse_temperature
    largest = tl.max(x, axis=0)
    # A block of only -inf must get mass 0, not nan.
    shift = tl.where(largest == float("-inf"), 0.0, largest)
    tl.store(maxima + row * num_blocks + block, largest)
    tl.store(sums + row * num_blocks + block, tl.sum(tl.exp(x - shift), axis=0))


@triton.jit
def _draw_kernel(
    logits, maxima, sums, uniforms, tokens, log_probs, vocabulary, num_blocks, inverse_temperature,
    BLOCK: tl.constexpr, MANY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    blocks = tl.arange(0, MANY)
    is_block = blocks < num_blocks
    largest = tl.load(maxima + row * num_blocks + blocks, mask=is_block, other=float("-inf"))
    top = tl.max(largest, axis=0)
    parts = tl.load(sums + row * num_blocks + blocks, mask=is_block, other=0.0)
    masses = (parts * tl.exp(largest - top)).to(tl.float64)
    total = tl.sum(masses, axis=0)
    target = tl.load(uniforms + row) * total
    # Choose the block where the cumulative mass first exceeds the target, and none after the last with any mass.
    cumulative = tl.cumsum(masses, axis=0)
    last = tl.max(tl.where(masses > 0.0, blocks, 0), axis=0)
    chosen = tl.minimum(tl.sum((cumulative <= target).to(tl.int32), axis=0), last)
    before = tl.sum(tl.where(blocks < chosen, masses, 0.0), axis=0)

    inner = tl.arange(0, BLOCK)
    columns = chosen * BLOCK + inner
    x = tl.load(logits + row * vocabulary + columns, mask=columns < vocabulary, other=float("-inf"))
    x = x.to(tl.float32) * inverse_temperature
    weights = tl.exp(x - top).to(tl.float64)
    within = before + tl.cumsum(weights, axis=0)
    last_inside = tl.max(tl.where(weights > 0.0, inner, 0), axis=0)
    place = tl.minimum(tl.sum((within <= target).to(tl.int32), axis=0), last_inside)
    score = tl.sum(tl.where(inner == place, x, 0.0), axis=0)
    tl.store(tokens + row, (chosen * BLOCK + place).to(tl.int64))
    tl.store(log_probs + row, score - top - tl.log(total).to(tl.float32))


def draw(logits: Tensor, uniforms: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Draw tokens by inverse CDF; return them and their log-probs, [n] each. Reads logits twice and copies nothing."""
    count, vocabulary = logits.shape
    num_blocks = triton.cdiv(vocabulary, _DRAW_BLOCK)
    maxima, sums = logits.new_empty(2, count, num_blocks, dtype=torch.float32)
    tokens = torch.empty(count, dtype=torch.long, device=logits.device)
    log_probs = torch.empty(count, dtype=torch.float32, device=logits.device)
    sizes: tuple[Any, ...] = (vocabulary, num_blocks, 1.0 / temperature)
    _block_sums_kernel[(count, num_blocks)](logits, maxima, sums, *sizes, BLOCK=_DRAW_BLOCK)
    blocks = {"BLOCK": _DRAW_BLOCK, "MANY": triton.next_power_of_2(num_blocks)}
    _draw_kernel[(count,)](logits, maxima, sums, uniforms, tokens, log_probs, *sizes, **blocks)
    return tokens, log_probs
