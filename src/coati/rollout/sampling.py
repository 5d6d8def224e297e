"""From logits to the next token: temperature, cuts, and a draw by inverse CDF. Every engine samples with this code."""

from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor
from transformers.generation.logits_process import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    MinPLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from coati.rollout.options import GenerateOptions


def score_processors(options: GenerateOptions) -> list[Any]:
    """From logits to log-probs: temperature, then whatever cuts the distribution down.

    They are transformers' own, and take (input_ids, scores); these need no input_ids.
    """
    processors: list[Any] = [_Temperature(options.sampling_temperature)]
    if not options.do_sample:
        return processors
    if options.top_k > 0:
        processors.append(TopKLogitsWarper(top_k=options.top_k))
    if options.top_p < 1.0:
        processors.append(TopPLogitsWarper(top_p=options.top_p))
    if options.min_p > 0.0:
        processors.append(MinPLogitsWarper(min_p=options.min_p))
    if options.typical_p < 1.0:
        processors.append(TypicalLogitsWarper(mass=options.typical_p))
    if 0.0 < options.epsilon_cutoff < 1.0:
        processors.append(EpsilonLogitsWarper(epsilon=options.epsilon_cutoff))
    if 0.0 < options.eta_cutoff < 1.0:
        processors.append(EtaLogitsWarper(epsilon=options.eta_cutoff))
    return processors


class _Temperature(LogitsProcessor):  # type: ignore[misc]
    """Divides by the temperature and leaves normalised log-probs, which cutting down does not change."""

    def __init__(self, temperature: float) -> None:
        self._temperature = temperature

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # noqa: ARG002
        return torch.log_softmax(scores.float() / self._temperature, dim=-1)


def inverse_cdf(log_probs: Tensor, uniforms: Tensor) -> Tensor:
    """For each row the token at which the cumulative probability first exceeds its uniform number, [B].

    In float64, so that the tail of a large vocabulary is not rounded away; a token of probability 0 is never
    drawn, because the cumulative sum does not rise there.
    """
    cumulative = log_probs.double().exp().cumsum(dim=-1)
    total = cumulative[:, -1]
    # A product that rounds up to the total would land one past the end: below it there is a token that has mass.
    targets = torch.minimum(uniforms.double() * total, torch.nextafter(total, torch.zeros_like(total)))
    tokens = torch.searchsorted(cumulative, targets.unsqueeze(-1), right=True).squeeze(-1)
    # Only nan gets past that: its row goes on as nan, which the learner's guard names, not as a bad index.
    return tokens.clamp(max=log_probs.shape[-1] - 1)
