"""`coati replay`: a run re-executed from its journal is identical bit for bit, or the first difference is named.

The runs have real models of a few hundred weights, and makers that take turns with the trainer in random order: samples
are delivered versions after they were started, weights change between two tokens, a maker dies and its successor gets
weights in the middle of a version, and the run is stopped and resumed.
"""

import copy
import functools
import json
import random
import shutil
import zlib

import pytest
import tiny
import torch

from coati import build
from coati.actors.host import Host
from coati.actors.maker import Maker
from coati.actors.options import MakerOptions, TrainerOptions
from coati.actors.ppo import PlainPPOTrainer
from coati.batching import split_experience_batch
from coati.cli.main import main
from coati.config import build_config, dump_config
from coati.errors import CheckpointError, ConfigError, ReplayDiffers
from coati.experience_maker.work_source import LeasedPrompts
from coati.ledger.audit import audit_run
from coati.ledger.journal import Journal, read_journal
from coati.peers import LocalPeers
from coati.replay import replay
from coati.trainer.checkpoints import find_checkpoint

pytestmark = pytest.mark.usefixtures("one_thread")

REWARD = """
def likes_early_letters(completions):
    return [sum(word in "abcd" for word in text.split()) / 4 for text in completions]
"""


class InterleavedMaker(Maker):
    """One of several makers in a process. New weights wait in its mailbox until it reads them."""

    def __init__(self, name, config, peers):
        with torch.random.fork_rng():  # with Ray it is built in its own process
            super().__init__(
                ["trainer"],
                functools.partial(build.make_strategy, config, "maker"),
                functools.partial(build.maker_models, config),
                options=MakerOptions.from_run(config, build.Parts()),
                host=Host(name, peers),
            )
        self._mail, self._scored = [], []
        self.prompts = LeasedPrompts(
            build.make_prompts(config),
            ["trainer"],
            build.ledger_rules(config),
            self.pipeline.served,
            peers=peers,
            maker_name=name,
        )

    def update_experience_maker(self, *, message):
        self._mail.append(copy.deepcopy(message))

    def look(self):
        while self._mail:
            super().update_experience_maker(message=self._mail.pop(0))

    def advance(self, dice):
        """Generate a token of each sample, admit new prompts among them, and load new weights in between."""
        if dice.random() < 0.3 or not self.pipeline.served.wait_for_full_update(0.0):
            self.look()
        if self._scored and dice.random() < 0.5:
            scored = self._scored.pop(0)
            made = self.pipeline.finish_batch(scored)
            items = [] if made is None else split_experience_batch(made)
            self._sender.send(self.prompts.close_leases(scored, items))
        if not self.pipeline.num_in_progress or dice.random() < 0.3:
            prompts = self.prompts.poll(dice.randrange(1, 4))
            if prompts is not None:
                self.pipeline.add_samples(prompts)
        if self.pipeline.num_in_progress and (batch := self.pipeline.generate_and_score()) is not None:
            self._scored.append(batch)


class Interleaved(PlainPPOTrainer):
    """A run with several makers on one thread."""

    def __init__(self, config, *, seed, stops_at=None, dies=False, checkpoint=None):
        self._dice, self._stops_at, self._dies = random.Random(seed), stops_at, dies
        self._config, peers = config, LocalPeers(trainer=self)
        super().__init__(
            ["maker-0", "maker-1"],
            functools.partial(build.make_strategy, config, "trainer"),
            functools.partial(build.trainer_models, config),
            options=TrainerOptions.from_run(config, build.Parts(), resume=checkpoint),
            host=Host("trainer", peers),
        )
        self._makers = {name: InterleavedMaker(name, config, peers) for name in self.maker_names}
        peers.targets |= self._makers
        train = config.train
        self.sync_models_to_remote_makers()
        self.fit(train.total_steps, train.update_steps, train.epochs)
        self._buffer.close()

    def next_batch(self):
        if self._dies and self._num_batches % self._config.train.update_steps and self.version:
            self._dies = False
            self._replace("maker-1")
        while not self.should_stop() and (batch := self._buffer.try_sample(0.0)) is None:
            self._dice.choice(list(self._makers.values())).advance(self._dice)
        if self.should_stop():
            return None
        for _ in range(2):  # makers continue while the trainer trains
            self._dice.choice(list(self._makers.values())).advance(self._dice)
        return batch

    def publish(self):
        super().publish()
        self._sender.wait_until_idle()  # the mailboxes must depend on the dice only

    def _replace(self, name):
        """Kill the maker with its samples in flight; its successor gets the current weights."""
        self.release_maker(name, "died")
        self._makers[name] = InterleavedMaker(name, self._config, self.host.peers)
        self.change_makers(["maker-0"])
        self.host.peers.targets |= self._makers
        self.change_makers(list(self._makers))
        self._update_late_makers()

    def should_stop(self):
        return self._stops_at is not None and self._num_batches >= self._stops_at


