"""Continuous batching over fixed slots, with as little of the host as possible.

Everything a step needs lies in tensors of fixed size and place: the slots' tokens and positions, the draws, what has
been written. So a whole step (model, sampling, log-prob, stop check, bookkeeping) can be captured as a CUDA graph and
replayed without the host, which learns only every few tokens which samples have ended, and a few tokens late: the
device never waits for it. A slot whose sample has ended computes into a row that is never read until the host learns of
it. Then it takes the next prompt; or, when none waits, the living slots are moved together and fewer are computed.

On a CPU the same steps run without a graph, and the host looks after every token.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coati.gpu import side_stream
from coati.rollout.engine import Rollout, RolloutRequest
from coati.rollout.native.decoder import SLOT_TILE, Decoder
from coati.rollout.native.operations import TritonOperations
from coati.rollout.native.slots import AliveCopy, HostView, PromptQueue, Responses, Slots, TokenRules
from coati.rollout.sampling import Sampler, stop_strings_of

# Tokens between two looks of the host at a GPU, and how many looks it has under way at most. A sample that has ended
# wastes about as many steps of its slot as the two make together; more, if others are admitted meanwhile.
STEPS_PER_LOOK = 4
LOOKS_UNDER_WAY = 2
# Buffers of captured steps have room for a multiple of so many positions, and attention by torch reads as many: so
# requests of slightly different lengths share buffers and graphs.
POSITION_STEP = 128
# Graphs that are kept. Slots need about ten (powers of two), for each set of sampling options.
MAX_GRAPHS = 64


class Sizes(NamedTuple):
    """What a request needs room for."""

    num_slots: int
    num_positions: int
    num_rows: int
    max_new_tokens: int


class SlotLoop:
    """Slots, buffers and graphs for one model; kept from one request to the next while they fit."""

    def __init__(self, decoder: Decoder, sizes: Sizes, *, is_captured: bool) -> None:
        self._decoder = decoder
        device = decoder.weight.device
        self._is_captured = is_captured
        if is_captured:
            sizes = sizes._replace(
                num_positions=_rounded_up(sizes.num_positions), max_new_tokens=_rounded_up(sizes.max_new_tokens)
            )
        elif device.type == "cpu":
            sizes = sizes._replace(num_slots=_tiled(sizes.num_slots))
        self._sizes = sizes
        self._cache = decoder.new_cache(sizes.num_slots, sizes.num_positions)
        self._slots = Slots.empty(sizes.num_slots, device)
        # One row more than there are: what a slot without a sample writes goes there.
        self._responses = Responses.empty(sizes.num_rows + 1, sizes.max_new_tokens, device)
        self._version = torch.zeros((), dtype=torch.long, device=device)
        # The least recently used first; with the rules, whose tensors a graph reads.
        self._graphs: dict[tuple[Any, ...], tuple[Any, TokenRules]] = {}
        self._pool: Any = None
        self._addresses: tuple[int, ...] = ()

    def fits(self, sizes: Sizes) -> bool:
        """Whether a request of these sizes can use these buffers, and the model is where it was."""
        like, cached = self._decoder.weight, self._cache.keys[0]
        has_room = all(needed <= mine for needed, mine in zip(sizes, self._sizes, strict=True))
        return has_room and (cached.device, cached.dtype) == (like.device, like.dtype)

    def generate(self, request: RolloutRequest, queue: PromptQueue, *, num_slots: int) -> Rollout:
        """Continue every prompt of the request, at most `num_slots` at a time."""
        self._drop_graphs_of_moved_weights()
        rules, rules_key = self._rules(request, queue.eos_token_ids)
        self._responses.begin(queue.pad_token, queue.uniforms)
        self._slots.alive.zero_()
        self._version.fill_(request.version)
        steps_per_look, looks_under_way = (STEPS_PER_LOOK, LOOKS_UNDER_WAY) if self._is_captured else (1, 1)
        view = HostView(looks_under_way)
        longest = 0  # every living slot's position lies below
        while True:
            if queue.has_waiting and (free := view.free(num_slots)):
                rows = queue.next_rows(len(free))
                for some in queue.alike(rows):
                    self._admit(queue, rows[some], [free[n] for n in some], rules)
                view.fill(free[: len(rows)], steps_left=queue.max_new_tokens - 1)
                longest = max(longest, int(queue.lengths[rows].max()) + 1)
                if self._is_captured and view.steps_left > 0:
                    continue  # steps first, so that the device is busy while the commit point has the host
                view.add(0, AliveCopy(self._slots.alive[: view.count]))
            elif not view.num_alive:
                return self._responses.rollout(request)
            else:
                self._compact(view)
                num_steps = min(steps_per_look, view.steps_left)
                longest = min(longest + num_steps, self._sizes.num_positions)
                self._run(num_steps, view.count, longest, rules, rules_key)
                view.add(num_steps, AliveCopy(self._slots.alive[: view.count]))
            if request.between_tokens is not None:
                # Weights change in place, in the memory that the graphs read; the cache stays.
                self._version.fill_(request.between_tokens())
            view.update()

    def _rules(self, request: RolloutRequest, eos_token_ids: tuple[int, ...]) -> tuple[TokenRules, tuple[Any, ...]]:
        """How this request's tokens are drawn and end, and what of that a graph depends on."""
        options, device = request.options, self._version.device
        stops = stop_strings_of(options.tokenizer, options.stop_strings, device) if options.stop_strings else None
        sampler = Sampler(options, draw=self._decoder.operations.draw)
        draws = (options.do_sample, options.temperature, options.top_k, options.top_p, options.min_p)
        key = (*draws, eos_token_ids, stops)
        return TokenRules(sampler, torch.tensor(eos_token_ids, dtype=torch.long, device=device), stops), key

    def _admit(self, queue: PromptQueue, rows: Tensor, free: list[int], rules: TokenRules) -> None:
        """Read prompts into free slots, and draw their first tokens."""
        slots = torch.tensor(free, dtype=torch.long, device=rows.device)
        prompts, lengths, which = queue.prompts_of(rows)
        logits = self._decoder.prefill(prompts, lengths, self._cache, slots, which)
        nothing = torch.zeros_like(rows)
        tokens, is_end, stop_states = self._responses.write(rules, logits, rows, nothing, nothing, self._version)
        mine = self._slots
        mine.rows[slots], mine.tokens[slots] = rows, tokens
        mine.positions[slots], mine.steps[slots] = queue.lengths[rows], nothing + 1
        mine.stop_states[slots], mine.limits[slots] = stop_states, queue.limits[rows]
        mine.alive[slots] = ~is_end & (queue.limits[rows] > 1)

    def _compact(self, view: HostView) -> None:
        """Move the living slots to the front where that lets fewer be computed.

        Graphs exist for few sizes, powers of two and all slots, so some slots without a sample are computed as well;
        what they write is never read. Without graphs slots move when a quarter have ended, because moving the cache
        costs a good part of a step; on a CPU they are computed in tiles, and move when that saves one.
        """
        num_alive = size = view.num_alive
        if self._is_captured:
            size = min(1 << (num_alive - 1).bit_length(), self._sizes.num_slots)
        elif self._slots.rows.device.type == "cpu":
            size = _tiled(num_alive)
        elif 4 * num_alive > 3 * view.count:
            size = view.count
        if size < view.count:
            living = [slot for slot, is_alive in enumerate(view.alive) if is_alive]
            order = torch.tensor(living, device=self._slots.rows.device)
            for tensor in (*self._cache.keys, *self._cache.values, *self._slots.tensors()):
                tensor[:num_alive] = tensor[order]
            self._slots.alive[num_alive:] = False
        view.resize(size)

    def _run(self, num_steps: int, count: int, longest: int, rules: TokenRules, rules_key: tuple[Any, ...]) -> None:
        if not self._is_captured:
            for _ in range(num_steps):
                self._step(count, longest, rules)
            return
        length = self._sizes.num_positions
        # Kernels read as far as each slot's position says, torch as far as it is told.
        if not isinstance(self._decoder.operations, TritonOperations):
            length = min(length, _rounded_up(longest))
        key = (count, length, rules_key)
        if key not in self._graphs:
            self._graphs[key] = self._captured(lambda: self._step(count, length, rules)), rules
        self._graphs[key] = graph, _ = self._graphs.pop(key)  # the last in line to be dropped
        if len(self._graphs) > MAX_GRAPHS:
            del self._graphs[next(iter(self._graphs))]
        for _ in range(num_steps):
            graph.replay()

    def _step(self, count: int, length: int, rules: TokenRules) -> None:
        """One token for each of the first `count` slots, all on the device and in place."""
        rows, tokens, positions, steps, limits, stop_states, alive = (t[:count] for t in self._slots.tensors())
        logits = self._decoder.decode(tokens, positions, self._cache, num_positions=length)
        rows = torch.where(alive, rows, self._sizes.num_rows)
        drawn, is_end, new_states = self._responses.write(rules, logits, rows, steps, stop_states, self._version)
        continues = alive & ~is_end & (steps + 1 < limits)
        tokens.copy_(drawn)
        if new_states is not stop_states:  # without stop strings, a kernel less in each step
            stop_states.copy_(new_states)
        # A slot that is done stays at a place that exists.
        positions.add_(continues)
        steps.add_(continues)
        alive.copy_(continues)

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
        # Other threads of the actor stage weights meanwhile; their allocations do not belong to this capture.
        with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
            step()
        self._pool = self._pool or graph.pool()
        return graph

    def _drop_graphs_of_moved_weights(self) -> None:
        addresses = self._decoder.join_weights() if self._is_captured else ()
        if addresses != self._addresses:
            self._addresses = addresses
            self._graphs.clear()


def _rounded_up(number: int) -> int:
    return -(-number // POSITION_STEP) * POSITION_STEP


def _tiled(num_slots: int) -> int:
    return -(-num_slots // SLOT_TILE) * SLOT_TILE
