"""Shared prefixes: which tokens are computed, and where each token of a row finds its result."""

import doctest
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import coati.models.packing
from coati.models.packed_attention import take_repeated
from coati.models.packing import MIN_SHARED_TOKENS, PackedRows, SharedPrefixes


def test_docstring_examples_run():
    assert doctest.testmod(coati.models.packing).attempted > 0
    assert doctest.testmod(coati.models.packing).failed == 0


def rows_of(packed):
    starts = packed.starts.tolist()
    return [range(start, end) for start, end in itertools.pairwise(starts)]


@given(
    rows=st.lists(st.lists(st.integers(0, 1), min_size=0, max_size=7), min_size=1, max_size=6),
    paddings=st.lists(st.integers(0, 2), min_size=6, max_size=6),
)
def test_a_token_is_shared_only_with_equal_prefixes(rows, paddings):
    """A vocabulary of two, so that rows share prefixes by chance; left padding may differ."""
    sequences, mask = torch.full((len(rows), 10), 7), torch.zeros(len(rows), 10, dtype=torch.long)
    for row, (words, padding) in enumerate(zip(rows, paddings, strict=False)):
        sequences[row, padding : padding + len(words)] = torch.tensor(words)
        mask[row, padding : padding + len(words)] = 1
    shared = SharedPrefixes.of(sequences, mask.bool(), min_tokens=2)
    if shared is None:
        return
    packed = PackedRows.of(sequences, mask)
    pasts = {at: tuple(packed.tokens[row.start : at + 1].tolist()) for row in rows_of(packed) for at in row}
    owners, slots = shared.owners.tolist(), shared.slots.tolist()
    assert len(slots) == len(packed)
    assert [slots[owner] for owner in owners] == list(range(len(owners)))
    assert all(pasts[owners[slot]] == pasts[at] for at, slot in enumerate(slots))
    assert len(owners) < len(slots)


def batch(*rows):
    width = max(map(len, rows))
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    return torch.tensor([list(row) + [0] * (width - len(row)) for row in rows]), mask


def num_computed(*rows):
    packed = PackedRows.of(*batch(*rows))
    return len(packed.computed(packed.tokens))


def test_a_prompt_is_computed_once_per_run_of_adjacent_rows():
    one, other = range(MIN_SHARED_TOKENS), range(50, 50 + MIN_SHARED_TOKENS)
    assert num_computed([*one, 1], [*one, 2, 3], [*other, 1], [*other, 2]) == 2 * MIN_SHARED_TOKENS + 5
    # Only adjacent rows are compared, and identical rows are computed once.
    assert num_computed([*one, 1], [*other, 1], [*one, 2]) == 3 * MIN_SHARED_TOKENS + 3
    assert num_computed([*one, 1], [*one, 1], [*one, 1]) == MIN_SHARED_TOKENS + 1


def test_prefixes_that_are_too_short_are_not_shared():
    short = range(MIN_SHARED_TOKENS - 1)
    assert PackedRows.of(*batch([*short, 1], [*short, 2])).shared is None
    prompt, long = range(MIN_SHARED_TOKENS), [100 + n for n in range(8 * MIN_SHARED_TOKENS)]
    assert PackedRows.of(*batch([*prompt, *long], [*prompt, 1])).shared is None
    assert PackedRows.of(*batch([*prompt, *long[: 5 * MIN_SHARED_TOKENS]], [*prompt, 1])).shared is not None


def shared_of(rows, mask):
    return SharedPrefixes.of(torch.tensor(rows), torch.tensor(mask).bool(), min_tokens=2)


def test_equal_words_at_different_positions_are_not_shared():
    words = [[5, 6, 7, 8, 9, 1], [0, 6, 7, 8, 9, 2]]
    assert shared_of(words, [[1] * 6, [0] + [1] * 5]) is None
    words = [[5, 6, 7, 8, 9, 1], [5, 6, 7, 8, 9, 2]]
    assert shared_of(words, [[1] * 6, [1, 0, 1, 1, 1, 1]]) is None
    assert shared_of(words, [[1] * 6, [1] * 6]).slots.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 6]


def test_rows_share_only_what_they_have_in_common_with_the_source_row():
    # The third row shares four words with the second, but only two with the first, which is the source of both.
    words = [[1, 2, 3, 4, 9], [1, 2, 5, 6, 7], [1, 2, 5, 6, 8]]
    slots = shared_of(words, [[1] * 5] * 3).slots.tolist()
    assert slots == [0, 1, 2, 3, 4, 0, 1, 5, 6, 7, 0, 1, 8, 9, 10]


def test_padding_content_does_not_matter():
    shared = shared_of([[3, 6, 7, 1], [4, 6, 7, 2]], [[0, 1, 1, 1]] * 2)
    assert shared.slots.tolist() == [0, 1, 2, 0, 1, 3]


@pytest.mark.parametrize("shape", [(2,), (2, 1)])  # with two dimensions or more, torch itself is exact on CPUs
def test_gradients_of_repeated_indices_add_up_in_float32(shape):
    values = torch.zeros(shape, dtype=torch.bfloat16, requires_grad=True)
    taken = take_repeated(values, torch.tensor([0] * 300 + [1]))
    taken.sum().backward()
    assert values.grad.flatten().tolist() == [300.0, 1.0]  # bfloat16 counts to 256 in steps of 1
    assert values.grad.dtype == torch.bfloat16
