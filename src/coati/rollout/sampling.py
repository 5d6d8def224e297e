"""Sampling of the next token from logits, and detection of stop strings; shared by the engines.

An automaton finds stop strings. The state of a response is the longest prefix of a stop string that it ends with. The
next state depends only on this state and the next token, so all transitions fit in a table, and a check is one lookup,
which a CUDA graph can contain.
"""

import functools
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.generation.logits_process import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from coati.config.generate import GenerateOptions
from coati.errors import GenerateOptionError


class Sampler:
    """Draws tokens from logits as the options say. `draw` replaces torch if no top-k, top-p or min-p is set."""

    def __init__(
        self, options: GenerateOptions, *, draw: Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]] | None = None
    ) -> None:
        self._temperature = options.sampling_temperature
        self._is_greedy = not options.do_sample
        self._filters: list[Any] = []
        if options.do_sample:
            if options.top_k > 0:
                self._filters.append(TopKLogitsWarper(top_k=options.top_k))
            if options.top_p < 1.0:
                self._filters.append(TopPLogitsWarper(top_p=options.top_p))
            if options.min_p > 0.0:
                self._filters.append(MinPLogitsWarper(min_p=options.min_p))
        self._draw = draw if options.do_sample and not self._filters else None

    def __call__(self, logits: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        """Return tokens and their log-probs before top-k, top-p and min-p, [n] each, from logits [n, vocabulary]."""
        if self._draw is not None:
            return self._draw(logits, uniforms, self._temperature)
        # Filters set entries to -inf and change no others, so a token that can be drawn keeps its log-prob.
        logits = logits.float() if self._temperature == 1.0 else logits.float() / self._temperature
        scores = torch.log_softmax(logits, dim=-1)
        for apply_filter in self._filters:
            scores = apply_filter(None, scores)
        tokens = scores.argmax(dim=-1) if self._is_greedy else inverse_cdf(scores, uniforms)
        return tokens, scores.gather(1, tokens.unsqueeze(1)).squeeze(1)


def inverse_cdf(log_probs: Tensor, uniforms: Tensor) -> Tensor:
    """Return for each row the token at which the cumulative probability first exceeds its uniform number, [B].

    Float64 keeps the tail of a large vocabulary from being rounded away. A token of probability 0 is never drawn.
    """
    cumulative = log_probs.double().exp().cumsum_(dim=-1)
    # The bound is for a product that rounds up to the total: it would select an index past the last token with mass.
    targets = uniforms.double().clamp(max=1 - 2**-51).unsqueeze(-1) * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, targets, right=True).squeeze(-1)
    # Only NaN still selects it. The row stays NaN, which the learner reports; an invalid index would crash the maker.
    return tokens.clamp(max=log_probs.shape[-1] - 1)


class StopStrings:
    """Automaton for stop strings: `table[state, token]` is the next state; 0 is the initial state, `found` a match.

    The last column is for token ids that the tokenizer does not have.
    """

    def __init__(self, strings: Sequence[str], token_texts: Sequence[str], device: torch.device) -> None:
        self._strings = strings
        prefixes = sorted({string[:size] for string in strings for size in range(len(string))}, key=len)
        self._states = {prefix: state for state, prefix in enumerate(prefixes)}
        self._max_prefix_length = len(prefixes[-1])
        self.found = len(prefixes)
        texts = [*token_texts, ""]
        by_first_char: dict[str, list[int]] = defaultdict(list)
        for token, text in enumerate(texts):
            by_first_char[text[:1]].append(token)
        from_start = torch.tensor([self._state_of(text) for text in texts], dtype=torch.int32)
        rows = [from_start]
        for state, prefix in enumerate(prefixes[1:], start=1):
            row = from_start.clone()
            row[by_first_char[""]] = state
            # Only tokens that continue this prefix, or a shorter one at its end, differ from the initial state.
            suffixes = [prefix[start:] for start in range(len(prefix))]
            next_chars = {
                string[len(suffix)]
                for suffix in suffixes
                if suffix in self._states
                for string in strings
                if string.startswith(suffix)
            }
            for token in (token for char in next_chars for token in by_first_char[char]):
                row[token] = self._state_of(prefix + texts[token])
            rows.append(row)
        self.table = torch.stack([*rows, torch.full_like(from_start, self.found)]).to(device)  # [states, V + 1]

    def _state_of(self, text: str) -> int:
        if any(string in text for string in self._strings):
            return self.found
        suffixes = (text[-size:] for size in range(min(self._max_prefix_length, len(text)), 0, -1))
        return next((self._states[suffix] for suffix in suffixes if suffix in self._states), 0)

    def can_be_found(self) -> bool:
        """Return whether some sequence of tokens spells a stop string."""
        reached, new = {0}, {0}
        while new:
            new = set(torch.unique(self.table[list(new)]).tolist()) - reached
            reached |= new
        return self.found in reached

    def advance(self, states: Tensor, tokens: Tensor) -> Tensor:
        """Return the states [n] after one more token [n] of each response."""
        return self.table[states, tokens.clamp(max=self.table.shape[1] - 1)].long()


@functools.lru_cache(maxsize=4)
def stop_strings_of(tokenizer: Any, strings: tuple[str, ...], device: torch.device) -> StopStrings:
    """Return the automaton for a tokenizer; raise GenerateOptionError if its tokens cannot spell any of the strings."""
    ids = list(range(len(tokenizer)))
    # The text that a token adds after another one: decoded alone, many tokenizers drop the space before a word.
    once = tokenizer.batch_decode([[token] for token in ids], skip_special_tokens=True)
    twice = tokenizer.batch_decode([[token, token] for token in ids], skip_special_tokens=True)
    stops = StopStrings(strings, [both[len(first) :] for first, both in zip(once, twice, strict=True)], device)
    if not stops.can_be_found():
        raise GenerateOptionError(
            f"generate option stop_strings={list(strings)!r} can never match: this tokenizer's tokens cannot spell any "
            "of them. Use another stop string, or eos_token_id."
        )
    return stops
