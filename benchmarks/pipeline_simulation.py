"""An event simulation of the detached pipeline: makers, the trainer's intake, training and the weight channel.

It takes the time of each piece of work when nothing else runs, and computes how they hold each other up.
Nothing is random unless `spread` is set, and then it depends on the seed alone.

    maker     wait until admitted (staleness) ► generate ► send (at most 2 sends unacknowledged) ► …
    intake    one batch after the other into the buffer; with a full buffer it stops, and makers with it
    trainer   wait for a batch ► train ► read the weights for the makers, when the version before has arrived ► on
    channel   delivers a version to all makers, while the trainer continues
    maker     takes new weights before its next batch

With `cores`, all work shares so many processors fairly: when more pieces than cores are in work, all slow down alike.
Without, every actor has its own.

What is left out: samples are consumed in order of arrival and not of rounds, so a slow maker holds no other back;
messages take no time beyond the work of sending and receiving.
"""

import dataclasses
import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable

MAX_IN_FLIGHT = 2
SATURATION_GAIN = 1.1  # doubling the makers gains less than this: something else is the limit


@dataclasses.dataclass(frozen=True, kw_only=True)
class PipelineModel:
    """A pipeline and what its pieces of work cost, in seconds of one core or card."""

    makers: int = 1
    rollout_batch: int
    """Samples that a maker makes at once, at most."""
    train_batch: int
    """Samples of one training step; every step makes a version."""
    versions: int
    generate_base: float = 0.0
    generate_per_sample: float = 0.0
    send: float = 0.0
    """The maker's part of handing a batch over."""
    intake: float = 0.0
    """The trainer's part, for one batch."""
    train_base: float = 0.0
    train_per_sample: float = 0.0
    publish_base: float = 0.0
    """The trainer's part of a version: it does nothing else meanwhile."""
    publish_per_maker: float = 0.0
    deliver_base: float = 0.0
    """From then on until all makers have a version."""
    deliver_per_maker: float = 0.0
    commit: float = 0.0
    max_staleness: int = 1
    """-1 for no bound."""
    buffer_limit: int = 0
    """Training batches; 0 for no limit."""
    cores: float | None = None
    spread: float = 0.0
    """Standard deviation of a generation's time, relative to its mean."""
    seed: int = 0

    def generate(self, samples: int) -> float:
        """Time of one rollout."""
        return self.generate_base + self.generate_per_sample * samples

    @property
    def train(self) -> float:
        """Time of one training step."""
        return self.train_base + self.train_per_sample * self.train_batch

    @property
    def publish(self) -> float:
        """Time in which the trainer reads new weights."""
        return self.publish_base + self.publish_per_maker * self.makers

    @property
    def deliver(self) -> float:
        """Time in which they go to all makers."""
        return self.deliver_base + self.deliver_per_maker * self.makers


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a simulated run came to."""

    seconds: float
    samples: int
    utilization: dict[str, float]
    """Share of the time that makers (the mean), intake, training and weights were at work."""
    waits: dict[str, float]
    """Share of the time that makers waited for weights and for room (means), and the trainer for data."""
    most_buffered: int

    @property
    def samples_per_second(self) -> float:
        """Throughput."""
        return self.samples / self.seconds if self.seconds else 0.0

    @property
    def limit(self) -> str:
        """What is busiest; "turns" if nothing is. Training and weights are one actor's work, so they count together."""
        busy = {
            "makers": self.utilization["makers"],
            "intake": self.utilization["intake"],
            "trainer": self.utilization["training"] + self.utilization["weights"],
        }
        name = max(busy, key=lambda key: busy[key])
        if busy[name] < 0.8:
            return "turns"
        if name == "trainer" and self.utilization["weights"] > self.utilization["training"]:
            return "weights"
        return name


