"""What the slot loop works on: the slots, their responses, and what the host learns of them."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from coati.config.generate import GenerateOptions
from coati.experience import Sample
from coati.randomness import keyed_uniforms
from coati.rollout.native.cache import enlarged
from coati.rollout.sampling import Sampler, StopStrings, stop_strings_of


@dataclasses.dataclass
class Slots:
    """What is being written in each slot, [N] each if nothing else is said."""

    rows: Tensor
    """Where its response goes."""
    tokens: Tensor
    """The newest token, not yet in the cache."""
    positions: Tensor
    """Where it goes."""
    steps: Tensor
    """How much of its response is written."""
    limits: Tensor
    """The most tokens of its response."""
    stop_states: Tensor
    """How much of a stop string the response ends with; see `StopStrings`."""
    alive: Tensor
    pages: Tensor
    """Where its keys and values are, [N, M]."""

    @classmethod
    def empty(cls, count: int, device: torch.device) -> "Slots":
        """Slots without a sample, and without pages."""
        rows, tokens, positions, steps, limits, states = torch.zeros(6, count, dtype=torch.long, device=device)
        alive = torch.zeros(count, dtype=torch.bool, device=device)
        pages = torch.zeros(count, 0, dtype=torch.long, device=device)
        return cls(rows, tokens, positions, steps, limits, states, alive, pages)

    def tensors(self) -> tuple[Tensor, ...]:
        """All of them, to be moved together."""
        return tuple(getattr(self, field.name) for field in dataclasses.fields(self))

    def place(self, texts: Sequence[list[int]]) -> None:
        """Note which pages the first slots have; one without is stopped, and gets page 0, as do all the others.

        Behind a text comes its first page again: torch reads and masks it, so it has to hold numbers.
        """
        table = np.zeros(self.pages.shape, dtype=np.int64)
        for row, pages in zip(table, texts, strict=False):
            row[:] = pages[0] if pages else 0
            row[: len(pages)] = pages
        self.pages.copy_(on_device(table, self.alive.device))
        has_pages = self.pages[:, 0] > 0
        self.alive &= has_pages
        if self.alive.is_cuda:  # kernels read as far as the position says
            self.positions *= has_pages


def on_device(numbers: Any, device: torch.device) -> Tensor:
    """Numbers as a tensor, without a wait for what the device does."""
    tensor = torch.as_tensor(numbers)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


class TokenRules(NamedTuple):
    """How tokens are drawn, and which of them end a response."""

    sampler: Sampler
    end_tokens: Tensor
    stops: StopStrings | None
    key: tuple[Any, ...]
    """What of that a graph depends on."""

    @classmethod
    def of(cls, options: GenerateOptions, model: Any, device: torch.device, *, draw: Any) -> "TokenRules":
        """The rules for a model; `draw` as for `Sampler`."""
        stops = stop_strings_of(options.tokenizer, options.stop_strings, device) if options.stop_strings else None
        eos_token_ids = options.eos_token_ids(model)
        end_tokens = torch.tensor(eos_token_ids, dtype=torch.long, device=device)
        draws = (options.do_sample, options.temperature, options.top_k, options.top_p, options.min_p)
        return cls(Sampler(options, draw=draw), end_tokens, stops, (*draws, eos_token_ids, stops))


@dataclasses.dataclass
class Place:
    """Where a sample is written; its next turn has the same."""

    rules: TokenRules
    slot: int = -1
    row: int = -1
    left: int = 0
    """After so many steps it has ended, because no response is longer."""
    born: int = -1
    """How many samples were begun before it."""
    pages: list[int] = dataclasses.field(default_factory=list)
    """Where its keys and values are; a sample that is not over and has none waits."""
    num_shared: int = 0
    """How many of them another sample fills."""
    num_cached: int = 0
    """Tokens that they hold when it is begun."""
    written: list[int] = dataclasses.field(default_factory=list)
    """What had been written of its response when it gave its pages up."""
    is_finite: bool = True
    """Whether its pages hold numbers only."""


@dataclasses.dataclass
class Responses:
    """What has been written of each row, [R, A] and [R], and the draws it is written by."""

    tokens: Tensor
    log_probs: Tensor
    versions: Tensor
    uniforms: Tensor
    has_ended: Tensor

    @classmethod
    def empty(cls, num_rows: int, width: int, device: torch.device) -> "Responses":
        """Room for so many rows of so many tokens."""
        return cls(
            tokens=torch.zeros(num_rows, width, dtype=torch.long, device=device),
            log_probs=torch.zeros(num_rows, width, device=device),
            versions=torch.zeros(num_rows, width, dtype=torch.long, device=device),
            uniforms=torch.zeros(num_rows, width, dtype=torch.float64, device=device),
            has_ended=torch.zeros(num_rows, dtype=torch.bool, device=device),
        )

    def enlarged(self, num_rows: int, width: int) -> "Responses":
        """The same with more room."""
        shapes = {name: (num_rows, width)[: tensor.ndim] for name, tensor in vars(self).items()}
        return Responses(**{name: enlarged(getattr(self, name), *shape) for name, shape in shapes.items()})

    def set_draws(self, samples: Sequence[Sample]) -> None:
        """Note the numbers by which tokens of these samples are drawn."""
        draws = torch.zeros(len(samples), max(one.limit for one in samples), dtype=torch.float64)
        for row, one in zip(draws, samples, strict=True):
            uniforms = keyed_uniforms(one.seed, [one.id], one.num_drawn + one.limit)[0, one.num_drawn :]
            row[: one.limit] = torch.from_numpy(uniforms)
        rows = on_device([one.place.row for one in samples], self.uniforms.device)
        self.uniforms[rows, : draws.shape[1]] = on_device(draws, self.uniforms.device)

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
        self.has_ended[rows] = is_end
        return tokens, is_end, stop_states

    def state(self, slots: Slots, count: int) -> Tensor:
        """How the first slots stand, as `Ended` has it, [n, 4]."""
        rows = slots.rows[:count]
        is_finite = self.log_probs[rows].isfinite().all(dim=1)
        parts = (slots.alive[:count], slots.steps[:count], self.has_ended[rows], is_finite)
        return torch.stack([part.long() for part in parts], dim=1)


class Ended(NamedTuple):
    """A sample that has ended."""

    sample: Sample
    num_written: int
    is_cut: bool
    is_finite: bool


class Look:
    """How the slots stood after some steps, on its way to the host while the device works on."""

    def __init__(self, state: Tensor, samples: list[Sample | None]) -> None:
        """`state` of the slots [n, 4], and what is in them."""
        self._samples = list(samples)
        self._event = torch.cuda.Event() if state.is_cuda else None  # type: ignore[no-untyped-call]
        self._state = torch.empty(state.shape, dtype=state.dtype, pin_memory=state.is_cuda)
        self._state.copy_(state, non_blocking=True)
        if self._event is not None:
            self._event.record()

    def ended(self) -> list[Ended]:
        """Wait for what was launched before it, and for nothing after it; which samples have ended, if that is news."""
        if self._event is not None:
            self._event.synchronize()
        return [
            Ended(sample, num_written, not has_ended, bool(is_finite))
            for sample, (alive, num_written, has_ended, is_finite) in zip(
                self._samples, self._state.tolist(), strict=True
            )
            if sample is not None and not sample.is_over and not alive
        ]
