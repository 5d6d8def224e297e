"""Compare leases with dealt shares, the rule before them: samples per second and ages, with long-tailed response times.

    python benchmarks/leases.py --parallel 30     # Ray actors in real time; for a machine with 16 cores
    python benchmarks/leases.py --simulated       # the ledger alone, in simulated time

There are 4 makers with 16 slots each, 64 samples per version, and 1 second of training per version. A maker of speed 1
takes exp(N(0, 1)) seconds per sample: half of the samples take less than a second, one in a thousand 22 or more. A
sample number always takes the same time for a given seed.

Dealt shares: number n belongs to maker n mod 4, which may start it when n < (η + version + 1) × 64; samples are trained
on in the order of their numbers. Leases: `coati.ledger.leases.Ledger`.

Only the engine and the learner are stand-ins, which sleep. The rest is the code of real runs: trainers are `PPOTrainer`
actors with their buffer, ledger and `fit`, and send the weights of a tiny model after each version; makers request
leases with `LeasedPrompts`, run a `WorkLoop`, deliver with `ItemSender` and receive weights with `WeightReceiver`. In a
real run a holder has one work loop over an engine that refills its slots. Here makers have one loop per slot; with
--unit batches they finish batches of 16, each when its longest response ends.
"""

import argparse
import concurrent.futures
import functools
import json
import os
import random
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ray
import torch
from checked import one_or_more

from coati.actors.options import TrainerOptions
from coati.config import Deadlines, TopologySettings, TrainSettings
from coati.devices import set_up_cpu
from coati.experience import BufferItem, Experience, Sample
from coati.experience_maker import ExperienceMaker
from coati.experience_maker.base import MakerBatch
from coati.experience_maker.delivery import ItemSender
from coati.experience_maker.pipeline import ExperiencePipeline
from coati.experience_maker.work_loop import WorkLoop
from coati.experience_maker.work_source import LeasedPrompts, WorkSource
from coati.ledger.leases import Ledger
from coati.ledger.rules import Lease, LeaseRequest, LedgerRules
from coati.ray.callbacks import TrainerCallback
from coati.ray.detached_trainer_ppo import PPOTrainer
from coati.ray.environment import remote
from coati.ray.peers import RayPeers
from coati.trainer.ppo import PPOLearner
from coati.trainer.strategies import DDPStrategy
from coati.weights.receiver import WeightReceiver
from coati.weights.served import ServedModels

TESTS = str(Path(__file__).resolve().parents[1] / "tests")
sys.path.append(TESTS)

from lease_world import World  # noqa: E402
from tiny import actor_and_critic, maker_models  # noqa: E402

NUM_MAKERS, SLOTS, SAMPLES, TRAIN_SECONDS, SIGMA = 4, 16, 64, 1.0, 1.0
SPEEDS = {"even": [1, 1, 1, 1], "uneven": [1, 1 / 2, 1 / 4, 1 / 8], "one 50 x slow": [1, 1, 1, 1 / 50]}
PATIENCE = 900.0  # seconds per run


class Case(NamedTuple):
    makers: str
    rule: str
    lead: int
    max_staleness: int
    unit: str = "samples"
    """What a maker finishes at once: "samples" or "batches"."""


class Outcome(NamedTuple):
    samples_per_second: float
    mean_age: float
    oldest: int


CASES = [
    Case("even", "dealt", 1, 1),
    Case("even", "dealt", 4, 4),
    Case("even", "leases", 1, 8),
    Case("uneven", "dealt", 4, 4),
    Case("uneven", "leases", 1, 4),
    Case("one 50 x slow", "leases", 1, 4),
]
GOALS = [(CASES[2], CASES[0], 2.5), (CASES[2], CASES[1], 1.0), (CASES[4], CASES[3], 3.0)]  # minimum ratio of samples/s


class DealtShares:
    """Dealt shares, with the ledger methods that a `LeasedBuffer` uses."""

    def __init__(self, rules: LedgerRules) -> None:
        self.rules, self.num_picked, self.version = rules, 0, 0
        self.events: list[Any] = []
        self._next: dict[str, int] = {}
        self._delivered: set[int] = set()
        self._records: dict[int, object] = {}

    def lease(self, request: LeaseRequest, **_: object) -> list[Lease]:
        rules, maker, version, wanted = self.rules, request.maker_name, request.version, request.wanted
        first = self._next.setdefault(maker, int(maker.rpartition("-")[2]))
        end = min((rules.max_staleness + version + 1) * rules.samples_per_version, rules.total_samples)
        numbers = list(range(first, end, NUM_MAKERS))[:wanted]
        self._next[maker] = first + NUM_MAKERS * len(numbers)
        return [Lease(number, 0) for number in numbers]

    def deliver(self, leases: Iterable[Lease], **_: object) -> list[Lease]:
        made = list(leases)
        self._delivered.update(lease.number for lease in made)
        self.events.append({"deliver": [lease.number for lease in made]})
        return made

    def pick(self) -> int | None:
        if self.num_picked not in self._delivered:
            return None
        self.num_picked += 1
        return self.num_picked - 1

    def mark_trained(self, version: int, *_: object) -> None:
        self.version = version

    @property
    def picked(self) -> list[int]:
        return list(range(self.version * self.rules.samples_per_version, self.num_picked))

    @property
    def makers(self) -> list[str]:
        return list(self._next)

    def blocked_by(self) -> dict[str, int]:
        return {f"maker {self.num_picked % NUM_MAKERS}": 1}

    def take_back(self, **_: object) -> list[int]:
        return []


