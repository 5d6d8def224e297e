"""Log-probabilities and entropies straight from hidden states: no `[tokens, vocabulary]` tensor exists.

The output head is applied to a chunk of tokens, what is wanted of its logits is read off, and the logits are let go.
The backward pass computes each chunk's logits again and turns them into gradients of the hidden states and of the head
at once. Memory is tokens × hidden and a chunk × vocabulary (at most 1 GiB with the kernels of a GPU, whatever the
vocabulary), instead of tokens × vocabulary; the price is one more product with the head.

Numbers and gradients are those of `coati.algos.logprobs` on `linear(hidden, weight, bias)`, whatever the size of the
chunks: a token's logits, softmax and gradient do not depend on its neighbours. Sums over tokens (the head's gradient)
are kept in float32 at least.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from coati.algos.head_operations import add_product, head_operations, wide_format
from coati.algos.logprobs import temperature_per_token
from coati.errors import ConfigError, DataError


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
    `with_entropy` the second result is None. Differentiable once, by `hidden`, `weight` and `bias`. Under autocast
    logits are computed in its format, as a linear layer's would be.

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
        chunk_tokens = head_operations(hidden.device, dtype).chunk_tokens(len(tokens), weight.shape[0])
    logprobs, entropy = _HeadLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, tokens.long().contiguous(), scale, dtype, chunk_tokens, with_entropy
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
    ) -> tuple[Tensor, Tensor | None]:
        # An entropy that only feeds a metric has no gradient; None instead of zeros saves its part of the backward.
        ctx.set_materialize_grads(False)
        ctx.dtype, ctx.chunk_tokens = dtype, chunk_tokens
        narrow_weight, narrow_bias = weight.to(dtype), None if bias is None else bias.to(dtype)
        operations = head_operations(hidden.device, dtype)
        logprobs = torch.empty(tokens.shape, dtype=wide_format(dtype), device=hidden.device)
        entropy = torch.empty_like(logprobs) if with_entropy else None
        sums: list[Tensor] = []
        for at in _chunks(len(tokens), chunk_tokens):
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
        for at in _chunks(len(tokens), ctx.chunk_tokens) if has_gradient else ():
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
