"""Makers and trainers with leases, on threads: whatever the interleaving, no sample is too old, lost or duplicated.

The plain objects of a run (buffer with its ledger, leased prompts, pipeline, work loop, sender, served models, fit
loop) work together. Models write the number of their version, so a batch shows which weights generated it.
"""

import functools
import itertools
import random
import threading
from types import SimpleNamespace

import pytest
import torch
from thread_peers import ThreadPeers, lose
from tiny import item
from torch import nn

from coati.actors.trainer import Trainer
from coati.background import run_in_background
from coati.batching import make_experience_batch
from coati.config import Deadlines
from coati.experience import Sample
from coati.experience_buffer.buffer import LeasedBuffer
from coati.experience_maker.base import AllSamplesDropped, ExperienceMaker, MakerBatch
from coati.experience_maker.delivery import ItemSender
from coati.experience_maker.pipeline import ExperiencePipeline
from coati.experience_maker.work_loop import WorkLoop
from coati.experience_maker.work_source import LeasedPrompts
from coati.ledger import LedgerRules
from coati.ledger.audit import audit_run
from coati.ledger.journal import Journal
from coati.peers import LocalPeers
from coati.weights.served import ServedModels, VerifiedUpdate

pytestmark = pytest.mark.usefixtures("one_thread")

SECONDS = 60.0  # far longer than anything here takes
BATCH, UPDATE_STEPS, TOTAL_STEPS = 4, 2, 5  # two versions of two batches, and a remainder
DEADLINES = Deadlines(batch_seconds=SECONDS, update_seconds=SECONDS)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("number", torch.zeros(()))


class Writer(ExperienceMaker):
    """Stores the number of the current weights as each token's log-prob, and drops some samples."""

    def __init__(self, dice, drops, dies):
        super().__init__(Model(), None, None, None)
        self._dice, self._drops, self.dies = dice, drops, dies

    def make_experience(self, input_ids, attention_mask, *, sample_ids, group_ids):
        if self.dies:
            raise SystemExit("killed")
        token = float(self.actor.number), self.policy_version
        pairs = zip(sample_ids.tolist(), group_ids.tolist(), strict=True)
        return self.experience_of([(sample_id, group_id, [token] * 3) for sample_id, group_id in pairs])

    def experience_of(self, samples):
        made = []
        for sample_id, group_id, tokens in samples:
            one = item(sample_id, num_actions=len(tokens))
            numbers, versions = zip(*tokens, strict=True)
            one.action_log_probs, one.policy_versions = torch.tensor(numbers), torch.tensor(versions)
            one.sample_ids, one.group_ids = torch.tensor(sample_id), torch.tensor(group_id)
            made.append(one)
        bad = {int(one.group_ids) for one in made if self._dice.random() < self._drops}
        kept = [one for one in made if int(one.group_ids) not in bad]
        if not kept:
            raise AllSamplesDropped("the dice dropped them")
        return make_experience_batch(kept)


class StreamingWriter(Writer):
    """Generates responses of different lengths token by token, with continuous batching."""

    room = 100

    def __init__(self, *settings):
        super().__init__(*settings)
        self._groups = {}  # by id: the group's prompts, and for each sample its length and the tokens generated

    @property
    def num_in_progress(self):
        return sum(len(prompts) for prompts, _ in self._groups.values())

    @property
    def num_generating(self):
        pairs = (pair for _, samples in self._groups.values() for pair in samples.values())
        return sum(len(tokens) < length for length, tokens in pairs)

    @property
    def num_complete(self):
        return sum(len(prompts) for prompts, samples in self._groups.values() if is_complete(samples))

    def start_samples(self, prompts):
        for group in sorted({sample.group for sample in prompts}):
            mine = [sample for sample in prompts if sample.group == group]
            lengths = {sample.id: self._dice.randrange(1, 5) for sample in mine}
            self._groups[group] = mine, {one: (length, []) for one, length in lengths.items()}

    def generate_tokens(self):
        for _, samples in self._groups.values():
            for length, tokens in samples.values():
                if len(tokens) < length:
                    tokens.append((float(self.actor.number), self.policy_version))

    def score_complete(self):
        done = {group: self._groups[group] for group in self._groups if is_complete(self._groups[group][1])}
        self._groups = {group: pair for group, pair in self._groups.items() if group not in done}
        batch = MakerBatch([sample for prompts, _ in done.values() for sample in prompts])
        samples = [(one, group, tokens) for group, (_, of) in done.items() for one, (_, tokens) in of.items()]
        assert {version for *_, tokens in samples for _, version in tokens} <= set(range(self.policy_version + 1))
        try:
            batch.experience = self.experience_of(samples)
        except AllSamplesDropped as error:
            batch.drop_error = error
        return batch

    def finalize(self, batch):
        pass


