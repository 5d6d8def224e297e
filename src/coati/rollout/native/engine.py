"""Continuous batching over fixed slots: a slot that is done takes the next prompt; the rest goes on."""

import dataclasses
import logging
from typing import Any

import torch
from torch import Tensor, nn

from coati.models.actor import unwrap
from coati.randomness import keyed_uniforms
from coati.rollout.engine import Rollout, RolloutRequest
from coati.rollout.native.decoder import Decoder, SlotCache, unsupported_reason
from coati.rollout.options import GenerateOptions
from coati.rollout.reference import ReferenceEngine
from coati.rollout.sampling import inverse_cdf, score_processors

logger = logging.getLogger(__name__)

DEFAULT_SLOTS = 256


class NativeEngine:
    """Writes what `ReferenceEngine` writes, from the same draws, without `generate`.

    Options of `generate` beyond sampling and lengths (penalties, stop strings, processors of the user's) go to the
    reference engine, and so do models of another shape; the log says so once for each reason.
    """

    def __init__(self, model: nn.Module, *, num_slots: int = DEFAULT_SLOTS) -> None:
        self._model = model
        self._num_slots = num_slots
        self._reference = ReferenceEngine(model)
        self._model_reason = unsupported_reason(model)
        self._decoder = None if self._model_reason else Decoder(model)
        self._cache: SlotCache | None = None
        self._reasons_said: set[str] = set()

    @torch.no_grad()
    def generate(self, request: RolloutRequest) -> Rollout:
        """Continue every prompt; the result is as wide as the longest response."""
        reason = self._model_reason or _unsupported_option(request.options)
        if self._decoder is None or reason:
            self._say(reason)
            return self._reference.generate(request)
        work = _Work(request, unwrap(self._model))
        # Prompts are read without their left padding, so a slot needs room for real tokens only.
        num_positions = int(work.lengths.max()) + request.max_new_tokens
        cache = self._room(min(self._num_slots, work.num_rows), num_positions)
        running = _Running.nobody(request.input_ids.device)
        while work.has_waiting or len(running):
            if free := cache.num_slots - len(running) if work.has_waiting else 0:
                running = running.joined(self._admit(work, cache, first_slot=len(running), count=free))
            if len(running):
                running = self._step(work, cache, running)
        return work.rollout()

    def _admit(self, work: "_Work", cache: SlotCache, *, first_slot: int, count: int) -> "_Running":
        """Read the next prompts into free slots and draw their first tokens; those that go on, packed together."""
        assert self._decoder is not None
        rows = work.next_rows(count)
        slots = torch.arange(first_slot, first_slot + len(rows), device=rows.device)
        prompts, lengths, which = work.prompts_of(rows)
        logits = self._decoder.prefill(prompts, lengths, cache, slots, which)
        tokens, goes_on = work.draw(rows, torch.zeros_like(rows), logits)
        _pack(cache, slots[goes_on], first_slot)
        positions = work.lengths[rows]
        return _Running(rows[goes_on], tokens[goes_on], positions[goes_on], torch.ones_like(rows)[goes_on])

    def _step(self, work: "_Work", cache: SlotCache, running: "_Running") -> "_Running":
        """One more token for everybody."""
        assert self._decoder is not None
        logits = self._decoder.decode(
            running.tokens, running.positions, cache, num_positions=int(running.positions.max()) + 1
        )
        tokens, goes_on = work.draw(running.rows, running.steps, logits)
        later = _Running(running.rows, tokens, running.positions + 1, running.steps + 1)
        if bool(goes_on.all()):
            return later
        _pack(cache, goes_on.nonzero().flatten(), 0)
        return later.select(goes_on)

    def _room(self, num_slots: int, num_positions: int) -> SlotCache:
        """The cache, made anew only when it is too small or the model has moved."""
        assert self._decoder is not None
        cache, like = self._cache, self._decoder.weight
        fits = (
            cache is not None
            and cache.num_slots >= num_slots
            and cache.num_positions >= num_positions
            and cache.keys[0].dtype == like.dtype
            and cache.keys[0].device == like.device
        )
        if cache is None or not fits:
            cache = self._cache = self._decoder.new_cache(num_slots, num_positions)
        return SlotCache(
            keys=[tensor[:num_slots] for tensor in cache.keys], values=[tensor[:num_slots] for tensor in cache.values]
        )

    def _say(self, reason: str) -> None:
        if reason not in self._reasons_said:
            self._reasons_said.add(reason)
            logger.warning("generation goes through transformers' generate, which is slower: %s", reason)


