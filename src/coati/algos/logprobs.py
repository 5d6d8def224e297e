"""Log-probs and entropies of tokens, from logits or directly from hidden states.

Both functions work on one chunk of tokens at a time and recompute each chunk in the backward pass, with the gradient in
closed form. With z = logits / temperature, p = softmax(z), H its entropy and a the token,

    d log p_a / dz = onehot(a) - p   and   dH / dz = -p · (log p + H).

`head_logprobs_and_entropy` never materialises a `[tokens, vocabulary]` tensor: it applies the head to a chunk, computes
the results and frees the logits. On a GPU this is compiled, because eager operations widen the logits to float32 and
read them several times, which costs more than the product with the head. The results of a token do not depend on the
chunk size. Results and sums over tokens are in float32 at least. Only first derivatives are supported.

`temperature` is a number, or a tensor whose shape is a prefix of the tokens' shape, such as `[B]`.
"""

import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from coati.errors import ConfigError

_CHUNK_TOKENS = 4096  # tokens whose logits are widened to float32 at once, where logits are given
# Bytes of logits per chunk. Small products would waste an accelerator; uncompiled code makes float32 copies as well.
_CHUNK_BYTES = 1 << 30
_CHUNK_BYTES_UNCOMPILED = 1 << 28
_CHUNK_BYTES_CPU = 1 << 27
_CHUNK_STEP = 128  # chunks on an accelerator are a multiple of this many tokens, for efficient matrix products


def logprobs_and_entropy(
    logits: Tensor,  # [..., T, V]
    tokens: Tensor,  # [..., T] token ids
    *,
    temperature: float | Tensor = 1.0,
    with_entropy: bool = True,
    chunk_tokens: int = _CHUNK_TOKENS,
) -> tuple[Tensor, Tensor | None]:
    """Return the log-prob of each token under softmax(logits / temperature), and its entropy, `[..., T]` each.

    A logit of -inf means probability 0 and adds nothing to the entropy.

    >>> logprobs, entropy = logprobs_and_entropy(torch.tensor([[0.0, 0.0, float("-inf")]]), torch.tensor([1]))
    >>> round(logprobs.item(), 4), round(entropy.item(), 4)  # -log 2, log 2
    (-0.6931, 0.6931)
    """
    shape = logits.shape[:-1]
    assert logits.dim() >= 2
    assert tokens.shape == shape, f"tokens of shape {tuple(tokens.shape)} for logits of {tuple(logits.shape)}"
    scale = temperature_per_token(temperature, shape, like=logits)
    flat, scale = logits.flatten(0, -2), None if scale is None else scale.reshape(-1, 1)
    logprobs, entropy = _ChunkedLogprobs.apply(  # type: ignore[no-untyped-call]
        flat, None, None, tokens.long().flatten(), scale, logits.dtype, chunk_tokens, with_entropy
    )
    return logprobs.reshape(shape), entropy.reshape(shape) if with_entropy else None


