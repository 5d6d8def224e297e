"""Log-probabilities and entropies straight from hidden states: no `[tokens, vocabulary]` tensor exists.

The output head is applied to a chunk of tokens, what is wanted of its logits is read off, and the logits are let go.
The backward pass computes each chunk's logits again and turns them into gradients of the hidden states and of the head
at once. Memory is tokens × hidden and a few chunks × vocabulary, instead of tokens × vocabulary; the price is one more
product with the head.

Numbers and gradients are those of `coati.algos.logprobs` on `linear(hidden, weight, bias)`, whatever the size of the
chunks: a token's logits, softmax and gradient do not depend on its neighbours. Sums over tokens (the head's gradient)
are kept in float32 at least.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from coati.algos.logprobs import temperature_per_token
from coati.errors import ConfigError, DataError

# Logits that exist at once, a few times over: on an accelerator small products would waste it. Less in host memory.
_CHUNK_LOGITS = 1 << 27
_CHUNK_LOGITS_CPU = 1 << 25


def head_logprobs_and_entropy(
    hidden: Tensor,  # [N, d]
    weight: Tensor,  # [V, d]
    tokens: Tensor,  # [N] token ids
    *,
    bias: Tensor | None = None,  # [V]
    temperature: float | Tensor = 1.0,  # or [N]
    with_entropy: bool = True,
    chunk_tokens: int = 0,
    compiled: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """log softmax(linear(hidden, weight, bias) / temperature) at each token, and its entropy, `[N]` each.

    `chunk_tokens` is how many tokens' logits exist at once; 0 chooses by the size of the vocabulary. Without
    `with_entropy` the second result is None. Differentiable once, by `hidden`, `weight` and `bias`. Under autocast
    logits are computed in its format, as a linear layer's would be. `compiled` reads logits fewer times, by code that
    torch.compile makes in the first call.

    >>> weight = torch.tensor([[0.0], [1.0]])
    >>> logprobs, entropy = head_logprobs_and_entropy(torch.zeros(3, 1), weight, torch.tensor([0, 1, 1]))
    >>> [round(value, 4) for value in logprobs.tolist()]  # two tokens, equally likely: -log 2
    [-0.6931, -0.6931, -0.6931]
    """
    _check(hidden, weight, tokens, bias)
    if chunk_tokens < 0:
        raise ConfigError(f"chunk_tokens must be 0 (chosen by vocabulary) or more, got {chunk_tokens}.")
    scale = temperature_per_token(temperature, tokens.shape, like=hidden)
    if scale is not None and bool((scale == 1).all()):
        scale = None
    device_type = hidden.device.type
    is_autocast = torch.is_autocast_enabled(device_type) and hidden.dtype != torch.float64
    dtype = torch.get_autocast_dtype(device_type) if is_autocast else hidden.dtype
    if chunk_tokens == 0:
        limit = _CHUNK_LOGITS_CPU if device_type == "cpu" else _CHUNK_LOGITS
        chunk_tokens = max(1, limit // weight.shape[0])
    logprobs, entropy = _HeadLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, tokens.long(), scale, dtype, chunk_tokens, with_entropy, compiled
    )
    return logprobs, entropy


class _HeadLogprobs(torch.autograd.Function):
    """With z the logits over the temperature, p = softmax(z), H its entropy and a the token:

    d log p_a / dz = onehot(a) - p   and   dH / dz = -p · (log p + H).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,  # [N, d]
        weight: Tensor,  # [V, d]
        bias: Tensor | None,  # [V]
        tokens: Tensor,  # [N]
        scale: Tensor | None,  # [N, 1] temperature
        dtype: torch.dtype,
        chunk_tokens: int,
        with_entropy: bool,
        compiled: bool,
    ) -> tuple[Tensor, Tensor | None]:
        # An entropy that only feeds a metric has no gradient; None instead of zeros saves its part of the backward.
        ctx.set_materialize_grads(False)
        ctx.dtype, ctx.chunk_tokens, ctx.compiled = dtype, chunk_tokens, compiled
        narrow_weight, narrow_bias = weight.to(dtype), None if bias is None else bias.to(dtype)
        read: Callable[..., Any] = _compiled(read_off) if compiled else _read_off_in_place
        logprobs = torch.empty(tokens.shape, dtype=_wide(dtype), device=hidden.device)
        entropy = torch.empty_like(logprobs) if with_entropy else None
        for at in _chunks(len(tokens), chunk_tokens):
            logits = F.linear(hidden[at].to(dtype), narrow_weight, narrow_bias)
            chosen, chunk_entropy = read(logits, tokens[at], _part(scale, at), with_entropy)
            logprobs[at] = chosen
            if entropy is not None:
                entropy[at] = chunk_entropy
        ctx.save_for_backward(hidden, weight, bias, tokens, scale, entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, tokens, scale, entropy = ctx.saved_tensors
        dtype, wide = ctx.dtype, _wide(ctx.dtype)
        narrow_weight, narrow_bias = weight.to(dtype), None if bias is None else bias.to(dtype)
        gradient_of = _compiled(logit_gradient) if ctx.compiled else _logit_gradient_in_place
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.zeros_like(hidden) if wants_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if wants_weight else None
        grad_bias = torch.zeros_like(bias, dtype=wide) if wants_bias else None
        has_gradient = grad_logprobs is not None or grad_entropy is not None
        for at in _chunks(len(tokens), ctx.chunk_tokens) if has_gradient else ():
            narrow_hidden = hidden[at].to(dtype)
            logits = F.linear(narrow_hidden, narrow_weight, narrow_bias)
            by_logprob, by_entropy = _part(grad_logprobs, at), _part(grad_entropy, at)
            grad = gradient_of(logits, tokens[at], _part(scale, at), by_logprob, by_entropy, _part(entropy, at))
            if grad_bias is not None:
                grad_bias += grad.sum(0, dtype=wide)
            if grad_hidden is not None:
                grad_hidden[at] = (grad @ narrow_weight).to(hidden.dtype)
            if grad_weight is not None:
                _add_product(grad_weight, grad.T, narrow_hidden)
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            *[None] * 6,
        )