@dataclasses.dataclass
class _Running:
    """The samples in the first n slots; all [n]."""

    rows: Tensor
    """Which of the request's rows each is."""
    tokens: Tensor
    """The newest token, not yet in the cache."""
    positions: Tensor
    """Where it goes."""
    steps: Tensor
    """Which token of the response comes next."""

    @classmethod
    def nobody(cls, device: torch.device) -> "_Running":
        """No slot is taken."""
        return cls(*(torch.zeros(0, dtype=torch.long, device=device) for _ in range(4)))

    def __len__(self) -> int:
        return len(self.rows)

    def joined(self, other: "_Running") -> "_Running":
        """These, and the others in the slots behind them."""
        if not len(self):
            return other
        return _Running(*(torch.cat(pair) for pair in zip(self._parts(), other._parts(), strict=True)))

    def select(self, mask: Tensor) -> "_Running":
        """Those that go on."""
        return _Running(*(part[mask] for part in self._parts()))

    def _parts(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.rows, self.tokens, self.positions, self.steps


class _Work:
    """The request's rows: what waits, and what has been written of each."""

    def __init__(self, request: RolloutRequest, model: Any) -> None:
        self._request = request
        options, device = request.options, request.input_ids.device
        self.num_rows = int(request.input_ids.shape[0])
        self.lengths = request.attention_mask.sum(dim=1)  # [B]
        self._next_row = 0
        self._version = request.version
        self._pad = options.pad_token(model)
        self._ends = torch.tensor(options.eos_token_ids(model), dtype=torch.long, device=device)
        self._processors = score_processors(options)
        draws = keyed_uniforms(request.seed, request.sample_ids.tolist(), request.max_new_tokens)
        self._uniforms = torch.from_numpy(draws).to(device)  # [B, A]
        shape = (self.num_rows, request.max_new_tokens)
        self._tokens = torch.full(shape, self._pad, dtype=torch.long, device=device)
        self._log_probs = torch.zeros(shape, device=device)
        self._versions = torch.full(shape, request.version, dtype=torch.long, device=device)
        self._written = torch.zeros(self.num_rows, dtype=torch.long, device=device)
        self._has_ended = torch.zeros(self.num_rows, dtype=torch.bool, device=device)

    @property
    def has_waiting(self) -> bool:
        """Whether prompts are left."""
        return self._next_row < self.num_rows

    def next_rows(self, count: int) -> Tensor:
        """The next prompts in line."""
        first, self._next_row = self._next_row, min(self.num_rows, self._next_row + count)
        return torch.arange(first, self._next_row, device=self._tokens.device)

    def prompts_of(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The different prompts among the rows, padded on the right [U, T], their lengths [U], and whose is whose."""
        ids, mask = self._request.input_ids[rows], self._request.attention_mask[rows].bool()
        lengths = self.lengths[rows]
        width = int(lengths.max())
        # Left padding off: position t of a row is its t-th real token.
        source = (ids.shape[1] - lengths).unsqueeze(1) + torch.arange(width, device=ids.device)
        is_real = source < ids.shape[1]
        tokens = ids.masked_fill(~mask, 0).gather(1, source.clamp(max=ids.shape[1] - 1)).masked_fill(~is_real, 0)
        keys = torch.cat([lengths.unsqueeze(1), tokens], dim=1)  # a prompt that ends in token 0 is not its prefix
        distinct, which = torch.unique(keys, dim=0, return_inverse=True)
        return distinct[:, 1:], distinct[:, 0], which

    def draw(self, rows: Tensor, steps: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The next token of each row, [n], written down, and which rows go on, [n]. New weights may be taken here."""
        scores = logits
        for process in self._processors:
            scores = process(None, scores)
        if self._request.options.do_sample:
            tokens = inverse_cdf(scores, self._uniforms[rows, steps])
        else:
            tokens = scores.argmax(dim=-1)
        self._tokens[rows, steps] = tokens
        self._log_probs[rows, steps] = scores.gather(1, tokens.unsqueeze(1)).squeeze(1)
        self._versions[rows, steps] = self._version
        self._written[rows] = steps + 1
        is_end = torch.isin(tokens, self._ends)
        self._has_ended[rows] = is_end
        if self._request.commit_point is not None:
            # The logits at hand are used up; the next ones may come from other weights, over the same cache.
            self._version = self._request.commit_point()
        return tokens, ~is_end & (steps + 1 < self._request.max_new_tokens)

    def rollout(self) -> Rollout:
        """Everything, as wide as the longest response."""
        request = self._request
        width = int(self._written.max())
        action_mask = torch.arange(width, device=self._tokens.device) < self._written.unsqueeze(1)
        return Rollout(
            sequences=torch.cat([request.input_ids, self._tokens[:, :width]], dim=1),
            attention_mask=torch.cat([request.attention_mask, action_mask.to(request.attention_mask.dtype)], dim=1),
            action_mask=action_mask,
            rollout_log_probs=self._log_probs[:, :width],
            is_cut=~self._has_ended,
            token_versions=self._versions[:, :width],
        )


def _pack(cache: SlotCache, slots: Tensor, first: int) -> None:
    """Move these slots, in order, to `first` and after it, unless they are there."""
    target = torch.arange(first, first + len(slots), device=slots.device)
    if not torch.equal(slots, target):
        for tensors in (cache.keys, cache.values):
            for tensor in tensors:
                tensor[first : first + len(slots)] = tensor[slots]


def _unsupported_option(options: GenerateOptions) -> str:
    names = sorted(options.extra)
    return f"the option {', '.join(names)} needs it" if names else ""
