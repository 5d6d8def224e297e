"""Reducing a step's numbers over ranks, without ranks: numbers of the parts combine to those of the whole batch."""

import pytest
import torch

from coati.algos.importance import effective_sample_size
from coati.algos.masked import masked_moments, masked_whiten
from coati.trainer.steps import StepNumbers, explained_variance, joined_moments

VALUES = torch.tensor([[3.0, 5.0, 1e30], [1.0, 9.0, 4.0], [7.0, 1e30, 1e30]], dtype=torch.float64)
MASK = torch.tensor([[True, True, False], [True, True, True], [True, False, False]])


def numbers_of(rows):
    """Return the numbers of a rank with these rows."""
    values, mask = VALUES[rows], MASK[rows]
    numbers = StepNumbers()
    numbers.add("tokens", mask.sum())
    numbers.add("tokens", torch.tensor(0))  # from another micro-batch
    numbers.add_maximum("largest", values[mask].max() if mask.any() else torch.tensor(0.0))
    numbers.add_maximum("largest", torch.tensor(-1.0))
    numbers.moments["values"] = masked_moments(values, mask)
    return numbers


@pytest.mark.parametrize("parts", [[[0], [1], [2]], [[0, 1], [2]], [[0, 1, 2], []]])
def test_parts_combine_to_the_whole(parts):
    everyone = [numbers_of(rows) for rows in parts]
    rows = torch.stack([numbers.as_vector() for numbers in everyone])
    whole = numbers_of([0, 1, 2])
    for rank, mine in enumerate(everyone):
        joined = mine.over_all_ranks(lambda vector, rank=rank: rows if torch.equal(vector, rows[rank]) else None)
        # 3, 5 · 1, 9, 4 · 7: six tokens, mean 29/6, Σ w = 29, Σ w² = 181
        assert joined.values() == {"tokens": 6.0, "largest": 9.0}
        moments = joined.moments["values"]
        assert moments.mean.item() == pytest.approx(29 / 6)
        assert moments.variance.item() == pytest.approx(181 / 6 - (29 / 6) ** 2)
        assert moments.num_entries.item() == 6
        assert effective_sample_size(moments).item() == pytest.approx(29**2 / (6 * 181))
        whitened = [masked_whiten(VALUES[part], MASK[part], moments=moments) for part in parts]
        expected = masked_whiten(VALUES, MASK)
        torch.testing.assert_close(torch.cat(whitened), expected, rtol=0, atol=1e-12)
        assert joined.moments["values"].mean.item() == pytest.approx(whole.moments["values"].mean.item())


def test_a_single_rank_keeps_its_numbers_unchanged():
    numbers = numbers_of([0, 2])
    assert numbers.over_all_ranks(lambda vector: vector[None]) is numbers


def test_equal_numbers_on_all_ranks_have_no_variance_and_no_tokens_no_moments():
    def joined(*parts):
        moments = [masked_moments(torch.full((1, 4), value), torch.arange(4)[None] < count) for value, count in parts]
        return joined_moments(*(torch.stack(column).double() for column in zip(*moments, strict=True)))

    assert joined((1e6 / 3, 3), (1e6 / 3, 4)).variance.item() == 0.0
    assert [scalar.item() for scalar in joined((5.0, 0), (5.0, 0))] == [0.0, 0.0, 0]
    assert joined((5.0, 0), (2.0, 1)).mean.item() == 2.0


def test_explained_variance_of_constant_targets_is_zero():
    constant = masked_moments(torch.ones(1, 3), torch.ones(1, 3, dtype=torch.bool))
    assert explained_variance(constant, constant) == 0.0
