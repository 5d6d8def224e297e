"""Makers that join and leave, and newcomers that fail at each point of their way in: the run continues as it was.

A real crew and scaler; makers and trainers are objects on threads.
"""

import contextlib
import itertools
import time
from collections import Counter
from types import SimpleNamespace

import pytest
from thread_peers import PATIENCE, ThreadPeers

from coati.config import build_config
from coati.errors import PeerDied, ScalingRefused
from coati.ledger import Standing
from coati.ray import run_actors
from coati.ray.run_actors import RunActors
from coati.ray.scaling import Scaler


class FakeMaker:
    def __init__(self):
        self.shares = []
        self.has_weights, self.is_held, self.part_error = True, False, None

    def progress(self):
        return SimpleNamespace(has_weights=self.has_weights)

    def hold_work(self):
        self.is_held = True
        return Standing(rounds_begun=4, next_position=4)

    def deal_work(self, share, loader):
        if self.part_error is not None:
            raise self.part_error
        self.is_held = False
        self.shares.append(share)


class FakeTrainer:
    def __init__(self, story):
        self.story, self.faults, self.on_change = story, {}, lambda: None

    def change_makers(self, names, updated, *, newcomers):
        self.story.append(("told", list(names), list(newcomers)))
        self.on_change()

    def newcomer_faults(self):
        return self.faults


class Stage:
    """A crew of one maker and one trainer, and what has happened to it."""

    def __init__(self, seconds=PATIENCE):
        self.story, self.started, self.options, self.working = [], [], {}, set()
        self.peers, self.on_create, self.free = ThreadPeers(), lambda name: None, {}
        config = build_config(
            {
                "model": {"path": "m"},
                "prompts": {"path": "p.jsonl"},
                "reward": {"function": "module:function"},
                "train": {"total_steps": 6, "batch_size": 2},
                "deadlines": dict.fromkeys(("start_seconds", "batch_seconds", "update_seconds"), seconds),
            }
        )
        self.run_actors = RunActors(config, checkpoints=None, host=self)
        self.run_actors.create(should_stop=lambda: False)
        self.maker, self.trainer = self.peers["maker-0"].target, self.peers["trainer-0"].target
        self.maker.shares.append(self.run_actors.membership.shares["maker-0"])
        self.scaler = Scaler(
            self.run_actors,
            deadlines=config.deadlines,
            is_private=True,
            start=lambda name, prompts: self.started.append(name),
            is_working=self.working.__contains__,
            before_end=lambda names: None,
        )

    def start(self, actor_class, ray_options, /, **arguments):
        name = ray_options["name"]
        self.options[name] = ray_options
        peer = self.peers.add(name, FakeTrainer(self.story) if name.startswith("trainer") else FakeMaker())
        self.on_create(name)
        return peer

    def kill(self, peer):
        self.story.append(("killed", peer.name))
        peer.kill()

    def free_resources(self):
        return self.free

    def silence(self, name, method):
        """Let an actor not answer."""
        self.peers.hold(name, method, nth=None)

    def scale_to(self, makers):
        for _ in self.scaler.scale_to(makers):
            time.sleep(0.001)  # the others' turn

    @property
    def killed(self):
        return [what[1] for what in self.story if what[0] == "killed"]

    def rounds(self, *names):
        """How often each round was dealt to one of these makers."""
        shares = [self.peers[name].target.shares[-1] for name in names]
        return Counter(itertools.chain(*([one.round_of(number) for number in range(one.total)] for one in shares)))


@pytest.fixture
def stage():
    return Stage()


@pytest.fixture
def hasty():
    """A stage whose deadlines pass while a test waits."""
    return Stage(seconds=0.3)


def test_newcomers_are_tried_then_dealt_in_then_counted_on(stage):
    stage.scale_to(3)
    everybody = ["maker-0", "maker-1", "maker-2"]
    assert stage.story == [("told", everybody, everybody[1:]), ("told", everybody, [])]
    assert stage.started == everybody[1:]
    assert stage.run_actors.membership.members == tuple(everybody)
    assert stage.rounds(*everybody) == Counter(range(12))


def fail_to_be_made(stage):
    def create(name):
        if name == "maker-2":
            raise ValueError("the name is taken")

    stage.on_create = create


def be_dead(stage):
    def create(name):
        if name == "maker-2":
            stage.peers.kill_at(name, "progress")
        else:
            stage.silence(name, "progress")  # it is not waited for when the other is dead

    stage.on_create = create


def not_load(stage):
    stage.on_create = lambda name: stage.silence(name, "progress")


def die_before_the_weights(stage):
    stage.trainer.on_change = lambda: stage.peers.kill("maker-1")


def reject_the_weights(stage):
    stage.trainer.faults = {"maker-1": "the head is wider here"}


def get_no_weights(stage):
    stage.on_create = lambda name: setattr(stage.peers[name].target, "has_weights", False)


def have_trainers_that_are_busy(stage):
    stage.silence("trainer-0", "change_makers")


def not_take_its_part(stage):
    error = OSError("no such file: prompts.jsonl")
    stage.on_create = lambda name: setattr(stage.peers[name].target, "part_error", error)


def be_silent_when_parts_are_dealt(stage):
    stage.on_create = lambda name: stage.silence(name, "deal_work")


def meet_a_maker_that_is_not_held_in_time(stage):
    stage.silence("maker-0", "hold_work")