class _Machine:
    """Processors that all running work shares fairly.

    As everything runs at the same speed, one counter of work done per piece is enough: a piece that needs w ends when
    the counter has grown by w since it began.
    """

    def __init__(self, cores: float | None) -> None:
        self._cores = cores
        self._ends: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0
        self._done = 0.0
        self.now = 0.0

    def work(self, seconds: float, then: Callable[[], None]) -> None:
        """Begin a piece of work, and call `then` when it is done."""
        self._number += 1
        heapq.heappush(self._ends, (self._done + seconds, self._number, then))

    def step(self) -> bool:
        """Advance to the next end of a piece; False if nothing runs."""
        if not self._ends:
            return False
        running = len(self._ends)
        speed = 1.0 if self._cores is None else min(1.0, self._cores / running)
        end, _, then = heapq.heappop(self._ends)
        self.now += (end - self._done) / speed
        self._done = end
        then()
        return True


class _Busy:
    """Adds up the time between on and off."""

    def __init__(self, machine: _Machine) -> None:
        self._machine = machine
        self._since: float | None = None
        self._total = 0.0

    def on(self) -> None:
        if self._since is None:
            self._since = self._machine.now

    def off(self) -> None:
        if self._since is not None:
            self._total += self._machine.now - self._since
            self._since = None

    @property
    def total(self) -> float:
        self.off()
        return self._total


class _Maker:
    def __init__(self, machine: _Machine, index: int) -> None:
        self.index = index
        self.issued = 0
        self.version = 0
        self.in_flight = 0
        self.held: int | None = None  # samples made that cannot be sent yet
        self.is_idle = True
        self.work, self.wait_weights, self.wait_room = _Busy(machine), _Busy(machine), _Busy(machine)


