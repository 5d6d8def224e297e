"""The staleness bound on its way from the trainer that decides it to the maker that keeps to it."""

import threading

import pytest
import ray
import torch
from ray_testing import PATIENCE, Background, experience, make_maker, make_ppo_trainer, numbered, trainer_models
from weight_testing import Noting, connect, deliver, header_of, messages_of

from coati.ledger import VersionSignals, WorkShare
from coati.ray.callbacks import MakerCallback

pytestmark = pytest.mark.usefixtures("cluster")


class Recorder:
    """Stands in for a controller: remembers what it is told, and leaves the bound alone."""

    max_staleness = 1

    def __init__(self):
        self.signals = []

    def decide(self, signals):
        self.signals.append(signals)
        return self.max_staleness


@pytest.fixture
def make_trainer(keep):
    """A trainer, and a maker that notes what it is sent."""

    def make(**kwargs):
        trainer = make_ppo_trainer([], **kwargs)
        keep(trainer._buffer)
        maker = Noting()
        connect(trainer, maker=maker)
        return trainer, maker

    return make


def test_a_bound_goes_out_with_every_version(make_trainer):
    # Whatever is measured the bound rises, as soon as the one before shows in the data: 0, 1 (one version more), 2.
    eager = {"target_kl": 1e9, "target_effective_samples": 0.0, "target_idle": 0.0}
    trainer, maker = make_trainer(staleness_control="adaptive", max_staleness=2, **eager)
    trainer.sync_models_to_remote_makers()
    for index in range(4):
        trainer.buffer_append(experience(4 * index, 4))
    trainer.fit(4, 1)
    trainer.sync_models_to_remote_makers()
    sent = [(version, bound) for version, bound, _ in maker.updates]
    assert sent == [(0, 0), (1, 1), (2, 1), (3, 2), (4, 2), (4, 2)]
    records = [record["metrics"] for record in trainer.records_since(0).records]
    assert [metrics["staleness/bound"] for metrics in records if "staleness/bound" in metrics] == [0, 1, 1, 2, 2, 2]
    shares = [metrics["wait/data_share"] for metrics in records if "wait/data_share" in metrics]
    assert len(shares) == 5
    assert all(0 <= share <= 1 for share in shares)


def test_a_fixed_bound_stays_out_of_the_updates(make_trainer):
    trainer, maker = make_trainer(max_staleness=2)
    trainer.buffer_append(experience(0, 4))
    trainer.fit(1, 1)
    assert maker.updates == [(1, None, False)]
    assert not any("staleness/bound" in record["metrics"] for record in trainer.records_since(0).records)


def test_data_is_judged_when_it_is_first_seen(make_trainer):
    recorder = Recorder()
    trainer, _ = make_trainer()
    trainer._staleness = recorder
    trainer.training_step(experience(90, 4))  # by hand: not part of any version
    for index in range(2):
        trainer.buffer_append(experience(4 * index, 4))
    trainer.fit(2, 2, train_epochs=2)
    (signals,) = recorder.signals
    kls = [
        record["metrics"]["policy/approx_kl"]
        for record in trainer.records_since(0).records
        if "policy/approx_kl" in record["metrics"]
    ]
    assert len(kls) == 4  # two batches, twice; the second epoch is nearer to or further from the data by learning
    assert signals.kl == pytest.approx((kls[0] + kls[1]) / 2)
    assert signals.kl != pytest.approx(sum(kls) / 4)
    assert signals.effective_samples is None  # nothing is corrected for here, so nobody weighs the samples


def test_a_group_of_ranks_decides_on_the_signals_of_all(make_trainer):
    trainer, _ = make_trainer()
    trainer._staleness = Recorder()

    class Group:
        """Two ranks; the other has seen KL 0.3 and ESS 0.4, and did not wait."""

        world_size, device = 2, "cpu"

        def all_reduce_sum(self, local):
            return local + torch.tensor([0.3, 0.0, 0.4])

    trainer.strategy = Group()
    shared = trainer._over_all_ranks(VersionSignals(kl=0.1, idle=0.5, effective_samples=0.8))
    assert (shared.kl, shared.idle, shared.effective_samples) == pytest.approx((0.2, 0.25, 0.6))


def test_a_maker_waits_as_the_newest_bound_says_and_leaves_no_prompt_out(sinks):
    # 2 rounds for each version, 8 samples in all, 2 · (η + v + 1) may be issued; the share allows η = 1.
    #   version 0, η = 1: 4     version 1, η = 0: 4, so it goes on waiting
    #   version 2, η = 0: 6     version 3, η = 1: 10, so the rest
    made = threading.Semaphore(0)

    class Signal(MakerCallback):
        def on_send_end(self):
            made.release()

    share = WorkShare(rounds_per_version=2, total_rounds=8, max_staleness=1)
    maker = make_maker(list(sinks)[:1], share=share, callbacks=[Signal()])

    models = dict(zip(("actor", "critic"), trainer_models(), strict=True))

    def send(version, bound):
        deliver(messages_of(models, header=header_of(version, max_staleness=bound)), maker)

    loop = Background(maker.workingloop, lambda: [numbered(0, 8)])
    assert made.acquire(timeout=PATIENCE)
    send(1, 0)
    send(2, 0)
    assert made.acquire(timeout=PATIENCE)
    send(3, 1)
    loop.result()
    (sink,) = list(sinks.values())[:1]
    assert ray.get(sink.versions.remote()) == [0] * 4 + [2] * 2 + [3] * 2
    assert ray.get(sink.sample_ids.remote()) == list(range(8))