FAILURES = [
    (fail_to_be_made, "the name is taken", ["maker-1"], "stage"),
    (be_dead, "maker-2 died", ["maker-1", "maker-2"], "stage"),
    (not_load, "maker-1, maker-2 did not answer", ["maker-1", "maker-2"], "hasty"),
    (die_before_the_weights, "maker-1 died", ["maker-1", "maker-2"], "stage"),
    (reject_the_weights, "maker-1: the head is wider here", ["maker-1", "maker-2"], "stage"),
    (get_no_weights, "weights", ["maker-1", "maker-2"], "hasty"),
    (have_trainers_that_are_busy, "trainer-0 did not answer", ["maker-1", "maker-2"], "hasty"),
    (not_take_its_part, "no such file: prompts.jsonl", ["maker-1", "maker-2"], "stage"),
    (be_silent_when_parts_are_dealt, "maker-1 did not answer", ["maker-1", "maker-2"], "hasty"),
    (meet_a_maker_that_is_not_held_in_time, "maker-0 did not answer", ["maker-1", "maker-2"], "hasty"),
]


@pytest.mark.parametrize(("fail", "reason", "made", "kind"), FAILURES, ids=[case[0].__name__ for case in FAILURES])
def test_newcomers_that(fail, reason, made, kind, request):
    stage = request.getfixturevalue(kind)
    fail(stage)
    with pytest.raises(ScalingRefused, match=rf"maker-1, maker-2 could not join.*{reason}"):
        stage.scale_to(3)
    assert stage.killed == made
    assert stage.run_actors.joining == {}
    assert stage.run_actors.updaters == {"maker-0": 0}
    told = [what for what in stage.story if what[0] == "told"]
    if told:  # of the newcomers, and then that they are gone
        assert told[1:] == [("told", ["maker-0"], [])]
    assert stage.started == []
    if fail is not meet_a_maker_that_is_not_held_in_time:
        stage.peers["maker-0"].drain()
    assert not stage.maker.is_held
    assert stage.run_actors.membership.members == ("maker-0",)
    assert stage.rounds("maker-0") == Counter(range(12)), "all of the work is with those who stay"


def test_after_a_refusal_others_may_join(stage):
    not_take_its_part(stage)
    with contextlib.suppress(ScalingRefused):
        stage.scale_to(2)
    stage.on_create = lambda name: stage.peers.kill_at(name, "progress")
    with pytest.raises(ScalingRefused, match="maker-2 died"):
        stage.scale_to(2)
    stage.on_create = lambda name: None
    stage.scale_to(2)
    assert stage.run_actors.membership.members == ("maker-0", "maker-3")
    assert stage.rounds("maker-0", "maker-3") == Counter(range(12))


def test_without_room_for_newcomers_what_they_need_and_what_is_free_are_counted(stage):
    stage.free = {"CPU": 1.0}
    with pytest.raises(ScalingRefused, match=r"2 CPUs.* 1 is free"):
        stage.run_actors.name_newcomers(2, is_private=False)
    stage.free = {}
    with pytest.raises(ScalingRefused, match=r"1 CPU.* 0 are free"):
        stage.run_actors.name_newcomers(1, is_private=False)


def test_on_one_machine_there_are_so_many_actors_for_a_core(stage, monkeypatch):
    monkeypatch.setattr(run_actors.os, "cpu_count", lambda: 1)
    with pytest.raises(ScalingRefused, match="9 actors"):
        stage.run_actors.name_newcomers(7, is_private=True)
    assert len(stage.run_actors.name_newcomers(6, is_private=True)) == 6


def test_a_newcomer_that_misses_an_update_while_it_is_dealt_in_leaves_and_its_rounds_go_back(stage):
    def note_fault():
        if stage.started:
            stage.trainer.faults = {"maker-1": "it was late"}

    stage.trainer.on_change = note_fault
    with pytest.raises(ScalingRefused, match=r"maker-1.*it was late"):
        stage.scale_to(2)
    assert stage.started == stage.killed == ["maker-1"]
    assert stage.run_actors.membership.members == ("maker-0",)
    assert stage.rounds("maker-0", "maker-1") == Counter(range(12))


def test_trainers_that_answer_late_do_not_undo_a_deal(hasty):
    hasty.peers.hold("trainer-0", "change_makers", nth=2)  # when newcomers are counted on
    hasty.scale_to(2)
    assert hasty.run_actors.membership.members == ("maker-0", "maker-1")
    assert hasty.killed == []


def test_makers_that_cannot_leave_now_stay(hasty):
    hasty.scale_to(2)
    held = hasty.peers.hold("maker-0", "hold_work")
    with pytest.raises(ScalingRefused, match=r"maker-1.*maker-0 did not answer"):
        hasty.scale_to(1)
    assert hasty.run_actors.membership.members == ("maker-0", "maker-1")
    assert hasty.rounds("maker-0", "maker-1") == Counter(range(12))
    held.release()
    hasty.silence("trainer-0", "change_makers")
    with pytest.raises(ScalingRefused, match=r"maker-1.*trainer-0 did not answer"):
        hasty.scale_to(1)
    assert hasty.killed == []


def test_a_member_that_is_dead_when_work_is_dealt_anew_is_an_error_by_name(stage):
    stage.scale_to(2)
    stage.peers.kill("maker-1")
    with pytest.raises(PeerDied, match="maker-1 died"):
        stage.scale_to(1)
    stage.peers["maker-0"].drain()
    assert not stage.maker.is_held
    assert stage.maker.shares[-1] == stage.run_actors.membership.shares["maker-0"], (
        "the other works by its share as before"
    )