def events_of(folder):
    return read_journal(folder / "ledger" / "stream-0.jsonl").events


def change(folder, number, **changes):
    """Rewrite the journal with changed values in an event."""
    path = folder / "ledger" / "stream-0.jsonl"
    records = [json.loads(line[9:]) for line in path.read_text().splitlines()]
    events = [event for record in records[1:] for event in record]
    events[number] |= changes
    bodies = [json.dumps(record).encode() for record in (records[0], events)]
    path.write_bytes(b"".join(b"%08x %b\n" % (zlib.crc32(body), body) for body in bodies))


def find(folder, kind, nth=0):
    """Return the position of the nth event of a kind, and the event."""
    return [(number, event) for number, event in enumerate(events_of(folder)) if kind in event][nth]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("words")
    tiny.save_words(folder)
    (folder / "rewards_of_the_replay_tests.py").write_text(REWARD)
    return folder


@pytest.fixture(scope="module")
def settings(files):
    def build(output, **changes):
        sections = {
            "run": {"seed": 1, "output": str(output)},
            "model": {"path": str(files / "model"), "device": "cpu"},
            "prompts": {"path": str(files / "prompts.jsonl")},
            "reward": {"function": "rewards_of_the_replay_tests:likes_early_letters", "search_paths": [str(files)]},
            "rollout": {"prompts_per_batch": 3, "max_new_tokens": 6, "in_flight": True},
            "train": {"total_steps": 13, "update_steps": 2, "batch_size": 4, "save_every": 1, "actor_lr": 0.02},
            "topology": {"threads_per_actor": 1, "makers": 2, "lead": 2, "max_staleness": 2},
        }
        names = sections.keys() | changes.keys()
        config = build_config({name: {**sections.get(name, {}), **changes.get(name, {})} for name in names})
        output.mkdir()
        (output / "config.toml").write_text(dump_config(config))
        return config

    return build


@pytest.fixture(scope="module")
def original(settings, tmp_path_factory):
    """A run that was stopped in the middle of a version and resumed, and in which a maker died."""
    config = settings(tmp_path_factory.mktemp("original") / "run")
    Interleaved(config, seed=0, stops_at=7, dies=True)
    checkpoint, state = find_checkpoint(config.output_folder / "checkpoints")
    assert state["version"] == 3  # one batch of the next version was trained on and lost
    Interleaved(config, seed=1, checkpoint=checkpoint)
    return config.output_folder


@pytest.fixture
def finished(original, tmp_path):
    """A copy of the original run, to be modified."""
    return shutil.copytree(original, tmp_path / "copy")


def check_variety(events):
    """Check that the run has the events that are hard to replay."""
    deliveries = [event for event in events if "deliver" in event]
    samples = [versions for event in deliveries for versions in event["written_by"]]
    assert any(len(versions) > 1 for versions in samples), "no weights came between two tokens"
    (late,) = [event for event in events if "makers" in event]
    assert late["samples"] % 8 == 4, "the successor did not get its weights in the middle of a version"


def test_a_resumed_run_replays_bit_for_bit(finished):
    events = events_of(finished)
    check_variety(events)
    assert any("resume" in event for event in events)
    assert audit_run(finished).oldest > 0, "no sample is older than its batch"
    seen = []
    result = replay(str(finished), on_version=lambda *numbers: seen.append(numbers))
    assert (result.version, result.num_samples) == (7, 52)  # the last version has one batch
    assert seen == [(version, 7) for version in range(8)]


def test_groups_adapters_epochs_and_the_reference_engine_replay(settings, tmp_path):
    config = settings(
        tmp_path / "run",
        rollout={"engine": "reference", "samples_per_prompt": 2},
        algorithm={"name": "grpo"},
        lora={"rank": 2},
        train={"epochs": 2, "save_every": 0, "total_steps": 7},
    )
    Interleaved(config, seed=3, dies=True)
    check_variety(events_of(tmp_path / "run"))
    assert replay(tmp_path / "run").version == 4


