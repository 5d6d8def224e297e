"""The native engine's loop: continuous batching over slots, with as little of the host as possible.

Everything a step needs lies in tensors of fixed size and place: the slots' tokens and positions, the draws, what has
been written. So a whole step (model, sampling, log-prob, stop check, bookkeeping) can be captured as a CUDA graph and
replayed without the host, which learns only every few tokens which samples have ended, and a few tokens late: the
device never waits for it. A slot whose sample has ended computes into a row that is never read until the host learns of
it. Then it takes the next prompt, of whatever request; or, when none waits, the living slots are moved together and
fewer are computed. A response has a row of its own, which does not move.

On a CPU the same steps run without a graph, and the host looks after every token.
"""

from collections import deque
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from coati.config.generate import GenerateOptions, native_engine_problem, options_problem
from coati.errors import ConfigError, GenerateOptionError
from coati.models.actor import unwrap
from coati.models.packing import base_of
from coati.models.tiles import padded_length
from coati.randomness import keyed_uniforms
from coati.rollout.engine import Response, RolloutRequest, Sample
from coati.rollout.native.decoder import SLOT_TILE, Decoder, SlotCache, enlarged
from coati.rollout.native.graphs import StepGraphs
from coati.rollout.native.operations import TritonOperations, slot_length
from coati.rollout.native.slots import Ended, Look, Place, Responses, Slots, TokenRules

DEFAULT_SLOTS = 256
# Tokens between two looks of the host at a GPU, and how many looks it has under way at most. A sample that has ended
# wastes about as many steps of its slot as the two make together; more, if others are admitted meanwhile.
STEPS_PER_LOOK = 4
LOOKS_UNDER_WAY = 2
# Buffers of captured steps have room for a multiple of so many positions, and attention by torch reads as many: so
# requests of slightly different lengths share buffers and graphs.
POSITION_STEP = 128


class Sizes(NamedTuple):
    """What there is room for."""

    num_slots: int
    num_positions: int
    max_new_tokens: int


