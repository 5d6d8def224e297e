"""From logits to the next token: temperature, cuts, and a draw by inverse CDF. Every engine samples with this code."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.generation.logits_process import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from coati.config.generate import GenerateOptions


class Sampler:
    """Draws tokens from logits as the options say.

    `draw` may replace torch for sampling at a temperature without cuts: (logits, uniforms, temperature) to tokens and
    log-probs.
    """

    def __init__(
        self,
        options: GenerateOptions,
        *,
        draw: Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]] | None = None,
    ) -> None:
        self._temperature = options.sampling_temperature
        self._is_greedy = not options.do_sample
        self._cuts: list[Any] = []
        if options.do_sample:
            if options.top_k > 0:
                self._cuts.append(TopKLogitsWarper(top_k=options.top_k))
            if options.top_p < 1.0:
                self._cuts.append(TopPLogitsWarper(top_p=options.top_p))
            if options.min_p > 0.0:
                self._cuts.append(MinPLogitsWarper(min_p=options.min_p))
        self._draw = draw if options.do_sample and not self._cuts else None

    def __call__(self, logits: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens and their log-probs before anything was cut, [n] each, from logits [n, vocabulary]."""
        if self._draw is not None:
            return self._draw(logits, uniforms, self._temperature)
        # Cutting sets entries to -inf and moves no other, so a token that can be drawn keeps its log-prob.
        scores = torch.log_softmax(logits.float() / self._temperature, dim=-1)
        for cut in self._cuts:
            scores = cut(None, scores)
        tokens = scores.argmax(dim=-1) if self._is_greedy else inverse_cdf(scores, uniforms)
        return tokens, scores.gather(1, tokens.unsqueeze(1)).squeeze(1)


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
    # Only NaN gets past that. Its row stays NaN, which the learner reports; an index out of range would end the maker.
    return tokens.clamp(max=log_probs.shape[-1] - 1)
