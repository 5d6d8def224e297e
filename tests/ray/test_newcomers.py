"""Newcomers that fail, at each point of their way in: the run goes on with what it had. A real crew and scaler.

Makers and trainers are fakes in this process, whose answers are references that Ray resolves, fails or never resolves.
"""

import contextlib
import itertools
from collections import Counter
from types import SimpleNamespace

import pytest
from ray_testing import Method

from coati.config import build_config
from coati.errors import PeerDied, ScalingRefused
from coati.ledger import Standing
from coati.ray import crew as crew_module
from coati.ray.crew import Crew
from coati.ray.scaling import Scaler


class FakeMaker:
    def __init__(self, name, story):
        self.name, self.story, self.shares = name, story, []
        self.has_weights, self.is_held = True, False
        self.progress = Method(lambda: SimpleNamespace(has_weights=self.has_weights))
        self.hold_work = Method(self._hold)
        self.deal_work = Method(self._deal)

    def _hold(self):
        self.is_held = True
        return Standing(rounds_begun=4, next_position=4)

    def _deal(self, share, loader):
        self.is_held = False
        self.shares.append(share)


class FakeTrainer:
    def __init__(self, name, story):
        self.name, self.story, self.faults = name, story, {}
        self.change_makers = Method(self._change)
        self.newcomer_faults = Method(lambda: self.faults)

    def _change(self, names, updated, *, newcomers):
        self.story.append(("told", list(names), list(newcomers)))
        self.on_change()

    def on_change(self):
        """What a test lets happen there."""


class Stage:
    """A crew of one maker and one trainer, and what has happened to it."""

    def __init__(self, monkeypatch, **topology):
        self.story, self.started, self.actors, self.options, self.working = [], [], {}, {}, set()
        self.on_create = lambda maker: None
        monkeypatch.setattr(crew_module, "_MAKER", self._actor_class(FakeMaker))
        monkeypatch.setattr(crew_module, "_TRAINER", self._actor_class(FakeTrainer))
        monkeypatch.setattr(crew_module, "_kill", self._kill)
        config = build_config(
            {
                "model": {"path": "m"},
                "prompts": {"path": "p.jsonl"},
                "reward": {"function": "module:function"},
                "train": {"total_steps": 6, "batch_size": 2},
                "topology": topology,
                "deadlines": {"start_seconds": 0.4, "batch_seconds": 0.4, "update_seconds": 0.4},
            }
        )
        self.crew = Crew(config, checkpoints=None)
        self.crew.create(should_stop=lambda: False)
        self.maker, self.trainer = self.actors["maker-0"], self.actors["trainer-0"]
        self.maker.shares.append(self.crew.membership.shares["maker-0"])
        self.scaler = Scaler(
            self.crew,
            deadlines=config.deadlines,
            is_private=True,
            start=lambda name, prompts: self.started.append(name),
            is_working=self.working.__contains__,
            before_end=lambda names: None,
        )

    def _actor_class(self, fake):
        def create(*, name, **options):
            self.options[name] = options
            self.actors[name] = fake(name, self.story)
            self.on_create(self.actors[name])
            return self.actors[name]

        return SimpleNamespace(options=lambda **options: SimpleNamespace(remote=lambda **_: create(**options)))

    def _kill(self, actor):
        self.story.append(("killed", actor.name))

    def scale_to(self, makers):
        for _ in self.scaler.scale_to(makers):
            pass

    @property
    def killed(self):
        return [what[1] for what in self.story if what[0] == "killed"]

    def rounds(self):
        """How often each round has been dealt to anybody who was ever there."""
        shares = [actor.shares[-1] for actor in self.actors.values() if getattr(actor, "shares", [])]
        return Counter(itertools.chain(*([one.round_of(number) for number in range(one.total)] for one in shares)))


@pytest.fixture
def stage(monkeypatch, cluster):
    return Stage(monkeypatch)


def test_newcomers_are_tried_then_dealt_in_then_counted_on(stage):
    stage.scale_to(3)
    everybody = ["maker-0", "maker-1", "maker-2"]
    assert stage.story == [("told", everybody, everybody[1:]), ("told", everybody, [])]
    assert stage.started == everybody[1:]
    assert stage.crew.membership.members == tuple(everybody)
    assert stage.rounds() == Counter(range(12))