class NativeEngine:
    """Writes what `ReferenceEngine` writes, from the same draws, much faster. Buffers grow with what is submitted.

    Requests with other options wait until those before have ended.
    """

    def __init__(self, model: nn.Module, *, num_slots: int = DEFAULT_SLOTS) -> None:
        if (reason := native_engine_problem(config_of(model), GenerateOptions())) is not None:
            raise ConfigError(f'The native engine cannot run this model: {reason}. Use rollout.engine = "reference".')
        self.model = model
        self._decoder = Decoder(model)
        self._max_slots = num_slots
        self._last_version = 0
        self._reset()

    def _reset(self) -> None:
        """Begin with nothing, where the model is now."""
        self._device = self._decoder.weight.device
        self._is_captured = self._device.type == "cuda"
        self._version = torch.full((), self._last_version, device=self._device)
        self._sizes = Sizes(0, 0, 0)
        self._cache = self._decoder.new_cache(*self._sizes[:2])
        self._slots = Slots.empty(0, self._device)
        self._responses = Responses.empty(1, 0, self._device)
        self._waiting: deque[Sample] = deque()
        self._samples: list[Sample | None] = []  # by slot, of those in use: the first so many
        self._kept: dict[int, list[int]] = {}  # responses of samples that have ended and have a slot, by id
        self._free_rows: list[int] = []
        self._looks: deque[Look] = deque()  # the oldest first
        self._ended: list[Response] = []  # not yet returned
        self._rules: TokenRules | None = None  # of all samples that are alive
        self._graphs = StepGraphs()

    @property
    def room(self) -> int:
        """Slots that nothing is written in or waits for."""
        return max(0, self._max_slots - self._num_samples)

    @property
    def _num_samples(self) -> int:
        """Samples that have a slot or wait for one."""
        return len([sample for sample in self._waiting if sample.place.slot < 0]) + len(self._held)

    @property
    def _held(self) -> list[Sample]:
        """Samples that have a slot."""
        return [sample for sample in self._samples if sample is not None]

    @property
    def _steps_left(self) -> int:
        """After so many steps none is alive."""
        return max((sample.place.left for sample in self._held if not sample.is_over), default=0)

    def submit(self, request: RolloutRequest) -> None:
        """As the protocol says."""
        if (problem := options_problem("native", request.options)) is not None:
            raise GenerateOptionError(f'{problem}. Leave it out, or use rollout.engine = "reference".')
        like, mine = self._decoder.weight, self._cache.keys[:1]
        if not self._num_samples and any((one.device, one.dtype) != (like.device, like.dtype) for one in mine):
            self._reset()
        samples = request.samples()
        rules = TokenRules.of(request.options, unwrap(self.model), self._device, draw=self._decoder.operations.draw)
        for sample in samples:
            sample.place = Place(rules)
        self._waiting += samples
        self._keep_graphs()

    @torch.no_grad()
    def advance(self) -> list[Response]:
        """Write a few tokens in each slot, on a CPU one; returns what the host learns to have ended."""
        has_begun = self._admit()
        if (left := self._steps_left) > 0 and (not has_begun or self._is_captured):
            self._compact()
            self._run(min(left, STEPS_PER_LOOK if self._is_captured else 1))
        if count := len(self._samples):
            state = self._responses.state(self._slots.rows[:count], self._slots.alive[:count])
            self._looks.append(Look(state, self._samples))
        looks_under_way = LOOKS_UNDER_WAY if self._is_captured else 1
        while self._looks and (len(self._looks) >= looks_under_way or self._steps_left <= 0):
            self._take_out(self._looks.popleft().ended())
        ended, self._ended = self._ended, []
        return ended

    def extend(self, sample_id: int, tokens: Sequence[int], max_new_tokens: int) -> None:
        """As the protocol says; it is the next to be begun, in the slot that it has."""
        response = self._kept.pop(sample_id)
        sample = next(sample for sample in self._held if sample.id == sample_id)
        turn = sample.next_turn(response, tokens, max_new_tokens)
        # The last token of a response is not in the cache, and what a slot does after it goes to the place before.
        turn.place.num_cached = len(sample.tokens) + max(0, len(response) - 2)
        self._waiting.appendleft(turn)

    @torch.no_grad()
    def commit(self, version: int) -> None:
        """As the protocol says."""
        if version == self._last_version:
            return
        self._last_version = version
        self._version.fill_(version)
        self._keep_graphs()

    def cancel(self, sample_ids: Collection[int]) -> None:
        """As the protocol says."""
        gone = {*sample_ids}
        self._waiting = deque(sample for sample in self._waiting if sample.id not in gone)
        self._ended = [response for response in self._ended if response.sample_id not in gone]
        for sample in self._held:
            if sample.id in gone:
                self._kept.pop(sample.id, None)
                self._slots.alive[sample.place.slot] = False
                self._free(sample)

    # Room

    def _make_room(self) -> None:
        """Have buffers for what waits and all that is there; if memory runs out, the engine can be used afterwards."""
        num_slots = min(self._max_slots, self._num_samples)
        num_positions = max(len(sample.tokens) + sample.limit for sample in self._waiting)
        max_new_tokens = max(sample.limit for sample in self._waiting)
        if self._is_captured:
            num_positions, max_new_tokens = _rounded_up(num_positions), _rounded_up(max_new_tokens)
        elif self._device.type == "cpu":
            num_slots = _tiled(num_slots)
        sizes = Sizes(*map(max, zip((num_slots, num_positions, max_new_tokens), self._sizes, strict=True)))
        if sizes == self._sizes:
            return
        self._graphs = StepGraphs()  # the others are of the old buffers
        length = slot_length(sizes.num_positions) if self._device.type == "cpu" else sizes.num_positions
        if self._held:
            self._cache.enlarge(sizes.num_slots, length)
            self._slots = Slots(*(enlarged(tensor, sizes.num_slots) for tensor in self._slots.tensors()))
        else:
            self._sizes, self._free_rows = Sizes(0, 0, 0), []
            self._cache = SlotCache([], [])  # its memory first
            self._responses = Responses.empty(1, 0, self._device)
            self._cache = self._decoder.new_cache(sizes.num_slots, length)
            self._slots = Slots.empty(sizes.num_slots, self._device)
        # What a slot without a sample writes goes into one row more than there are slots.
        self._responses = self._responses.enlarged(sizes.num_slots + 1, sizes.max_new_tokens)
        self._free_rows += range(self._sizes.num_slots, sizes.num_slots)
        self._sizes = sizes
        self._keep_graphs()

    def _on_device(self, numbers: Any) -> Tensor:
        """Numbers as a tensor, without a wait for what the device does."""
        tensor = torch.as_tensor(numbers)
        return tensor.pin_memory().to(self._device, non_blocking=True) if self._device.type == "cuda" else tensor

    def _keep_graphs(self) -> None:
        """Drop graphs if weights are not where they were."""
        if self._is_captured:
            self._graphs.keep_for(self._decoder.join_weights())

    # Into slots and out of them

    def _admit(self) -> bool:
        """Begin samples that wait, as far as there are slots for them; False if none was begun."""
        if not self._waiting:
            return False
        self._make_room()
        num_slots = min(self._max_slots, self._sizes.num_slots)
        used = len(self._samples)
        free = deque(slot for slot in range(num_slots) if slot >= used or self._samples[slot] is None)
        new: list[Sample] = []
        while self._waiting and (free or self._waiting[0].place.slot >= 0) and self._may_begin(self._waiting[0]):
            sample = self._waiting.popleft()
            place, self._rules = sample.place, sample.place.rules
            if place.slot < 0:
                place.slot, place.row = free.popleft(), self._free_rows.pop()
                self._samples += [None] * (place.slot + 1 - len(self._samples))
            self._samples[place.slot] = sample
            place.left = sample.limit - 1
            new.append(sample)
        later_turns = [sample for sample in new if sample.place.num_cached]
        if first_turns := [sample for sample in new if not sample.place.num_cached]:
            self._begin(first_turns, self._read(first_turns, [sample.tokens for sample in first_turns]))
        for sample in later_turns:
            past = sample.place.num_cached
            self._begin([sample], self._read([sample], [sample.tokens[past:]], past=past))
        return bool(new)

    def _may_begin(self, sample: Sample) -> bool:
        """Whether its tokens are drawn by the rules of all that are alive."""
        if self._rules is not None and self._rules.key == sample.place.rules.key:
            return True
        return all(other.is_over for other in self._held)

    def _read(self, samples: Sequence[Sample], texts: Sequence[Sequence[int]], *, past: int = 0) -> Tensor:
        """Read texts into the slots of samples, behind `past` tokens; logits of the token after each, [n, vocabulary].

        All are read together or, on a CPU, those that are filled up to the same length.
        """
        is_tiled = self._device.type == "cpu" and not past
        lengths = [padded_length(len(text)) if is_tiled else 0 for text in texts]
        logits, order = [], []
        for length in sorted({*lengths}):
            rows = [row for row in range(len(texts)) if lengths[row] == length]
            distinct: dict[tuple[int, ...], int] = {}
            which = [distinct.setdefault(tuple(texts[row]), len(distinct)) for row in rows]
            width = length or max(map(len, distinct))
            tokens = self._on_device([[*text, *[0] * (width - len(text))] for text in distinct])
            ends = self._on_device([len(text) for text in distinct])
            slots, which_text = self._on_device([[samples[row].place.slot for row in rows], which])
            logits.append(self._decoder.prefill(tokens, ends, self._cache, slots, which_text, past=past))
            order += rows
        if len(logits) == 1:
            return logits[0]
        return torch.cat(logits)[torch.tensor(order).argsort()]

    def _begin(self, samples: Sequence[Sample], logits: Tensor) -> None:
        """Draw the first tokens of samples that have been read."""
        numbers = [(one.place.slot, one.place.row, one.limit, len(one.tokens)) for one in samples]
        slots, rows, limits, positions = self._on_device(numbers).unbind(dim=1)
        draws = torch.zeros(len(samples), max(one.limit for one in samples), dtype=torch.float64)
        for row, one in zip(draws, samples, strict=True):
            uniforms = keyed_uniforms(one.seed, [one.id], one.num_drawn + one.limit)[0, one.num_drawn :]
            row[: one.limit] = torch.from_numpy(uniforms)
        self._responses.uniforms[rows, : draws.shape[1]] = self._on_device(draws)
        nothing = torch.zeros_like(rows)
        assert self._rules is not None
        tokens, is_end, states = self._responses.write(self._rules, logits, rows, nothing, nothing, self._version)
        mine = self._slots
        mine.rows[slots], mine.tokens[slots] = rows, tokens
        mine.positions[slots], mine.steps[slots] = positions, nothing + 1
        mine.stop_states[slots], mine.limits[slots] = states, limits
        mine.alive[slots] = ~is_end & (limits > 1)

    def _take_out(self, ended: Sequence[Ended]) -> None:
        """Note the responses of samples that have ended, and free their slots."""
        if not ended:
            return
        rows, mine = self._on_device([one.sample.place.row for one in ended]), self._responses
        written = [part[rows] for part in (mine.tokens, mine.log_probs, mine.versions)]
        for number, (sample, num_written, is_cut, is_finite) in enumerate(ended):
            tokens, log_probs, versions = (part[number, :num_written] for part in written)
            fields = {"tokens": tokens, "log_probs": log_probs, "versions": versions}
            self._ended.append(Response(sample_id=sample.id, is_cut=is_cut, **fields))
            if not is_finite:  # attention multiplies masked places of the cache by 0, and 0 times NaN is NaN
                for tensor in (*self._cache.keys, *self._cache.values):
                    tensor[sample.place.slot] = 0
                mine.log_probs[sample.place.row] = 0
            if sample.is_kept:
                sample.is_over, self._kept[sample.id] = True, tokens.tolist()
            else:
                self._free(sample)

    def _free(self, sample: Sample) -> None:
        sample.is_over, self._samples[sample.place.slot] = True, None
        self._free_rows.append(sample.place.row)

    # Steps

    def _compact(self) -> None:
        """Move the slots with a sample to the front where that lets fewer be computed.

        Graphs exist for few sizes, powers of two and all slots, so some slots without a sample are computed as well;
        what they write is never read. Without graphs slots move when a quarter have ended, because moving the cache
        costs a good part of a step; on a CPU they are computed in tiles, and move when that saves one.
        """
        held, count = self._held, len(self._samples)
        num_held = size = len(held)
        if self._is_captured:
            size = min(1 << (num_held - 1).bit_length(), self._sizes.num_slots)
        elif self._device.type == "cpu":
            size = _tiled(num_held)
        elif 4 * num_held > 3 * count:
            size = count
        if size < count:
            order = self._on_device([sample.place.slot for sample in held])
            for tensor in (*self._cache.keys, *self._cache.values, *self._slots.tensors()):
                tensor[:num_held] = tensor[order]
            self._slots.alive[num_held:] = False
            for slot, sample in enumerate(held):
                sample.place.slot = slot
            self._samples = [*held]
        self._samples += [None] * (size - len(self._samples))

    def _run(self, num_steps: int) -> None:
        """Take so many steps with the slots in use."""
        count, rules = len(self._samples), self._rules
        assert rules is not None
        alive = [sample for sample in self._held if not sample.is_over]
        # One past the largest position.
        longest = max(len(one.tokens) + one.limit - 1 - one.place.left for one in alive) + num_steps
        for sample in alive:
            sample.place.left -= num_steps
        length = min(longest, self._sizes.num_positions)
        if not self._is_captured:
            for _ in range(num_steps):
                self._step(count, length, rules)
            return
        # Kernels read as far as each slot's position says, torch as far as it is told.
        is_told = not isinstance(self._decoder.operations, TritonOperations)
        length = min(self._sizes.num_positions, _rounded_up(length)) if is_told else self._sizes.num_positions
        self._graphs.replay(
            (count, length, rules.key),
            lambda: self._step(count, length, rules),
            times=num_steps,
            changed=self._slots.tensors(),
            used=rules,
        )

    def _step(self, count: int, length: int, rules: TokenRules) -> None:
        """One token for each of the first `count` slots, all on the device and in place."""
        rows, tokens, positions, steps, limits, stop_states, alive = (t[:count] for t in self._slots.tensors())
        logits = self._decoder.decode(tokens, positions, self._cache, num_positions=length)
        rows = torch.where(alive, rows, self._sizes.num_slots)
        drawn, is_end, new_states = self._responses.write(rules, logits, rows, steps, stop_states, self._version)
        continues = alive & ~is_end & (steps + 1 < limits)
        tokens.copy_(drawn)
        if new_states is not stop_states:  # without stop strings, a kernel less in each step
            stop_states.copy_(new_states)
        # A slot that is done stays at a place that exists.
        positions.add_(continues)
        steps.add_(continues)
        alive.copy_(continues)


def config_of(model: nn.Module) -> dict[str, Any]:
    """What `config.json` of a model holds."""
    base = base_of(unwrap(model))
    config = base.config.to_dict() if hasattr(base, "config") else {}
    return {**config, "architectures": [type(base).__name__]}


def _rounded_up(number: int) -> int:
    return -(-number // POSITION_STEP) * POSITION_STEP


def _tiled(num_slots: int) -> int:
    return -(-num_slots // SLOT_TILE) * SLOT_TILE
