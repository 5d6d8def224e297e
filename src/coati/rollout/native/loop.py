"""The native engine's loop: continuous batching over slots, with as little host work as possible.

The tensors of a step have fixed sizes and addresses, so a whole step can be captured as a CUDA graph and replayed
without the host. The host learns every few tokens, and a few tokens late, which samples have ended, so the device never
waits for it. Until then, the slot of an ended sample computes into a row that is never read. Then the slot takes the
next prompt of any request or, if none waits, the active slots are compacted and fewer are computed. Each response has
its own row, which does not move; neither do keys and values.

If pages run out, the youngest sample is preempted. Once enough are free, it is prefilled again and continues where it
was, with the same draws. On a CPU, steps run without a graph and the host checks after every token.
"""

import itertools
import math
from collections import deque
from collections.abc import Collection, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from coati.config.generate import GenerateOptions, native_engine_problem, options_problem
from coati.errors import ConfigError, GenerateOptionError, OutOfMemory
from coati.experience import Sample
from coati.models.actor import unwrap
from coati.models.tiles import products_of
from coati.rollout.engine import copied_for_engine
from coati.rollout.native.blocks import tiled
from coati.rollout.native.cache import enlarged
from coati.rollout.native.decoder import Decoder, config_of
from coati.rollout.native.graphs import StepGraphs, graph_size
from coati.rollout.native.operations import TritonOperations, slot_length
from coati.rollout.native.prefill import prefill_batch_of, prefill_passes
from coati.rollout.native.slots import Ended, Place, Responses, Slots, Snapshot, TokenRules, on_device

DEFAULT_SLOTS = 256
# Tokens between two snapshots of a GPU's slots for the host, and the maximum number of snapshots in flight.
STEPS_PER_SNAPSHOT = 4
MAX_SNAPSHOTS = 2
# Positions per page on a GPU.
PAGE_SIZE = 64
# Up to this length, attention on a GPU does not split texts into parts; longer texts need graphs of their own.
SHORT_TEXT = 512
# Share of a GPU's slots that must be free before prefill, unless fewer samples wait: small prefill passes are slow.
PREFILL_SHARE = 1 / 16
# Rows per product in batch-invariant prefill on a GPU.
PREFILL_TILE = 512
# More positions than any text has.
UNBOUNDED = 1 << 40


