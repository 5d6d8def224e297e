"""Continuous batching over fixed slots, with as little of the host as possible.

Everything a step needs lies in tensors of fixed size and place: the slots' tokens and positions, the draws, what has
been written. So a whole step (model, sampling, log-prob, stop check, bookkeeping) can be captured as a CUDA graph and
played back without the host, which looks only every few tokens, and at tokens before those that are being written: so
the device has always something to do. A slot whose sample has ended goes on computing into a row that nobody reads,
until the host looks: then it takes the next prompt; or, when nothing waits, the living slots are packed together and
fewer are computed.

On a CPU the same steps run without a graph, and the host looks after every token.
"""

import dataclasses
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from coati.gpu import side_stream
from coati.rollout.engine import Rollout, RolloutRequest
from coati.rollout.native.decoder import Decoder
from coati.rollout.native.operations import TorchOperations, TritonOperations
from coati.rollout.native.work import Work
from coati.rollout.options import GenerateOptions
from coati.rollout.sampling import inverse_cdf, score_processors

# Tokens between two looks of the host at a GPU, and how many looks it has under way at most. A sample that has ended
# wastes about as many steps of its slot as the two make together; more, if others are admitted meanwhile.
STEPS_PER_LOOK = 4
LOOKS_UNDER_WAY = 2
# Attention by torch reads the cache up to a multiple of this, so that few lengths need a graph.
_POSITION_STEP = 128


