"""Leases against the rule before them (dealt shares): samples per second and ages, with long-tailed response times.

    python benchmarks/leases.py                        # in simulated time, mean of 10 seeds
    python benchmarks/leases.py --actors --seeds 3     # Ray actors in real time; give it an idle machine

4 makers with 16 slots each, 64 samples for each version, 40 versions, 1 second of training for each. A maker of speed 1
takes exp(N(0, 1)) seconds for a sample: half take less than a second, one of a thousand 22 or more. A number takes the
same time in every run with the same seed and each time it is made, because a sample's draws are keyed.

Dealt: number n belongs to maker n mod 4, which may begin it when n < (η + version + 1) × 64; trained on in the order of
numbers. Leases: `coati.ledger.leases.Ledger`. With --actors, the ledger is in an actor that also trains (waits), and
makers are actors with an engine that waits; --second shortens all seconds.
"""

import argparse
import asyncio
import contextlib
import heapq
import json
import random
import statistics
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from checked import one_or_more

from coati.ledger.leases import Ledger
from coati.ledger.rules import Lease, LedgerRules

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

NUM_MAKERS, SLOTS, SAMPLES, VERSIONS, TRAIN_SECONDS, SIGMA = 4, 16, 64, 40, 1.0, 1.0
SPEEDS = {"even": [1, 1, 1, 1], "uneven": [1, 1 / 2, 1 / 4, 1 / 8], "one 50 x slow": [1, 1, 1, 1 / 50]}


class Case(NamedTuple):
    makers: str
    rule: str
    lead: int
    max_staleness: int


class Outcome(NamedTuple):
    samples_per_second: float
    mean_age: float
    oldest: int


TOO_SLOW = Case("one 50 x slow", "dealt", 4, 4)  # for real time
CASES = [
    Case("even", "dealt", 1, 1),
    Case("even", "dealt", 4, 4),
    Case("even", "leases", 1, 8),
    Case("uneven", "dealt", 4, 4),
    Case("uneven", "leases", 1, 4),
    TOO_SLOW,
    Case("one 50 x slow", "leases", 1, 4),
]


class DealtShares:
    """The rule before leases, with the methods of a ledger that makers and trainers use."""

    def __init__(self, rules: LedgerRules) -> None:
        self.rules, self.num_picked = rules, 0
        self._next: dict[str, int] = {}
        self._delivered: set[int] = set()
        self._works: dict[int, object] = {}

    def lease(self, maker: str, *, version: int, wanted: int, **_: object) -> list[Lease]:
        rules = self.rules
        first = self._next.setdefault(maker, int(maker.split("-")[1]))
        end = min((rules.max_staleness + version + 1) * rules.samples_per_version, rules.total_samples)
        numbers = list(range(first, end, NUM_MAKERS))[:wanted]
        self._next[maker] = first + NUM_MAKERS * len(numbers)
        return [Lease(number, 0) for number in numbers]

    def deliver(self, leases: Iterable[Lease], **_: object) -> list[int]:
        numbers = [lease.number for lease in leases]
        self._delivered.update(numbers)
        return numbers

    def pick(self) -> int | None:
        if self.num_picked not in self._delivered:
            return None
        self.num_picked += 1
        return self.num_picked - 1

    def take_back(self, **_: object) -> list[int]:
        return []

    def train(self, *_: object) -> None:
        pass

    note_version_time = train


def make_ledger(case: Case) -> Ledger | DealtShares:
    rules = LedgerRules(
        samples_per_version=SAMPLES,
        total_samples=SAMPLES * VERSIONS,
        lead=case.lead,
        max_staleness=case.max_staleness,
    )
    return Ledger(rules) if case.rule == "leases" else DealtShares(rules)


def seconds_of(seed: int, number: int) -> float:
    """What a maker of speed 1 takes for a sample."""
    return random.Random(f"{seed}-{number}").lognormvariate(0, SIGMA)


def simulate(case: Case, seed: int) -> Outcome:
    from lease_world import World

    world = World(
        seed=seed,
        speeds=SPEEDS[case.makers],
        slots=[SLOTS] * NUM_MAKERS,
        versions=VERSIONS,
        train_time=TRAIN_SECONDS,
        tail=SIGMA,
        groups_per_version=SAMPLES,
        lead=case.lead,
        max_staleness=case.max_staleness,
    )
    world.ledgers = [make_ledger(case)]
    assert world.run(), f"{case} stands still with seed {seed}"
    return Outcome(SAMPLES * VERSIONS / world.now, statistics.mean(world.ages), max(world.ages))