@pytest.mark.parametrize(("placement", "scheduling"), [("spread", "SPREAD"), ("pack", None), ("auto", None)])
def test_newcomers_are_outside_the_reserved_places_and_spread_over_nodes_if_all_are(
    monkeypatch, cluster, placement, scheduling
):
    stage = Stage(monkeypatch, placement=placement)
    try:
        stage.scale_to(2)
    finally:
        stage.crew.end()
    assert stage.options["maker-1"].get("scheduling_strategy") == scheduling
    assert ("scheduling_strategy" in stage.options["maker-0"]) == (placement != "auto")


def fail_to_be_made(stage, answers):
    def create(maker):
        if maker.name == "maker-2":
            del stage.actors["maker-2"]  # there was none
            raise ValueError("the name is taken")

    stage.on_create = create


def be_dead(stage, answers):
    def create(maker):
        if maker.name == "maker-2":
            maker.progress = Method(answers.dead)
        else:
            maker.progress = Method(answers.never)  # nobody waits for the one when the other is dead

    stage.on_create = create


def not_load(stage, answers):
    stage.on_create = lambda maker: setattr(maker, "progress", Method(answers.never))


def die_before_the_weights(stage, answers):
    stage.trainer.on_change = lambda: setattr(stage.actors["maker-1"], "progress", Method(answers.dead))


def reject_the_weights(stage, answers):
    stage.trainer.faults = {"maker-1": "the head is wider here"}


def get_no_weights(stage, answers):
    stage.on_create = lambda maker: setattr(maker, "has_weights", False)


def have_trainers_that_are_busy(stage, answers):
    stage.trainer.change_makers = Method(lambda *_, **__: answers.never())


def not_take_its_part(stage, answers):
    def refuse(share, loader):
        assert stage.maker.is_held
        raise OSError("no such file: prompts.jsonl")

    stage.on_create = lambda maker: setattr(maker, "deal_work", Method(refuse))


def be_silent_when_parts_are_dealt(stage, answers):
    stage.on_create = lambda maker: setattr(maker, "deal_work", Method(lambda *_: answers.never()))


def meet_a_maker_that_is_not_held_in_time(stage, answers):
    stage.maker.hold_work = Method(answers.never)


FAILURES = [
    (fail_to_be_made, "the name is taken", ["maker-1"]),
    (be_dead, "maker-2 died while waiting for maker-1, maker-2 to start", ["maker-1", "maker-2"]),
    (not_load, r"waited 0.4 s for .* load their models \(maker-1, maker-2 did not", ["maker-1", "maker-2"]),
    (die_before_the_weights, "maker-1 died while waiting for", ["maker-1", "maker-2"]),
    (reject_the_weights, "maker-1: the head is wider here", ["maker-1", "maker-2"]),
    (get_no_weights, "waited 0.4 s for maker-1, maker-2 to get the weights", ["maker-1", "maker-2"]),
    (have_trainers_that_are_busy, "waited 0.4 s for the trainers to take note", ["maker-1", "maker-2"]),
    (not_take_its_part, "no such file: prompts.jsonl", ["maker-1", "maker-2"]),
    (be_silent_when_parts_are_dealt, "waited 0.4 s for newcomers to take their parts", ["maker-1", "maker-2"]),
    (meet_a_maker_that_is_not_held_in_time, "waited 0.4 s for work to be dealt", ["maker-1", "maker-2"]),
]


@pytest.mark.parametrize(("fail", "reason", "made"), FAILURES, ids=[case[0].__name__ for case in FAILURES])
def test_newcomers_that(fail, reason, made, stage, answers):
    fail(stage, answers)
    with pytest.raises(
        ScalingRefused, match=f"maker-1, maker-2 could not join, so the run goes on without: .*{reason}"
    ):
        stage.scale_to(3)
    assert stage.killed == made
    assert stage.crew.joining == {}
    assert stage.crew.updaters == {"maker-0": 0}
    told = [what for what in stage.story if what[0] == "told"]
    if told:  # of the newcomers, and then that they are gone, before they are
        assert told[1:] == [("told", ["maker-0"], [])]
        assert stage.story.index(told[-1]) < stage.story.index(("killed", "maker-1"))
    assert stage.started == []
    assert not stage.maker.is_held
    assert stage.crew.membership.members == ("maker-0",)
    stage.actors = {"maker-0": stage.maker}
    assert stage.rounds() == Counter(range(12)), "all of the work is with those who stay"


