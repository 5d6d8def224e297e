"""The state of the slot loop: slots, their responses, and snapshots of it for the host."""

import dataclasses
import functools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from coati.config.generate import GenerateOptions
from coati.experience import Sample
from coati.randomness import keyed_uniforms
from coati.rollout.native.cache import enlarged
from coati.rollout.sampling import Sampler, StopStrings, stop_strings_of


def _arrays_of(state: Any) -> Any:
    """Return all tensors but the page table as numpy arrays, which share their memory, on a CPU."""
    return SimpleNamespace(**{name: tensor.numpy() for name, tensor in vars(state).items() if name != "pages"})


@dataclasses.dataclass
class Slots:
    """The state of each slot, [N] each unless stated otherwise."""

    rows: Tensor  # row of its response in `Responses`
    tokens: Tensor  # the newest token, not yet in the cache
    positions: Tensor  # position of that token in the text
    steps: Tensor  # number of response tokens generated
    limits: Tensor  # maximum number of response tokens
    stop_states: Tensor  # state of the response in `StopStrings`
    alive: Tensor
    pages: Tensor  # page table: pages of its keys and values, [N, M]

    @classmethod
    def empty(cls, count: int, device: torch.device) -> "Slots":
        """Return slots without samples and pages."""
        rows, tokens, positions, steps, limits, states = torch.zeros(6, count, dtype=torch.long, device=device)
        alive = torch.zeros(count, dtype=torch.bool, device=device)
        pages = torch.zeros(count, 0, dtype=torch.long, device=device)
        return cls(rows, tokens, positions, steps, limits, states, alive, pages)

    def tensors(self) -> tuple[Tensor, ...]:
        """Return all fields, which move together."""
        return tuple(getattr(self, field.name) for field in dataclasses.fields(self))

    arrays = functools.cached_property(_arrays_of)

    def place(self, texts: Sequence[list[int]]) -> None:
        """Write the page table of the first slots. Slots without pages are stopped and get page 0, as do all others.

        The pages of a text are followed by its first page: torch reads and masks them, so they must be finite.
        """
        table = np.zeros(self.pages.shape, dtype=np.int64)
        for row, pages in zip(table, texts, strict=False):
            row[:] = pages[0] if pages else 0
            row[: len(pages)] = pages
        self.pages.copy_(on_device(table, self.alive.device))
        has_pages = self.pages[:, 0] > 0
        self.alive &= has_pages
        if self.alive.is_cuda:  # kernels read up to the position
            self.positions *= has_pages


def on_device(numbers: Any, device: torch.device) -> Tensor:
    """Copy numbers to a tensor on the device without synchronising."""
    tensor = torch.as_tensor(numbers)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


class TokenRules(NamedTuple):
    """How tokens are drawn, and which of them end a response."""

    sampler: Sampler
    end_tokens: Tensor
    stops: StopStrings | None
    key: tuple[Any, ...]  # the part of this that a CUDA graph depends on

    @classmethod
    def of(cls, options: GenerateOptions, model: Any, device: torch.device, *, draw: Any) -> "TokenRules":
        """Build the rules for a model; `draw` is passed to `Sampler`."""
        stops = stop_strings_of(options.tokenizer, options.stop_strings, device) if options.stop_strings else None
        eos_token_ids = options.eos_token_ids(model)
        end_tokens = torch.tensor(eos_token_ids, dtype=torch.long, device=device)
        draws = (options.do_sample, options.temperature, options.top_k, options.top_p, options.min_p)
        return cls(Sampler(options, draw=draw), end_tokens, stops, (*draws, eos_token_ids, stops))


