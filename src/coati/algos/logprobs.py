"""Log-probabilities of tokens, and entropies, from logits.

`logprobs_of` and `entropy_of` are the definitions, in plain autograd. `logprobs_and_entropy` gives the same
numbers and gradients for training: it widens to float32 one chunk of tokens at a time, keeps nothing but the
logits it was given, and recomputes each chunk in the backward pass straight into one gradient buffer.
(`torch.utils.checkpoint` over slices would hold the chunks' gradients and their concatenation at once.)
Where the hidden states and the head are at hand, `coati.algos.head_logprobs` needs no logits at all.

In all three, `temperature` divides the logits: a number, or a tensor whose shape leads that of the tokens,
such as `[B]` for one temperature per sample. Where the optional `mask` is False, logits and tokens may be
garbage, the results are 0 and no gradient flows.
"""

import math
from collections.abc import Iterator
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from coati.algos.masked import at_least_float32
from coati.errors import ConfigError, DataError


def logprobs_of(
    logits: Tensor,  # [..., T, V]
    tokens: Tensor,  # [..., T] token ids
    *,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,  # [..., T] bool
) -> Tensor:
    """Log-probability of each token under softmax(logits / temperature), `[..., T]`.

    >>> logits = torch.tensor([[0.0, 0.0, 0.0, 0.0]])
    >>> round(logprobs_of(logits, torch.tensor([2])).item(), 4)  # -log 4
    -1.3863
    """
    _check_shapes(logits, tokens, mask)
    scale = temperature_per_token(temperature, logits.shape[:-1], like=logits)
    return _pick(_log_softmax(logits, scale, mask), tokens, mask)


def entropy_of(
    logits: Tensor,  # [..., T, V]
    *,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,  # [..., T] bool
) -> Tensor:
    """Entropy in nats of softmax(logits / temperature) at each position, `[..., T]`.

    A logit of -inf is a token that cannot come; it adds nothing.

    >>> round(entropy_of(torch.tensor([[0.0, 0.0, float("-inf")]])).item(), 4)  # log 2
    0.6931
    """
    _check_shapes(logits, None, mask)
    return _entropy(
        _log_softmax(logits, temperature_per_token(temperature, logits.shape[:-1], like=logits), mask), mask
    )