def head_logprobs_and_entropy(
    hidden: Tensor,  # [N, d]
    weight: Tensor,  # [V, d]
    tokens: Tensor,  # [N] token ids
    *,
    bias: Tensor | None = None,  # [V]
    temperature: float | Tensor = 1.0,  # or [N]
    with_entropy: bool = True,
    chunk_tokens: int = 0,
) -> tuple[Tensor, Tensor | None]:
    """Return log softmax(linear(hidden, weight, bias) / temperature) at each token, and its entropy, `[N]` each.

    `chunk_tokens` is the number of tokens whose logits exist at once; 0 picks one that bounds memory. Under autocast,
    logits are computed in the autocast dtype.

    >>> weight = torch.tensor([[0.0], [1.0]])
    >>> logprobs, entropy = head_logprobs_and_entropy(torch.zeros(3, 1), weight, torch.tensor([0, 1, 1]))
    >>> [round(value, 4) for value in logprobs.tolist()]  # two equally likely tokens: -log 2
    [-0.6931, -0.6931, -0.6931]
    """
    assert tokens.shape == hidden.shape[:1], f"tokens of shape {tuple(tokens.shape)} for {tuple(hidden.shape)}"
    scale = temperature_per_token(temperature, tokens.shape, like=hidden)
    if scale is not None and bool((scale == 1).all()):
        scale = None
    device_type = hidden.device.type
    is_autocast = torch.is_autocast_enabled(device_type) and hidden.dtype != torch.float64
    dtype = torch.get_autocast_dtype(device_type) if is_autocast else hidden.dtype
    if chunk_tokens == 0:
        chunk_tokens = _default_chunk_tokens(weight.shape[0], hidden.device, dtype)
    logprobs, entropy = _ChunkedLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, tokens.long().contiguous(), scale, dtype, chunk_tokens, with_entropy
    )
    return logprobs, entropy


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,  # hidden states [N, d], or [N, V] logits
        weight: Tensor | None,  # [V, d] of the head; None: the inputs are logits
        bias: Tensor | None,  # [V]
        tokens: Tensor,  # [N]
        scale: Tensor | None,  # [N, 1] temperature
        dtype: torch.dtype,
        chunk_tokens: int,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor | None]:
        # An entropy that only feeds a metric has no gradient; None instead of zeros skips its part of the backward.
        ctx.set_materialize_grads(False)
        ctx.dtype, ctx.chunk_tokens = dtype, chunk_tokens
        is_compiled = weight is not None and _compiles(inputs.device)
        read_off: Callable[..., Any] = _compiled(_read_off_at_once) if is_compiled else _read_off
        narrow = [None if each is None else each.to(dtype) for each in (weight, bias)]
        logprobs = torch.empty(tokens.shape, dtype=wide_dtype(dtype), device=inputs.device)
        entropy = torch.empty_like(logprobs) if with_entropy else None
        all_sums = []
        for at in _chunks(len(tokens), chunk_tokens):
            logits = _logits(inputs[at], *narrow)
            own_scale = None if scale is None else scale[at]
            logprobs[at], of_chunk, sums = read_off(logits, tokens[at], own_scale, with_entropy)
            del logits  # before those of the next chunk are allocated
            if entropy is not None:
                entropy[at] = of_chunk
            all_sums.append(sums)
        saved_sums = torch.cat(all_sums) if is_compiled and all_sums else None
        ctx.save_for_backward(inputs, weight, bias, tokens, scale, entropy, saved_sums)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        inputs, weight, bias, tokens, scale, entropy, sums = ctx.saved_tensors
        if grad_logprobs is None and grad_entropy is None:
            return (None,) * 8
        wide = wide_dtype(ctx.dtype)
        gradient = _gradient if sums is None else _compiled(_gradient_in_place)
        narrow = [None if each is None else each.to(ctx.dtype) for each in (weight, bias)]
        wants_inputs, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        grad_inputs = torch.empty_like(inputs) if wants_inputs else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if wants_weight else None
        grad_bias = torch.zeros_like(bias, dtype=wide) if wants_bias else None
        for at in _chunks(len(tokens), ctx.chunk_tokens):
            logits = _logits(inputs[at], *narrow)
            given = (scale, sums, grad_logprobs, grad_entropy, entropy)
            grad, of_tokens = gradient(logits, tokens[at], *(None if each is None else each[at] for each in given))
            grad.scatter_(-1, tokens[at].unsqueeze(-1), of_tokens)
            if grad_bias is not None:
                grad_bias += grad.sum(0, dtype=wide)
            if grad_inputs is not None:
                grad_inputs[at] = grad if narrow[0] is None else grad @ narrow[0]
            if grad_weight is not None:
                _add_product(grad_weight, grad.T, inputs[at].to(ctx.dtype))
            del logits, grad
        return (
            grad_inputs,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            *[None] * 5,
        )


