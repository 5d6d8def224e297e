"""Continuous batching on a CPU, where the host looks after every token and nothing has to be captured.

Samples that are being written are columns (see `columns`). What is drawn is kept as it comes, step by step, and sorted
into rows once, at the end. A sample that has ended makes room for the next prompt. When none waits, it is computed
along, into a part of its row that is masked later, until enough have ended to be worth packing the others together.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coati.rollout.engine import Rollout, RolloutRequest
from coati.rollout.native.columns import ColumnDecoder, Floats, Integers
from coati.rollout.native.work import Work
from coati.rollout.options import GenerateOptions
from coati.rollout.sampling import inverse_cdf, score_processors

# Columns are packed when one in so many has ended: moving the cache costs a good part of a step.
_ENDED_PART = 4


class ColumnLoop:
    """The cache for one model; kept from one request to the next while it fits."""

    def __init__(self, decoder: ColumnDecoder, *, num_slots: int, num_positions: int) -> None:
        self._decoder = decoder
        self._num_slots, self._num_positions = num_slots, num_positions
        # Twice what a sample needs: while prompts wait, places move on, and what lies before all starts comes free.
        self._num_places = 2 * num_positions
        self._room = decoder.new_columns(num_slots, self._num_places)
        self._is_clean = True  # whether all that lies there are numbers: masked or not, they are computed with

    def fits(self, *, num_slots: int, num_positions: int) -> bool:
        """Whether a request of these sizes can use this cache."""
        return (
            num_slots <= self._num_slots
            and num_positions <= self._num_positions
            and self._room.dtype == self._decoder.weight.dtype
        )

    def generate(self, request: RolloutRequest, work: Work, *, num_slots: int) -> Rollout:
        """Continue every prompt of the request, at most `num_slots` at a time."""
        self._decoder.find_weights()
        if not self._is_clean:
            self._room.zero_()
        self._is_clean = False
        sheet = _Sheet(request, work)
        columns = _Columns(self._decoder, self._room, self._num_places, work, num_slots)
        version = request.version
        while True:
            # Not while somebody else's code runs: what is made in inference mode can never be part of a gradient.
            with torch.inference_mode():
                if work.has_waiting and (free := columns.free):
                    columns.admit(work.next_rows(len(free)), free, sheet, version)
                elif not columns.any_alive:
                    break
                else:
                    columns.step(sheet, version)
            if request.commit_point is not None:
                # Weights change in place, where the columns read them; the cache stays.
                version = request.commit_point()
        rollout = sheet.rollout(request, work)
        self._is_clean = bool(rollout.rollout_log_probs.isfinite().all())
        return rollout


class _Columns:
    """What is being written, n samples side by side: the lists and the last dimension of every array."""

    def __init__(self, decoder: ColumnDecoder, room: Tensor, num_places: int, work: Work, count: int) -> None:
        self._decoder, self._room, self._num_places, self._work = decoder, room, num_places, work
        self._longest_prompt = int(work.lengths.max())
        self._place = self._longest_prompt  # where the next token goes
        self._first = 0  # before which nobody looks
        self._mask: Floats | None = None  # of all places, [L, 1, 1, n]
        self._rows = [0] * count
        self._alive = [False] * count
        self._starts = [0] * count  # place of the first token
        self._left = [0] * count  # tokens before the limit
        self._tokens: Integers
        self._positions: Integers  # in the sample's own text
        self._cells: Integers  # of the sheet, where the next token goes
        self._tokens, self._positions, self._cells = np.zeros((3, count), np.int64)
        self._step = decoder.step_for(room, num_places, count)

    @property
    def any_alive(self) -> bool:
        return any(self._alive)

    @property
    def free(self) -> list[int]:
        """Columns that may take a prompt."""
        return [column for column, lives in enumerate(self._alive) if not lives]

    def admit(self, rows: Tensor, free: list[int], sheet: "_Sheet", version: int) -> None:
        """Read prompts into free columns, and draw their first tokens."""
        free = free[: len(rows)]
        self._make_room()
        prompts, lengths, which = self._work.prompts_of(rows)
        logits, stored = self._decoder.read_prompts(prompts, lengths, which)
        self._step.cache[:, self._place - stored.shape[1] : self._place, :, :, free] = stored
        cells = rows.numpy() * sheet.width
        tokens = sheet.draw(logits, cells, version)
        # Copies: the sheet has those of the last step.
        self._tokens, self._positions, self._cells = self._tokens.copy(), self._positions.copy(), self._cells.copy()
        self._tokens[free], self._cells[free] = tokens, cells + 1
        self._positions[free] = own_lengths = lengths[which].numpy()
        for column, row, length in zip(free, rows.tolist(), own_lengths.tolist(), strict=True):
            self._rows[column], self._alive[column] = row, True
            self._starts[column], self._left[column] = self._place - length, sheet.width - 1
        self._end_some(tokens, free, sheet)
        self._set_view()

    def step(self, sheet: "_Sheet", version: int) -> None:
        """One token for every column."""
        num_ended = self._alive.count(False)
        is_over = 0 in self._left  # of one that has ended: its row has no room for more
        if num_ended * _ENDED_PART >= len(self._alive) or is_over:
            self._pack()
        self._make_room()
        first, place = self._first, self._place
        mask = None if self._mask is None else self._mask[first : place + 1]
        logits = self._step(self._tokens, self._positions, first, place, mask)
        self._tokens = sheet.draw(logits, self._cells, version)
        self._cells, self._positions = self._cells + 1, self._positions + 1
        self._place += 1
        self._left = [left - 1 for left in self._left]
        self._end_some(self._tokens, range(len(self._alive)), sheet)

    def _set_view(self) -> None:
        """From where on columns may look, after starts have changed."""
        starts = [start for start, lives in zip(self._starts, self._alive, strict=True) if lives]
        self._first = min(starts, default=0)
        self._mask = None
        if any(start != self._first for start in starts):
            is_hidden = np.arange(self._num_places)[:, None] < np.array(self._starts)  # [L, n]
            self._mask = np.where(is_hidden, -np.inf, 0.0).astype(self._step.cache.dtype)[:, None, None]

    def _make_room(self) -> None:
        """Move everything to the front of the cache when its end is reached."""
        if self._place < self._num_places:
            return
        shift = min(self._first, self._place - self._longest_prompt)
        cache = self._step.cache
        cache[:, : self._place - shift] = cache[:, shift : self._place].copy()
        self._place -= shift
        self._starts = [start - shift for start in self._starts]
        self._set_view()

    def _pack(self) -> None:
        """Keep the living columns only."""
        living = [column for column, lives in enumerate(self._alive) if lives]
        self._rows, self._starts, self._left = (
            [column[index] for index in living] for column in (self._rows, self._starts, self._left)
        )
        self._alive = [True] * len(living)
        self._tokens, self._positions, self._cells = (
            array[living] for array in (self._tokens, self._positions, self._cells)
        )
        used = slice(self._first, self._place)
        kept = self._step.cache[:, used].take(living, axis=-1)  # a copy, because both lie in the same room
        self._step = self._decoder.step_for(self._room, self._num_places, len(living))
        self._step.cache[:, used] = kept
        self._set_view()

    def _end_some(self, tokens: Integers, columns: Iterable[int], sheet: "_Sheet") -> None:
        """Note which of the columns that just got a token have ended."""
        for column, token in zip(columns, tokens.tolist(), strict=True):
            if self._alive[column] and (token in sheet.ends or self._left[column] == 0):
                self._alive[column] = False
                sheet.close(self._rows[column], sheet.width - self._left[column], has_ended=token in sheet.ends)


class _Drawn(NamedTuple):
    """What one step drew, [n] each."""

    cells: Integers
    """Row times the width of the sheet, plus the number of the token in the response."""
    tokens: Integers
    log_probs: Floats
    versions: Integers


class _Sheet:
    """Everything that has been drawn, and how far each row is written."""

    def __init__(self, request: RolloutRequest, work: Work) -> None:
        self.width = request.max_new_tokens
        self.ends = frozenset(work.ends.tolist())
        self._dice = _Dice(request.options, work.uniforms)
        self._drawn: list[_Drawn] = []
        self._written = [0] * work.num_rows
        self._has_ended = [False] * work.num_rows

    def draw(self, logits: Tensor, cells: Integers, version: int) -> Integers:
        """The tokens for these cells, [n], written down."""
        tokens, log_probs = self._dice(logits, cells)
        self._drawn.append(_Drawn(cells, tokens, log_probs, np.full(len(cells), version)))
        return tokens

    def close(self, row: int, written: int, *, has_ended: bool) -> None:
        """A row is complete."""
        self._written[row], self._has_ended[row] = written, has_ended

    def rollout(self, request: RolloutRequest, work: Work) -> Rollout:
        """All rows, as wide as the longest response."""
        width = max(self._written)
        is_written = np.arange(width) < np.array(self._written)[:, None]
        cells, *columns = (np.concatenate(parts) for parts in zip(*self._drawn, strict=True))

        def page(values: NDArray[np.generic], blank: float) -> Tensor:
            whole = np.empty(work.num_rows * self.width, values.dtype)
            whole[cells] = values
            return torch.from_numpy(np.where(is_written, whole.reshape(-1, self.width)[:, :width], blank))

        responses, log_probs, versions = map(page, columns, (work.pad, 0.0, 0))
        action_mask = torch.from_numpy(is_written)
        return Rollout(
            sequences=torch.cat([request.input_ids, responses], dim=1),
            attention_mask=torch.cat([request.attention_mask, action_mask.to(request.attention_mask.dtype)], dim=1),
            action_mask=action_mask,
            rollout_log_probs=log_probs,
            is_cut=~torch.tensor(self._has_ended),
            token_versions=versions,
        )


class _Dice:
    """Draws tokens from logits as the options say."""

    def __init__(self, options: GenerateOptions, uniforms: Tensor) -> None:
        self._processors = score_processors(options)
        self._is_greedy = not options.do_sample
        self._temperature = options.sampling_temperature
        self._uniforms: NDArray[np.float64] = uniforms.numpy().reshape(-1)
        # A hair below, so that the product with a total never rounds up to it.
        self._targets = self._uniforms * (1.0 - 2.0**-52)

    def __call__(self, logits: Tensor, cells: Integers) -> tuple[Integers, Floats]:
        """Tokens and their log-probs, [n] each, by the draws of these cells."""
        if not self._is_greedy and len(self._processors) == 1:  # the temperature alone
            return self._drawn(logits.float(), cells)
        scores = logits
        for process in self._processors:
            scores = process(None, scores)
        uniforms = torch.from_numpy(self._uniforms[cells])
        tokens = scores.argmax(dim=-1) if self._is_greedy else inverse_cdf(scores, uniforms)
        return tokens.numpy(), scores.gather(1, tokens.unsqueeze(1)).squeeze(1).float().numpy()

    def _drawn(self, logits: Tensor, cells: Integers) -> tuple[Integers, Floats]:
        """`inverse_cdf` with fewer operations, for probabilities of which none was cut: sums are in float64 too."""
        probs = torch.softmax(logits if self._temperature == 1.0 else logits / self._temperature, dim=-1)
        cumulative = probs.cumsum(dim=-1, dtype=torch.float64)
        targets = self._targets[cells] * cumulative.numpy()[:, -1]
        found = torch.searchsorted(cumulative, torch.from_numpy(targets[:, None]), right=True).numpy()[:, 0]
        # The bound is for nan: such a row goes on as nan, which the learner's guard names, not as a bad index.
        tokens = np.minimum(found, probs.shape[1] - 1)
        return tokens, np.log(probs.numpy()[np.arange(len(tokens)), tokens])
