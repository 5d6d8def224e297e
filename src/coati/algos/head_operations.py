"""What is read off a chunk of logits, and the gradient that goes back into it: with torch, or as Triton kernels.

Both compute the same, up to rounding. The torch functions are the definition, and what CPUs and float64 run. Kernels
are taken on a GPU on which they have shown, once, that they compute what torch does.
"""

import functools
import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

# Logits of one chunk: on an accelerator small products would waste it. torch makes float32 copies of them.
_CHUNK_LOGITS = 1 << 27
_CHUNK_LOGITS_CPU = 1 << 25
# With kernels a chunk exists once and in its own format, so that this many bytes of logits is all there ever is.
_CHUNK_BYTES = 1 << 30
# Such chunks are cut to a multiple of this many tokens, which matrix products like.
_CHUNK_STEP = 128

# How far kernels may be from torch in their trial, as a part of the largest result; gradients are in these formats.
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


class Reading(NamedTuple):
    """[n] each, in at least float32."""

    logprobs: Tensor
    entropy: Tensor | None
    sums: Tensor | None
    """[2, n] what the kernels want back for the gradient; None from torch, which reduces again."""


class TorchHead:
    """Plain torch, with as few and as small tensors as single operations allow."""

    def __init__(self, device: torch.device) -> None:
        self._is_host = device.type == "cpu"

    def chunk_tokens(self, num_tokens: int, vocabulary: int) -> int:  # noqa: ARG002
        """How many tokens' logits to compute at once."""
        return max(1, (_CHUNK_LOGITS_CPU if self._is_host else _CHUNK_LOGITS) // vocabulary)

    def read_off(
        self,
        logits: Tensor,  # [n, V]
        tokens: Tensor,  # [n]
        scale: Tensor | None,  # [n, 1]
        *,
        with_entropy: bool,
    ) -> Reading:
        """Log-prob of each token and entropy of its distribution."""
        log_p = _log_softmax(logits, scale)
        chosen = log_p.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
        if not with_entropy:
            return Reading(chosen, None, None)
        if self._is_host:  # where torch's entr is many times slower than a product
            p = log_p.exp()
            return Reading(chosen, -log_p.clamp_(min=torch.finfo(log_p.dtype).min).mul_(p).sum(-1), None)
        # entr(p) = -p log p, and 0 at p = 0: a token that cannot come adds nothing.
        return Reading(chosen, torch.special.entr(log_p.exp_()).sum(-1), None)

    def gradient(
        self,
        logits: Tensor,  # [n, V]
        tokens: Tensor,  # [n]
        scale: Tensor | None,  # [n, 1]
        sums: Tensor | None,  # noqa: ARG002
        grad_logprobs: Tensor | None,  # [n]
        grad_entropy: Tensor | None,  # [n]
        entropy: Tensor | None,  # [n]
    ) -> Tensor:
        """Gradient of the loss by the logits, [n, V], in their format."""
        wide, index = wide_format(logits.dtype), tokens.unsqueeze(-1)
        by_logprob = torch.zeros_like(index, dtype=wide) if grad_logprobs is None else grad_logprobs.unsqueeze(-1)
        if grad_entropy is None:
            # p - onehot in full precision: 1 - p is small where the token was likely.
            gradient = _scaled(logits, scale).softmax(-1, dtype=wide)
            gradient.scatter_add_(-1, index, torch.full_like(by_logprob, -1.0))
            factor = -by_logprob
        else:
            assert entropy is not None
            log_p = _log_softmax(logits, scale)
            p = log_p.exp()
            # A token that cannot come has log p = -inf, and 0 · -inf is nan.
            gradient = log_p.clamp_(min=torch.finfo(wide).min).add_(entropy.unsqueeze(-1))
            gradient.mul_(-grad_entropy.unsqueeze(-1)).sub_(by_logprob).mul_(p)
            gradient.scatter_add_(-1, index, by_logprob)
            factor = torch.ones_like(by_logprob)
        if scale is not None:
            factor = factor / scale
        if gradient.dtype == logits.dtype:
            return gradient.mul_(factor)
        return torch.mul(gradient, factor, out=torch.empty_like(logits))  # multiplied and narrowed in one pass


class TritonHead:
    """The same, one kernel each; `gradient` writes over the logits."""

    def __init__(self, dtype: torch.dtype) -> None:
        from coati.algos.head_kernels import gradient_in_place, read_off

        self.read_off: Callable[..., Reading] = read_off
        self.gradient: Callable[..., Tensor] = gradient_in_place
        self._num_bytes = dtype.itemsize

    def chunk_tokens(self, num_tokens: int, vocabulary: int) -> int:
        """As above: chunks of like size, because a short last one would waste the device too."""
        most = max(1, _CHUNK_BYTES // (vocabulary * self._num_bytes))
        if most < _CHUNK_STEP or num_tokens <= most:
            return most
        most -= most % _CHUNK_STEP
        num_chunks = -(-num_tokens // most)
        return -(-num_tokens // (num_chunks * _CHUNK_STEP)) * _CHUNK_STEP


@functools.cache
def head_operations(device: torch.device, dtype: torch.dtype) -> TorchHead | TritonHead:
    """Kernels for logits on a GPU on which they work; torch otherwise."""
    if device.type != "cuda" or dtype not in _TOLERANCE:
        return TorchHead(device)
    if reason := head_kernel_problem(device, dtype):
        warnings.warn(
            f"computing log-probs without Triton kernels, which is slower: {reason}", RuntimeWarning, stacklevel=2
        )
        return TorchHead(device)
    return TritonHead(dtype)


@functools.cache
def head_kernel_problem(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why this machine's Triton cannot be used for logits of this format; None if it can.

    Triton compiles with whatever compiler and driver it finds, so its kernels are tried before they are trusted.
    """
    try:
        errors = _trial_errors(TritonHead(dtype), TorchHead(device), device, dtype)
    except Exception as error:  # not installed, no compiler, a card or driver that it does not know
        return f"{type(error).__name__}: {error}"
    wrong = [name for name, error in errors.items() if not error <= _TOLERANCE[dtype]]
    return f"their results differ from torch's ({', '.join(wrong)})" if wrong else None


@torch.no_grad()
def _trial_errors(kernels: TritonHead, plain: TorchHead, device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """How far the kernels are from torch, by result: with a vocabulary of odd size, and a token that cannot come."""
    generator = torch.Generator().manual_seed(0)
    vocabulary = 5003
    logits = (3 * torch.randn(4, vocabulary, generator=generator)).to(device, dtype)
    logits[1, 17] = -torch.inf
    tokens = torch.tensor([0, 18, 4999, vocabulary - 1], device=device)
    grads = torch.randn(2, 4, generator=generator).to(device)
    temperatures = torch.tensor([[0.5], [1.0], [0.7], [2.0]], device=device)
    results: list[dict[str, Tensor]] = []
    for head in (kernels, plain):
        found: dict[str, Tensor] = {}
        for name, scale in (("", None), (" at a temperature", temperatures)):
            reading = head.read_off(logits, tokens, scale, with_entropy=True)
            assert reading.entropy is not None
            found[f"log-probs{name}"], found[f"entropy{name}"] = reading.logprobs, reading.entropy
            for what, by_entropy in (("gradient", None), ("gradient of entropy", grads[1])):
                given = (scale, reading.sums, grads[0], by_entropy, reading.entropy)
                found[what + name] = head.gradient(logits.clone(), tokens, *given).float()
        results.append(found)
    return {
        name: float((results[0][name] - expected).abs().max() / expected.abs().max())
        for name, expected in results[1].items()
    }


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, where the factors may be in a narrower format."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif total.is_cuda and adds_products_in_place(total.device, left.dtype):
        _add_narrow_product(total, left, right)
    else:
        total += left @ right


@functools.cache
def adds_products_in_place(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this torch adds a product of such factors to a float32 matrix in one go: tried, and held against sums."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(24, width, generator=generator).to(device, dtype) for width in (40, 16))
    total = torch.randn(40, 16, generator=generator).to(device)
    expected = total.double() + left.T.double() @ right.double()
    try:
        with torch.no_grad():
            _add_narrow_product(total, left.T, right)
    except (RuntimeError, TypeError, NotImplementedError):
        return False
    # Rounded to half precision on the way it would be off by a hundred times this.
    return bool((total - expected).abs().max() < 1e-4)


def _add_narrow_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    torch.addmm(total, left, right, out_dtype=total.dtype, out=total)


def wide_format(dtype: torch.dtype) -> torch.dtype:
    """What sums and softmaxes are computed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _scaled(logits: Tensor, scale: Tensor | None) -> Tensor:
    return logits if scale is None else logits.to(wide_format(logits.dtype)) / scale


def _log_softmax(logits: Tensor, scale: Tensor | None) -> Tensor:
    return _scaled(logits, scale).log_softmax(-1, dtype=wide_format(logits.dtype))
