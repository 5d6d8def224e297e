"""A maker that evaluates, on threads: weights stay fixed, replies are lost, trainers die."""

import json

import pytest
import torch
from thread_peers import ThreadPeers

from coati import build
from coati.errors import CheckpointError
from coati.evaluation.schedule import EvalSchedule
from coati.evaluation.work import EvaluationWork
from coati.experience_maker import NaiveExperienceMaker
from coati.experience_maker.pipeline import ExperiencePipeline
from coati.monitor import read_jsonl
from coati.rollout import ReferenceEngine
from coati.trainer.strategies import DDPStrategy
from coati.weights.served import ServedModels, VerifiedUpdate


class Trainer:
    """The methods of a trainer that makers call."""

    def __init__(self, config, **options):
        self.records = []
        self.schedule = EvalSchedule(config.eval, record=self.records.append, **options)

    def next_evaluation(self, maker, version, incarnation):
        return self.schedule.grant(maker, version, incarnation)

    def evaluated(self, job, found):
        return self.schedule.report(job, found)

    @property
    def versions(self):
        return [record["evaluation"]["version"] for record in self.records]


class WatchedEngine(ReferenceEngine):
    """An engine that calls `before_batch` before each batch."""

    def __init__(self, model, before_batch):
        super().__init__(model)
        self._before_batch = before_batch

    def submit(self, samples):
        self._before_batch()
        super().submit(samples)


class Maker:
    """A maker of the run, without its loop."""

    def __init__(self, config, peers, before_batch=lambda: None, **options):
        models = build.maker_models(config)
        strategy = DDPStrategy(seed=0, device="cpu")
        engine = WatchedEngine(models[0], before_batch)
        maker = NaiveExperienceMaker(*models, algorithm=config.algorithm, engine=engine)
        self.served = ServedModels(maker.trained_models)
        self.pipeline = ExperiencePipeline(maker, self.served)
        self.work = EvaluationWork(
            config, None, strategy, self.served, peers=peers, trainer="trainer", maker="maker-0", **options
        )

    def turn(self):
        """Ask for an evaluation as the loop does, and run it; return whether there was one."""
        if (work := self.work.poll()) is None:
            return False
        work.run(self.pipeline)
        return True

    def update(self, version, scale=1.1):
        """A full update that scales all weights."""
        tensors = {
            (label, name): tensor * scale if tensor.is_floating_point() else tensor
            for label, module in self.served.modules.items()
            for name, tensor in module.state_dict().items()
        }
        return VerifiedUpdate(version=version, tensors=tensors, is_full=True)


@pytest.fixture
def config(config_of):
    return config_of({"best_by": "avg@2", "rollout": {"samples_per_prompt": 2, "prompts_per_batch": 2}})


def test_new_weights_wait_until_the_evaluation_is_done(config):
    trainer = Trainer(config)
    maker = Maker(config, ThreadPeers(trainer=trainer), lambda: maker.served.offer(maker.update(1)))
    calm = Maker(config, ThreadPeers(trainer=Trainer(config)))
    before = {name: tensor.clone() for name, tensor in maker.served.modules["actor"].state_dict().items()}
    assert maker.turn()
    assert maker.served.version == 1, "the new weights are committed afterwards"
    saved = build.load_actor(config, str(config.output_folder / "best")).state_dict()
    assert all(torch.equal(saved[name], tensor) for name, tensor in before.items()), "the version that was evaluated"
    assert calm.turn()
    first = config.output_folder / "evaluations" / "held-out-0.jsonl"
    assert trainer.versions == [0]
    assert len(read_jsonl(first)) == 10
    assert not maker.turn()


def test_trainers_are_notified_before_every_batch(config):
    events = []
    maker = Maker(config, ThreadPeers(trainer=Trainer(config)), lambda: events.append("batch"))
    maker.work.poll().run(maker.pipeline, lambda: events.append("notified"))
    assert events == ["notified", "batch"] * 3  # 5 prompts, 2 at a time


def test_a_report_whose_reply_is_lost_counts_once(config):
    trainer = Trainer(config)
    peers = ThreadPeers(trainer=trainer)
    peers.drop_reply("trainer", "evaluated")
    assert Maker(config, peers).turn()
    assert trainer.versions == [0]


def test_the_best_model_is_kept_across_restarts(config_of):
    config = config_of({"best_by": "avg@2", "every": 1, "rollout": {"samples_per_prompt": 2}})
    trainer = Trainer(config)
    maker = Maker(config, ThreadPeers(trainer=trainer))
    values, kept = [], []
    for version in range(4):
        if version:
            maker.served.offer(maker.update(version, scale=(3.0 if version % 2 else -3.0)))
        assert maker.turn()
        values.append(trainer.records[-1]["evaluation"]["avg@2"])
        kept.append(json.loads((config.output_folder / "best" / "evaluation.json").read_text())["version"])
    bests = [
        max(range(n + 1), key=lambda version: values[version]) for n in range(4)
    ]  # the first one, if several are equal
    assert len(set(values)) > 1, "otherwise the test shows nothing"
    assert kept == bests
    assert [record["evaluation"]["is_best"] for record in trainer.records] == [
        n == best for n, best in enumerate(bests)
    ]
    again = Trainer(config)
    successor = Maker(config, ThreadPeers(trainer=again))
    assert successor.turn()
    expected = bests[-1] == 0
    assert again.records[-1]["evaluation"]["is_best"] == expected, (
        "a model that was saved but not reported is recognised"
    )


def test_an_evaluation_whose_grant_was_lost_is_done(config):
    trainer = Trainer(config)
    peers = ThreadPeers(trainer=trainer)
    peers.drop_reply("trainer", "next_evaluation")
    assert Maker(config, peers).turn()
    assert trainer.versions == [0]


def test_a_maker_serves_the_next_trainer_if_one_dies_meanwhile(config):
    peers = ThreadPeers(trainer=Trainer(config))
    maker = Maker(config, peers, lambda: peers.kill("trainer"))
    assert maker.turn()
    assert not maker.turn(), "there is no trainer"
    second = Trainer(config, incarnation=1)
    peers.add("trainer", second)
    assert not maker.turn(), "its weights are those of the first trainer"
    maker.served.offer(VerifiedUpdate(version=0, incarnation=1, tensors=maker.update(0).tensors, is_full=True))
    maker.pipeline.experience_maker.engine._before_batch = lambda: None
    assert maker.turn()
    assert second.versions == [0]


def test_a_result_counts_even_if_the_model_cannot_be_saved(config, monkeypatch, caplog):
    def full(*args, **kwargs):
        raise CheckpointError("the disk is full")

    monkeypatch.setattr(DDPStrategy, "save_model", full)
    trainer = Trainer(config)
    assert Maker(config, ThreadPeers(trainer=trainer)).turn()
    assert trainer.versions == [0]
    assert "disk is full" in caplog.text


def test_a_stop_ends_an_evaluation_between_two_batches(config):
    trainer, batches = Trainer(config), []
    maker = Maker(config, ThreadPeers(trainer=trainer), lambda: batches.append(1), should_stop=lambda: len(batches) > 1)
    assert maker.turn()
    assert (len(batches), trainer.versions) == (2, [])