def test_after_a_refusal_others_may_join(stage, answers):
    not_take_its_part(stage, answers)
    with contextlib.suppress(ScalingRefused):
        stage.scale_to(2)
    stage.on_create = lambda maker: setattr(maker, "progress", Method(answers.dead))
    with pytest.raises(ScalingRefused, match="maker-2 died while waiting for maker-2 to start and load its models: "):
        stage.scale_to(2)
    stage.on_create = lambda maker: None
    stage.scale_to(2)
    assert stage.crew.membership.members == ("maker-0", "maker-3")
    assert stage.rounds() == Counter(range(12))


def test_without_room_for_newcomers_what_they_need_and_what_is_free_are_counted(stage, monkeypatch):
    monkeypatch.setattr(crew_module.ray, "available_resources", lambda: {"CPU": 1.0})
    with pytest.raises(ScalingRefused, match=r"^2 more makers need 2 CPUs, but 1 is free\."):
        stage.crew.name_newcomers(2, is_private=False)
    monkeypatch.setattr(crew_module.ray, "available_resources", dict)
    with pytest.raises(ScalingRefused, match=r"^1 more maker needs 1 CPU, but 0 are free\."):
        stage.crew.name_newcomers(1, is_private=False)


def test_on_one_machine_there_are_so_many_actors_for_a_core(stage, monkeypatch):
    monkeypatch.setattr(crew_module.os, "cpu_count", lambda: 1)
    with pytest.raises(
        ScalingRefused, match=r"^7 more makers would make it 9 actors on 1 core, .* may have 8 for each"
    ):
        stage.crew.name_newcomers(7, is_private=True)
    assert len(stage.crew.name_newcomers(6, is_private=True)) == 6


def test_a_newcomer_that_misses_an_update_while_it_is_dealt_in_leaves_and_its_rounds_go_back(stage):
    def note_fault():
        if stage.started:
            stage.trainer.faults = {"maker-1": "it was late"}

    stage.trainer.on_change = note_fault
    with pytest.raises(ScalingRefused, match="maker-1 joined and had to leave again: maker-1: it was late"):
        stage.scale_to(2)
    assert stage.started == stage.killed == ["maker-1"]
    assert stage.crew.membership.members == ("maker-0",)
    assert stage.rounds() == Counter(range(12))


def test_trainers_that_answer_late_do_not_undo_a_deal(stage, answers):
    def answer_no_more():
        stage.trainer.change_makers = Method(lambda *_, **__: answers.never())

    stage.trainer.on_change = answer_no_more  # after the first time, when they hear of the newcomer
    stage.scale_to(2)
    assert stage.crew.membership.members == ("maker-0", "maker-1")
    assert stage.killed == []


def test_makers_that_cannot_leave_now_stay(stage, answers):
    stage.scale_to(2)
    stage.maker.hold_work = Method(answers.never)
    with pytest.raises(ScalingRefused, match=r"maker-1 cannot leave now, so the run goes on as it was: waited 0\.4 s"):
        stage.scale_to(1)
    assert not stage.actors["maker-1"].is_held
    assert stage.crew.membership.members == ("maker-0", "maker-1")
    assert stage.rounds() == Counter(range(12))
    stage.maker.hold_work = Method(stage.maker._hold)
    stage.trainer.change_makers = Method(lambda *_, **__: answers.never())
    with pytest.raises(
        ScalingRefused, match=r"maker-1 makes nothing more, but stays until the run ends: waited 0\.4 s"
    ):
        stage.scale_to(1)
    assert stage.killed == []


def test_a_member_that_is_dead_when_work_is_dealt_anew_is_an_error_by_name(stage, answers):
    stage.scale_to(2)
    stage.actors["maker-1"].hold_work = Method(answers.dead)
    with pytest.raises(PeerDied, match="maker-1 died while waiting for work to be dealt anew"):
        stage.scale_to(1)
    assert not stage.maker.is_held
