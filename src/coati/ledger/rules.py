"""What is leased, the limits under which it is, and how quickly makers work."""

import dataclasses
from typing import Any, NamedTuple

from coati.errors import ConfigError

# A lease is taken back from a maker that another one outpaces by this factor.
_MUCH_QUICKER = 2.0
# How much what a maker has done before counts in its speed, each time it gets leases: one batch with a long response
# says little, however many groups it has.
_MEMORY = 0.98

Event = dict[str, Any]  # a change of a ledger, as its journal holds it


class Lease(NamedTuple):
    """The right to make one group (`LedgerRules.group_size` samples of a prompt), as a maker gets it."""

    number: int  # of the run; it decides the prompt and the ids of the samples, for any maker
    epoch: int
    """Which grant of the number this is: what was made for an earlier one is refused.

    It rises when the lease is returned and when it is granted, and begins at a random number after a restart.
    """


class Ending(NamedTuple):
    """A lease for which nothing will be delivered, and why."""

    lease: Lease
    reason: str
    fate: str = "drop"  # or "quarantine"


class LeaseRequest(NamedTuple):
    """What a maker asks for. A request that is repeated has the same number, and gets the same answer."""

    maker: str
    number: int
    version: int  # the weights that the maker serves
    wanted: int  # samples that it can take
    endings: tuple[Ending, ...] = ()  # leases that came to nothing since the last request
    incarnation: int = 0  # of the maker: one that is started again has a greater one
    trainer_incarnation: int = 0  # the incarnation of the trainers whose weights the maker serves


@dataclasses.dataclass(frozen=True, kw_only=True)
class LedgerRules:
    """What one trainer consumes, and how far makers may go ahead of it.

    Trainer `stream` of `num_streams` has every `num_streams`-th lease of the run.
    """

    samples_per_version: int
    total_samples: int
    lead: int = 1
    max_staleness: int | None = None  # η; None for no bound
    group_size: int = 1  # samples of a lease: those that are compared with each other, or 1
    stream: int = 0
    num_streams: int = 1

    def __post_init__(self) -> None:
        for name in ("samples_per_version", "total_samples", "group_size", "num_streams"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be 1 or more, got {getattr(self, name)}.")
        if self.lead < 0 or (self.max_staleness is not None and self.max_staleness < 0):
            raise ConfigError(
                f"lead and max_staleness must be 0 or more, got {self.lead} and {self.max_staleness}. Use 0 for both "
                "for on-policy training."
            )
        if self.samples_per_version % self.group_size or self.total_samples % self.group_size:
            raise ConfigError(
                f"a version and the whole run must hold whole groups of {self.group_size} samples for each trainer, "
                f"got {self.samples_per_version} and {self.total_samples} samples. Make train.batch_size × "
                "train.update_steps and train.batch_size × train.total_steps multiples of rollout.samples_per_prompt."
            )

    @property
    def is_on_policy(self) -> bool:
        """Whether every sample is trained on at the version that wrote it."""
        return self.max_staleness == 0

    @property
    def limit(self) -> int:
        """Samples that may be granted and not trained on. More than the bound allows would only wait."""
        lead = self.lead if self.max_staleness is None else min(self.lead, self.max_staleness)
        return (lead + 1) * self.samples_per_version


@dataclasses.dataclass(slots=True)
class Pace:
    """How quickly a maker ends its leases; earlier ones count less and less."""

    since: float = 0.0  # when `held` last changed
    held: int = 0  # samples that it is making, with those of leases that were taken back
    room: int = 0  # samples that it asked for, if it got none: it has nothing else to do
    samples: float = 0.0  # delivered
    seconds: float = 0.0  # for which it has had samples, added up over these

    def hold(self, samples: int, now: float) -> None:
        """It has got so many samples to make."""
        self.seconds = self._seconds(now)
        self.held, self.since = self.held + samples, now

    def end(self, samples: int, now: float, *, is_made: bool = True) -> None:
        """It has made so many, or will not."""
        self.hold(-samples, now)
        self.samples += samples * is_made

    def note_request(self) -> None:
        """It has got leases."""
        self.samples, self.seconds = self.samples * _MEMORY, self.seconds * _MEMORY

    def speed(self, now: float, *, at_best: bool = False) -> float:
        """One over the seconds that it has a sample on average; `at_best`: as if it delivered all that it has now."""
        return (self.samples + self.held * at_best) / max(1e-9, self._seconds(now))

    def _seconds(self, now: float) -> float:
        return self.seconds + self.held * (now - self.since)


class Paces(dict[str, Pace]):
    """The paces of all makers of a trainer, by name. What follows from them only moves work between makers."""

    def quicker_than(self, maker: str, now: float) -> list[str]:
        """Makers that are much quicker than this one, the quickest first; none if it is unknown."""
        if maker not in self:
            return []
        limit = self._slow_speed(maker, now)
        speeds = {other: pace.speed(now) for other, pace in self.items()}
        return sorted((other for other in speeds if speeds[other] > limit), key=lambda other: -speeds[other])

    def num_rivals(self, maker: str, now: float) -> int:
        """How many other makers there are, without those that this one is much quicker than."""
        speed = self[maker].speed(now)
        return sum(other != maker and speed <= self._slow_speed(other, now) for other in self)

    def _slow_speed(self, maker: str, now: float) -> float:
        """The speed above which others are much quicker than this one."""
        return _MUCH_QUICKER * self[maker].speed(now, at_best=True)
