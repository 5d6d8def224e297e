"""However slow makers and trainers are, and whenever: no sample is trained on when it is older than the bound.

The plain objects of a run (gate, pipeline, work loop, sender, served models, rounds, fit loop) run under a seeded
scheduler, which decides at every named point which of them continues.
"""

import itertools
import random
import threading
from collections import deque

import pytest
import torch
from tiny import item
from torch import nn

from coati.config import Deadlines
from coati.experience import make_experience_batch
from coati.experience_buffer import BatchCollector
from coati.experience_maker.base import AllSamplesDropped, ExperienceMaker, MakerBatch
from coati.experience_maker.delivery import ItemSender
from coati.experience_maker.pipeline import ExperiencePipeline
from coati.experience_maker.work_loop import WorkLoop
from coati.ledger import DeliveryLog, RoundOrder, WorkShare, ages_of
from coati.peers import Peer, Peers, PendingCall
from coati.ray.run_actors import first_updaters
from coati.trainer.fit_loop import FitLoop, FitSteps
from coati.weights import ServedModels, VerifiedUpdate

PATIENCE = 180.0  # seconds that a test waits for what should come at once, on however busy a machine

BATCH, UPDATE_STEPS, TOTAL_STEPS = 2, 2, 7  # 7 = three versions of two batches, and a remainder
NUM_TOKENS = 3
DEADLINES = Deadlines(start_seconds=PATIENCE, batch_seconds=PATIENCE, update_seconds=PATIENCE, grace_seconds=1.0)
MAKER_BATCH = 3
BUFFER_LIMIT = 2


def share_of(index, num_makers, num_trainers, max_staleness):
    return WorkShare(
        rounds_per_version=UPDATE_STEPS * BATCH,
        total_rounds=TOTAL_STEPS * BATCH,
        max_staleness=max_staleness,
        maker_index=index,
        num_makers=num_makers,
        num_trainers=num_trainers,
    )


class Scheduler:
    """Runs functions in threads, one at a time. At each pause seeded dice decide who goes on.

    Some are slow: they are chosen rarely, for a while. If nobody can go on before all are done, that is starvation.
    """

    def __init__(self, seed):
        self._dice = random.Random(seed)
        self._waits = {}  # who to (what for, may go on)
        self._speeds = {}
        self._batons = {}
        self._back = threading.Semaphore(0)
        self._me = threading.local()
        self._error = None

    def spawn(self, name, function):
        self._waits[name] = ("its start", lambda: True)
        self._speeds[name] = 1.0
        self._batons[name] = threading.Semaphore(0)
        threading.Thread(target=self._run, args=(name, function), daemon=True).start()

    def _run(self, name, function):
        self._me.name = name
        assert self._batons[name].acquire(timeout=PATIENCE)
        try:
            function()
        except BaseException as error:
            self._error = error
        del self._waits[name]
        self._back.release()

    def pause(self, point, until=lambda: True):
        """Let others go first; come back when `until` holds and the dice say so."""
        name = self._me.name
        self._waits[name] = (point, until)
        self._back.release()
        assert self._batons[name].acquire(timeout=PATIENCE), f"{name} was left at {point}"

    def run(self):
        while self._waits:
            ready = [name for name, (_, until) in self._waits.items() if until()]
            assert ready, f"nobody can go on: { ({name: point for name, (point, _) in self._waits.items()}) }"
            if self._dice.random() < 0.1:
                self._speeds = {name: self._dice.random() ** 4 + 1e-3 for name in self._speeds}
            name = self._dice.choices(ready, [self._speeds[one] for one in ready])[0]
            self._batons[name].release()
            assert self._back.acquire(timeout=PATIENCE), f"{name} does not come back"
            if self._error is not None:
                raise self._error


