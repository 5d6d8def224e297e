"""Staleness by admission: a prompt is issued only while the text written for it can still be fresh enough.

With `max_staleness` η, version v of the weights may see samples issued up to number `(η + v + 1) × samples
per version`. So no finished sample is thrown away for its age, and η = 0 is on-policy training. A run of M
makers and T trainers splits the work in rounds: one round is one sample for each trainer, so every trainer
gets its share exactly, whatever M and T are. Samples that are compared with each other (groups) are never parted:
rounds are then dealt in hands that hold whole groups.
"""

import dataclasses
import math

from coati.errors import ConfigError, DataError

UNBOUNDED = -1


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

    maker_index: int = 0
    num_makers: int = 1
    num_trainers: int = 1

    group_size: int = 1
    """Samples of one prompt that must be made together by one maker; 1 where each stands for itself."""

    def __post_init__(self) -> None:
        if self.max_staleness < UNBOUNDED:
            raise ConfigError(
                f"max_staleness must be 0 or more (or -1 for no bound), got {self.max_staleness}. "
                "Use 0 for on-policy training."
            )
        if not 0 <= self.maker_index < self.num_makers or self.num_trainers < 1:
            raise ConfigError(
                "maker_index must be in 0…num_makers - 1 and num_trainers 1 or more, got maker "
                f"{self.maker_index} of {self.num_makers} and {self.num_trainers} trainers."
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
        """The round of this maker's `number`-th item to any one trainer: it gets every `num_makers`-th hand."""
        hand, place = divmod(number, self._rounds_per_hand)
        return (self.maker_index + hand * self.num_makers) * self._rounds_per_hand + place

    @property
    def _rounds_per_hand(self) -> int:
        """Fewest rounds that hold whole groups: what is dealt to one maker at a time."""
        return self.group_size // math.gcd(self.group_size, self.num_trainers)

    def _share_of(self, rounds: int) -> int:
        """This maker's part of the first `rounds` rounds: every `num_makers`-th hand, beginning at its index.

        Dealt out like cards, so that a share never shrinks when rounds are added. `rounds` are whole hands.
        """
        num_hands = len(range(self.maker_index, rounds // self._rounds_per_hand, self.num_makers))
        return num_hands * self._rounds_per_hand * self.num_trainers


class AdmissionGate:
    """Counts what a maker has issued against its share.

    Dropped samples are given back, so that others take their place.
    """

    def __init__(self, share: WorkShare) -> None:
        self.share = share
        self._upper_bound = share.max_staleness
        self._num_issued = 0

    @property
    def num_issued(self) -> int:
        """Samples issued and not given back."""
        return self._num_issued

    @property
    def is_done(self) -> bool:
        """Whether this maker has issued all its samples."""
        return self._num_issued >= self.share.total

    def admissible(self, wanted: int, *, version: int) -> int:
        """How many of `wanted` samples may be issued now, 0 if the maker has to wait for new weights."""
        if wanted % self.share.group_size:
            raise DataError(
                f"a batch of prompts must hold whole groups of {self.share.group_size} samples, got {wanted} samples. "
                "Repeat each prompt group_size times, side by side."
            )
        return max(0, min(wanted, self.share.limit(version) - self._num_issued))

    def limit_staleness(self, max_staleness: int) -> None:
        """Another η from now on, at most the one that the share began with; an unbounded share stays so.

        What is issued stays issued: under a lower η the maker waits until the versions have caught up.
        """
        bound = min(max_staleness, self._upper_bound)
        if bound not in (self.share.max_staleness, UNBOUNDED):
            self.share = dataclasses.replace(self.share, max_staleness=bound)

    def issue(self, num_samples: int) -> None:
        """Samples are on their way."""
        self._num_issued += num_samples

    def give_back(self, num_samples: int) -> None:
        """Samples were dropped before they reached a trainer."""
        self._num_issued -= num_samples

    def version_needed(self) -> int | None:
        """The version to wait for before the next sample; None if all are issued."""
        return self.share.version_needed(self._num_issued)
