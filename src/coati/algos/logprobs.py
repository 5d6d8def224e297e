"""Log-probabilities of tokens, and entropies, from logits or straight from hidden states.

Both work on a chunk of tokens at a time and compute each chunk again in the backward pass, with the gradient in closed
form: with p = softmax(logits / temperature), H its entropy and a the token,

    d log p_a / dz = onehot(a) - p   and   dH / dz = -p · (log p + H),   where z = logits / temperature.

`logprobs_and_entropy` holds the logits it was given, their gradient, and a chunk in float32. For
`head_logprobs_and_entropy` no `[tokens, vocabulary]` tensor exists: the output head is applied to a chunk, what is
wanted of its logits is read off, and they are dropped. Memory is tokens × hidden and a chunk × vocabulary (at most
1 GiB with the kernels of a GPU); the price is one more product with the head. A token's numbers do not depend on the
size of the chunks, and sums over tokens (the head's gradient) are kept in float32 at least.

`temperature` divides the logits: a number, or a tensor whose shape leads that of the tokens, such as `[B]` for one
temperature per sample. Results are float32, or float64 for float64 inputs. Differentiable once.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from coati.algos.head_operations import TorchHead, add_product, head_operations, wide_format
from coati.errors import ConfigError, DataError


def logprobs_and_entropy(
    logits: Tensor,  # [..., T, V]
    tokens: Tensor,  # [..., T] token ids
    *,
    temperature: float | Tensor = 1.0,
    chunk_tokens: int = 4096,
    with_entropy: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Log-prob of each token under softmax(logits / temperature), and the entropy of that, `[..., T]` each.

    Without `with_entropy` the second result is None. A logit of -inf is a token that cannot come; it adds nothing.

    >>> logprobs, entropy = logprobs_and_entropy(torch.tensor([[0.0, 0.0, float("-inf")]]), torch.tensor([1]))
    >>> round(logprobs.item(), 4), round(entropy.item(), 4)  # -log 2, log 2
    (-0.6931, 0.6931)
    """
    shape = logits.shape[:-1]
    if logits.dim() < 2 or tokens.shape != shape:
        raise DataError(
            f"logits must be [..., tokens, vocabulary] and tokens have that shape without the vocabulary, got "
            f"{tuple(logits.shape)} and {tuple(tokens.shape)}. Pass logits[:, :-1] with tokens[:, 1:]."
        )
    if chunk_tokens < 1:
        raise ConfigError(f"chunk_tokens must be 1 or more, got {chunk_tokens}. Use 4096, or less to save memory.")
    scale = temperature_per_token(temperature, shape, like=logits)
    # Chunks are cut as views along the last two dimensions, because flattening a slice of the logits, such as
    # logits[:, prompt:-1], would copy all of it.
    flat_logits = logits.unsqueeze(0) if logits.dim() == 2 else logits.flatten(0, -3)  # [N, T, V]
    rows = flat_logits.shape[:2]
    logprobs, entropy = _ChunkedLogprobs.apply(  # type: ignore[no-untyped-call]
        flat_logits,
        tokens.long().reshape(rows),
        None if scale is None else scale.reshape(*rows, 1),
        chunk_tokens,
        with_entropy,
    )
    return logprobs.reshape(shape), entropy.reshape(shape) if with_entropy else None


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,  # [N, T, V]
        tokens: Tensor,  # [N, T]
        scale: Tensor | None,  # [N, T, 1] temperature
        chunk_tokens: int,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor | None]:
        # An entropy that only feeds a metric has no gradient; None instead of zeros saves its part of the backward.
        ctx.set_materialize_grads(False)
        ctx.chunk_tokens = chunk_tokens
        logprobs = torch.empty(tokens.shape, dtype=wide_format(logits.dtype), device=logits.device)
        entropy = torch.empty_like(logprobs) if with_entropy else None
        operations = TorchHead(logits.device)
        for at in _blocks(tokens.shape, chunk_tokens):
            reading = operations.read_off(logits[at], tokens[at], _part(scale, at), with_entropy=with_entropy)
            logprobs[at] = reading.logprobs
            if entropy is not None:
                assert reading.entropy is not None
                entropy[at] = reading.entropy
        ctx.save_for_backward(logits, tokens, scale, entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        logits, tokens, scale, entropy = ctx.saved_tensors
        grad_logits = torch.empty_like(logits)  # [N, T, V], the only tensor of full size made here
        operations = TorchHead(logits.device)
        for at in _blocks(tokens.shape, ctx.chunk_tokens):
            parts = (_part(scale, at), None, _part(grad_logprobs, at), _part(grad_entropy, at), _part(entropy, at))
            grad_logits[at] = operations.gradient(logits[at], tokens[at], *parts)
        return grad_logits, *[None] * 4


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
    """log softmax(linear(hidden, weight, bias) / temperature) at each token, and its entropy, `[N]` each.

    `chunk_tokens` is how many tokens' logits exist at once; 0 chooses by the size of the vocabulary. Without
    `with_entropy` the second result is None. Gradients are of `hidden`, `weight` and `bias`. Under autocast logits are
    computed in its format, as a linear layer's would be.

    >>> weight = torch.tensor([[0.0], [1.0]])
    >>> logprobs, entropy = head_logprobs_and_entropy(torch.zeros(3, 1), weight, torch.tensor([0, 1, 1]))
    >>> [round(value, 4) for value in logprobs.tolist()]  # two tokens, equally likely: -log 2
    [-0.6931, -0.6931, -0.6931]
    """
    _check_head(hidden, weight, tokens, bias)
    if chunk_tokens < 0:
        raise ConfigError(f"chunk_tokens must be 0 (chosen by vocabulary) or more, got {chunk_tokens}.")
    scale = temperature_per_token(temperature, tokens.shape, like=hidden)
    if scale is not None and bool((scale == 1).all()):
        scale = None
    device_type = hidden.device.type
    is_autocast = torch.is_autocast_enabled(device_type) and hidden.dtype != torch.float64
    dtype = torch.get_autocast_dtype(device_type) if is_autocast else hidden.dtype
    if chunk_tokens == 0:
        chunk_tokens = head_operations(hidden.device, dtype).chunk_tokens(len(tokens), weight.shape[0])
    logprobs, entropy = _HeadLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, tokens.long().contiguous(), scale, dtype, chunk_tokens, with_entropy
    )
    return logprobs, entropy