def make_ledger(case: Case, versions: int) -> Ledger | DealtShares:
    rules = make_rules(case, versions)
    return Ledger(rules) if case.rule == "leases" else DealtShares(rules)


def make_rules(case: Case, versions: int) -> LedgerRules:
    return LedgerRules(
        samples_per_version=SAMPLES,
        total_samples=SAMPLES * versions,
        lead=case.lead,
        max_staleness=case.max_staleness,
    )


def seconds_of(seed: int, number: int) -> float:
    """Return the time that a maker of speed 1 takes for a sample."""
    return random.Random(f"{seed}-{number}").lognormvariate(0, SIGMA)


def simulate(case: Case, seed: int, versions: int) -> Outcome:
    world = World(
        seed=seed,
        speeds=SPEEDS[case.makers],
        slots=[SLOTS] * NUM_MAKERS,
        versions=versions,
        train_time=TRAIN_SECONDS,
        tail=SIGMA,
        groups_per_version=SAMPLES,
        lead=case.lead,
        max_staleness=case.max_staleness,
        in_batches=case.unit == "batches",
    )
    world.ledgers = [make_ledger(case, versions)]
    assert world.run(), f"{case} makes no progress with seed {seed}"
    return Outcome(SAMPLES * versions / world.now, statistics.mean(world.ages), max(world.ages))


class Numbers:
    """A stand-in for a `PromptStream` that returns samples by number, shared by all waiting slots."""

    samples_per_batch = 0

    def batch(self, numbers: Sequence[int], *, group_size: int = 1) -> tuple[list[Sample], dict[int, str]]:
        assert group_size == 1
        return [Sample(number, [3, 3]) for number in numbers], {}


class WaitingMaker(ExperienceMaker):
    """A maker that sleeps for the longest response time of a batch."""

    seed: int
    second: float

    def make_experience(self, input_ids: Any, *_: Any, sample_ids: Any) -> Experience:
        time.sleep(max(seconds_of(self.seed, number) for number in sample_ids.tolist()) * self.second)
        floats, ids = torch.zeros(len(input_ids), 1), torch.cat([input_ids, input_ids[:, :1]], dim=1)
        return Experience(ids, floats, floats, floats[:, 0], floats, floats, torch.ones_like(ids), floats == 0)


class Slot:
    """One work loop of a maker, with the weights that it serves."""

    def __init__(self, maker: "Maker", seed: int, second: float) -> None:
        engine = WaitingMaker(*maker_models(0))
        engine.seed, engine.second = seed, second
        self.served = ServedModels(engine.trained_models, name=maker.name)
        self.receiver = WeightReceiver(self.served)
        sender = ItemSender(
            [maker.trainer],
            peers=RayPeers(),
            maker_name=maker.name,
            deadlines=maker.deadlines,
            should_stop=maker.stopped.is_set,
        )
        self.loop = WorkLoop(
            ExperiencePipeline(engine, self.served),
            SlotPrompts(maker),
            sender,
            deadlines=maker.deadlines,
            stop=maker.stopped,
        )


class SlotPrompts(WorkSource):
    """The prompts of one slot, out of those that its maker has leased."""

    wait_name = LeasedPrompts.wait_name

    def __init__(self, maker: "Maker") -> None:
        self._maker = maker

    def wait_for_work(self, room: int) -> list[Sample] | None:  # noqa: ARG002
        return self._maker.draw()

    def close_leases(self, batch: MakerBatch, items: list[BufferItem]) -> list[BufferItem]:
        return self._maker.prompts.close_leases(batch, items)


