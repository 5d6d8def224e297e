"""Rows of a batch that begin alike: what they have in common is computed once.

Several responses to one prompt come as so many rows, each with the whole prompt in front. A token's hidden state
depends on what comes before it and on nothing else, so the prompt's is the same in all of them:

        [p q r a b]                                       a row's token    computed at
        [p q r c .]    →    computed: p q r a b c d e     p q r a b        0 1 2 3 4
        [p q r d e]                                       p q r c          0 1 2 5
                                                          p q r d e        0 1 2 6 7

Only attention sees whole rows. It takes a prompt's keys and values as often as there are rows with it, and their
gradients add up, so log-probs, values and gradients are those of whole rows to rounding.
"""

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

LEAST_TOKENS = 4
"""A beginning in common that is worth its bookkeeping."""
_LEAST_SHARE = 8  # of all tokens it must be at least one in so many


@dataclasses.dataclass(frozen=True)
class SharedPrefixes:
    """Which of the N tokens of rows that lie end to end are computed, T of them; the others are as in another row."""

    owners: Tensor
    """[T] of each token that is computed: where it is among the N."""
    slots: Tensor
    """[N] of each token: where it is among the T."""

    @classmethod
    def of(cls, sequences: Tensor, is_real: Tensor, *, least: int = LEAST_TOKENS) -> "SharedPrefixes | None":
        """What the rows of a padded batch `[B, S]` have in common with the rows right before them; None if too little.

        >>> rows = torch.tensor([[5, 6, 7, 1], [5, 6, 7, 2], [5, 6, 8, 9]])
        >>> shared = SharedPrefixes.of(rows, torch.ones_like(rows, dtype=torch.bool), least=2)
        >>> shared.owners.tolist(), shared.slots.tolist()
        ([0, 1, 2, 3, 7, 10, 11], [0, 1, 2, 3, 0, 1, 2, 4, 0, 1, 5, 6])
        """
        if sequences.shape[0] < 2 or sequences.shape[1] < least:
            return None
        is_like = (is_real[1:] == is_real[:-1]) & ((sequences[1:] == sequences[:-1]) | ~is_real[1:])
        in_common = (is_like.cumprod(dim=1).bool() & is_real[1:]).sum(dim=1)
        lengths = is_real.sum(dim=1)
        *counts, num_tokens = torch.cat([in_common, lengths.sum().unsqueeze(0)]).tolist()
        heads, shared = _lenders(counts, least)
        if sum(shared) * _LEAST_SHARE < max(num_tokens, 1):
            return None
        head_of, shared_of = torch.tensor([heads, shared], device=sequences.device)  # [B] each
        spots = is_real.flatten().nonzero().squeeze(1)  # [N]
        rows = spots // sequences.shape[1]
        positions = (is_real.cumsum(dim=1) - 1).flatten()[spots]
        is_taken = positions < shared_of[rows]
        own_slots = (~is_taken).cumsum(dim=0) - 1
        starts = lengths.cumsum(dim=0) - lengths  # [B]
        return cls(
            owners=(~is_taken).nonzero().squeeze(1),
            slots=torch.where(is_taken, own_slots[starts[head_of[rows]] + positions], own_slots),
        )


def _lenders(in_common: Sequence[int], least: int) -> tuple[list[int], list[int]]:
    """From which row each one takes its first tokens, and how many.

    `in_common` has what each row but the first shares with the one before; what that one took itself is from the same
    lender, so the smaller of the two numbers is what they all have.

    >>> _lenders([40, 35, 3, 50], 32)
    ([0, 0, 0, 3, 3], [0, 40, 35, 0, 50])
    """
    heads, shared = [0], [0]
    for row, count in enumerate(in_common, start=1):
        is_head = heads[-1] == row - 1
        length = count if is_head else min(count, shared[-1])
        heads.append(heads[-1] if length >= least else row)
        shared.append(length if length >= least else 0)
    return heads, shared
