"""What the slot loop works on: waiting prompts, the slots, what the host knows of them, and the responses."""

import dataclasses
from collections import deque
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coati.models.tiles import padded_length
from coati.randomness import keyed_uniforms
from coati.rollout.engine import Rollout, RolloutRequest
from coati.rollout.sampling import Sampler, StopStrings


class PromptQueue:
    """Hands out prompts in order. B rows, A the most tokens of a response."""

    def __init__(self, request: RolloutRequest, model: Any) -> None:
        self._request = request
        self.num_rows = int(request.input_ids.shape[0])
        self.lengths = request.attention_mask.sum(dim=1)  # [B]
        self.limits = request.limits  # [B]
        self.max_new_tokens = int(self.limits.max())  # A
        # Prompts are read without their left padding, so a slot needs room for real tokens only.
        self.num_positions = int((self.lengths + self.limits).max())
        self.pad_token = request.options.pad_token(model)
        self.eos_token_ids = request.options.eos_token_ids(model)
        draws = keyed_uniforms(request.seed, request.sample_ids.tolist(), self.max_new_tokens)
        self.uniforms = torch.from_numpy(draws).to(request.input_ids.device)  # [B, A]
        self._next_row = 0

    @property
    def has_waiting(self) -> bool:
        """Whether prompts are left."""
        return self._next_row < self.num_rows

    def next_rows(self, count: int) -> Tensor:
        """At most so many of the prompts in line, [n]."""
        first, self._next_row = self._next_row, min(self.num_rows, self._next_row + count)
        return torch.arange(first, self._next_row, device=self.lengths.device)

    def alike(self, rows: Tensor) -> list[list[int]]:
        """Which of the rows are read together: all or, on a CPU, those that are filled up to the same length."""
        if rows.device.type != "cpu":
            return [list(range(len(rows)))]
        parts: dict[int, list[int]] = {}
        for n, length in enumerate(self.lengths[rows].tolist()):
            parts.setdefault(padded_length(length), []).append(n)
        return list(parts.values())

    def prompts_of(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The different prompts among the rows, right-padded [U, T], their lengths [U], and each row's prompt."""
        ids, mask = self._request.input_ids[rows], self._request.attention_mask[rows].bool()
        lengths = self.lengths[rows]
        width = int(lengths.max())
        width = padded_length(width) if rows.device.type == "cpu" else width
        # Left padding off: position t of a row is its t-th real token.
        source = (ids.shape[1] - lengths).unsqueeze(1) + torch.arange(width, device=ids.device)
        is_real = source < ids.shape[1]
        tokens = ids.masked_fill(~mask, 0).gather(1, source.clamp(max=ids.shape[1] - 1)).masked_fill(~is_real, 0)
        keys = torch.cat([lengths.unsqueeze(1), tokens], dim=1)  # a prompt that ends in token 0 is not its prefix
        distinct, which = torch.unique(keys, dim=0, return_inverse=True)
        return distinct[:, 1:], distinct[:, 0], which


@dataclasses.dataclass
class Slots:
    """What is being written in each slot, [N] each."""

    rows: Tensor
    """Which of the request's rows."""
    tokens: Tensor
    """The newest token, not yet in the cache."""
    positions: Tensor
    """Where it goes."""
    steps: Tensor
    """Index of the next token in its response."""
    limits: Tensor
    """The most tokens of its response."""
    stop_states: Tensor
    """How much of a stop string the response ends with; see `StopStrings`."""
    alive: Tensor

    @classmethod
    def empty(cls, count: int, device: torch.device) -> "Slots":
        """Slots without a sample."""
        rows, tokens, positions, steps, limits, states = torch.zeros(6, count, dtype=torch.long, device=device)
        return cls(rows, tokens, positions, steps, limits, states, torch.zeros(count, dtype=torch.bool, device=device))

    def tensors(self) -> tuple[Tensor, ...]:
        """All of them, to be moved together."""
        return tuple(getattr(self, field.name) for field in dataclasses.fields(self))


class TokenRules(NamedTuple):
    """How tokens are drawn, and which of them end a response."""

    sampler: Sampler
    end_tokens: Tensor
    stops: StopStrings | None


@dataclasses.dataclass
class Responses:
    """What has been written of each row, [B, A] and [B], and the draws it is written by."""

    tokens: Tensor
    log_probs: Tensor
    versions: Tensor
    uniforms: Tensor
    num_written: Tensor
    has_ended: Tensor

    @classmethod
    def empty(cls, num_rows: int, width: int, device: torch.device) -> "Responses":
        """Room for so many rows of so many tokens."""
        return cls(
            tokens=torch.zeros(num_rows, width, dtype=torch.long, device=device),
            log_probs=torch.zeros(num_rows, width, device=device),
            versions=torch.zeros(num_rows, width, dtype=torch.long, device=device),
            uniforms=torch.zeros(num_rows, width, dtype=torch.float64, device=device),
            num_written=torch.zeros(num_rows, dtype=torch.long, device=device),
            has_ended=torch.zeros(num_rows, dtype=torch.bool, device=device),
        )

    def begin(self, pad_token: int, uniforms: Tensor) -> None:
        """Clear everything, and take a request's draws, [B, A]."""
        self.tokens.fill_(pad_token)
        for tensor in (self.log_probs, self.versions, self.num_written, self.has_ended):
            tensor.zero_()
        self.uniforms[: uniforms.shape[0], : uniforms.shape[1]] = uniforms

    def write(
        self, rules: TokenRules, logits: Tensor, rows: Tensor, steps: Tensor, stop_states: Tensor, version: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Draw and record the next token of each row; tokens, whether they end it, and stop states, [n] each."""
        tokens, log_probs = rules.sampler(logits, self.uniforms[rows, steps])
        is_end = (tokens.unsqueeze(1) == rules.end_tokens).any(dim=1)
        if rules.stops is not None:
            stop_states = rules.stops.advance(stop_states, tokens)
            is_end = is_end | (stop_states == rules.stops.found)
        self.tokens[rows, steps] = tokens
        self.log_probs[rows, steps] = log_probs
        self.versions[rows, steps] = version
        self.num_written[rows] = steps + 1
        self.has_ended[rows] = is_end
        return tokens, is_end, stop_states

    def rollout(self, request: RolloutRequest) -> Rollout:
        """All rows of the request, as wide as the longest response."""
        count = request.input_ids.shape[0]
        num_written = self.num_written[:count]
        width = int(num_written.max())
        action_mask = torch.arange(width, device=num_written.device) < num_written.unsqueeze(1)
        return Rollout(
            sequences=torch.cat([request.input_ids, self.tokens[:count, :width]], dim=1),
            attention_mask=torch.cat([request.attention_mask, action_mask.to(request.attention_mask.dtype)], dim=1),
            action_mask=action_mask,
            rollout_log_probs=self.log_probs[:count, :width].clone(),
            is_cut=~self.has_ended[:count],
            token_versions=self.versions[:count, :width].clone(),
        )


class AliveCopy:
    """A copy of which slots are alive, on its way to the host while the device works on."""

    def __init__(self, alive: Tensor) -> None:
        self._event = torch.cuda.Event() if alive.is_cuda else None  # type: ignore[no-untyped-call]
        self._alive = torch.empty(alive.shape, dtype=alive.dtype, pin_memory=alive.is_cuda)
        self._alive.copy_(alive, non_blocking=True)
        if self._event is not None:
            self._event.record()

    def result(self) -> list[bool]:
        """Wait for what was launched before the copy, and for nothing after it."""
        if self._event is not None:
            self._event.synchronize()
        alive: list[bool] = self._alive.tolist()
        return alive


class HostView:
    """What the host knows of the slots. It may take a slot to be alive whose sample has ended; never the reverse."""

    def __init__(self, copies_under_way: int) -> None:
        self.alive: list[bool] = []
        """Of the slots in use."""
        self.steps_left = 0
        """After so many steps none is alive, because no response is longer."""
        self._copies_under_way = copies_under_way
        self._copies: deque[AliveCopy] = deque()  # of slots in their present order, the oldest first

    @property
    def count(self) -> int:
        """How many slots are in use: the first so many."""
        return len(self.alive)

    @property
    def num_alive(self) -> int:
        """How many of them are alive, as far as the host knows."""
        return sum(self.alive)

    def free(self, num_slots: int) -> list[int]:
        """Which of so many slots can take a sample."""
        return [slot for slot in range(num_slots) if slot >= self.count or not self.alive[slot]]

    def fill(self, slots: list[int], *, steps_left: int) -> None:
        """Record new samples in these slots, each with so many steps to go; no other has more."""
        self.alive += [False] * (slots[-1] + 1 - self.count)
        for slot in slots:
            self.alive[slot] = True
        self.steps_left = steps_left
        self._copies.clear()  # they were made before the new samples came

    def resize(self, size: int) -> None:
        """Record that the living slots were moved together to the front of so many."""
        if size < self.count:
            num_alive = self.num_alive
            self.alive = [slot < num_alive for slot in range(size)]
            self._copies.clear()  # they are of the slots in their old order
        elif size > self.count:
            self.alive += [False] * (size - self.count)
            self._copies.clear()

    def add(self, num_steps: int, copy: AliveCopy) -> None:
        """Record that the slots in use took so many steps, and a copy made after them."""
        self.steps_left -= num_steps
        self._copies.append(copy)

    def update(self) -> None:
        """Learn which samples have ended: from the oldest copy, once enough are under way, or without any."""
        if self.steps_left <= 0:
            self.alive = [False] * self.count
        elif len(self._copies) >= self._copies_under_way:
            self.alive = self._copies.popleft().result()