@overload
def logprobs_and_entropy(
    logits: Tensor,
    tokens: Tensor,
    *,
    temperature: float | Tensor = ...,
    mask: Tensor | None = ...,
    chunk_tokens: int = ...,
    with_entropy: Literal[True] = ...,
) -> tuple[Tensor, Tensor]: ...
@overload
def logprobs_and_entropy(
    logits: Tensor,
    tokens: Tensor,
    *,
    temperature: float | Tensor = ...,
    mask: Tensor | None = ...,
    chunk_tokens: int = ...,
    with_entropy: bool,
) -> tuple[Tensor, Tensor | None]: ...
def logprobs_and_entropy(
    logits: Tensor,  # [..., T, V]
    tokens: Tensor,  # [..., T] token ids
    *,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,  # [..., T] bool
    chunk_tokens: int = 4096,
    with_entropy: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """`logprobs_of` and `entropy_of` together, `[..., T]` each, at most `chunk_tokens` positions at a time.

    Beyond the logits, memory is a few `[chunk_tokens, V]` tensors, and in the backward pass the gradient of
    the logits itself. Without `with_entropy` the second result is None. Differentiable once.

    >>> logits = torch.zeros(1, 2, 4)
    >>> logprobs, entropy = logprobs_and_entropy(logits, torch.tensor([[0, 3]]), chunk_tokens=1)
    >>> bool(torch.equal(logprobs, logprobs_of(logits, torch.tensor([[0, 3]]))))
    True
    """
    _check_shapes(logits, tokens, mask)
    if chunk_tokens < 1:
        raise ConfigError(f"chunk_tokens must be 1 or more, got {chunk_tokens}. Use 4096, or less to save memory.")
    scale = temperature_per_token(temperature, logits.shape[:-1], like=logits)
    # [N, T, ...]: chunks are cut as views along N and T, because flattening a slice of the logits, such as
    # logits[:, prompt:-1], into [N * T, V] would copy all of it.
    flat_logits = logits.unsqueeze(0) if logits.dim() == 2 else logits.flatten(0, -3)
    rows = flat_logits.shape[:2]
    logprobs, entropy = _ChunkedLogprobs.apply(  # type: ignore[no-untyped-call]
        flat_logits,
        tokens.reshape(rows),
        None if scale is None else scale.reshape(*rows, 1),
        None if mask is None else mask.reshape(rows),
        chunk_tokens,
        with_entropy,
    )
    shape = logits.shape[:-1]
    return logprobs.reshape(shape), entropy.reshape(shape) if with_entropy else None


class _ChunkedLogprobs(torch.autograd.Function):
    """Log-probs and entropies of `[N, T, V]` logits, with the gradient in closed form.

    With p = softmax(z / τ), H its entropy and a the token:
    d log p_a / dz = (onehot(a) - p) / τ   and   dH / dz = -p · (log p + H) / τ.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,  # [N, T, V]
        tokens: Tensor,  # [N, T]
        scale: Tensor | None,  # [N, T, 1] temperature
        mask: Tensor | None,  # [N, T]
        chunk_tokens: int,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.save_for_backward(logits, tokens, scale, mask)
        ctx.chunk_tokens = chunk_tokens
        # An entropy that only feeds a metric has no gradient; None instead of zeros saves its whole pass.
        ctx.set_materialize_grads(False)
        dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
        logprobs = torch.empty(tokens.shape, dtype=dtype, device=logits.device)
        entropy = torch.empty_like(logprobs) if with_entropy else None
        for at in _chunks(tokens.shape[0], tokens.shape[1], chunk_tokens):
            chunk_mask = None if mask is None else mask[at]
            log_p = _log_softmax(logits[at], None if scale is None else scale[at], chunk_mask)
            logprobs[at] = _pick(log_p, tokens[at], chunk_mask)
            if entropy is not None:
                entropy[at] = _entropy(log_p, chunk_mask)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, None, None, None, None, None]:
        logits, tokens, scale, mask = ctx.saved_tensors
        grad_logits = torch.empty_like(logits)  # [N, T, V], the only full-size tensor made here
        for at in _chunks(tokens.shape[0], tokens.shape[1], ctx.chunk_tokens):
            chunk_scale = None if scale is None else scale[at]
            chunk_mask = None if mask is None else mask[at]
            grad = _chunk_gradient(
                _log_softmax(logits[at], chunk_scale, chunk_mask),
                _safe_tokens(tokens[at], chunk_mask),
                None if grad_logprobs is None else grad_logprobs[at],
                None if grad_entropy is None else grad_entropy[at],
            )
            if chunk_scale is not None:
                grad /= chunk_scale
            if chunk_mask is not None:
                grad.masked_fill_(~chunk_mask.unsqueeze(-1), 0.0)
            grad_logits[at] = grad
        return grad_logits, None, None, None, None, None


def _chunk_gradient(
    log_p: Tensor,  # [n, t, V]
    tokens: Tensor,  # [n, t]
    grad_logprobs: Tensor | None,  # [n, t]
    grad_entropy: Tensor | None,  # [n, t]
) -> Tensor:
    """Gradient of the loss by logits / temperature, `[n, t, V]`."""
    p = log_p.exp()
    if grad_entropy is not None:
        p_log_p = p * _finite(log_p)
        entropy = -p_log_p.sum(-1, keepdim=True)
        grad = p_log_p.add_(p * entropy).mul_(-grad_entropy.unsqueeze(-1))
    else:
        grad = torch.zeros_like(p)
    if grad_logprobs is not None:
        by_logprob = grad_logprobs.unsqueeze(-1)
        grad -= p.mul_(by_logprob)
        grad.scatter_add_(-1, tokens.unsqueeze(-1), by_logprob)
    return grad


def _chunks(num_rows: int, row_length: int, chunk_tokens: int) -> Iterator[tuple[slice, slice]]:
    """Index pairs that cover `[num_rows, row_length]`, each at most `chunk_tokens` positions."""
    rows_per_chunk = max(1, chunk_tokens // max(1, row_length))
    for row in range(0, num_rows, rows_per_chunk):
        for column in range(0, row_length, chunk_tokens):
            yield slice(row, row + rows_per_chunk), slice(column, column + chunk_tokens)


def _log_softmax(logits: Tensor, scale: Tensor | None, mask: Tensor | None) -> Tensor:
    """log softmax(logits / scale) in at least float32; uniform where `mask` is False."""
    wide = at_least_float32(logits)
    if mask is not None:
        wide = wide.masked_fill(~mask.unsqueeze(-1), 0.0)
    if scale is not None:
        wide = wide / scale.to(wide.dtype)
    return wide.log_softmax(-1)


def _pick(log_p: Tensor, tokens: Tensor, mask: Tensor | None) -> Tensor:
    """The entry of `log_p` `[..., V]` at each token, 0 where `mask` is False."""
    picked = log_p.gather(-1, _safe_tokens(tokens, mask).unsqueeze(-1)).squeeze(-1)
    return picked if mask is None else picked.masked_fill(~mask, 0.0)


def _entropy(log_p: Tensor, mask: Tensor | None) -> Tensor:
    """Entropy of `log_p` `[..., V]`, 0 where `mask` is False."""
    entropy = -(log_p.exp() * _finite(log_p)).sum(-1)
    return entropy if mask is None else entropy.masked_fill(~mask, 0.0)


def _finite(log_p: Tensor) -> Tensor:
    # A token that cannot come has log p = -inf, and 0 * -inf is nan; 0 times the lowest float is 0.
    return log_p.clamp(min=torch.finfo(log_p.dtype).min)


def _safe_tokens(tokens: Tensor, mask: Tensor | None) -> Tensor:
    # Padding often carries -100 or another id that is no index.
    tokens = tokens.long()
    return tokens if mask is None else tokens.masked_fill(~mask, 0)


def temperature_per_token(temperature: float | Tensor, shape: torch.Size, *, like: Tensor) -> Tensor | None:
    """The temperature as `[*shape, 1]`, or None when it is the number 1 and nothing needs dividing."""
    if not isinstance(temperature, Tensor):
        if not (math.isfinite(temperature) and temperature > 0):
            raise ConfigError(_temperature_rule(temperature))
        if temperature == 1:
            return None
        temperature = torch.tensor(temperature, dtype=torch.float64)
    elif not bool((temperature.isfinite() & (temperature > 0)).all()):
        raise ConfigError(_temperature_rule(temperature.tolist()))
    if temperature.shape != shape[: temperature.dim()]:
        raise DataError(
            f"a temperature tensor must have a shape that leads {tuple(shape)}, the shape of the tokens, got "
            f"{tuple(temperature.shape)}. Pass one temperature per sample."
        )
    # float64 does not exist on every accelerator; what is computed in decides.
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    column = temperature.detach().to(device=like.device, dtype=dtype)
    column = column.reshape(column.shape + (1,) * (len(shape) - column.dim()))
    return column.expand(shape).unsqueeze(-1)  # [*shape, 1]


def _temperature_rule(value: object) -> str:
    return (
        f"temperature must be positive and finite, got {value}. Use the temperature that the tokens were "
        "sampled with, or 1.0 for greedy decoding."
    )


def _check_shapes(logits: Tensor, tokens: Tensor | None, mask: Tensor | None) -> None:
    if logits.dim() < 2:
        raise DataError(
            f"logits must be [..., tokens, vocabulary], got shape {tuple(logits.shape)}. Add a token dimension."
        )
    expected = tuple(logits.shape[:-1])
    for name, tensor in (("tokens", tokens), ("mask", mask)):
        if tensor is not None and tuple(tensor.shape) != expected:
            raise DataError(
                f"{name} must have the shape of the logits without the vocabulary, {expected}, got "
                f"{tuple(tensor.shape)}. Pass logits[:, :-1] with tokens[:, 1:]."
            )
    if mask is not None and mask.dtype != torch.bool:
        raise DataError(f"mask must be a bool tensor, got {mask.dtype}. Convert it with mask.bool().")