class Maker:
    """Concurrent slots that lease their prompts together."""

    def __init__(self, case: Case, index: int, seed: int, second: float, versions: int, run: str) -> None:
        set_up_cpu(1)
        self.name, self.trainer = f"{run}-maker-{index}", f"{run}-trainer"
        self.deadlines, self.stopped = Deadlines(), threading.Event()
        rules, second = make_rules(case, versions), second / SPEEDS[case.makers][index]
        num_slots, self._size = (1, SLOTS) if case.unit == "batches" else (SLOTS, 1)
        self._slots = [Slot(self, seed, second) for _ in range(num_slots)]
        self._numbers, self._ready, self._has_news = Numbers(), deque[Any](), threading.Event()
        self._turn, self._count = threading.Lock(), threading.Lock()
        self.prompts = LeasedPrompts(
            self._numbers,  # type: ignore[arg-type]
            [self.trainer],
            rules,
            self,  # type: ignore[arg-type]
            peers=RayPeers(),
            maker_name=self.name,
            should_stop=self.stopped.is_set,
        )

    @ray.method(concurrency_group="compute")
    def work(self) -> None:
        """Work until stopped. Raises the first error of a slot."""
        with concurrent.futures.ThreadPoolExecutor(len(self._slots)) as pool:
            try:
                for done in concurrent.futures.as_completed([pool.submit(slot.loop.run) for slot in self._slots]):
                    done.result()
            finally:
                self.stopped.set()

    @ray.method(concurrency_group="model_io")
    def update_experience_maker(self, *, message: Any) -> None:
        for slot in self._slots:
            slot.receiver.receive(message)
        self._has_news.set()

    def sharing_fault(self, probe: Any) -> str | None:
        return self._slots[0].receiver.sharing_fault(probe)

    def is_ready(self) -> bool:
        return True

    def draw(self) -> list[Sample] | None:
        """Return prompts for one slot. The slot that holds the turn requests leases for all waiting slots."""
        self._add_wanted(self._size)
        with self._turn:
            while not self._ready:
                if self.stopped.is_set():
                    return None
                batch = self.prompts.poll(self._numbers.samples_per_batch)
                if batch is None:
                    self.wait_for_version(self.version + 1, deadline_seconds=0.05)
                    continue
                self._ready += [batch[first : first + self._size] for first in range(0, len(batch), self._size)]
            mine = self._ready.popleft()
        self._add_wanted(-self._size)
        return mine

    def _add_wanted(self, samples: int) -> None:
        with self._count:
            self._numbers.samples_per_batch += samples

    # The part of `ServedModels` that `LeasedPrompts` uses.

    incarnation = 0

    @property
    def version(self) -> int:
        """Version of the last slot, which all other slots have reached."""
        return self._slots[-1].served.newest[1]

    def wait_for_version(self, at_least: int, *, deadline_seconds: float) -> bool:
        """Wait for new weights, like `ServedModels.wait_for_version`."""
        self._has_news.wait(deadline_seconds)
        self._has_news.clear()
        return self.version >= at_least


class WaitingLearner(PPOLearner):
    """A learner that sleeps for the same time on every batch."""

    seconds: float

    def step(self, _: Experience) -> dict[str, float]:
        time.sleep(self.seconds)
        return {"actor_loss": 0.0}


def make_learner(seconds: float, *args: Any, **settings: Any) -> WaitingLearner:
    learner = WaitingLearner(*args, **settings)
    learner.seconds = seconds
    return learner


class Ages(TrainerCallback):
    """Records the ages of batches."""

    def __init__(self) -> None:
        self.means: list[float] = []
        self.oldest = 0

    def on_batch_end(self, metrics: dict[str, Any], _: Experience) -> None:
        self.means.append(metrics["train/age_mean"])
        self.oldest = max(self.oldest, int(metrics["train/age_max"]))


class Trainer(PPOTrainer):
    """A trainer with leases or dealt shares."""

    def __init__(self, case: Case, second: float, versions: int, run: str) -> None:
        self._ages, self._second, self._versions = Ages(), second, versions
        super().__init__(
            [f"{run}-maker-{index}" for index in range(NUM_MAKERS)],
            lambda: DDPStrategy(seed=0, device="cpu"),
            lambda: actor_and_critic(0),
            callbacks=[self._ages],
            options=TrainerOptions(
                train=TrainSettings(batch_size=SAMPLES, total_steps=versions),
                topology=TopologySettings(max_staleness=case.max_staleness),
                rules=make_rules(case, versions),
                learner=functools.partial(make_learner, TRAIN_SECONDS * second),
                num_threads=1,
            ),
        )
        assert self._leased is not None
        self._leased._ledger = make_ledger(case, versions)  # type: ignore[assignment]

    @ray.method(concurrency_group="compute")
    def measure(self) -> Outcome:
        began = time.monotonic()
        self.fit(self._versions, 1)
        seconds = (time.monotonic() - began) / self._second
        return Outcome(SAMPLES * self._versions / seconds, statistics.mean(self._ages.means), self._ages.oldest)


