"""Leases, the limits on granting them, and the speed of makers. The ledger knows makers by name only."""

import dataclasses
from typing import Any, NamedTuple

from coati.errors import ConfigError

_MUCH_FASTER = 2.0  # A lease is taken back from a maker if another maker is faster by this factor
# Decay of a maker's speed statistics each time it gets leases. It decays per request, not per group, because one batch
# with a long response says little however many groups it has.
_MEMORY = 0.98

Event = dict[str, Any]  # a change of a ledger, in the journal's format


class Lease(NamedTuple):
    """The right and duty to make one group: `LedgerRules.group_size` samples of a prompt."""

    number: int  # unique in the run; determines the prompt and the sample ids, for any maker
    epoch: int
    """Fencing epoch: deliveries for an earlier grant of the same number are refused.

    It increases when the lease is returned and when it is granted, and starts at a random number after a restart.
    """


class Ending(NamedTuple):
    """A lease for which nothing will be delivered, and the reason."""

    lease: Lease
    reason: str
    fate: str = "drop"  # or "quarantine"


class LeaseRequest(NamedTuple):
    """A maker's request for leases. A retry has the same number and gets the same answer."""

    maker_name: str
    number: int
    version: int  # version of the weights that the maker serves
    wanted: int  # number of samples that the maker can start; 0 if it is busy with other work
    endings: tuple[Ending, ...] = ()  # leases dropped or quarantined since the last request
    incarnation: int = 0  # of the maker; increases each time it is restarted
    trainer_incarnation: int = 0  # of the trainers whose weights the maker serves


@dataclasses.dataclass(frozen=True, kw_only=True)
class LedgerRules:
    """What one trainer consumes, and how far makers may run ahead of it.

    Trainer number `stream` of `num_streams` owns every `num_streams`-th lease number. The journal has these names.
    """

    samples_per_version: int
    total_samples: int
    lead: int = 1
    max_staleness: int | None = None  # η; None for no bound
    group_size: int = 1  # samples per lease: those of a prompt if the algorithm compares them, else 1
    stream: int = 0
    num_streams: int = 1

    def __post_init__(self) -> None:
        for name in ("samples_per_version", "total_samples", "group_size", "num_streams"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be 1 or more, got {getattr(self, name)}.")
        if min(self.lead, self.max_staleness or 0) < 0:
            raise ConfigError(
                f"lead and max_staleness must be 0 or more, got {self.lead} and {self.max_staleness}. Set both to 0 "
                "for on-policy training, or max_staleness to None for no bound."
            )
        if self.samples_per_version % self.group_size or self.total_samples % self.group_size:
            raise ConfigError(
                f"each version and the whole run must consist of whole groups of {self.group_size} samples for each "
                f"trainer, got {self.samples_per_version} and {self.total_samples} samples. Make train.batch_size × "
                "train.update_steps and train.batch_size × train.total_steps multiples of rollout.samples_per_prompt."
            )

    @property
    def limit(self) -> int:
        """Maximum number of samples granted and not yet trained on. A lead above the staleness bound has no effect."""
        lead = self.lead if self.max_staleness is None else min(self.lead, self.max_staleness)
        return (lead + 1) * self.samples_per_version


@dataclasses.dataclass(slots=True)
class Pace:
    """Speed of a maker: the inverse of the time for which it holds a sample. Old measurements decay."""

    since: float = 0.0  # when `held` last changed
    held: int = 0  # samples in work, including those of leases taken back
    room: int = 0  # samples of its last request if none were granted, so the maker is idle; else 0
    samples: float = 0.0  # samples delivered, decayed
    seconds: float = 0.0  # sum over all samples of the time held, decayed

    def hold(self, samples: int, now: float) -> None:
        """Record that the maker was granted `samples` samples."""
        self.seconds = self._seconds(now)
        self.held, self.since = self.held + samples, now

    def end(self, samples: int, now: float, *, is_made: bool = True) -> None:
        """Record that the maker delivered `samples` samples, or dropped them (`is_made=False`)."""
        self.hold(-samples, now)
        self.samples += samples * is_made

    def note_request(self) -> None:
        """Decay the statistics, once for each request that was granted leases."""
        self.samples, self.seconds = self.samples * _MEMORY, self.seconds * _MEMORY

    def speed(self, now: float, *, at_best: bool = False) -> float:
        """Return samples per second of holding a sample; `at_best`: as if it delivered everything it holds now."""
        return (self.samples + self.held * at_best) / max(1e-9, self._seconds(now))

    def _seconds(self, now: float) -> float:
        return self.seconds + self.held * (now - self.since)


class Paces(dict[str, Pace]):
    """The speeds of a trainer's makers, by name. They decide who makes a group, never what it contains."""

    def faster_than(self, maker: str, now: float) -> list[str]:
        """Return the makers that are much faster than `maker`, fastest first; none if `maker` is unknown."""
        if maker not in self:
            return []
        limit = self._slow_speed(maker, now)
        speeds = {other: pace.speed(now) for other, pace in self.items()}
        return sorted((other for other in speeds if speeds[other] > limit), key=lambda other: -speeds[other])

    def num_rivals(self, maker: str, now: float) -> int:
        """Return the number of other makers, except those that `maker` is much faster than."""
        speed = self[maker].speed(now)
        return sum(other != maker and speed <= self._slow_speed(other, now) for other in self)

    def _slow_speed(self, maker: str, now: float) -> float:
        """Return the speed above which other makers are much faster than `maker`."""
        return _MUCH_FASTER * self[maker].speed(now, at_best=True)
