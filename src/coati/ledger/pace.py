"""How quickly makers work: what a slow one may hold, and what a quicker one should take over from it.

These are measurements, and everything that follows from them only moves work between makers.
"""

import dataclasses

# A lease is taken back from a maker that another one outpaces by this factor.
_MUCH_QUICKER = 2.0
# How much what a maker has done before counts in its speed, each time it gets leases: one batch with a long response
# says little, however many groups it has.
_MEMORY = 0.98


@dataclasses.dataclass(slots=True)
class Pace:
    """How quickly a maker ends its leases; earlier ones count less and less."""

    since: float = 0.0  # when `held` last changed
    held: int = 0  # samples of its open leases
    room: int = 0  # samples that it asked for, if it got none: it has nothing else to do
    samples: float = 0.0  # delivered
    seconds: float = 0.0  # for which it has held samples, added up over these

    def hold(self, samples: int, now: float) -> None:
        """It holds so many more samples, or fewer."""
        self.seconds = self._seconds(now)
        self.held, self.since = self.held + samples, now

    def note_delivery(self, groups: int, size: int, now: float) -> None:
        """It has delivered groups of `size` samples."""
        self.hold(-groups * size, now)
        self.samples += groups * size

    def note_request(self) -> None:
        """It has got leases."""
        self.samples, self.seconds = self.samples * _MEMORY, self.seconds * _MEMORY

    def speed(self, now: float, *, more: int = 0) -> float:
        """One over the seconds that it holds a sample on average; as if it had delivered so many `more`."""
        return (self.samples + more) / max(1e-9, self._seconds(now))

    def _seconds(self, now: float) -> float:
        return self.seconds + self.held * (now - self.since)


class Paces(dict[str, Pace]):
    """The paces of all makers of a trainer, by name, and how long its versions take."""

    def __init__(self, group_size: int) -> None:
        super().__init__()
        self._group_size = group_size
        self._version_began: float | None = None
        self._seconds_per_version = 0.0

    def asking(self, maker: str, now: float) -> Pace:
        """The pace of a maker that asks for leases."""
        if self._version_began is None:
            self._version_began = now
        return self.setdefault(maker, Pace(since=now))

    def note_version(self, now: float) -> None:
        """A version has ended."""
        if self._version_began is not None:
            self._seconds_per_version = now - self._version_began
        self._version_began = now

    def can_finish(self, maker: str, versions: int, now: float) -> bool:
        """Whether a maker usually finishes a group in so many versions, or no other is much quicker.

        A slow one gets one at a time, to be measured again.
        """
        pace = self[maker]
        if pace.held == 0 or not self._seconds_per_version:
            return True
        speed = pace.speed(now, more=self._group_size)
        return speed * self._seconds_per_version * versions >= 1.0 or not self.quicker_than(maker, now)

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
        return _MUCH_QUICKER * self[maker].speed(now, more=self._group_size)
