"""Staleness by admission: a prompt is issued only while the text written for it can still be fresh enough.

With `max_staleness` η, version v of the weights may see samples issued up to number `(η + v + 1) × samples
per version`. So no finished sample is thrown away for its age, and η = 0 is on-policy training. A run of M
makers and T trainers splits the work in rounds: one round is one sample for each trainer, so every trainer
gets its share exactly, whatever M and T are. Samples that are compared with each other (groups) are never parted:
rounds are then dealt in hands that hold whole groups.

Makers may join and leave while a run trains. Rounds that no maker has begun are then dealt again: from some round on,
hands go to other makers than before. So a share is a sequence of deals, and the shares of all makers that a run ever
had cover each of its rounds exactly once.
"""

import dataclasses
import itertools
import math
import threading
from collections.abc import Iterator
from typing import NamedTuple

from coati.errors import ConfigError, DataError

UNBOUNDED = -1


class Deal(NamedTuple):
    """From round `first_round` on, hands go to `num_makers` makers in turn; nothing to a maker without an index."""

    first_round: int
    maker_index: int | None
    num_makers: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkShare:
    """What one maker of a run has to deliver, and how far ahead of training it may go.

    >>> share = WorkShare(rounds_per_version=8, total_rounds=24, max_staleness=0)
    >>> share.limit(version=0), share.limit(version=1), share.limit(version=9)
    (8, 16, 24)
    """

    rounds_per_version: int
    """Samples that each trainer consumes for one weight version: update steps times batch size."""

    total_rounds: int
    """Samples that each trainer consumes in the whole run."""

    max_staleness: int = UNBOUNDED
    """η: how many versions older than the newest the training data may be; -1 for no bound."""

    maker_index: int | None = 0
    """This maker's place among `num_makers`; None for one that waits to be dealt in."""

    num_makers: int = 1
    num_trainers: int = 1

    group_size: int = 1
    """Samples of one prompt that must be made together by one maker; 1 where each stands for itself."""

    later_deals: tuple[Deal, ...] = ()
    """Deals after the first, each from its round on, when makers joined or left."""

    def __post_init__(self) -> None:
        if self.max_staleness < UNBOUNDED:
            raise ConfigError(
                f"max_staleness must be 0 or more (or -1 for no bound), got {self.max_staleness}. "
                "Use 0 for on-policy training."
            )
        for deal in self._deals:
            if deal.num_makers < 1 or not 0 <= (deal.maker_index or 0) < deal.num_makers or self.num_trainers < 1:
                raise ConfigError(
                    "maker_index must be in 0…num_makers - 1 and num_trainers 1 or more, got maker "
                    f"{deal.maker_index} of {deal.num_makers} and {self.num_trainers} trainers."
                )
        if self.rounds_per_version < 1 or self.total_rounds < 1:
            raise ConfigError(
                f"rounds_per_version and total_rounds must be 1 or more, got {self.rounds_per_version} and "
                f"{self.total_rounds}. They count samples for each trainer."
            )
        if self.group_size < 1:
            raise ConfigError(f"group_size must be 1 or more, got {self.group_size}. It counts samples of one prompt.")
        if self.rounds_per_version % self._rounds_per_hand or self.total_rounds % self._rounds_per_hand:
            raise ConfigError(
                f"group_size {self.group_size} must divide the samples of a version and of the run over all trainers, "
                f"got {self.rounds_per_version} and {self.total_rounds} rounds of {self.num_trainers}. "
                f"Make both a multiple of {self._rounds_per_hand}."
            )
        starts = [deal.first_round for deal in self._deals]
        if starts != sorted(starts) or any(start % self._rounds_per_hand for start in starts):
            raise ConfigError(
                f"later_deals must begin one after the other, at a multiple of {self._rounds_per_hand} rounds, got "
                f"{starts[1:]}. Use whole_hands to round up."
            )

    @property
    def total(self) -> int:
        """Samples this maker delivers in the whole run."""
        return self._share_of(self.total_rounds)

    def limit(self, version: int) -> int:
        """How many samples this maker may have issued in all while `version` serves."""
        if self.max_staleness == UNBOUNDED:
            return self.total
        return self._share_of(min(self.total_rounds, (self.max_staleness + version + 1) * self.rounds_per_version))

    def version_needed(self, num_issued: int) -> int | None:
        """The lowest version at which one more sample may be issued; None if all are."""
        if num_issued >= self.total:
            return None
        if self.max_staleness == UNBOUNDED:
            return 0
        # Inverse of `limit`: the next sample belongs to this round of the whole run.
        next_round = self.round_of(num_issued // self.num_trainers)
        return max(0, next_round // self.rounds_per_version - self.max_staleness)

    def round_of(self, number: int) -> int:
        """The round of this maker's `number`-th item to any one trainer; it must be one that the share holds."""
        hand, place = divmod(number, self._rounds_per_hand)
        for hands in self._hands(self.total_rounds):
            if hand < len(hands):
                return hands[hand] * self._rounds_per_hand + place
            hand -= len(hands)
        raise AssertionError(f"item {number} is beyond the share")

    def rounds_begun(self, num_issued: int) -> int:
        """Rounds of the run up to the last that `num_issued` samples of this maker reach into, in whole hands.

        All of them if nothing is left to issue: a maker that has ended its work cannot be dealt more.
        """
        if num_issued >= self.total:
            return self.total_rounds
        last = (num_issued - 1) // self.num_trainers
        return 0 if num_issued == 0 else self.whole_hands(self.round_of(last) + 1)

    def whole_hands(self, rounds: int) -> int:
        """`rounds`, rounded up to what can be dealt."""
        return -(-rounds // self._rounds_per_hand) * self._rounds_per_hand

    def dealt(self, first_round: int, maker_index: int | None, num_makers: int) -> "WorkShare":
        """This share with another deal from `first_round` on.

        >>> share = WorkShare(rounds_per_version=4, total_rounds=12).dealt(6, 1, 3)
        >>> [share.round_of(number) for number in range(share.total)]
        [0, 1, 2, 3, 4, 5, 7, 10]
        """
        return dataclasses.replace(self, later_deals=(*self.later_deals, Deal(first_round, maker_index, num_makers)))

    @property
    def _rounds_per_hand(self) -> int:
        """Fewest rounds that hold whole groups: what is dealt to one maker at a time."""
        return self.group_size // math.gcd(self.group_size, self.num_trainers)

    @property
    def _deals(self) -> tuple[Deal, ...]:
        return (Deal(0, self.maker_index, self.num_makers), *self.later_deals)

    def _hands(self, rounds: int) -> Iterator[range]:
        """This maker's hands among the first `rounds` rounds, deal by deal: every `num_makers`-th from its index on."""
        starts = [deal.first_round // self._rounds_per_hand for deal in self._deals]
        end = rounds // self._rounds_per_hand
        for deal, (start, stop) in zip(self._deals, itertools.pairwise([*starts, end]), strict=True):
            if deal.maker_index is not None:
                yield range(start + deal.maker_index, min(stop, end), deal.num_makers)

    def _share_of(self, rounds: int) -> int:
        """This maker's part of the first `rounds` rounds.

        Dealt out like cards, so that a share never shrinks when rounds are added. `rounds` are whole hands.
        """
        return sum(map(len, self._hands(rounds))) * self._rounds_per_hand * self.num_trainers


class AdmissionGate:
    """Counts what a maker has issued against its share.

    Dropped samples are given back, so that others take their place. The maker's work and the driver call from
    different threads, so that a sample is admitted and counted in one go.
    """

    def __init__(self, share: WorkShare) -> None:
        self.share = share
        self._num_issued = 0
        self._is_held = False
        self._changed = threading.Condition(threading.RLock())

    @property
    def num_issued(self) -> int:
        """Samples issued and not given back."""
        return self._num_issued

    @property
    def is_done(self) -> bool:
        """Whether this maker has issued all its samples."""
        with self._changed:
            return self._num_issued >= self.share.total

    def admissible(self, wanted: int, *, version: int) -> int:
        """How many of `wanted` samples may be issued now, 0 if the maker has to wait (for new weights, or a deal)."""
        if wanted % self.share.group_size:
            raise DataError(
                f"a batch of prompts must hold whole groups of {self.share.group_size} samples, got {wanted} samples. "
                "Repeat each prompt group_size times, side by side."
            )
        with self._changed:
            return 0 if self._is_held else max(0, min(wanted, self.share.limit(version) - self._num_issued))

    def admit(self, wanted: int, *, version: int) -> int:
        """Issue as many of `wanted` samples as may be issued now, and say how many."""
        with self._changed:
            num_samples = self.admissible(wanted, version=version)
            self.issue(num_samples)
            return num_samples

    def issue(self, num_samples: int) -> None:
        """Samples are on their way."""
        with self._changed:
            self._num_issued += num_samples

    def give_back(self, num_samples: int) -> None:
        """Samples were dropped before they reached a trainer."""
        with self._changed:
            self._num_issued -= num_samples

    def version_needed(self) -> int | None:
        """The version to wait for before the next sample; None if all are issued."""
        with self._changed:
            return self.share.version_needed(self._num_issued)

    # Another share

    def hold(self) -> int:
        """Issue nothing more until the next deal; returns the rounds of the run that this maker has begun."""
        with self._changed:
            self._is_held = True
            return self.share.rounds_begun(self._num_issued)

    def deal(self, share: WorkShare) -> None:
        """Take another share, which must hold everything that is issued."""
        with self._changed:
            self.share = share
            self._is_held = False
            self._changed.notify_all()

    def wait_for_deal(self, deadline_seconds: float) -> bool:
        """Wait while a deal is being made; False after the deadline."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._is_held, timeout=deadline_seconds)