class NativeEngine:
    """Generates what `ReferenceEngine` does, from the same draws, but much faster. Buffers grow as needed.

    Requests with different options wait until the earlier ones have ended.
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
        """Start empty, on the model's current device."""
        self._device = self._decoder.weight.device
        self._made_for = self._device, self._decoder.weight.dtype
        self._is_captured = self._device.type == "cuda"
        self._by_columns = self._decoder.uses_columns
        self._version = torch.full((), self._last_version, device=self._device)
        self._cache = self._decoder.new_cache()
        num_slots = tiled(self._max_slots)
        self._slots = Slots.empty(num_slots, self._device)
        # The last row takes the writes of slots without a sample.
        self._responses = Responses.empty(num_slots + 1, 0, self._device)
        self._free_rows = list(range(num_slots))
        self._births = itertools.count()
        self._waiting: deque[Sample] = deque()
        self._samples: list[Sample | None] = []  # by slot, up to the last slot in use
        self._page_table_is_stale = False  # whether the page table on the device is out of date
        self._kept: dict[int, list[int]] = {}  # responses of ended samples that keep their slot, by id
        self._snapshots: deque[Snapshot] = deque()  # the oldest first
        self._ended: list[Sample] = []  # not yet returned
        self._rules: TokenRules | None = None  # of all active samples
        self._graphs = StepGraphs()
        self._weights: tuple[int, ...] = ()  # their addresses; see `_update_weight_addresses`

    @property
    def room(self) -> int:
        """Number of slots that no sample holds or waits for."""
        return max(0, self._max_slots - self._num_samples)

    @property
    def _is_invariant(self) -> bool:
        """Whether a GPU computes each sample regardless of the others; a CPU always does."""
        return self._is_captured and self._decoder.is_invariant

    @property
    def _num_samples(self) -> int:
        """Number of samples that have a slot or wait for one."""
        return len([sample for sample in self._waiting if sample.place.slot < 0]) + len(self._held)

    @property
    def _held(self) -> list[Sample]:
        """Samples that have a slot."""
        return [sample for sample in self._samples if sample is not None]

    @property
    def _alive(self) -> list[Sample]:
        """Active samples: they have pages, and the host has not seen their end."""
        return [sample for sample in self._held if _is_alive(sample)]

    @property
    def _steps_left(self) -> int:
        """Number of steps until no sample is active."""
        return max((sample.place.left for sample in self._alive), default=0)

    def submit(self, samples: Sequence[Sample]) -> None:
        """Queue samples; see `RolloutEngine.submit`."""
        if (problem := options_problem("native", samples[0].options)) is not None:
            raise GenerateOptionError(f'{problem}. Remove it, or use rollout.engine = "reference".')
        like = self._decoder.weight
        if not self._num_samples and (like.device, like.dtype) != self._made_for:
            self._reset()
        samples, options = copied_for_engine(samples), samples[0].options
        rules = TokenRules.of(options, unwrap(self.model), self._device, draw=self._decoder.operations.draw)
        for sample in samples:
            sample.place = Place(rules)
        self._waiting += samples
        self._update_weight_addresses()

    @torch.no_grad()
    def advance(self) -> list[Sample]:
        """Generate a few tokens in each slot (on a CPU: one) and return samples that are known to have ended."""
        has_begun = bool(self._waiting) and self._admit()
        if (left := self._steps_left) > 0 and (not has_begun or self._is_captured):
            num_steps = min(left, STEPS_PER_SNAPSHOT if self._is_captured else 1)
            self._extend_pages(num_steps)
            if self._alive:
                self._run(num_steps, self._compact())
        if not self._is_captured:
            self._finish_samples(self._ended_on_cpu())
        elif self._samples:
            self._take_snapshot()
        while self._snapshots and (len(self._snapshots) >= MAX_SNAPSHOTS or self._steps_left <= 0):
            self._finish_samples(self._snapshots.popleft().ended())
        ended, self._ended = self._ended, []
        return ended

    def extend(self, sample_id: int, tokens: Sequence[int], max_new_tokens: int) -> None:
        """Continue a sample; see `RolloutEngine.extend`. It is the next to start, in the slot that it has."""
        response = self._kept.pop(sample_id)
        sample = next(sample for sample in self._held if sample.id == sample_id)
        turn = sample.next_turn(response, tokens, max_new_tokens)
        turn.place.written = []
        if turn.place.pages:
            # The last token of a response is not in the cache, and later steps of its slot overwrite the one before it.
            turn.place.num_cached = len(sample.tokens) + max(0, len(response) - 2)
        self._waiting.appendleft(turn)

    @torch.no_grad()
    def commit(self, version: int) -> None:
        """Record the version of the weights; see `RolloutEngine.commit`."""
        if version == self._last_version:
            return
        self._last_version = version
        self._version.fill_(version)
        self._update_weight_addresses()
        self._cache.forget_shared_prompts()

    def cancel(self, sample_ids: Collection[int]) -> None:
        """Drop samples; see `RolloutEngine.cancel`."""
        gone = {*sample_ids}
        self._waiting = deque(sample for sample in self._waiting if sample.id not in gone)
        self._ended = [sample for sample in self._ended if sample.id not in gone]
        for sample in self._held:
            if sample.id in gone:
                self._kept.pop(sample.id, None)
                self._record_finiteness(sample)
                self._responses.log_probs[sample.place.row] = 0
                self._free(sample)

    def _enlarge_buffers(self) -> None:
        """Enlarge buffers to fit the longest waiting texts."""
        longest = max(len(sample.tokens) + sample.limit for sample in self._waiting)
        longest_response = max(sample.limit for sample in self._waiting)
        self._decoder.check_length(longest)
        if self._is_captured:  # few sizes, because each needs its own graphs
            sizes = (max(PAGE_SIZE, one) for one in (longest, longest_response))
            longest, longest_response = (1 << (one - 1).bit_length() for one in sizes)
            self._cache.enlarge(0, PAGE_SIZE)
        else:
            self._cache.enlarge(tiled(min(self._max_slots, self._num_samples)) + 1, slot_length(longest))
        num_slots, num_pages = self._slots.pages.shape
        if longest_response >= self._responses.tokens.shape[1]:  # a finished slot stays one past the last token
            self._responses = self._responses.enlarged(num_slots + 1, longest_response + 1)
        if self._cache.covering(longest) > num_pages:
            self._slots.pages = enlarged(self._slots.pages, num_slots, self._cache.covering(longest))
            self._page_table_is_stale = True

    def _allocate_prompt_pages(self, sample: Sample, num_alive: int) -> bool:
        """Allocate pages to start a sample, leaving a spare one per active sample on a GPU; return False if too few."""
        place, cache = sample.place, self._cache
        while True:
            shared = [] if place.pages else cache.prompt_pages(sample.tokens)
            # One more position: a sample that ends with its first token keeps writing there until the host knows.
            # Preemption would change a sample's bits: batch-invariant samples reserve pages for their whole length.
            num_more = sample.limit if self._is_invariant else len(place.written) + 1
            missing = cache.covering(len(sample.tokens) + num_more) - len(place.pages) - len(shared)
            if cache.has_free(missing + num_alive * self._is_captured):
                break
            if num_alive:
                return False
            self._reclaim_pages(sample)
        is_read_whole, place.num_shared = not place.pages, len(shared)
        place.pages += [*cache.use(shared), *cache.take(missing)]
        if is_read_whole:
            cache.share_prompt(sample.tokens, place.pages)
        return True

    def _extend_pages(self, num_steps: int) -> None:
        """Allocate pages for `num_steps` more tokens per sample; if too few are free, preempt the youngest samples."""
        for sample in () if self._by_columns else self._alive:
            place, end = sample.place, len(sample.tokens) + sample.limit - 1
            missing = self._cache.covering(min(end, end - place.left + num_steps)) - len(place.pages)
            while missing > 0 and _is_alive(sample) and not self._cache.has_free(missing):
                self._reclaim_pages(sample)
            if missing > 0 and _is_alive(sample):
                place.pages += self._cache.take(missing)
                self._page_table_is_stale = True

    def _reclaim_pages(self, sample: Sample) -> None:
        """Free pages for this sample: those of ended samples, else those of a kept sample, else of the youngest."""
        num_ended = len(self._ended)
        self._take_snapshot()  # a sample that started after the last snapshot may have ended with its first token
        while self._snapshots:
            self._finish_samples(self._snapshots.popleft().ended())
        if len(self._ended) > num_ended:
            return
        having = [one for one in self._held if one.place.pages]
        if all(one.place is sample.place for one in having):
            raise OutOfMemory(
                f"A prompt of {len(sample.tokens)} tokens and a response of up to {sample.limit} do not fit in "
                f"{max(0, self._cache.num_pages - 1)} pages of {self._cache.page_size} tokens, half of the GPU's free "
                "memory. Use a smaller rollout.max_new_tokens, or a GPU with more memory."
            )
        self._preempt(max(having, key=lambda one: (one.is_over, one.place.born)))

    def _preempt(self, sample: Sample) -> None:
        """Release a sample's pages; if it has not ended, queue it to be prefilled again (preemption)."""
        place = sample.place
        self._record_finiteness(sample)
        self._release(sample)
        if not sample.is_over:
            place.written = self._responses.tokens[place.row, : self._slots.steps[place.slot]].tolist()
            self._waiting.appendleft(sample)

    def _record_finiteness(self, sample: Sample) -> None:
        """Record whether non-finite weights have written to the pages of a sample, unless already known."""
        place = sample.place
        place.is_finite = place.is_finite and bool(self._responses.log_probs[place.row].isfinite().all())

    def _release(self, sample: Sample) -> None:
        """Release the pages of a sample, and stop its slot."""
        place = sample.place
        freed = self._cache.release(place.pages)
        if not place.is_finite:  # attention multiplies masked cache entries by 0, and 0 times NaN is NaN
            for tensor in self._cache.tensors():
                tensor[freed] = 0
        place.pages, place.num_cached, place.num_shared, place.is_finite = [], 0, 0, True
        self._page_table_is_stale = True
        if self._by_columns:
            self._slots.arrays.alive[place.slot] = False

    # Admission and completion

    def _admit(self) -> bool:
        """Start waiting samples as far as slots and pages allow; return False if none started."""
        used = len(self._samples)
        free = deque(slot for slot in range(self._max_slots) if slot >= used or self._samples[slot] is None)
        if self._waiting[0].place.slot < 0 and not self._is_prefill_due(len(free)):
            return False
        self._enlarge_buffers()
        num_alive, new = len(self._alive), list[Sample]()
        while self._waiting and (free or self._waiting[0].place.slot >= 0) and self._may_begin(self._waiting[0]):
            if not self._allocate_prompt_pages(sample := self._waiting[0], num_alive + len(new)):
                break
            self._waiting.popleft()
            place, self._rules = sample.place, sample.place.rules
            if place.slot < 0:
                place.slot, place.row, place.born = free.popleft(), self._free_rows.pop(), next(self._births)
                assert not self._by_columns or place.pages == [place.slot + 1], place  # what columns rely on
                self._samples += [None] * (place.slot + 1 - len(self._samples))
            self._samples[place.slot], self._page_table_is_stale = sample, True
            place.left = sample.limit - 1 - len(place.written)
            new.append(sample)
        for samples in prefill_passes(new):
            batch = prefill_batch_of(samples, self._cache.page_size, self._device)
            num_positions = self._slots.pages.shape[1] * self._cache.page_size
            with products_of(PREFILL_TILE if self._is_invariant else 0):
                logits = self._decoder.prefill(batch, self._cache, num_positions=num_positions)
            self._begin(samples, logits)
        return bool(new)

    def _is_prefill_due(self, num_free: int) -> bool:
        """Return whether to prefill waiting samples now, with this number of free slots, or with more of them later."""
        alive, num_waiting = self._alive, len(self._waiting)
        if not alive:
            return True
        if self._is_captured:
            return num_free >= min(self._max_slots * PREFILL_SHARE, num_waiting)
        # A CPU takes about as long for a prefill pass as for a step, whatever their sizes. If responses have n tokens,
        # the fraction of samples to start together that takes the fewest of both is the square root of 2 / n.
        longest = max(sample.limit for sample in (*alive, *itertools.islice(self._waiting, num_free)))
        fraction = math.sqrt(2 / max(2, longest))
        return min(num_free, num_waiting) >= fraction * min(len(alive) + num_waiting, self._max_slots)

    def _may_begin(self, sample: Sample) -> bool:
        """Return whether its tokens are drawn by the same rules as those of the active samples."""
        return (self._rules is not None and self._rules.key == sample.place.rules.key) or not self._alive

    def _begin(self, samples: Sequence[Sample], logits: Tensor) -> None:
        """Draw the next token of samples that have been prefilled."""
        self._responses.set_draws(samples)
        numbers = [
            (one.place.slot, one.place.row, one.limit, len(one.tokens), len(one.place.written)) for one in samples
        ]
        slots, rows, limits, positions, steps = on_device(numbers, self._device).unbind(dim=1)
        mine = self._slots
        states = mine.stop_states[slots] * (steps > 0)
        assert self._rules is not None
        tokens, is_end, states = self._responses.write(self._rules, logits, rows, steps, states, self._version)
        mine.rows[slots], mine.tokens[slots] = rows, tokens
        mine.positions[slots], mine.steps[slots] = positions + steps, steps + 1
        mine.stop_states[slots], mine.limits[slots] = states, limits
        mine.alive[slots] = ~is_end & (steps + 1 < limits)

    def _take_snapshot(self) -> None:
        samples = [one if one and one.place.pages else None for one in self._samples]
        self._snapshots.append(Snapshot(self._slots, self._responses, samples))

    def _ended_on_cpu(self) -> list[Ended]:
        """Return samples that have ended, which on a CPU the host sees without a snapshot."""
        slots, rows, ended = self._slots.arrays, self._responses.arrays, []
        for sample in self._alive:
            if not slots.alive[slot := sample.place.slot]:
                is_cut, log_probs = not rows.has_ended[sample.place.row], rows.log_probs[sample.place.row]
                ended.append(Ended(sample, int(slots.steps[slot]), is_cut, bool(np.isfinite(log_probs).all())))
        return ended

    def _finish_samples(self, ended: Sequence[Ended]) -> None:
        """Store the responses of samples that have ended, and free their slots."""
        if not ended:
            return
        rows, mine = on_device([one.sample.place.row for one in ended], self._device), self._responses
        written = [part[rows] for part in (mine.tokens, mine.log_probs, mine.versions)]
        for number, (sample, num_written, is_cut, is_finite) in enumerate(ended):
            sample.response, sample.log_probs, sample.versions = (part[number, :num_written] for part in written)
            sample.is_cut = is_cut
            self._ended.append(sample)
            if not is_finite:
                sample.place.is_finite = False
                mine.log_probs[sample.place.row] = 0
            if sample.is_kept:
                sample.is_over, self._kept[sample.id] = True, sample.response.tolist()
            else:
                self._free(sample)

    def _free(self, sample: Sample) -> None:
        self._release(sample)
        sample.is_over, self._samples[sample.place.slot] = True, None
        self._free_rows.append(sample.place.row)

    def _update_weight_addresses(self) -> None:
        self._weights = self._decoder.join_weights()

    def _compact(self) -> int:
        """Move active samples to the front if that saves slots; return the number of slots to compute.

        Graphs exist for few sizes, and a CPU computes slots in tiles, so some slots without a sample are computed too.
        Their results are never read.
        """
        alive = self._alive
        if self._is_invariant:
            return len(self._slots.alive)
        last = max(sample.place.slot for sample in alive)
        if self._by_columns:  # the page of a slot would have to move with it, which takes as long as it saves
            return tiled(last + 1)
        size = min(graph_size(len(alive)), len(self._slots.alive)) if self._is_captured else tiled(len(alive))
        if size <= last:
            held = [*alive, *(sample for sample in self._held if not _is_alive(sample))]
            order = on_device([sample.place.slot for sample in held], self._device)
            for tensor in self._slots.tensors():
                tensor[: len(held)] = tensor[order]
            for slot, sample in enumerate(held):
                sample.place.slot = slot
            self._samples, self._page_table_is_stale = [*held], True
        return size

    def _run(self, num_steps: int, count: int) -> None:
        """Run `num_steps` steps with the first `count` slots."""
        if self._page_table_is_stale and not self._by_columns:
            self._slots.place([one.place.pages if one else [] for one in self._samples])
            self._page_table_is_stale = False
        rules, alive, most = self._rules, self._alive, self._slots.pages.shape[1] * self._cache.page_size
        assert rules is not None
        # One past the largest position.
        longest = max(len(one.tokens) + one.limit - 1 - one.place.left for one in alive) + num_steps
        for sample in alive:
            sample.place.left -= num_steps
        if not self._is_captured:
            if self._by_columns:
                self._step_columns(count, longest, rules)
            else:
                self._step(count, min(longest, most), rules)
            return
        length = min(1 << (max(longest, SHORT_TEXT) - 1).bit_length(), most)
        if isinstance(self._decoder.operations, TritonOperations) and length > SHORT_TEXT:
            length = most  # kernels read up to each slot's position
        if self._is_invariant:
            length = UNBOUNDED  # the split into parts must not depend on the longest text
        buffers = (*self._cache.tensors(), *self._slots.tensors(), *vars(self._responses).values())
        self._graphs.invalidate_unless((*self._weights, *(tensor.data_ptr() for tensor in buffers)))
        self._graphs.replay(
            (count, length, rules.key),
            lambda: self._step(count, length, rules),
            times=num_steps,
            changed=self._slots.tensors(),
            used=rules,
        )

    def _step(self, count: int, length: int, rules: TokenRules) -> None:
        """Generate one token in each of the first `count` slots, on the device and in place."""
        rows, tokens, positions, steps, limits, stop_states, alive, pages = (t[:count] for t in self._slots.tensors())
        logits = self._decoder.decode(tokens, positions, pages, self._cache, num_positions=length)
        rows = torch.where(alive, rows, len(self._slots.alive))
        drawn, is_end, new_states = self._responses.write(rules, logits, rows, steps, stop_states, self._version)
        tokens.copy_(drawn)
        if new_states is not stop_states:  # one kernel less per step without stop strings
            stop_states.copy_(torch.where(alive, new_states, stop_states))
        steps.add_(alive)
        alive.logical_and_(~is_end).logical_and_(steps < limits)
        positions.add_(alive)  # a finished slot stays at a valid position

    def _step_columns(self, count: int, length: int, rules: TokenRules) -> None:
        """Do what `_step` does if `Decoder.uses_columns`, with numpy."""
        self._update_weight_addresses()
        slots, responses = self._slots.arrays, self._responses.arrays
        used, decode = slots.alive.nonzero()[0], self._decoder.decode_columns
        logits = decode(slots.tokens[:count], slots.positions[:count], used, self._cache, num_positions=length)
        uniforms = torch.from_numpy(responses.uniforms[slots.rows[:count], slots.steps[:count]])
        tokens, log_probs = (drawn.numpy()[used] for drawn in rules.sampler(logits, uniforms))
        is_end = (tokens[:, None] == rules.end_tokens.numpy()).any(axis=1)
        if rules.stops is not None:
            states = rules.stops.advance(*map(torch.from_numpy, (slots.stop_states[used], tokens))).numpy()
            slots.stop_states[used], is_end = states, is_end | (states == rules.stops.found)
        rows, steps = slots.rows[used], slots.steps[used]
        responses.tokens[rows, steps], responses.log_probs[rows, steps] = tokens, log_probs
        responses.versions[rows, steps], responses.has_ended[rows] = self._last_version, is_end
        is_alive = ~is_end & (steps + 1 < slots.limits[used])
        slots.tokens[used], slots.steps[used], slots.alive[used] = tokens, steps + 1, is_alive
        slots.positions[used] += is_alive


def _is_alive(sample: Sample) -> bool:
    return bool(sample.place.pages) and not sample.is_over
