"""Does a maker compute what its trainer computes? Both sides compute log-probs of a fixed prompt, and compare.

A checksum proves that the bytes arrived. A canary proves that they went to the right places and mean the same there:
a layer that was mapped to the wrong name, a scale that was lost, a model of another configuration. It cannot tell two
versions apart that differ by less than rounding.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from coati.errors import ConfigError
from coati.models.actor import action_logprobs, unwrap
from coati.models.calls import context_length_of

CANARY_TOKENS = 16


class Canary(NamedTuple):
    """What an actor says about the fixed prompt."""

    logprobs: tuple[float, ...]
    tolerance: float
    """Mean absolute difference to another actor, in nats, that rounding explains. Other kernels, other batch shapes and
    adapters that are merged on one side only change the last bits, and 16-bit numbers have few of them."""


def canary_tokens(vocab_size: int, length: int = CANARY_TOKENS) -> Tensor:
    """The fixed prompt, `[1, length]`: it depends on nothing but the vocabulary's size, and is spread over all of it.

    >>> canary_tokens(50, length=4).tolist()
    [[0, 19, 38, 7]]
    """
    step = max(1, round(vocab_size * 0.381966))  # the golden section: no short cycle, no clusters
    return (torch.arange(length) * step % vocab_size).unsqueeze(0)


@torch.no_grad()
def make_canary(actor: nn.Module, *, device: torch.device | None = None) -> Canary:
    """Compute log-probs of the fixed prompt's tokens but the first, with dropout off.

    `device` is where the actor computes, which need not be where its offloaded weights rest. In a sharded group all
    ranks must call it, because their forward is one.
    """
    model = unwrap(actor)
    vocab_size = getattr(getattr(model, "config", None), "vocab_size", None)
    if not isinstance(vocab_size, int) or vocab_size < 1:
        raise ConfigError(
            'topology.verify_updates = "canary" needs an actor whose config says its vocab_size, got '
            f'{type(model).__name__} without one. Use verify_updates = "checksum".'
        )
    tokens = canary_tokens(vocab_size, length=min(CANARY_TOKENS, context_length_of(model) or CANARY_TOKENS))
    tokens = tokens.to(device or next(actor.parameters()).device)
    # Each has its own: blocks that compute their activations twice, and LoRA's dropout, are in training alone.
    modes = [(module, module.training) for module in actor.modules()]
    actor.eval()
    try:
        logprobs, _ = action_logprobs(actor, tokens, torch.ones_like(tokens), tokens.shape[1] - 1)
    finally:
        for module, was_training in modes:
            module.training = was_training
    dtypes = {parameter.dtype for parameter in actor.parameters() if parameter.is_floating_point()}
    tolerance = 1e-4 if dtypes <= {torch.float64, torch.float32} else 0.1
    return Canary(logprobs=tuple(logprobs[0].double().tolist()), tolerance=tolerance)


def canary_fault(actor: nn.Module, sent: Canary) -> str | None:
    """What is wrong with the receiver's actor; None if it computes what the sender's does."""
    here = make_canary(actor)
    pairs = list(zip(sent.logprobs, here.logprobs, strict=True))
    difference = sum(abs(theirs - ours) for theirs, ours in pairs) / max(1, len(pairs))
    tolerance = max(sent.tolerance, here.tolerance)
    if difference <= tolerance:  # and not with nan on either side
        return None
    theirs, ours = max(pairs, key=lambda pair: abs(pair[0] - pair[1]))
    return (
        f"its log-probs of the canary differ by {difference:.3g} nats on average, and {tolerance:g} is allowed (for "
        f"example {ours:.4f} instead of {theirs:.4f})"
    )