def test_a_run_stopped_in_the_middle_of_a_version_replays(settings, tmp_path):
    folder = tmp_path / "run"
    Interleaved(settings(folder), seed=5, stops_at=5)
    _, last = find(folder, "train", -1)
    assert last["samples"] == 20
    assert replay(folder).num_samples == 20
    assert replay(folder, until=1).num_samples == 8


def test_a_run_of_groups_that_was_stopped_amid_one_replays_silently(settings, tmp_path, caplog):
    folder = tmp_path / "run"
    groups = {"algorithm": {"name": "grpo"}, "rollout": {"samples_per_prompt": 8}, "train": {"total_steps": 12}}
    Interleaved(settings(folder, **groups), seed=5, stops_at=5)  # batches of 4
    assert find(folder, "train", -1)[1]["samples"] == 20
    caplog.clear()
    assert replay(folder).num_samples == 20
    assert replay(folder, until=1).num_samples == 8
    assert "training ends" not in caplog.text


def test_the_first_weight_that_differs_is_named(finished):
    number, event = find(finished, "publish", 3)
    digests = event["weights"]["actor"]
    change(finished, number, weights={**event["weights"], "actor": f"{digests[:8]}01234567{digests[16:]}"})
    with pytest.raises(ReplayDiffers, match=r"version 2 differs in 1 of \d+ weights.*actor.*layers\.0.*01234567"):
        replay(finished)
    assert replay(finished, until=1).version == 1


@pytest.mark.parametrize("what", ["order of training", "weights of a batch"])
def test_a_modified_journal_is_detected(finished, what, capsys, monkeypatch):
    if what == "order of training":  # swap samples of the first two batches
        events = events_of(finished)
        delivered = {number: place for place, event in enumerate(events) for number in event.get("deliver", ())}
        picks = [(place, event) for place, event in enumerate(events) if "pick" in event]
        pairs = ((one, other) for one in picks[:4] for other in picks[4:8] if delivered[other[1]["pick"][0]] < one[0])
        (first, one), (last, other) = next(pairs)
        change(finished, first, **other)
        change(finished, last, **one)
        expected = "version 1 differs"
    else:
        number, event = next(
            (n, event)
            for n, event in enumerate(events_of(finished))
            if "deliver" in event and all(versions[0] >= 1 for versions in event["written_by"])
        )
        change(finished, number, written_by=[[0]] * len(event["written_by"]))
        expected = "differs in"
    monkeypatch.setattr("sys.argv", ["coati", "replay", str(finished)])
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 1
    assert expected in capsys.readouterr().out


def test_a_reward_passed_from_python_is_passed_again(finished, capsys, monkeypatch):
    path = finished / "config.toml"
    path.write_text(path.read_text().replace("rewards_of_the_replay_tests:likes", "__main__:likes"))
    monkeypatch.setattr("sys.argv", ["coati", "replay", str(finished)])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    assert "coati.replay.replay(folder, parts=coati.build.Parts(reward=...))" in capsys.readouterr().err

    def likes_early_letters(completions):
        return [sum(word in "abcd" for word in text.split()) / 4 for text in completions]

    assert replay(finished, until=1, parts=build.Parts(reward=likes_early_letters)).version == 1


def test_runs_that_cannot_be_replayed_are_rejected_with_the_reason(settings, tmp_path):
    with pytest.raises(CheckpointError, match="has no journals"):
        replay(tmp_path)
    config = settings(tmp_path / "run")
    journal = Journal(tmp_path / "run" / "ledger" / "stream-0.jsonl", build.ledger_rules(config), run="r")
    journal.write([{"grant": [0], "maker": "m", "version": 0}, {"train": 1, "samples": 0}])
    with pytest.raises(ConfigError, match="GPU"):
        replay(tmp_path / "run")
    journal.write([{"pick": [0]}])
    with pytest.raises(CheckpointError, match="group 0: pick"):
        replay(tmp_path / "run")
    two = settings(tmp_path / "two", topology={"trainers": 2})
    for stream in range(2):
        Journal(tmp_path / "two" / "ledger" / f"stream-{stream}.jsonl", build.ledger_rules(two, stream), run="r")
    with pytest.raises(ConfigError, match="one trainer"):
        replay(tmp_path / "two")