class _Simulation:
    def __init__(self, model: PipelineModel) -> None:
        self.model = model
        self.machine = _Machine(model.cores)
        self.random = random.Random(model.seed)
        self.makers = [_Maker(self.machine, index) for index in range(model.makers)]
        self.total = model.versions * model.train_batch
        self.version = 0
        self.buffered = self.most_buffered = self.trained = 0
        self.is_training = self.is_delivering = self.has_to_publish = False
        self.arrived: deque[tuple[_Maker, int]] = deque()
        self.taking: _Maker | None = None
        self.training, self.publishing = _Busy(self.machine), _Busy(self.machine)
        self.intake, self.wait_data = _Busy(self.machine), _Busy(self.machine)

    def run(self) -> Outcome:
        self.wait_data.on()
        for maker in self.makers:
            self.next_rollout(maker)
        while self.trained < self.total and self.machine.step():
            pass
        assert self.trained == self.total, "a simulated run must not stall"
        seconds, count = self.machine.now, len(self.makers)

        def share(total: float, of: int = 1) -> float:
            return total / (seconds * of) if seconds else 0.0

        return Outcome(
            seconds=seconds,
            samples=self.trained,
            utilization={
                "makers": share(sum(maker.work.total for maker in self.makers), count),
                "intake": share(self.intake.total),
                "training": share(self.training.total),
                "weights": share(self.publishing.total),
            },
            waits={
                "weights": share(sum(maker.wait_weights.total for maker in self.makers), count),
                "room": share(sum(maker.wait_room.total for maker in self.makers), count),
                "data": share(self.wait_data.total),
            },
            most_buffered=self.most_buffered,
        )

    # Makers.

    def limit(self, maker: _Maker) -> int:
        """Samples that a maker may have issued in all: every M-th of those that the bound admits."""
        admitted = self.total
        if self.model.max_staleness >= 0:
            admitted = min(self.total, (self.model.max_staleness + maker.version + 1) * self.model.train_batch)
        return self.share(maker, admitted)

    def share(self, maker: _Maker, samples: int) -> int:
        return (samples - maker.index + len(self.makers) - 1) // len(self.makers)

    def next_rollout(self, maker: _Maker) -> None:
        maker.is_idle = False
        has_new_weights = maker.version < self.version
        maker.version = self.version
        samples = min(self.model.rollout_batch, self.limit(maker) - maker.issued)
        if samples <= 0:
            maker.is_idle = True
            maker.work.off()
            if maker.issued < self.share(maker, self.total):
                maker.wait_weights.on()
            return
        maker.wait_weights.off()
        maker.work.on()
        maker.issued += samples
        seconds = self.model.generate(samples) * max(0.0, 1.0 + self.model.spread * self.random.gauss(0.0, 1.0))
        seconds += self.model.commit if has_new_weights else 0.0
        self.machine.work(seconds + self.model.send, lambda: self.made(maker, samples))

    def made(self, maker: _Maker, samples: int) -> None:
        if maker.in_flight >= MAX_IN_FLIGHT:
            maker.held = samples
            maker.work.off()
            maker.wait_room.on()
            return
        maker.in_flight += 1
        self.arrived.append((maker, samples))
        self.take_in()
        self.next_rollout(maker)

    # The trainer's buffer.

    def take_in(self) -> None:
        if self.taking is None and self.arrived:
            self.taking, samples = self.arrived.popleft()
            self.intake.on()
            self.machine.work(self.model.intake, lambda: self.taken(samples))

    def taken(self, samples: int) -> None:
        self.intake.off()
        self.buffered += samples
        self.most_buffered = max(self.most_buffered, self.buffered)
        self.next_step()
        self.acknowledge()

    def acknowledge(self) -> None:
        """The call returns when what it brought has room; until then no other is served."""
        maker = self.taking
        limit = self.model.buffer_limit
        if maker is None or self.intake_is_at_work() or (limit and self.buffered // self.model.train_batch > limit):
            return
        self.taking = None
        maker.in_flight -= 1
        if maker.held is not None:
            samples, maker.held = maker.held, None
            maker.wait_room.off()
            self.made(maker, samples)
        self.take_in()

    def intake_is_at_work(self) -> bool:
        return self.intake._since is not None

    # The trainer.

    def next_step(self) -> None:
        if self.is_training or self.buffered < self.model.train_batch:
            return
        self.is_training = True
        self.wait_data.off()
        self.buffered -= self.model.train_batch
        self.training.on()
        self.machine.work(self.model.train, self.step_done)
        self.acknowledge()

    def step_done(self) -> None:
        self.training.off()
        self.trained += self.model.train_batch
        self.publishing.on()
        self.has_to_publish = True
        self.publish()

    def publish(self) -> None:
        """One version after the other: until the one before has arrived, the trainer stands still."""
        if self.has_to_publish and not self.is_delivering:
            self.has_to_publish = False
            self.is_delivering = True
            self.machine.work(self.model.publish, self.published)

    def published(self) -> None:
        self.publishing.off()
        self.machine.work(self.model.deliver, self.delivered)
        self.is_training = False
        self.next_step()
        if not self.is_training:
            self.wait_data.on()

    def delivered(self) -> None:
        self.version += 1
        self.is_delivering = False
        for maker in self.makers:
            if maker.is_idle:
                self.next_rollout(maker)
        self.publish()


def simulate(model: PipelineModel) -> Outcome:
    """Run the model to its end: all samples trained on."""
    return _Simulation(model).run()


def sweep(model: PipelineModel, makers: list[int]) -> list[tuple[int, Outcome]]:
    """The same pipeline with other numbers of makers."""
    return [(count, simulate(dataclasses.replace(model, makers=count))) for count in makers]


def saturation(outcomes: list[tuple[int, Outcome]]) -> tuple[int, str] | None:
    """The number of makers from which doubling them gains less than a tenth, and what is the limit there.

    None if the throughput still grows at the last one.
    """
    for (count, outcome), (more, next_outcome) in itertools.pairwise(outcomes):
        doublings = (more / count) / 2
        if next_outcome.samples_per_second < SATURATION_GAIN * doublings * outcome.samples_per_second:
            return count, next_outcome.limit
    return None
