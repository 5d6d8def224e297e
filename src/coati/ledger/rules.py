"""What is leased, and the limits under which it is."""

import dataclasses
from typing import Any, NamedTuple

from coati.errors import ConfigError

Event = dict[str, Any]
"""A change of a ledger, as its journal holds it."""


class Lease(NamedTuple):
    """The right to make one prompt group, as a maker gets it."""

    number: int
    """Of the run; it decides the prompt and the ids of the samples, for any maker."""
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
    version: int
    """The weights that the maker serves."""
    wanted: int
    """Samples that it can take."""
    endings: tuple[Ending, ...] = ()
    """Leases that came to nothing since the last request."""
    incarnation: int = 0
    """Of the maker: one that is started again has a greater one."""
    trainer_incarnation: int = 0
    """The incarnation of the trainers whose weights the maker serves."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LedgerRules:
    """What one trainer consumes, and how far makers may go ahead of it.

    Trainer `stream` of `num_streams` has every `num_streams`-th lease of the run.
    """

    samples_per_version: int
    total_samples: int
    lead: int = 1
    max_staleness: int | None = None
    """η; None for no bound."""
    group_size: int = 1
    """Samples of a lease: those that are compared with each other, or 1."""
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
        return (self.usual_age + 1) * self.samples_per_version

    @property
    def usual_age(self) -> int:
        """The age of samples when all makers are equally quick."""
        return self.lead if self.max_staleness is None else min(self.lead, self.max_staleness)
