"""Makers that join and leave a run: who makes which rounds, with which prompts, from when on.

Every maker is held for a moment and reports its position. Rounds that no maker has begun are dealt again to those that
stay or join. What a maker had been dealt below that it still makes, one that leaves too, and then it is
done. So each round is made by exactly one maker, whatever joins and leaves there are, and in the same order as before;
the staleness bound holds as it did.

Prompts are shared again from the first position that no maker has drawn. A maker that leaves gets what it still needs
from an order far beyond (`APART`): a part of the common order would have to be reserved for it, and left out when it
is gone.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from coati.ledger.admission import WorkShare

# Positions in the order of prompts between those of the run and those of makers that leave at its first, second, …
# change. Ids stay below 2^63 for a thousand samples per prompt and eight thousand changes.
APART = 2**40


class Standing(NamedTuple):
    """Where a maker was when it was held."""

    rounds_begun: int
    next_position: int


class PromptPart(NamedTuple):
    """Which positions of the order of prompts are a maker's: those of its shard from the first on."""

    shard: int
    num_shards: int
    first_position: int = 0


class Place(NamedTuple):
    """What a maker works on from now on."""

    share: WorkShare
    prompts: PromptPart


class Membership:
    """The makers of a run and their shares.

    >>> share = WorkShare(rounds_per_version=4, total_rounds=12)
    >>> membership = Membership({"a": share})
    >>> places = membership.redeal({"a": Standing(5, next_position=8)}, joining=["b"])
    >>> [places["b"].share.round_of(number) for number in range(places["b"].share.total)]
    [6, 8, 10]
    >>> places["b"].prompts
    PromptPart(shard=1, num_shards=2, first_position=8)
    """

    def __init__(self, shares: Mapping[str, WorkShare]) -> None:
        self._shares = dict(shares)
        self._first_round = 0
        self._first_position = 0
        self._num_changes = 0

    @property
    def members(self) -> tuple[str, ...]:
        """Makers that have a part in what is to come."""
        return tuple(self._shares)

    @property
    def shares(self) -> dict[str, WorkShare]:
        """What each of them has been dealt."""
        return dict(self._shares)

    def restore(self, shares: Mapping[str, WorkShare]) -> None:
        """Take back a deal that no maker works by: these were the shares before it."""
        self._shares = dict(shares)

    def share_in_waiting(self) -> WorkShare:
        """The share of a maker that is to join: nothing, until it is dealt in."""
        some = next(iter(self._shares.values()))
        return dataclasses.replace(some, maker_index=None, num_makers=1, later_deals=())

    def redeal(
        self, standings: Mapping[str, Standing], *, joining: Sequence[str] = (), leaving: Sequence[str] = ()
    ) -> dict[str, Place]:
        """Deal again; return the places of all members and of all who join. Exactly the members are held."""
        assert standings.keys() == self._shares.keys(), "every member is held, and no other"
        # Makers that left had begun rounds and drawn prompts too, so neither ever goes back.
        self._first_round = max(self._first_round, *(standing.rounds_begun for standing in standings.values()))
        self._first_position = max(self._first_position, *(standing.next_position for standing in standings.values()))
        self._num_changes += 1
        before = self._shares
        waiting = self.share_in_waiting()
        names = [*(name for name in before if name not in leaving), *joining]
        places: dict[str, Place] = {}
        for index, name in enumerate(names):
            share = before.get(name, waiting).dealt(self._first_round, index, len(names))
            places[name] = Place(share, PromptPart(index, len(names), self._first_position))
        self._shares = {name: place.share for name, place in places.items()}
        for index, name in enumerate(leaving):
            share = before[name].dealt(self._first_round, None, len(names))
            places[name] = Place(share, PromptPart(index, len(leaving), self._num_changes * APART))
        return places