class Trainer:
    """Holds the ledger, and trains by waiting. An asyncio actor: one thing happens at a time."""

    def __init__(self, case: Case, second: float) -> None:
        self._ledger = make_ledger(case)
        self._second = second
        self._version = self._asks = 0
        self._written: dict[int, int] = {}
        self._changed = asyncio.Event()

    async def lease(self, maker: str, wanted: int) -> list[Lease] | None:
        """Wait until there are leases for a maker, which has the newest weights by then; None at the end."""
        while self._version < VERSIONS:
            self._asks += 1
            version, now = self._version, time.monotonic()
            if leases := self._ledger.lease(maker, ask=self._asks, version=version, wanted=wanted, now=now):
                self._written.update((lease.number, version) for lease in leases)
                return leases
            await self._changed.wait()
        return None

    async def deliver(self, made: list[Lease]) -> None:
        self._ledger.deliver(made, now=time.monotonic())
        self._tell()

    async def fit(self) -> Outcome:
        began, ages = time.monotonic(), []
        for version in range(VERSIONS):
            for _ in range(SAMPLES):
                ages.append(version - self._written[await self._next()])
            await asyncio.sleep(TRAIN_SECONDS * self._second)
            self._version = version + 1
            self._ledger.train(self._version)
            self._ledger.note_version_time(time.monotonic())
            self._tell()
        seconds = (time.monotonic() - began) / self._second
        return Outcome(len(ages) / seconds, statistics.mean(ages), max(ages))

    async def _next(self) -> int:
        while (number := self._ledger.pick()) is None:
            if self._ledger.take_back(now=time.monotonic()):
                self._tell()
            with contextlib.suppress(TimeoutError):  # makers are slow or not by the time that passes, too
                await asyncio.wait_for(self._changed.wait(), self._second / 10)
        return number

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class Maker:
    """Asks for leases, waits as long as each takes, and delivers it."""

    def __init__(self, trainer: Any, name: str, speed: float, seed: int, second: float) -> None:
        self._trainer, self._name, self._seed, self._second = trainer, name, seed, second / speed

    def work(self) -> None:
        import ray

        running: list[tuple[float, Lease]] = []  # a heap of when they are finished
        pending = None
        while True:
            made, now = [], time.monotonic()
            while running and running[0][0] <= now:
                made.append(heapq.heappop(running)[1])
            if made:
                self._trainer.deliver.remote(made)
            if pending is None and len(running) < SLOTS:
                pending = self._trainer.lease.remote(self._name, SLOTS - len(running))
            until_next = max(0.0, running[0][0] - now) if running else 60.0
            if pending is None:
                time.sleep(until_next)
            elif ray.wait([pending], timeout=until_next)[0]:
                leases, pending, now = ray.get(pending), None, time.monotonic()
                if leases is None:
                    return
                for lease in leases:
                    heapq.heappush(running, (now + seconds_of(self._seed, lease.number) * self._second, lease))


def run_actors(case: Case, seed: int, second: float) -> Outcome:
    import ray

    trainer = ray.remote(num_cpus=0, max_concurrency=100)(Trainer).remote(case, second)
    makers = [
        ray.remote(num_cpus=0)(Maker).remote(trainer, f"maker-{index}", speed, seed, second)
        for index, speed in enumerate(SPEEDS[case.makers])
    ]
    outcome = trainer.fit.remote()
    calls = [outcome, *(maker.work.remote() for maker in makers)]
    while outcome in calls:
        ready, calls = ray.wait(calls, timeout=3600)
        assert ready, f"{case} stands still with seed {seed}"
        ray.get(ready)  # raises what a maker raised
    for actor in (trainer, *makers):
        ray.kill(actor)
    return ray.get(outcome)


def check(outcomes: dict[Case, Outcome]) -> list[tuple[str, bool]]:
    """What must hold, and whether it does."""
    slow, old, new = (outcomes[case] for case in CASES[:3])
    uneven_old, uneven_new = (outcomes[case] for case in CASES[3:5])
    gain, uneven_gain = (
        after.samples_per_second / before.samples_per_second
        for before, after in ((slow, new), (uneven_old, uneven_new))
    )
    return [
        (f"even makers: {gain:.1f} x dealt at η = 1, at least 2.5", gain >= 2.5),
        ("even makers: more than dealt at η = 4", new.samples_per_second > old.samples_per_second),
        ("even makers: less than half of its mean age", new.mean_age < old.mean_age / 2),
        (f"uneven makers: {uneven_gain:.1f} x dealt at η = 4, at least 3", uneven_gain >= 3),
        ("uneven makers: less than half of its mean age", uneven_new.mean_age < uneven_old.mean_age / 2),
        ("the bound holds", all(outcome.oldest <= case.max_staleness for case, outcome in outcomes.items())),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=one_or_more, default=10)
    parser.add_argument("--actors", action="store_true", help="Ray actors in real time")
    parser.add_argument("--second", type=float, default=0.2, help="with --actors: how long a second takes")
    parser.add_argument("--json", type=Path, help="also write the results here")
    options = parser.parse_args()
    if options.actors:
        import ray

        ray.init(num_cpus=NUM_MAKERS + 1, include_dashboard=False, log_to_driver=False)
    print(f"{'makers':<15}{'rule':<8}{'lead':>5}{'η':>4}{'samples/s':>11}{'mean age':>10}{'oldest':>8}")
    outcomes = {}
    for case in CASES:
        if options.actors and case == TOO_SLOW:
            continue
        runs = [
            run_actors(case, seed, options.second) if options.actors else simulate(case, seed)
            for seed in range(options.seeds)
        ]
        rate, age = (statistics.mean(run[index] for run in runs) for index in (0, 1))
        outcomes[case] = Outcome(rate, age, max(run.oldest for run in runs))
        lead = str(case.lead) if case.rule == "leases" else ""
        print(
            f"{case.makers:<15}{case.rule:<8}{lead:>5}{case.max_staleness:>4}{rate:>11.1f}{age:>10.2f}"
            f"{outcomes[case].oldest:>8}",
            flush=True,
        )
    for claim, holds in check(outcomes):
        print(f"{'yes' if holds else 'NO':<4}{claim}")
    if options.json:
        rows = [{**case._asdict(), **outcome._asdict()} for case, outcome in outcomes.items()]
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