class Model(nn.Module):
    """Its one weight is the number of the version, so that what it writes tells who wrote it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("number", torch.zeros(()))


def update_to(version):
    return VerifiedUpdate(version, "trainer", {("actor", "number"): torch.tensor(float(version))}, True)


class FakeScores:
    """Scores that come when the scheduler lets the reward of the maker go on."""

    def __init__(self, scheduler, may_issue):
        self._scheduler, self._may_issue = scheduler, may_issue
        self.is_ready, self.terms = False, {}

    def wait(self, seconds=None):
        """As long as it takes; with a limit also until something else can be done."""
        self._scheduler.pause("scores", lambda: self.is_ready or (seconds is not None and self._may_issue()))


class FakeGeneration(ExperienceMaker):
    """Writes the number of the weights it sees as each token's log-prob, and pauses between tokens.

    A reward, computed by another thread, drops some samples.
    """

    def __init__(self, model, scheduler, dice, may_issue):
        super().__init__(model, None, None, None)
        self._scheduler, self._dice, self._may_issue = scheduler, dice, may_issue
        self.to_score = deque()
        self._num_unfinished = 0
        self.num_overlapping = 0

    def make_experience(self, input_ids, attention_mask):
        raise NotImplementedError

    def begin(self, prompts):
        self.num_overlapping += self._num_unfinished > 0
        self._num_unfinished += 1
        written, versions = [], []
        for _ in range(NUM_TOKENS):
            written.append(float(self.actor.number))
            versions.append(self.policy_version)
            self._scheduler.pause("a token")
            if self.between_tokens is not None:
                self.policy_version = self.between_tokens()
        made = []
        for sample_id in prompts.sample_ids.tolist():
            one = item(sample_id, num_actions=NUM_TOKENS)
            one.action_log_probs = torch.tensor(written)
            one.policy_versions = torch.tensor(versions)
            made.append(one)
        self.to_score.append(FakeScores(self._scheduler, self._may_issue))
        return MakerBatch(prompts, make_experience_batch(made), self.to_score[-1])

    def finish(self, batch):
        batch.scores.wait()
        self._num_unfinished -= 1
        kept = torch.tensor([self._dice.random() < 0.9 for _ in range(batch.experience.num_samples)])
        if not kept.any():
            raise AllSamplesDropped("the dice dropped them")
        batch.keep(kept)


class ScheduledCall(PendingCall):
    """A delivery; its acknowledgement comes when the trainer's `append_loop` has taken the items in."""

    def __init__(self, scheduler, items):
        self.scheduler, self.items, self.is_done = scheduler, items, False

    def done(self):
        return self.is_done

    def result(self, timeout):
        assert self.is_done

    @classmethod
    def wait(cls, calls, num_done, timeout):
        until = lambda: sum(call.is_done for call in calls) >= num_done  # noqa: E731
        calls[0].scheduler.pause("an acknowledgement", until)
        return [call for call in calls if call.is_done]


class TrainerPeer(Peer):
    def __init__(self, trainer, scheduler):
        super().__init__(trainer.name)
        self._trainer, self._scheduler = trainer, scheduler

    def has(self, method):
        return True

    def call(self, method, items):
        assert method == "buffer_extend"
        call = ScheduledCall(self._scheduler, list(items))
        self._trainer.calls.append(call)
        return call


class TrainerPeers(Peers):
    def __init__(self, trainers, scheduler):
        super().__init__()
        self._peers = {trainer.name: TrainerPeer(trainer, scheduler) for trainer in trainers}

    def _lookup(self, name):
        return self._peers.get(name)

    def _names(self):
        return self._peers

    def share(self, value):
        return value


class ScheduledPipeline(ExperiencePipeline):
    """Waits for weights at a point of the scheduler."""

    def __init__(self, *args, scheduler, **kwargs):
        super().__init__(*args, **kwargs)
        self._scheduler = scheduler

    def may_issue(self):
        return self.served.version >= (self.gate.version_needed() or 0)

    def wait_for_admission(self, deadline_seconds):
        self._scheduler.pause(f"version {self.gate.version_needed()}", self.may_issue)
        return True


class NotingSender(ItemSender):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.sent = []

    def send(self, items):
        self.sent += [int(one.sample_ids) for one in items]
        super().send(items)


class Run:
    """M makers and T trainers in one process."""

    def __init__(self, seed, *, num_makers, num_trainers, max_staleness, in_flight, in_step):
        self.scheduler = Scheduler(seed)
        self.dice = random.Random(seed + 1)
        self.trainers = [Trainer(self, rank, num_trainers, in_step) for rank in range(num_trainers)]
        self.makers = [
            Maker(
                self,
                share_of(index, num_makers, num_trainers, max_staleness),
                in_flight,
            )
            for index in range(num_makers)
        ]
        for kind, members in (("maker", self.makers), ("trainer", self.trainers)):
            for index, member in enumerate(members):
                self.scheduler.spawn(f"{kind} {index}", member.work)
        for trainer in self.trainers:
            self.scheduler.spawn(f"the buffer of {trainer.name}", trainer.append_loop)
        for index, maker in enumerate(self.makers):
            self.scheduler.spawn(f"the reward of maker {index}", maker.reward_loop)
        self.scheduler.run()


class Maker:
    """The real work loop, pipeline and sender of a maker; its reward is another thread."""

    def __init__(self, run, share, in_flight):
        self._run = run
        model = Model()
        self.served = ServedModels({"actor": model})
        self.generation = FakeGeneration(model, run.scheduler, run.dice, lambda: self._pipeline.may_issue())
        self._pipeline = ScheduledPipeline(
            self.generation, self.served, share=share, in_flight=in_flight, scheduler=run.scheduler
        )
        self.sender = NotingSender(
            [trainer.name for trainer in run.trainers],
            peers=TrainerPeers(run.trainers, run.scheduler),
            sender=f"maker {share.maker_index}",
            deadlines=DEADLINES,
            share=share,
        )
        self._first_id = share.maker_index * 10**6
        self.is_finished = False

    def work(self):
        WorkLoop(self._pipeline, self.sender, deadlines=DEADLINES).run(self._prompts())
        self.sender.flush()
        self.is_finished = True

    def reward_loop(self):
        waiting = self.generation.to_score
        while True:
            self._run.scheduler.pause("a batch to score", lambda: waiting or self.is_finished)
            if not waiting:
                return
            self._run.scheduler.pause("a reward")
            waiting.popleft().is_ready = True

    def _prompts(self):
        for first in itertools.count(self._first_id, MAKER_BATCH):
            ids = torch.arange(first, first + MAKER_BATCH)
            yield {"input_ids": torch.ones(MAKER_BATCH, 2), "sample_ids": ids}


