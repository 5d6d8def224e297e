"""Simulated makers and trainers around real ledgers, for tests of the properties of leases."""

import dataclasses
import heapq
import itertools
import random
from collections import Counter
from typing import Any

from coati.ledger.leases import Ledger
from coati.ledger.rules import Lease, LeaseRequest, LedgerRules


@dataclasses.dataclass(eq=False)
class Maker:
    """A maker that works on `slots` leases at a time."""

    name: str
    speed: float
    slots: int
    version: int = 0
    is_stalled: bool = False
    busy: set[tuple[int, Lease]] = dataclasses.field(default_factory=set)
    asks: int = 0


class World:
    """Makers that request leases from all ledgers, and trainers that publish once each has trained on a version."""

    def __init__(
        self,
        *,
        seed: int,
        speeds: list[float],
        slots: list[int],
        versions: int,
        train_time: float = 1.0,
        commit_delay: float = 0.05,
        tail: float = 1.0,
        drop_rate: float = 0.0,
        num_streams: int = 1,
        group_size: int = 1,
        groups_per_version: int = 8,
        lead: int = 1,
        max_staleness: int | None = 1,
        in_batches: bool = False,
    ) -> None:
        """With `in_batches`, a maker requests leases only when all of its leases have ended."""
        self.seed, self.rng = seed, random.Random(seed)
        self.rules = [
            LedgerRules(
                samples_per_version=groups_per_version * group_size,
                total_samples=groups_per_version * group_size * versions,
                lead=lead,
                max_staleness=max_staleness,
                group_size=group_size,
                stream=stream,
                num_streams=num_streams,
            )
            for stream in range(num_streams)
        ]
        self.ledgers = [Ledger(rules) for rules in self.rules]
        self.versions, self.train_time, self.commit_delay = versions, train_time, commit_delay
        self.tail, self.drop_rate, self.in_batches = tail, drop_rate, in_batches
        self.makers = {
            f"maker-{i}": Maker(f"maker-{i}", *both) for i, both in enumerate(zip(speeds, slots, strict=True))
        }
        self.now, self.version = 0.0, 0
        self.is_training = False
        self.picked: list[list[int]] = [[] for _ in self.ledgers]
        self.ages: list[int] = []
        self.written: dict[int, int] = {}  # number -> version at which it was started
        self.fates: Counter[int] = Counter()
        self.most_in_flight = 0
        self._events: list[tuple[float, int, str, Any]] = []
        self._tick = itertools.count()

    def at(self, time: float, kind: str, *what: Any) -> None:
        """Schedule a call of `on_<kind>(*what)`."""
        heapq.heappush(self._events, (time, next(self._tick), kind, what))

    def length(self, number: int) -> float:
        """Return the time that a maker of speed 1 takes for a group, which depends only on its number."""
        return random.Random(f"{self.seed}-{number}").lognormvariate(0, self.tail) if self.tail else 1.0

    def run(self) -> bool:
        """Run until all versions are trained. Return False if the simulation gets stuck."""
        self.at(0.0, "look")
        while self._events and self.version < self.versions:
            self.now, _, kind, what = heapq.heappop(self._events)
            getattr(self, f"on_{kind}")(*what)
            self._ask_all()
            self._pick_all()
            self._ask_all()
        return self.version >= self.versions

    def _ask_all(self) -> None:
        for maker in list(self.makers.values()):
            for stream, ledger in enumerate(self.ledgers):
                free = maker.slots - len(maker.busy)
                if maker.is_stalled or free <= 0 or (self.in_batches and maker.busy):
                    continue
                maker.asks += 1
                wanted = free * self.rules[stream].group_size
                leases = ledger.lease(LeaseRequest(maker.name, maker.asks, maker.version, wanted), now=self.now)
                lengths = [self.length(lease.number) / maker.speed for lease in leases]
                for lease, length in zip(leases, lengths, strict=True):
                    maker.busy.add((stream, lease))
                    ends = self.now + (max(lengths) if self.in_batches else length)
                    self.at(ends, "done", maker, stream, lease, maker.version)
                in_flight = (
                    sum(record.state != "trained" for record in ledger._records.values()) * ledger.rules.group_size
                )
                self.most_in_flight = max(self.most_in_flight, in_flight)

    def _pick_all(self) -> None:
        if self.is_training or self.version >= self.versions:
            return
        for stream, ledger in enumerate(self.ledgers):
            want = self.rules[stream].samples_per_version // self.rules[stream].group_size
            while len(self.picked[stream]) < want:
                number = ledger.pick()
                if number is None:
                    ledger.take_back(now=self.now)
                    break
                self.ages.append(self.version - self.written[number])
                self.picked[stream].append(number)
        if all(
            len(picked) * rules.group_size == rules.samples_per_version
            for picked, rules in zip(self.picked, self.rules, strict=True)
        ):
            self.is_training = True
            self.at(self.now + self.train_time, "trained")

    def on_look(self) -> None:
        """Let makers request leases."""

    def on_done(self, maker: Maker, stream: int, lease: Lease, version: int) -> None:
        if maker.is_stalled:
            self.at(self.now + 1.0, "done", maker, stream, lease, version)
            return
        maker.busy.discard((stream, lease))
        ledger = self.ledgers[stream]
        if self.rng.random() < self.drop_rate:
            self.fates[lease.number] += ledger.drop(lease, "bad luck", now=self.now)
        elif ledger.deliver([lease], now=self.now):
            self.written[lease.number] = version

    def on_trained(self) -> None:
        self.version += 1
        self.is_training = False
        for stream, ledger in enumerate(self.ledgers):
            ledger.mark_trained(self.version)
            self.fates.update(self.picked[stream])
            self.picked[stream] = []
        for maker in self.makers.values():
            self.at(self.now + self.commit_delay, "commit", maker, self.version)

    def on_commit(self, maker: Maker, version: int) -> None:
        maker.version = max(maker.version, version)

    def on_die(self, name: str) -> None:
        self.makers.pop(name, None)
        for ledger in self.ledgers:
            ledger.release(name, "died")

    def on_join(self, name: str, speed: float, slots: int) -> None:
        self.makers[name] = Maker(name, speed, slots, version=self.version)

    def on_stall(self, name: str, seconds: float) -> None:
        if (maker := self.makers.get(name)) is not None:
            maker.is_stalled = True
            for ledger in self.ledgers:  # as when its leases expire
                ledger.release(name, "stalled")
            self.at(self.now + seconds, "wake", maker)

    def on_wake(self, maker: Maker) -> None:
        maker.is_stalled = False
        maker.busy.clear()