class _HeadLogprobs(torch.autograd.Function):
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
    ) -> tuple[Tensor, Tensor | None]:
        # An entropy that only feeds a metric has no gradient; None instead of zeros saves its part of the backward.
        ctx.set_materialize_grads(False)
        ctx.dtype, ctx.chunk_tokens = dtype, chunk_tokens
        narrow_weight, narrow_bias = weight.to(dtype), None if bias is None else bias.to(dtype)
        operations = head_operations(hidden.device, dtype)
        logprobs = torch.empty(tokens.shape, dtype=wide_format(dtype), device=hidden.device)
        entropy = torch.empty_like(logprobs) if with_entropy else None
        sums: list[Tensor] = []
        for at in _spans(len(tokens), chunk_tokens):
            logits = F.linear(hidden[at].to(dtype), narrow_weight, narrow_bias)
            reading = operations.read_off(logits, tokens[at], _part(scale, at), with_entropy=with_entropy)
            del logits  # before the next chunk's are there
            logprobs[at] = reading.logprobs
            if entropy is not None:
                assert reading.entropy is not None
                entropy[at] = reading.entropy
            if reading.sums is not None:
                sums.append(reading.sums)
        ctx.save_for_backward(hidden, weight, bias, tokens, scale, entropy, torch.cat(sums, 1) if sums else None)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, tokens, scale, entropy, sums = ctx.saved_tensors
        dtype, wide = ctx.dtype, wide_format(ctx.dtype)
        narrow_weight, narrow_bias = weight.to(dtype), None if bias is None else bias.to(dtype)
        operations = head_operations(hidden.device, dtype)
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.zeros_like(hidden) if wants_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if wants_weight else None
        grad_bias = torch.zeros_like(bias, dtype=wide) if wants_bias else None
        has_gradient = grad_logprobs is not None or grad_entropy is not None
        for at in _spans(len(tokens), ctx.chunk_tokens) if has_gradient else ():
            narrow_hidden = hidden[at].to(dtype)
            logits = F.linear(narrow_hidden, narrow_weight, narrow_bias)
            grad = operations.gradient(
                logits,
                tokens[at],
                _part(scale, at),
                None if sums is None else sums[:, at],
                _part(grad_logprobs, at),
                _part(grad_entropy, at),
                _part(entropy, at),
            )
            if grad_bias is not None:
                grad_bias += grad.sum(0, dtype=wide)
            if grad_hidden is not None:
                grad_hidden[at] = (grad @ narrow_weight).to(hidden.dtype)
            if grad_weight is not None:
                add_product(grad_weight, grad.T, narrow_hidden)
            del logits, grad
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            *[None] * 5,
        )


def _part(tensor: Tensor | None, at: Any) -> Tensor | None:
    return None if tensor is None else tensor[at]


def _spans(num_tokens: int, chunk_tokens: int) -> Iterator[slice]:
    for start in range(0, num_tokens, chunk_tokens):
        yield slice(start, min(start + chunk_tokens, num_tokens))


def _blocks(shape: torch.Size, chunk_tokens: int) -> Iterator[tuple[slice, slice]]:
    """Index pairs that cover two dimensions, each at most `chunk_tokens` positions."""
    num_rows, row_length = shape
    for rows in _spans(num_rows, max(1, chunk_tokens // max(1, row_length))):
        for columns in _spans(row_length, chunk_tokens):
            yield rows, columns


def _check_head(hidden: Tensor, weight: Tensor, tokens: Tensor, bias: Tensor | None) -> None:
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise DataError(
            f"hidden states must be [tokens, hidden] and the head's weight [vocabulary, hidden], got "
            f"{tuple(hidden.shape)} and {tuple(weight.shape)}. Flatten the batch first."
        )
    if tokens.shape != hidden.shape[:1]:
        raise DataError(f"tokens must be [{hidden.shape[0]}], one for each hidden state, got {tuple(tokens.shape)}.")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise DataError(f"the head's bias must be [{weight.shape[0]}], got {tuple(bias.shape)}.")


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