# What is read off a chunk of logits, and the gradient that goes back into it: each once as plain formulas, which
# torch.compile makes one or two kernels of, and once with as few and as small tensors as single operations allow.


def read_off(
    logits: Tensor,  # [n, V]
    tokens: Tensor,  # [n]
    scale: Tensor | None,  # [n, 1]
    with_entropy: bool,
) -> tuple[Tensor, Tensor | None]:
    """Log-prob of each token and entropy of its distribution, [n] each, in at least float32."""
    log_p = _log_softmax(logits, scale)
    chosen = log_p.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    # entr(p) = -p log p, and 0 at p = 0: a token that cannot come adds nothing.
    return chosen, torch.special.entr(log_p.exp()).sum(-1) if with_entropy else None


def _read_off_in_place(
    logits: Tensor, tokens: Tensor, scale: Tensor | None, with_entropy: bool
) -> tuple[Tensor, Tensor | None]:
    log_p = _log_softmax(logits, scale)
    chosen = log_p.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    if not with_entropy:
        return chosen, None
    if logits.device.type == "cpu":  # where torch's entr is many times slower than a product
        p = log_p.exp()
        return chosen, -log_p.clamp_(min=torch.finfo(log_p.dtype).min).mul_(p).sum(-1)
    return chosen, torch.special.entr(log_p.exp_()).sum(-1)


def logit_gradient(
    logits: Tensor,  # [n, V]
    tokens: Tensor,  # [n]
    scale: Tensor | None,  # [n, 1]
    grad_logprobs: Tensor | None,  # [n]
    grad_entropy: Tensor | None,  # [n]
    entropy: Tensor | None,  # [n]
) -> Tensor:
    """Gradient of the loss by the logits, [n, V], in their format."""
    log_p = _log_softmax(logits, scale)
    p = log_p.exp()
    gradient = torch.zeros_like(p)
    if grad_logprobs is not None:
        is_token = torch.arange(logits.shape[1], device=logits.device) == tokens.unsqueeze(-1)
        gradient = gradient + (is_token.to(p.dtype) - p) * grad_logprobs.unsqueeze(-1)
    if grad_entropy is not None and entropy is not None:
        gradient = gradient - p * (_finite(log_p) + entropy.unsqueeze(-1)) * grad_entropy.unsqueeze(-1)
    return (gradient if scale is None else gradient / scale).to(logits.dtype)


def _logit_gradient_in_place(
    logits: Tensor,
    tokens: Tensor,
    scale: Tensor | None,
    grad_logprobs: Tensor | None,
    grad_entropy: Tensor | None,
    entropy: Tensor | None,
) -> Tensor:
    wide, index = _wide(logits.dtype), tokens.unsqueeze(-1)
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
        gradient = log_p.clamp_(min=torch.finfo(wide).min).add_(entropy.unsqueeze(-1))
        gradient.mul_(-grad_entropy.unsqueeze(-1)).sub_(by_logprob).mul_(p)
        gradient.scatter_add_(-1, index, by_logprob)
        factor = torch.ones_like(by_logprob)
    if scale is not None:
        factor = factor / scale
    if gradient.dtype == logits.dtype:
        return gradient.mul_(factor)
    return torch.mul(gradient, factor, out=torch.empty_like(logits))  # multiplied and narrowed in one pass


def _scaled(logits: Tensor, scale: Tensor | None) -> Tensor:
    return logits if scale is None else logits.to(_wide(logits.dtype)) / scale


def _log_softmax(logits: Tensor, scale: Tensor | None) -> Tensor:
    return _scaled(logits, scale).log_softmax(-1, dtype=_wide(logits.dtype))


def _finite(log_p: Tensor) -> Tensor:
    # A token that cannot come has log p = -inf, and 0 · -inf is nan.
    return log_p.clamp(min=torch.finfo(log_p.dtype).min)


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, where the product may be in a narrower format."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _part(tensor: Tensor | None, at: slice) -> Tensor | None:
    return None if tensor is None else tensor[at]


def _chunks(num_tokens: int, chunk_tokens: int) -> Iterator[slice]:
    for start in range(0, num_tokens, chunk_tokens):
        yield slice(start, min(start + chunk_tokens, num_tokens))


def _check(hidden: Tensor, weight: Tensor, tokens: Tensor, bias: Tensor | None) -> None:
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise DataError(
            f"hidden states must be [tokens, hidden] and the head's weight [vocabulary, hidden], got "
            f"{tuple(hidden.shape)} and {tuple(weight.shape)}. Flatten the batch first."
        )
    if tokens.shape != hidden.shape[:1]:
        raise DataError(f"tokens must be [{hidden.shape[0]}], one for each hidden state, got {tuple(tokens.shape)}.")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise DataError(f"the head's bias must be [{weight.shape[0]}], got {tuple(bias.shape)}.")