def _logits(inputs: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    return inputs if weight is None else F.linear(inputs.to(weight.dtype), weight, bias)


def _chunks(num_tokens: int, chunk_tokens: int) -> Iterator[slice]:
    return (slice(start, start + chunk_tokens) for start in range(0, num_tokens, chunk_tokens))


def temperature_per_token(temperature: float | Tensor, shape: torch.Size, *, like: Tensor) -> Tensor | None:
    """Return the temperature as `[*shape, 1]`, or None if it is the number 1 and no division is needed."""
    if not isinstance(temperature, Tensor):
        if temperature == 1:
            return None
        temperature = torch.tensor(temperature, dtype=torch.float64)
    if not bool((temperature.isfinite() & (temperature > 0)).all()):
        raise ConfigError(
            f"temperature must be positive and finite, got {temperature.tolist()}. Use the temperature that the tokens "
            "were sampled with, or 1.0 for greedy decoding."
        )
    assert temperature.shape == shape[: temperature.dim()], "one temperature for each sample"
    # Not every accelerator has float64, so use the dtype of the computation.
    column = temperature.detach().to(device=like.device, dtype=wide_dtype(like.dtype))
    column = column.reshape(column.shape + (1,) * (len(shape) - column.dim()))
    return column.expand(shape).unsqueeze(-1)  # [*shape, 1]


def _default_chunk_tokens(vocabulary: int, device: torch.device, dtype: torch.dtype) -> int:
    budget = _CHUNK_BYTES_CPU
    if device.type != "cpu":
        budget = _CHUNK_BYTES if _compiles(device) else _CHUNK_BYTES_UNCOMPILED
    most = max(1, budget // (vocabulary * dtype.itemsize))
    return most if device.type == "cpu" or most < _CHUNK_STEP else most - most % _CHUNK_STEP


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left @ right to `total` in place; the factors may have a narrower dtype."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif total.is_cuda and torch.version.cuda is not None:  # NVIDIA's library adds it before rounding
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += left @ right


@functools.cache
def _compiles(device: torch.device) -> bool:
    """Return whether torch.compile works on a device; tries it once on an accelerator, and warns if it fails."""
    if device.type == "cpu":
        return False
    try:
        torch.compile(torch.neg)(torch.zeros(2, device=device))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # no Triton, no C compiler, or an unsupported GPU or driver
        reason = " ".join(str(error).splitlines()[:2])  # the compiler's message and its cause
        warnings.warn(f"computing log-probs uncompiled, which is slower: {reason}", RuntimeWarning, stacklevel=2)
        return False
    return True


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function of tensors with a dynamic first dimension."""
    compiled = torch.compile(function)

    def call(*args: Any) -> Any:
        for tensor in args:
            if isinstance(tensor, Tensor):
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return compiled(*args)

    return call


def _read_off(
    logits: Tensor,  # [n, V]
    tokens: Tensor,  # [n]
    scale: Tensor | None,  # [n, 1]
    with_entropy: bool,
) -> tuple[Tensor, Tensor | None, None]:
    """Return the log-prob of each token and the entropy of its distribution, [n] each."""
    log_p = _log_softmax(logits, scale, None)
    chosen = log_p.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    if not with_entropy:
        return chosen, None, None
    p = log_p.exp()  # not torch's entr, which is many times slower on a CPU
    return chosen, -log_p.clamp_(min=torch.finfo(log_p.dtype).min).mul_(p).sum(-1), None


def _read_off_at_once(
    logits: Tensor, tokens: Tensor, scale: Tensor | None, with_entropy: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Like `_read_off`, for compilation into fewer passes; also return [n, 2]: max logit, log Σ exp(logit - max)."""
    z = _scaled(logits, scale).to(wide_dtype(logits.dtype))
    top = z.amax(-1, keepdim=True)
    above = z - top
    mass = above.exp()
    total = mass.sum(-1, keepdim=True)
    # Kept separate: their sum would lose digits that 1 - p of a likely token needs.
    sums = torch.cat([top, total.log()], dim=1)
    chosen = above.gather(-1, tokens.unsqueeze(-1)).squeeze(-1) - sums[:, 1]
    if not with_entropy:
        return chosen, None, sums
    return chosen, sums[:, 1] - (above.clamp(min=-1e4) * mass).sum(-1) / total.squeeze(-1), sums


def _gradient(
    logits: Tensor,  # [n, V]
    tokens: Tensor,  # [n]
    scale: Tensor | None,  # [n, 1]
    sums: Tensor | None,  # [n, 2] from `_read_off_at_once`; None: reduce again
    grad_logprobs: Tensor | None,  # [n]
    grad_entropy: Tensor | None,  # [n]
    entropy: Tensor | None,  # [n]
) -> tuple[Tensor, Tensor]:
    """Return the loss gradient of the logits, [n, V], and its values at the tokens, [n, 1], in the logits' dtype.

    The caller writes the second into the first.
    """
    wide, index = wide_dtype(logits.dtype), tokens.unsqueeze(-1)
    by_logprob = torch.zeros_like(index, dtype=wide) if grad_logprobs is None else grad_logprobs.unsqueeze(-1)
    if grad_entropy is None:
        is_reduced = sums is not None
        gradient = (
            _log_softmax(logits, scale, sums).exp() if is_reduced else _scaled(logits, scale).softmax(-1, dtype=wide)
        )
        own = gradient.gather(-1, index) - 1.0  # in full precision: 1 - p is small for a likely token
        factor = -by_logprob
    else:
        assert entropy is not None
        log_p = _log_softmax(logits, scale, sums)
        p = log_p.exp()
        # A token of probability 0 has log p = -inf, and 0 · -inf is nan; below -1e4 p is 0.
        gradient = log_p.clamp_(min=-1e4).add_(entropy.unsqueeze(-1))
        gradient.mul_(-grad_entropy.unsqueeze(-1)).sub_(by_logprob).mul_(p)
        own = gradient.gather(-1, index) + by_logprob
        factor = torch.ones_like(by_logprob)
    if scale is not None:
        factor = factor / scale
    own = (own * factor).to(logits.dtype)
    return gradient.mul_(factor).to(logits.dtype), own


def _gradient_in_place(logits: Tensor, tokens: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    """Compute `_gradient` from the saved sums, in the memory of the logits."""
    # The values at the tokens are computed separately: torch.compile would store a wide gradient that is used twice.
    _, of_tokens = _gradient(logits.gather(-1, tokens.unsqueeze(-1)), torch.zeros_like(tokens), *given)
    return logits.copy_(_gradient(logits, tokens, *given)[0]), of_tokens


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that sums and softmaxes are computed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _scaled(logits: Tensor, scale: Tensor | None) -> Tensor:
    return logits if scale is None else logits.to(wide_dtype(logits.dtype)) / scale


def _log_softmax(logits: Tensor, scale: Tensor | None, sums: Tensor | None) -> Tensor:
    scaled, wide = _scaled(logits, scale), wide_dtype(logits.dtype)
    if sums is None:
        return scaled.log_softmax(-1, dtype=wide)
    return (scaled.to(wide) - sums[:, :1]) - sums[:, 1:]