def run_actors(case: Case, seed: int, versions: int, *, second: float) -> Outcome:
    run = f"{case.makers}-{case.rule}-{case.max_staleness}-{case.unit}-{seed}".replace(" ", "-")
    make_trainer = remote(Trainer, groups=("buffer_length", "buffer_append", "buffer_sample", "model_io", "compute"))
    make_maker = remote(Maker, groups=("model_io", "compute"))
    trainer = make_trainer.options(name=f"{run}-trainer", num_cpus=0).remote(case, second, versions, run)
    makers = [
        make_maker.options(name=f"{run}-maker-{index}", num_cpus=0).remote(case, index, seed, second, versions, run)
        for index in range(NUM_MAKERS)
    ]
    try:
        ray.get([trainer.progress.remote(), *(maker.is_ready.remote() for maker in makers)], timeout=PATIENCE)
        outcome = trainer.measure.remote()
        calls = [outcome, *(maker.work.remote() for maker in makers)]
        while outcome in calls:
            ready, calls = ray.wait(calls, timeout=PATIENCE)
            assert ready, f"{case} makes no progress with seed {seed}"
            ray.get(ready)  # raises the error of a maker
        return ray.get(outcome)
    finally:
        for actor in (trainer, *makers):
            ray.kill(actor)


def check(outcomes: dict[Case, Outcome]) -> list[tuple[str, bool]]:
    """Return the claims, and whether each one holds."""
    claims = [("the bound holds", all(outcome.oldest <= case.max_staleness for case, outcome in outcomes.items()))]
    found = {case._replace(unit="samples"): outcome for case, outcome in outcomes.items()}
    for new, old, wanted in GOALS:
        if new in found:
            gain = found[new].samples_per_second / found[old].samples_per_second
            age = found[new].mean_age / max(found[old].mean_age, 1e-9)
            about = f"{new.makers} makers, over dealt with η = {old.max_staleness}"
            claims.append((f"{about}: {gain:.2f} x the samples/s, goal {wanted:g}", gain >= wanted))
            if old.max_staleness == 4:
                claims.append((f"{about}: {age:.2f} of its mean age, goal below 0.5", age < 0.5))
    return claims


def start_ray(num_actors: int) -> None:
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [TESTS, os.environ.get("PYTHONPATH")]))
    ray.init(num_cpus=num_actors, include_dashboard=False, log_to_driver=False, object_store_memory=2**30)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[100, 101, 102, 103, 104])
    parser.add_argument("--versions", type=one_or_more, default=40)
    parser.add_argument("--makers", nargs="+", choices=SPEEDS, default=list(SPEEDS))
    parser.add_argument("--simulated", action="store_true", help="the ledger alone, in simulated time")
    parser.add_argument("--unit", choices=["samples", "batches"], default="samples", help="what makers finish at once")
    parser.add_argument("--second", type=float, default=0.5, help="real seconds per second of the model")
    parser.add_argument("--parallel", type=one_or_more, default=1, help="number of concurrent runs, 5 processes each")
    parser.add_argument("--json", type=Path, help="write the results of all runs to this file")
    options = parser.parse_args()
    if options.simulated:
        measure = simulate
    else:
        start_ray(options.parallel * (NUM_MAKERS + 1))
        measure = functools.partial(run_actors, second=options.second)
    cases = [case._replace(unit=options.unit) for case in CASES if case.makers in options.makers]
    with concurrent.futures.ThreadPoolExecutor(options.parallel) as pool:
        runs = {
            case: [pool.submit(measure, case, seed, options.versions) for seed in options.seeds]
            for case in sorted(cases, key=lambda case: case.rule != "dealt")  # the slowest first
        }
        outcomes = report(cases, runs, options.json)
    for claim, holds in check(outcomes):
        print(f"{'yes' if holds else 'NO':<4}{claim}")


def report(
    cases: Sequence[Case], runs: dict[Case, list["concurrent.futures.Future[Outcome]"]], path: Path | None
) -> dict[Case, Outcome]:
    """Print the mean of each case and write all runs to `path`."""
    print(f"{'makers':<15}{'unit':<9}{'rule':<8}{'lead':>5}{'η':>4}{'samples/s':>11}{'mean age':>10}{'oldest':>8}")
    outcomes, rows = {}, []
    for case in cases:
        results = [future.result() for future in runs[case]]
        rate, age = (statistics.mean(result[index] for result in results) for index in (0, 1))
        outcomes[case] = Outcome(rate, age, max(result.oldest for result in results))
        lead = str(case.lead) if case.rule == "leases" else ""
        print(
            f"{case.makers:<15}{case.unit:<9}{case.rule:<8}{lead:>5}{case.max_staleness:>4}{rate:>11.1f}{age:>10.2f}"
            f"{outcomes[case].oldest:>8}",
            flush=True,
        )
        rows.append({**case._asdict(), **outcomes[case]._asdict(), "runs": results})
        if path is not None:
            path.write_text(json.dumps(rows, indent=1))
    return outcomes


if __name__ == "__main__":
    main()
