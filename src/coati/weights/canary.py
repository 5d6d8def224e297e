"""Does a maker compute what its trainer computes? A fixed prompt, and the log-probs that the sender gives it.

A checksum proves that the bytes arrived. A canary proves that they went to the right places and mean the same there:
a layer that was mapped to the wrong name, a scale that was lost, a model of another configuration. It cannot tell two
versions apart that differ by less than rounding.
"""

import dataclasses

import torch
from torch import Tensor, nn

from coati.errors import ConfigError
from coati.models.actor import action_logprobs, unwrap
from coati.models.calls import context_length_of

CANARY_TOKENS = 16
# Mean absolute difference of the log-probs, in nats. Other kernels, other batch shapes and adapters that are merged on
# one side only change the last bits, and 16-bit numbers have few of them.
_TOLERANCES = {torch.float64: 1e-4, torch.float32: 1e-4}
_TOLERANCE_16_BIT = 0.1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Canary:
    """What the sender's actor says about the fixed prompt."""

    logprobs: tuple[float, ...]
    tolerance: float


def canary_tokens(vocab_size: int, length: int = CANARY_TOKENS) -> Tensor:
    """The fixed prompt, `[1, length]`: it depends on nothing but the vocabulary's size, and is spread over all of it.

    >>> canary_tokens(50, length=4).tolist()
    [[0, 19, 38, 7]]
    """
    step = max(1, round(vocab_size * 0.381966))  # the golden section: no short cycle, no clusters
    return (torch.arange(length) * step % vocab_size).unsqueeze(0)


def make_canary(actor: nn.Module, *, device: torch.device | None = None) -> Canary:
    """The sender's side. In a sharded group all ranks must call it, because their forward is one.

    `device` is where the actor computes, which need not be where its offloaded weights rest.
    """
    return Canary(logprobs=canary_logprobs(actor, device=device), tolerance=tolerance_of(actor))


@torch.no_grad()
def canary_logprobs(actor: nn.Module, *, device: torch.device | None = None) -> tuple[float, ...]:
    """Log-probs of the fixed prompt's tokens but the first, with dropout off."""
    tokens = canary_tokens(_vocab_size(actor), length=min(CANARY_TOKENS, context_length_of(unwrap(actor)) or 2**31))
    tokens = tokens.to(device or next(actor.parameters()).device)
    # Each has its own: blocks that compute their activations twice, and LoRA's dropout, are in training alone.
    modes = [(module, module.training) for module in actor.modules()]
    actor.eval()
    try:
        logprobs, _ = action_logprobs(actor, tokens, torch.ones_like(tokens), tokens.shape[1] - 1)
    finally:
        for module, was_training in modes:
            module.training = was_training
    return tuple(logprobs[0].double().tolist())


def tolerance_of(actor: nn.Module) -> float:
    """How far apart two sides may be, one of which computes like this model."""
    dtypes = {parameter.dtype for parameter in actor.parameters() if parameter.is_floating_point()}
    return max((_TOLERANCES.get(dtype, _TOLERANCE_16_BIT) for dtype in dtypes), default=_TOLERANCE_16_BIT)


def canary_fault(actor: nn.Module, canary: Canary) -> str | None:
    """What is wrong with the receiver's actor; None if it computes what the sender's does."""
    found = canary_logprobs(actor)
    if len(found) != len(canary.logprobs):
        return f"its log-probs of the canary are {len(found)}, expected {len(canary.logprobs)}"
    pairs = list(zip(canary.logprobs, found, strict=True))
    difference = sum(abs(sent - here) for sent, here in pairs) / max(1, len(pairs))
    tolerance = max(canary.tolerance, tolerance_of(actor))
    if difference <= tolerance:  # and not with nan on either side
        return None
    sent, here = max(pairs, key=lambda pair: abs(pair[0] - pair[1]))
    return (
        f"its log-probs of the canary differ by {difference:.3g} nats on average, and {tolerance:g} is allowed (for "
        f"example {here:.4f} instead of {sent:.4f})"
    )


def _vocab_size(actor: nn.Module) -> int:
    config = getattr(unwrap(actor), "config", None)
    size = getattr(config, "vocab_size", None)
    if not isinstance(size, int) or size < 1:
        raise ConfigError(
            'topology.verify_updates = "canary" needs an actor whose config says its vocab_size, got '
            f'{type(unwrap(actor)).__name__} without one. Use verify_updates = "checksum".'
        )
    return size