@dataclasses.dataclass
class Place:
    """Slot, row and pages of a sample, which its next turn keeps."""

    rules: TokenRules
    slot: int = -1
    row: int = -1
    left: int = 0  # maximum number of steps until its response ends
    born: int = -1  # number of samples that were admitted before it
    pages: list[int] = dataclasses.field(default_factory=list)
    """Pages of its keys and values. A sample that has none and is not over is waiting."""
    num_shared: int = 0  # number of these pages that another sample fills
    num_cached: int = 0  # number of tokens in these pages when its turn starts
    written: list[int] = dataclasses.field(default_factory=list)
    """Response tokens that were generated before it was preempted."""
    is_finite: bool = True  # whether its pages hold finite numbers only


@dataclasses.dataclass
class Responses:
    """Generated tokens of each row, [R, A], whether it has ended, [R], and its random numbers."""

    tokens: Tensor
    log_probs: Tensor
    versions: Tensor
    uniforms: Tensor
    has_ended: Tensor

    @classmethod
    def empty(cls, num_rows: int, width: int, device: torch.device) -> "Responses":
        """Return room for `num_rows` rows of `width` tokens."""
        return cls(
            tokens=torch.zeros(num_rows, width, dtype=torch.long, device=device),
            log_probs=torch.zeros(num_rows, width, device=device),
            versions=torch.zeros(num_rows, width, dtype=torch.long, device=device),
            uniforms=torch.zeros(num_rows, width, dtype=torch.float64, device=device),
            has_ended=torch.zeros(num_rows, dtype=torch.bool, device=device),
        )

    arrays = functools.cached_property(_arrays_of)

    def enlarged(self, num_rows: int, width: int) -> "Responses":
        """Return a copy with more room."""
        shapes = {name: (num_rows, width)[: tensor.ndim] for name, tensor in vars(self).items() if name != "arrays"}
        return Responses(**{name: enlarged(getattr(self, name), *shape) for name, shape in shapes.items()})

    def set_draws(self, samples: Sequence[Sample]) -> None:
        """Set the random numbers that tokens of these samples are drawn with."""
        draws = np.zeros((len(samples), max(one.limit for one in samples)))
        most = max(one.num_drawn + one.limit for one in samples)
        uniforms = keyed_uniforms([one.seed for one in samples], [one.id for one in samples], most)
        for own, row, one in zip(draws, uniforms, samples, strict=True):
            own[: one.limit] = row[one.num_drawn : one.num_drawn + one.limit]
        rows = on_device([one.place.row for one in samples], self.uniforms.device)
        self.uniforms[rows, : draws.shape[1]] = on_device(draws, self.uniforms.device)

    def write(
        self, rules: TokenRules, logits: Tensor, rows: Tensor, steps: Tensor, stop_states: Tensor, version: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Draw and record the next token of each row; return tokens, whether they end it, and stop states, [n] each."""
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


class Ended(NamedTuple):
    """A sample whose response has ended."""

    sample: Sample
    num_written: int
    is_cut: bool
    is_finite: bool


class Snapshot:
    """A snapshot of the slots that hold `samples`, copied to the host while the device continues."""

    def __init__(self, slots: Slots, responses: Responses, samples: list[Sample | None]) -> None:
        self._samples, count, rows = samples, len(samples), slots.rows[: len(samples)]
        is_finite = responses.log_probs[rows].isfinite().all(dim=1)
        parts = slots.alive[:count], slots.steps[:count], responses.has_ended[rows], is_finite
        state = torch.stack([part.long() for part in parts], dim=1)  # [n, 4]
        self._event = torch.cuda.Event() if state.is_cuda else None  # type: ignore[no-untyped-call]
        self._state = torch.empty(state.shape, dtype=state.dtype, pin_memory=state.is_cuda)
        self._state.copy_(state, non_blocking=True)
        if self._event is not None:
            self._event.record()

    def ended(self) -> list[Ended]:
        """Wait for work launched before the snapshot, but not after it; return samples not yet known to have ended."""
        if self._event is not None:
            self._event.synchronize()
        return [
            Ended(sample, num_written, not has_ended, bool(is_finite))
            for sample, (alive, num_written, has_ended, is_finite) in zip(
                self._samples, self._state.tolist(), strict=True
            )
            if sample is not None and not sample.is_over and not alive
        ]