def is_complete(samples):
    return all(len(tokens) == length for length, tokens in samples.values())


class Prompts:
    """A stream of equal prompts."""

    samples_per_batch = 6
    skipped = SimpleNamespace(total=lambda: 0)

    def __init__(self, group_size):
        self._size = group_size

    def batch(self, numbers, *, group_size):
        ids = [number * group_size + part for number in numbers for part in range(group_size)]
        return [Sample(one, [1, 1], group=one // group_size) for one in ids], {}


class CheckingTrainer(Trainer):
    def __init__(self, rules, run, folder):
        path = folder and folder / "ledger" / f"stream-{rules.stream}.jsonl"
        self.buffer = LeasedBuffer(rules, BATCH, open_journal=path and (lambda: Journal(path, rules, run="")))
        super().__init__([], buffer=self.buffer, deadlines=DEADLINES)
        self._run = run
        self.ages, self.trained = [], []

    def training_step(self, batch):
        mask = batch.full_action_mask()
        assert torch.equal(
            batch.action_log_probs[mask], batch.policy_versions[mask].float()
        )  # generated by the weights recorded
        self.ages.append(batch.age_metrics(self.version)["train/age_max"])
        self.trained += batch.sample_ids.tolist()
        return {}

    def _update_remote_makers(self, fully_update=False):
        if self is self._run.trainers[0]:  # all trainers advance together; the first one decides
            for maker in self._run.makers:
                maker.offer(self.version)

    def next_batch(self):
        batch = super().next_batch()
        self._run.barrier.wait(SECONDS)
        return batch


class Maker:
    def __init__(self, run, name, rules, dice, drops, in_flight, dies=False):
        self.writer = (StreamingWriter if run.streams and not dies else Writer)(dice, drops, dies)
        self.served = ServedModels(self.writer.trained_models)
        self.stop = threading.Event()
        names = list(run.peers)
        peers = run.network(run.peers)
        self.prompts = LeasedPrompts(
            Prompts(rules.group_size),
            names,
            rules,
            self.served,
            peers=peers,
            maker_name=name,
            deadlines=DEADLINES,
            should_stop=self.stop.is_set,
        )
        sender = ItemSender(
            names,
            peers=peers,
            maker_name=name,
            deadlines=DEADLINES,
            retry_seconds=0.0,
        )
        pipeline = ExperiencePipeline(self.writer, self.served, commit_between_tokens=in_flight)
        self.loop = WorkLoop(pipeline, self.prompts, sender, deadlines=DEADLINES, stop=self.stop)
        self.work = run_in_background(self.loop.run, name=name)

    def offer(self, version):
        tensors = {("actor", "number"): torch.tensor(float(version))}
        self.served.offer(VerifiedUpdate(version=version, tensors=tensors, is_full=True))


class Run:
    def __init__(
        self,
        seed,
        *,
        num_makers,
        num_trainers,
        max_staleness,
        lead=1,
        group_size=1,
        drops=0.1,
        in_flight=False,
        dies=False,
        streams=True,
        network=lambda targets: LocalPeers(**targets),
        folder=None,
    ):
        self.network, self.streams = network, streams
        rules = [
            LedgerRules(
                samples_per_version=BATCH * UPDATE_STEPS,
                total_samples=BATCH * TOTAL_STEPS,
                lead=lead,
                max_staleness=max_staleness,
                group_size=group_size,
                stream=stream,
                num_streams=num_trainers,
            )
            for stream in range(num_trainers)
        ]
        self.barrier = threading.Barrier(num_trainers)
        self.trainers = [CheckingTrainer(one, self, folder) for one in rules]
        self.peers = {
            f"t{index}": SimpleNamespace(lease=functools.partial(self._lease, one), buffer_extend=one.buffer.extend)
            for index, one in enumerate(self.trainers)
        }
        self.makers, self._dead, self._lease_lock = [], None, threading.Lock()
        if dies:  # while it holds the first leases
            self._start_and_die(rules[0])
        self.makers = [
            Maker(self, f"m{index}", rules[0], random.Random(seed + index), drops, in_flight)
            for index in range(num_makers)
        ]
        fits = [
            run_in_background(lambda one=one: one.fit(TOTAL_STEPS, UPDATE_STEPS), name="fit") for one in self.trainers
        ]
        for fit in fits:
            fit.result(SECONDS)
        for maker in self.makers:
            maker.stop.set()
        for maker in self.makers:
            maker.work.result(SECONDS)

    def _start_and_die(self, rules):
        maker = Maker(self, "dead", rules, random.Random(0), 0.0, False, dies=True)
        assert isinstance(maker.work.exception(SECONDS), SystemExit)
        maker.stop.set()
        with self._lease_lock:  # its thread that requests leases dies too
            self._dead = "dead"
            for trainer in self.trainers:
                assert trainer.buffer.release("dead", "died")

    def _lease(self, trainer, request):
        with self._lease_lock:
            return [] if request.maker_name == self._dead else trainer.buffer.lease(request)


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("max_staleness", [0, 1, 3, None])
@pytest.mark.parametrize(("num_makers", "num_trainers"), [(1, 1), (3, 1), (1, 2), (3, 2)])
def test_every_sample_is_trained_on_once_and_none_is_too_old(num_makers, num_trainers, max_staleness, streams):
    torch.set_num_threads(1)
    for seed, group_size in enumerate((1, 2)):
        run = Run(
            seed,
            num_makers=num_makers,
            num_trainers=num_trainers,
            max_staleness=max_staleness,
            group_size=group_size,
            in_flight=bool(seed),
            streams=streams,
        )
        trained = [number for trainer in run.trainers for number in trainer.trained]
        assert len(set(trained)) == len(trained) == BATCH * TOTAL_STEPS * num_trainers
        ages = [age for trainer in run.trainers for age in trainer.ages]
        assert min(ages) >= 0
        assert max_staleness is None or max(ages) <= max_staleness
        for stream, trainer in enumerate(run.trainers):
            assert {number // group_size % num_trainers for number in trainer.trained} == {stream}
            if max_staleness == 0:
                assert trainer.trained == sorted(trainer.trained)


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_leases_of_a_dead_maker_are_made_by_another(max_staleness):
    run = Run(3, num_makers=1, num_trainers=1, max_staleness=max_staleness, drops=0.0, dies=True)
    (trainer,) = run.trainers
    assert sorted(trainer.trained) == list(range(BATCH * TOTAL_STEPS))  # the same ids, without replacements


def test_lost_calls_and_lost_answers_lose_and_double_nothing(tmp_path):
    dice, lost = random.Random(5), []

    def maybe_lose(peer):
        if dice.random() < 0.3:
            lost.append(peer.name)
            lose(peer)

    def network(targets):
        peers = ThreadPeers(**targets)
        for name in targets:
            for method, point in itertools.product(("lease", "buffer_extend"), ("before", "after")):
                peers[name].at(method, point, maybe_lose, None)
        return peers

    run = Run(1, num_makers=3, num_trainers=2, max_staleness=2, group_size=2, network=network, folder=tmp_path)
    assert len(lost) > 10
    trained = [number for trainer in run.trainers for number in trainer.trained]
    assert len(set(trained)) == len(trained) == BATCH * TOTAL_STEPS * 2
    account = audit_run(tmp_path)
    assert account.problems == []
    assert account.oldest <= 2
    assert sum(trainer.progress().num_made for trainer in run.trainers) == account.num_made >= len(trained)