class Trainer(FitSteps):
    """The buffer and the fit loop of a trainer. Trainers in step agree on every batch, as ranks of a group do."""

    def __init__(self, run, rank, num_trainers, in_step):
        self._run, self._rank, self._num_trainers, self._in_step = run, rank, num_trainers, in_step
        self._deliveries, self._rounds, self._collector = DeliveryLog(), RoundOrder(), BatchCollector(BATCH)
        self.calls = deque()
        self._batches = []
        self._votes = []
        self.name = f"trainer {rank}"
        self.version = 0
        self.ages, self.trained = [], []

    def work(self):
        FitLoop(self).run(TOTAL_STEPS, UPDATE_STEPS, train_epochs=1)

    def append_loop(self):
        """One call after the other, as the concurrency group of an actor runs them. Some are executed twice."""
        while self._is_more_to_come():
            call = self.calls.popleft()
            for _ in range(1 + (self._run.dice.random() < 0.2)):
                self._take_in(call.items)
            call.is_done = True

    def _is_more_to_come(self):
        makers = self._run.makers
        self._run.scheduler.pause("a delivery", lambda: self.calls or all(maker.is_finished for maker in makers))
        return bool(self.calls)

    def _take_in(self, items):
        ready = self._rounds.add(self._deliveries.fresh(items))
        self._batches += self._collector.add(ready)
        self._run.scheduler.pause("room in the buffer", lambda: len(self._batches) <= BUFFER_LIMIT)

    def next_batch(self):
        self._run.scheduler.pause("a batch", lambda: self._batches)
        return self._batches.pop(0)

    def agree(self, has_data, is_stopped):
        if not self._in_step:
            return super().agree(has_data, is_stopped)
        self._votes.append(has_data and not is_stopped)
        number = len(self._votes)
        everyone = self._run.trainers
        self._run.scheduler.pause("the others", lambda: all(len(one._votes) >= number for one in everyone))
        return all(one._votes[number - 1] for one in everyone)

    def train_on(self, batch):
        self._run.scheduler.pause("a step")
        assert torch.equal(batch.action_log_probs, batch.policy_versions.float())  # written by who it says
        self.ages.append(ages_of(batch, self.version).oldest)
        self.trained += batch.sample_ids.tolist()
        self._run.scheduler.pause("the end of a step")
        return {}

    def publish(self):
        self.version += 1
        updaters = first_updaters(range(len(self._run.makers)), self._num_trainers)
        for maker in (one for one, rank in updaters.items() if rank == self._rank):
            self._run.scheduler.pause("an update")
            self._run.makers[maker].served.offer(update_to(self.version))


SHAPES = [
    # M, T, whether the trainers are one group: without that, the fast one may run ahead of the slow one
    *((makers, 1, True) for makers in range(1, 5)),
    *((makers, 2, in_step) for makers in range(1, 5) for in_step in (True, False)),
]
SOME = [(2, 1, True), (1, 2, False), (3, 2, True)]


@pytest.mark.parametrize("shapes", [SOME, pytest.param(3 * SHAPES, marks=pytest.mark.long)], ids=["some", "all"])
@pytest.mark.parametrize("in_flight", [False, True], ids=["between batches", "in flight"])
@pytest.mark.parametrize("max_staleness", range(4))
def test_measured_ages_never_exceed_the_bound_and_no_trainer_starves(max_staleness, in_flight, shapes):
    torch.set_num_threads(1)
    oldest, num_overlapping = 0.0, 0
    for seed, (num_makers, num_trainers, in_step) in enumerate(shapes):
        run = Run(
            seed,
            num_makers=num_makers,
            num_trainers=num_trainers,
            max_staleness=max_staleness,
            in_flight=in_flight,
            in_step=in_step,
        )
        where = f"{num_makers} makers, {num_trainers} trainers, seed {seed}"
        ages = [age for trainer in run.trainers for age in trainer.ages]
        assert max(ages) <= max_staleness, where
        assert min(ages) >= 0 or not in_step, where  # no data from the future
        oldest = max(oldest, *ages)
        num_overlapping += sum(maker.generation.num_overlapping for maker in run.makers)
        trained = [index for trainer in run.trainers for index in trainer.trained]
        assert len(trained) == TOTAL_STEPS * BATCH * num_trainers, where
        assert sorted(trained) == sorted(index for maker in run.makers for index in maker.sender.sent), where
        assert len(set(trained)) == len(trained), where
    assert oldest == max_staleness  # the runs go as far as they may: the bound is what held them
    assert (num_overlapping > 0) == (max_staleness > 0)  # batches generated while the last one was scored