class SlotLoop:
    """Slots, buffers and graphs for one model; kept from one request to the next while they fit."""

    def __init__(
        self, decoder: Decoder, *, num_slots: int, num_positions: int, num_rows: int, max_new_tokens: int
    ) -> None:
        self._decoder = decoder
        device = decoder.weight.device
        self._is_captured = device.type == "cuda"
        self._num_slots, self._num_positions = num_slots, num_positions
        self._num_rows, self._max_new_tokens = num_rows, max_new_tokens
        self._cache = decoder.new_cache(num_slots, num_positions)
        self._slots = _Slots.empty(num_slots, device)
        # One row more than there are: what a slot without a sample writes goes there.
        self._pages = _Pages.empty(num_rows + 1, max_new_tokens, device)
        self._version = torch.zeros((), dtype=torch.long, device=device)
        self._graphs: dict[tuple[Any, ...], tuple[Any, _Sampler]] = {}
        self._pool: Any = None
        self._addresses: tuple[int, ...] = ()

    def fits(self, *, num_slots: int, num_positions: int, num_rows: int, max_new_tokens: int) -> bool:
        """Whether a request of these sizes can use these buffers, and the model is where it was."""
        like, cached = self._decoder.weight, self._cache.keys[0]
        return (
            num_slots <= self._num_slots
            and num_positions <= self._num_positions
            and num_rows <= self._num_rows
            and max_new_tokens <= self._max_new_tokens
            and (cached.device, cached.dtype) == (like.device, like.dtype)
        )

    def generate(self, request: RolloutRequest, work: Work, *, num_slots: int) -> Rollout:
        """Continue every prompt of the request, at most `num_slots` at a time."""
        self._forget_graphs_of_moved_weights()
        sampler = _Sampler(request.options, work.ends, self._decoder.operations)
        self._pages.begin(work)
        self._slots.alive.zero_()
        self._version.fill_(request.version)
        steps_per_look, looks_under_way = (STEPS_PER_LOOK, LOOKS_UNDER_WAY) if self._is_captured else (1, 1)
        known = _Known(looks_under_way)
        longest = 0  # every living slot's position lies below
        while True:
            if work.has_waiting and (free := known.free(num_slots)):
                rows = work.next_rows(len(free))
                self._admit(work, rows, free[: len(rows)], sampler, request)
                known.filled(free[: len(rows)], steps_left=request.max_new_tokens - 1)
                longest = max(longest, int(work.lengths[rows].max()) + 1)
                if self._is_captured and known.steps_left > 0:
                    continue  # steps first: with them to do the device needs nobody while the commit point has the host
                known.ran(0, _Look(self._slots.alive[: known.count]))
            elif not known.num_alive:
                return self._pages.rollout(request, work)
            else:
                self._pack(known)
                num_steps = min(steps_per_look, known.steps_left)
                longest = min(longest + num_steps, self._num_positions)
                self._run(num_steps, known.count, longest, sampler, request.max_new_tokens)
                known.ran(num_steps, _Look(self._slots.alive[: known.count]))
            if request.commit_point is not None:
                # Weights change in place, in the memory that the graphs read; the cache stays.
                self._version.fill_(request.commit_point())
            known.look()

    def _admit(self, work: Work, rows: Tensor, free: list[int], sampler: "_Sampler", request: RolloutRequest) -> None:
        """Read prompts into free slots, and draw their first tokens."""
        slots = torch.tensor(free, dtype=torch.long, device=rows.device)
        prompts, lengths, which = work.prompts_of(rows)
        logits = self._decoder.prefill(prompts, lengths, self._cache, slots, which)
        steps = torch.zeros_like(rows)
        tokens, is_end = self._pages.draw(sampler, logits, rows, steps, self._version)
        mine = self._slots
        mine.rows[slots], mine.tokens[slots] = rows, tokens
        mine.positions[slots], mine.steps[slots] = work.lengths[rows], steps + 1
        mine.alive[slots] = ~is_end & (request.max_new_tokens > 1)

    def _pack(self, known: "_Known") -> None:
        """Move the living slots to the front where that lets fewer be computed.

        Graphs exist for few sizes, powers of two and all slots, so some slots without a sample are computed as well;
        what they write is never read. Without graphs slots move when a quarter have ended, because moving the cache
        costs a good part of a step.
        """
        num_alive = size = known.num_alive
        if self._is_captured:
            size = min(1 << (num_alive - 1).bit_length(), self._num_slots)
        elif 4 * num_alive > 3 * known.count:
            size = known.count
        if size < known.count:
            living = [slot for slot, lives in enumerate(known.alive) if lives]
            order = torch.tensor(living, device=self._slots.rows.device)
            for tensor in (*self._cache.keys, *self._cache.values, *self._slots.tensors()):
                tensor[:num_alive] = tensor[order]
            self._slots.alive[num_alive:] = False
        known.packed_to(size)

    def _run(self, num_steps: int, count: int, longest: int, sampler: "_Sampler", max_new_tokens: int) -> None:
        if not self._is_captured:
            for _ in range(num_steps):
                self._step(count, longest, sampler, max_new_tokens)
            return
        length = self._num_positions
        # Kernels read as far as each slot's position says, torch as far as it is told.
        if not isinstance(self._decoder.operations, TritonOperations):
            length = min(length, -(-longest // _POSITION_STEP) * _POSITION_STEP)
        key = (count, length, max_new_tokens, sampler.key)
        if key not in self._graphs:
            # The sampler stays with the graph, which goes on reading its tensors.
            graph = self._captured(lambda: self._step(count, length, sampler, max_new_tokens))
            self._graphs[key] = (graph, sampler)
        for _ in range(num_steps):
            self._graphs[key][0].replay()

    def _step(self, count: int, length: int, sampler: "_Sampler", max_new_tokens: int) -> None:
        """One token for each of the first `count` slots, all on the device and in place."""
        mine = self._slots
        tokens, positions, steps, alive = (
            tensor[:count] for tensor in (mine.tokens, mine.positions, mine.steps, mine.alive)
        )
        logits = self._decoder.decode(tokens, positions, self._cache, num_positions=length)
        rows = torch.where(alive, mine.rows[:count], self._num_rows)
        drawn, is_end = self._pages.draw(sampler, logits, rows, steps, self._version)
        goes_on = alive & ~is_end & (steps + 1 < max_new_tokens)
        tokens.copy_(drawn)
        # Only those that go on move: a slot that is done stays at a place that exists.
        positions.add_(goes_on)
        steps.add_(goes_on)
        alive.copy_(goes_on)

    def _captured(self, step: Callable[[], None]) -> Any:
        """The step as a CUDA graph. What the warm-up does is undone, or done again by the first replay."""
        saved = [tensor.clone() for tensor in self._slots.tensors()]

        def restore() -> None:
            for tensor, value in zip(self._slots.tensors(), saved, strict=True):
                tensor.copy_(value)

        stream = side_stream(self._version.device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                step()
                restore()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads of the actor stage weights meanwhile; their allocations are none of this capture's business.
        with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
            step()
        self._pool = self._pool or graph.pool()
        return graph

    def _forget_graphs_of_moved_weights(self) -> None:
        addresses = self._decoder.join_weights() if self._is_captured else ()
        if addresses != self._addresses:
            self._addresses = addresses
            self._graphs.clear()


class _Look:
    """Which slots are alive after all that was launched before, on its way to the host."""

    def __init__(self, alive: Tensor) -> None:
        self._event = torch.cuda.Event() if alive.is_cuda else None  # type: ignore[no-untyped-call]
        self._alive = torch.empty(alive.shape, dtype=alive.dtype, pin_memory=alive.is_cuda)
        self._alive.copy_(alive, non_blocking=True)
        if self._event is not None:
            self._event.record()

    def result(self) -> list[bool]:
        """Waits for what was launched before, and for nothing that came after."""
        if self._event is not None:
            self._event.synchronize()
        alive: list[bool] = self._alive.tolist()
        return alive


class _Known:
    """What the host knows of the slots. Samples may have ended since it looked, so it takes some to be alive that are
    not; never the other way round."""

    def __init__(self, looks_under_way: int) -> None:
        self.alive: list[bool] = []
        """Of the slots in use."""
        self.steps_left = 0
        """After so many steps none is alive, because no response is longer."""
        self._looks_under_way = looks_under_way
        self._looks: deque[_Look] = deque()  # at slots that lie as they do now, the oldest first

    @property
    def count(self) -> int:
        """Beyond the first so many slots none is in use."""
        return len(self.alive)

    @property
    def num_alive(self) -> int:
        return sum(self.alive)

    def free(self, num_slots: int) -> list[int]:
        """Which of so many slots can take a sample."""
        return [slot for slot in range(num_slots) if slot >= self.count or not self.alive[slot]]

    def filled(self, slots: list[int], *, steps_left: int) -> None:
        """These slots have new samples, each with so many steps before it; no other has more."""
        self.alive += [False] * (slots[-1] + 1 - self.count)
        for slot in slots:
            self.alive[slot] = True
        self.steps_left = steps_left
        self._looks.clear()  # they know nothing of the new ones

    def packed_to(self, size: int) -> None:
        """So many slots are in use now: the living were moved to the front, or the others are some that nobody used."""
        if size < self.count:
            num_alive = self.num_alive
            self.alive = [slot < num_alive for slot in range(size)]
            self._looks.clear()  # they saw the slots where they lay
        elif size > self.count:
            self.alive += [False] * (size - self.count)
            self._looks.clear()

    def ran(self, num_steps: int, look: _Look) -> None:
        """The slots in use took so many steps."""
        self.steps_left -= num_steps
        self._looks.append(look)

    def look(self) -> None:
        """Learn who has ended: from the oldest look, if there are enough of them, or without any."""
        if self.steps_left <= 0:
            self.alive = [False] * self.count
        elif len(self._looks) >= self._looks_under_way:
            self.alive = self._looks.popleft().result()


@dataclasses.dataclass
class _Slots:
    """What is being written in each slot, [N] each."""

    rows: Tensor
    """Which of the request's rows."""
    tokens: Tensor
    """The newest token, not yet in the cache."""
    positions: Tensor
    """Where it goes."""
    steps: Tensor
    """Which token of the response comes next."""
    alive: Tensor

    @classmethod
    def empty(cls, count: int, device: torch.device) -> "_Slots":
        rows, tokens, positions, steps = torch.zeros(4, count, dtype=torch.long, device=device)
        return cls(rows, tokens, positions, steps, torch.zeros(count, dtype=torch.bool, device=device))

    def tensors(self) -> tuple[Tensor, ...]:
        return self.rows, self.tokens, self.positions, self.steps, self.alive


@dataclasses.dataclass
class _Pages:
    """What has been written of each row, [B + 1, A] and [B + 1], and the draws it is written by."""

    tokens: Tensor
    log_probs: Tensor
    versions: Tensor
    written: Tensor
    has_ended: Tensor
    uniforms: Tensor

    @classmethod
    def empty(cls, num_rows: int, width: int, device: torch.device) -> "_Pages":
        return cls(
            tokens=torch.zeros(num_rows, width, dtype=torch.long, device=device),
            log_probs=torch.zeros(num_rows, width, device=device),
            versions=torch.zeros(num_rows, width, dtype=torch.long, device=device),
            written=torch.zeros(num_rows, dtype=torch.long, device=device),
            has_ended=torch.zeros(num_rows, dtype=torch.bool, device=device),
            uniforms=torch.zeros(num_rows, width, dtype=torch.float64, device=device),
        )

    def begin(self, work: Work) -> None:
        """Blank pages, and the request's draws."""
        self.tokens.fill_(work.pad)
        for tensor in (self.log_probs, self.versions, self.written, self.has_ended):
            tensor.zero_()
        rows, width = work.uniforms.shape
        self.uniforms[:rows, :width] = work.uniforms

    def draw(
        self, sampler: "_Sampler", logits: Tensor, rows: Tensor, steps: Tensor, version: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The next token of each row, written down, and whether it ends the response, [n] each."""
        tokens, log_probs = sampler(logits, self.uniforms[rows, steps])
        self.tokens[rows, steps] = tokens
        self.log_probs[rows, steps] = log_probs
        self.versions[rows, steps] = version
        self.written[rows] = steps + 1
        is_end = (tokens.unsqueeze(1) == sampler.ends).any(dim=1)
        self.has_ended[rows] = is_end
        return tokens, is_end

    def rollout(self, request: RolloutRequest, work: Work) -> Rollout:
        """All rows, as wide as the longest response."""
        count, written = work.num_rows, self.written[: work.num_rows]
        width = int(written.max())
        action_mask = torch.arange(width, device=written.device) < written.unsqueeze(1)
        return Rollout(
            sequences=torch.cat([request.input_ids, self.tokens[:count, :width]], dim=1),
            attention_mask=torch.cat([request.attention_mask, action_mask.to(request.attention_mask.dtype)], dim=1),
            action_mask=action_mask,
            rollout_log_probs=self.log_probs[:count, :width].clone(),
            is_cut=~self.has_ended[:count],
            token_versions=self.versions[:count, :width].clone(),
        )


class _Sampler:
    """Draws tokens from logits as the options say."""

    def __init__(self, options: GenerateOptions, ends: Tensor, operations: TorchOperations | TritonOperations) -> None:
        self._processors = score_processors(options)
        self._is_greedy = not options.do_sample
        self._operations = operations
        self._temperature = options.sampling_temperature
        self.ends = ends
        self.key = (
            options.do_sample,
            options.temperature,
            options.top_k,
            options.top_p,
            options.min_p,
            options.typical_p,
            options.epsilon_cutoff,
            options.eta_cutoff,
            tuple(ends.tolist()),
        )

    def __call__(self, logits: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens and their log-probs, [n] each."""
        if not self._is_greedy and len(self._processors) == 1:  # the temperature alone
            return self._operations.draw(logits, uniforms, self._temperature)
        scores = logits
        for process in self._processors:
            scores = process(None, scores)
        tokens = scores.argmax(dim=-1) if self._is_greedy else inverse_cdf(scores, uniforms)
        return tokens, scores.gather(1, tokens.unsqueeze(1)).squeeze(1)
