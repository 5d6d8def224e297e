"""What is done with a chunk of logits, as Triton kernels: each reads it once, and makes no copy of it.

They compute in float32 what `logprobs.py` computes with torch, whose operations pass over logits again and again. Only
imported on a machine with a GPU and Triton.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from coati.algos.logprobs import Reading

# One program reads a row in steps of LANES strips. A strip is what one thread loads at once: 16 bytes.
_LANES = 512
_STRIP_BYTES = 16
# Logits that one program turns into their gradient.
_GRADIENT_BLOCK = 4096


@triton.jit
def _joined(largest, total, weighted, newest, WITH_ENTROPY: tl.constexpr):
    """The sums of e^(x - largest) and of (x - largest) · e^(x - largest), with `newest` in place of `largest`."""
    nothing = float("-inf")
    # Where nothing but -inf has been seen there is no mass, and no nan.
    shift = tl.where(newest == nothing, 0.0, newest)
    shrink = tl.exp(largest - shift)
    if WITH_ENTROPY:
        moved = tl.where(largest == nothing, 0.0, largest - shift)
        weighted = (weighted + moved * total) * shrink
    return shift, total * shrink, weighted


@triton.jit
def _read_off_kernel(
    logits, tokens, temperatures, log_probs, entropies, maxima, log_sums, vocabulary,
    HAS_TEMPERATURE: tl.constexpr, WITH_ENTROPY: tl.constexpr, LANES: tl.constexpr, STRIP: tl.constexpr,
):  # fmt: skip
    """One row. Each lane keeps its own maximum and sums, so that the loop has nothing to wait for."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * vocabulary
    inverse = 1.0
    if HAS_TEMPERATURE:
        inverse = 1.0 / tl.load(temperatures + row)
    places = tl.arange(0, LANES)[:, None] * STRIP + tl.arange(0, STRIP)[None, :]
    largest = tl.full((LANES,), float("-inf"), tl.float32)
    total = tl.zeros((LANES,), tl.float32)
    weighted = tl.zeros((LANES,), tl.float32)
    for start in range(0, vocabulary, LANES * STRIP):
        columns = start + places
        x = tl.load(logits + columns, mask=columns < vocabulary, other=float("-inf")).to(tl.float32) * inverse
        newest = tl.maximum(largest, tl.max(x, axis=1))
        shift, total, weighted = _joined(largest, total, weighted, newest, WITH_ENTROPY)
        apart = x - shift[:, None]
        mass = tl.exp(apart)
        total += tl.sum(mass, axis=1)
        if WITH_ENTROPY:
            weighted += tl.sum(tl.where(mass > 0.0, mass * apart, 0.0), axis=1)
        largest = newest
    top, total, weighted = _joined(largest, total, weighted, tl.max(largest, axis=0), WITH_ENTROPY)
    mass_of_all = tl.sum(total, axis=0)
    log_sum = tl.log(mass_of_all)
    token = tl.load(tokens + row)
    is_known = (token >= 0) & (token < vocabulary)
    chosen = tl.load(logits + token, mask=is_known, other=float("nan")).to(tl.float32) * inverse
    tl.store(log_probs + row, (chosen - top) - log_sum)
    # Apart, and not as their sum: 1 - p of a likely token needs the digits that the sum would lose.
    tl.store(maxima + row, top)
    tl.store(log_sums + row, log_sum)
    if WITH_ENTROPY:
        tl.store(entropies + row, log_sum - tl.sum(weighted, axis=0) / mass_of_all)


def read_off(
    logits: Tensor,  # [n, V]
    tokens: Tensor,  # [n]
    scale: Tensor | None,  # [n, 1]
    *,
    with_entropy: bool,
) -> Reading:
    """Log-prob of each token, entropy of its distribution, and [2, n] largest logit and log of the sum above it."""
    count, vocabulary = logits.shape
    log_probs, entropy = logits.new_empty(2, count, dtype=torch.float32)
    sums = logits.new_empty(2, count, dtype=torch.float32)
    with torch.cuda.device_of(logits):
        _read_off_kernel[(count,)](
            logits,
            tokens,
            log_probs if scale is None else scale.contiguous(),
            log_probs,
            entropy,
            sums[0],
            sums[1],
            vocabulary,
            HAS_TEMPERATURE=scale is not None,
            WITH_ENTROPY=with_entropy,
            LANES=_LANES,
            STRIP=_STRIP_BYTES // logits.element_size(),
            num_warps=4,
        )
    return Reading(log_probs, entropy if with_entropy else None, sums)


@triton.jit
def _gradient_kernel(
    logits, tokens, temperatures, maxima, log_sums, grad_log_probs, grad_entropies, entropies, vocabulary, num_blocks,
    HAS_TEMPERATURE: tl.constexpr, HAS_ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    row = (program // num_blocks).to(tl.int64)
    columns = (program % num_blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < vocabulary
    logits += row * vocabulary
    inverse = 1.0
    if HAS_TEMPERATURE:
        inverse = 1.0 / tl.load(temperatures + row)
    x = tl.load(logits + columns, mask=inside, other=float("-inf"))
    log_p = (x.to(tl.float32) * inverse - tl.load(maxima + row)) - tl.load(log_sums + row)
    p = tl.exp(log_p)
    is_token = tl.where(columns == tl.load(tokens + row), 1.0, 0.0)
    gradient = (is_token - p) * tl.load(grad_log_probs + row)
    if HAS_ENTROPY:
        # A token that cannot come has log p = -inf, and 0 · -inf is nan.
        surprise = tl.where(p > 0.0, p * (log_p + tl.load(entropies + row)), 0.0)
        gradient -= surprise * tl.load(grad_entropies + row)
    tl.store(logits + columns, (gradient * inverse).to(x.dtype), mask=inside)


def gradient_in_place(
    logits: Tensor,  # [n, V]
    tokens: Tensor,  # [n]
    scale: Tensor | None,  # [n, 1]
    sums: Tensor,  # [2, n] of `read_off`
    grad_logprobs: Tensor | None,  # [n]
    grad_entropy: Tensor | None,  # [n]
    entropy: Tensor | None,  # [n]
) -> Tensor:
    """The logits turned into the gradient of the loss by them: the same memory, [n, V]."""
    count, vocabulary = logits.shape
    num_blocks = triton.cdiv(vocabulary, _GRADIENT_BLOCK)
    maxima, log_sums = (part.contiguous() for part in sums)
    by_logprob = torch.zeros_like(maxima) if grad_logprobs is None else grad_logprobs.contiguous()
    has_entropy = grad_entropy is not None and entropy is not None
    with torch.cuda.device_of(logits):
        _gradient_kernel[(count * num_blocks,)](
            logits,
            tokens,
            maxima if scale is None else scale.contiguous(),
            maxima,
            log_sums,
            by_logprob,
            grad_entropy.contiguous() if grad_entropy is not None else maxima,
            entropy.contiguous() if entropy is not None else maxima,
            vocabulary,
            num_blocks,
            HAS_TEMPERATURE=scale is not None,
            HAS_ENTROPY=has_entropy,
            BLOCK=_GRADIENT_BLOCK,
            num_warps=4,
        )
    return logits
