"""Makers that join, leave and die, on threads: the run has as many as it should, and its trainers know of each."""

import re
import time
from types import SimpleNamespace

import pytest
from fake_actors import Host
from thread_peers import PATIENCE

from coati.config import build_config
from coati.errors import PeerDied, RewardError
from coati.monitor.run_log import RunLog
from coati.ray import run_actor, supervisor
from coati.ray.actor_factory import ActorFactory
from coati.ray.run_actor import Restarts
from coati.ray.supervisor import Supervisor

CLOCK = SimpleNamespace(now=0.0, monotonic=lambda: CLOCK.now, sleep=lambda seconds: None)


@pytest.fixture(autouse=True)
def driver_time(monkeypatch):
    """The driver's clock, which stands still unless a test moves it."""
    monkeypatch.setattr(CLOCK, "now", 0.0)
    for module in (supervisor, run_actor):
        monkeypatch.setattr(module, "time", CLOCK)


class Stage:
    """A run that trains, and what has happened to it."""

    def __init__(self, *, makers=1, trainers=1, max_restarts=3, is_private=True):
        self.host = Host()
        self.peers, self.killed = self.host.peers, self.host.killed
        self.restarts = Restarts(max_restarts, clock=CLOCK.monotonic)
        config = build_config(
            {
                "model": {"path": "m"},
                "prompts": {"path": "p.jsonl"},
                "reward": {"function": "module:function"},
                "train": {"total_steps": 6, "batch_size": 2},
                "topology": {"makers": makers, "trainers": trainers},
            }
        )
        factory = ActorFactory(config, host=self.host)
        factory.is_private = is_private
        self.log = RunLog(None, total_steps=6)
        self.crew = Supervisor(config, factory, self.log, self.restarts)
        self.crew.create_all(None)
        self.until(lambda: self.crew.trainer_states == {"training"} and not self.loading)
        for trainer in self.crew.trainers:
            del self.story_of(trainer)[:]

    def __getitem__(self, name):
        return self.host[name]

    def scale_to(self, makers):
        self.crew.scale_to(makers)
        self.until(lambda: not self.crew.pending)

    def turn(self):
        self.crew.turn(0.0)

    def until(self, is_reached):
        """Take turns until something is as it should be."""
        deadline = time.monotonic() + PATIENCE
        while not is_reached():
            assert time.monotonic() < deadline, f"still {self.crew.pending!r}"
            self.turn()
            time.sleep(0)  # the others' turn

    def die(self, name):
        self.peers[name].kill()
        self.turn()

    @property
    def loading(self):
        """Makers without a loop, or without weights."""
        return [name for name, maker in self.crew.makers.items() if maker.state in ("loading", "loaded")]

    @property
    def story(self):
        return self.story_of("trainer-0")

    def story_of(self, trainer):
        """What a trainer was told."""
        self.peers[trainer].call("progress").result(PATIENCE)  # after all that came before
        return self[trainer].story

    @property
    def alive(self):
        return sorted(name for name in self.crew.makers if self.peers[name].is_alive)

    def check_consistent(self):
        """The same makers are alive, counted and working."""
        names = self.alive
        assert sorted(self.crew.working_makers) == names
        assert self.crew.size == len(names)


@pytest.fixture
def stage():
    return Stage()


# Joining and leaving


def test_makers_that_join_work_at_once_and_have_joined_when_they_have_weights(stage):
    stage.host.on_start = lambda name: setattr(stage[name], "has_weights", False)
    stage.crew.scale_to(3)
    stage.until(lambda: stage.crew.working_makers == ["maker-0", "maker-1", "maker-2"])
    assert stage.crew.size == 1
    stage["maker-1"].has_weights = True
    stage.until(lambda: stage.crew.pending.startswith("maker-2 loading"))
    assert stage.crew.size == 2
    stage["maker-2"].has_weights = True
    stage.until(lambda: not stage.crew.pending)
    stage.check_consistent()
    assert stage.alive == ["maker-0", "maker-1", "maker-2"]
    assert stage.story[-1] == ("told", "maker-0", "maker-1", "maker-2")


def test_makers_that_leave_finish_their_work_and_the_rest_of_it_goes_to_others(stage, caplog):
    stage.scale_to(3)
    del stage.story[:]
    for name in ("maker-1", "maker-2"):
        stage[name].records.append({"warning": f"the last words of {name}", "kind": name})
    held = stage.peers.hold("maker-2", "stop")
    stage.crew.scale_to(1)
    assert stage.crew.size == 1
    stage.until(lambda: stage.crew.pending.startswith("maker-2 finishing"))
    assert stage.killed == ["maker-1"]
    held.release()
    stage.until(lambda: not stage.crew.pending)
    assert stage.killed == ["maker-1", "maker-2"]
    assert all(f"the last words of {name}" in caplog.text for name in stage.killed)
    assert stage.story == [
        ("release", "maker-1", "left"),
        ("told", "maker-0", "maker-2"),
        ("release", "maker-2", "left"),
        ("told", "maker-0"),
    ]
    stage.check_consistent()


def test_names_are_not_used_again_by_makers_that_join(stage):
    stage.scale_to(2)
    stage.scale_to(1)
    stage.scale_to(2)
    assert stage.alive == ["maker-0", "maker-2"]
    stage.check_consistent()


def test_without_room_what_makers_need_and_what_is_free_are_counted():
    stage = Stage(is_private=False)
    stage.host.free = {"CPU": 1.0}
    stage.crew.scale_to(3)
    assert re.search(r"2 CPUs.* 1 is free", stage.crew.refusal)
    stage.host.free = {}
    stage.crew.scale_to(2)
    assert re.search(r"1 CPU.* 0 are free", stage.crew.refusal)
    stage.check_consistent()


def test_each_maker_is_updated_by_one_trainer_which_it_keeps():
    stage = Stage(makers=3, trainers=2)
    stage.scale_to(5)
    stage.scale_to(4)
    stage.die("maker-0")
    CLOCK.now += 1.0
    stage.turn()
    stage.until(lambda: not stage.loading)
    last = [stage.story_of(f"trainer-{rank}")[-1] for rank in range(2)]
    assert [sorted(told) for told in last] == [["maker-0", "maker-2", "told"], ["maker-1", "maker-3", "told"]]


def fail_to_be_made(stage):
    def create(name):
        if name == "maker-2":
            raise ValueError("the name is taken")

    stage.host.on_start = create
    return "the name is taken"


def die(stage):
    stage.host.on_start = lambda name: name == "maker-2" and stage.peers.kill(name)
    return "killed by the test"


def not_load(stage):
    stage.host.on_start = lambda name: stage[name].fail(OSError("no such file: prompts.jsonl"))
    return r"no such file: prompts\.jsonl"


@pytest.mark.parametrize("fail", [fail_to_be_made, die, not_load])
def test_of_makers_that_cannot_join_nothing_is_left(stage, fail):
    reason = fail(stage)
    create = stage.host.on_start

    def create_without_weights(name):
        if name.startswith("maker"):
            stage[name].has_weights = False
        create(name)

    stage.host.on_start = create_without_weights
    stage.scale_to(3)
    assert re.search(f"maker-1, maker-2 could not join.*{reason}", stage.crew.refusal)
    assert stage.story[-1] == ("told", "maker-0")
    assert stage.alive == ["maker-0"]
    assert stage.restarts.counts["makers"] == 0
    stage.check_consistent()
    stage.host.on_start = lambda name: None
    stage.scale_to(2)  # others may join
    assert stage.alive == ["maker-0", "maker-3"]
    stage.check_consistent()


def test_makers_that_fail_together_are_refused_together(stage):
    held = []

    def create(name):
        stage[name].has_weights = False
        held.append(stage.peers.hold(name, "progress"))

    stage.host.on_start = create
    stage.crew.scale_to(3)
    stage.turn()
    for name in ("maker-1", "maker-2"):
        stage.peers.kill(name)
    stage.until(lambda: stage.crew.refusal)
    assert stage.crew.refusal.startswith("maker-1, maker-2 could not join")
    stage.check_consistent()


def test_a_lost_answer_of_a_maker_that_joins_is_asked_for_again(stage):
    stage.host.on_start = lambda name: stage.peers.drop_reply(name, "progress")
    stage.scale_to(2)
    stage.check_consistent()


# Death


def test_a_maker_that_dies_is_replaced_after_a_while_under_its_name(stage):
    stage.die("maker-0")
    assert stage.crew.size == 1, "it will be there again"
    assert stage.crew.working_makers == []
    CLOCK.now += 0.4
    stage.turn()
    assert stage.alive == []
    CLOCK.now += 0.2
    stage.turn()
    assert stage.alive == ["maker-0"]
    stage.until(lambda: not stage.loading)
    # Told twice: to trainers its successor is a maker that joins, and needs weights.
    assert stage.story == [("release", "maker-0", "died"), ("told",), ("told", "maker-0")]
    stage.check_consistent()


def test_trainers_do_not_update_a_maker_before_it_has_loaded(stage):
    held = []
    stage.host.on_start = lambda name: held.append(stage.peers.hold(name, "progress"))
    stage.die("maker-0")
    CLOCK.now += 0.5
    stage.turn()
    stage.turn()
    assert stage.story[-1] == ("told",), "or each update would wait for it"
    held[0].release()
    stage.until(lambda: not stage.loading)
    assert stage.story[-1] == ("told", "maker-0")


def test_a_maker_that_never_loads_is_killed_and_counts_as_dead(stage):
    stage.host.on_start = lambda name: stage.peers.hold(name, "progress")
    stage.die("maker-0")
    CLOCK.now += 0.5
    stage.turn()
    stage.host.on_start = lambda name: None
    CLOCK.now += 10_000.0
    stage.until(lambda: stage.restarts.counts["makers"] == 2)
    assert stage.killed.count("maker-0") >= 2
    CLOCK.now += 30.0
    stage.until(lambda: stage.alive == ["maker-0"] and not stage.loading)
    stage.check_consistent()


def test_each_death_is_followed_by_a_longer_wait_up_to_a_limit():
    stage, waits = Stage(max_restarts=9), []
    for _ in range(9):
        stage.die("maker-0")
        begun = CLOCK.now
        while not stage.alive:
            CLOCK.now += 0.25
            stage.turn()
        waits.append(CLOCK.now - begun)
    assert waits == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]


def test_a_maker_that_lived_long_enough_comes_back_at_once_when_it_dies_again(stage):
    for _ in range(3):
        stage.die("maker-0")
        CLOCK.now += 0.5
        stage.turn()
        assert stage.alive == ["maker-0"]
        CLOCK.now += 61.0


def test_after_so_many_restarts_a_death_is_the_end_and_has_a_name():
    stage = Stage(makers=2, max_restarts=1)
    stage.die("maker-0")
    with pytest.raises(PeerDied, match=r"maker-1 died.*1 time \(topology\.max_restarts\)"):
        stage.die("maker-1")


def test_restarts_of_long_ago_do_not_count():
    stage = Stage(max_restarts=1)
    for _ in range(3):
        stage.die("maker-0")
        CLOCK.now += 1.0
        stage.until(lambda: stage.alive == ["maker-0"])
        CLOCK.now += 3601.0
    assert stage.restarts.counts["makers"] == 3


def test_what_a_maker_raises_is_not_repaired_by_another(stage):
    stage["maker-0"].fail(RewardError("no such judge"))
    with pytest.raises(RewardError, match="no such judge") as caught:
        stage.until(lambda: False)
    assert caught.value.__notes__ == ["raised in maker-0"]
    assert stage.restarts.counts["makers"] == 0


def test_a_maker_that_dies_while_it_leaves_is_gone_as_it_should_be(stage):
    stage.scale_to(2)
    stage.peers.hold("maker-1", "stop")
    stage.crew.scale_to(1)
    stage.die("maker-1")
    assert stage.crew.pending == ""
    assert stage.restarts.counts["makers"] == 0
    assert stage.story[-2:] == [("release", "maker-1", "died"), ("told", "maker-0")]
    stage.check_consistent()


def test_a_member_that_dies_while_others_join_is_replaced_and_they_join(stage):
    stage.host.on_start = lambda name: setattr(stage[name], "has_weights", name != "maker-1")
    stage.crew.scale_to(2)
    stage.die("maker-0")
    CLOCK.now += 1.0
    stage.turn()
    assert stage.crew.pending.startswith("maker-1")
    stage["maker-1"].has_weights = True
    stage.until(lambda: not stage.crew.pending and not stage.loading)
    assert stage.alive == ["maker-0", "maker-1"]
    stage.check_consistent()


@pytest.mark.parametrize("makers", [1, 2])
def test_the_dead_are_the_first_to_leave(makers):
    stage = Stage(makers=3)
    stage.die("maker-1")
    stage.die("maker-2")
    assert stage.crew.size == 3
    stage.scale_to(makers)
    CLOCK.now += 100.0
    stage.turn()
    stage.until(lambda: not stage.loading)
    assert len(stage.alive) == makers
    assert "maker-0" in stage.alive
    stage.check_consistent()


def test_a_successor_that_still_loads_leaves_at_once(stage):
    stage.scale_to(2)
    stage.host.on_start = lambda name: stage.peers.hold(name, "progress")
    stage.die("maker-1")
    CLOCK.now += 1.0
    stage.turn()
    assert stage.alive == ["maker-0", "maker-1"]
    stage.scale_to(1)
    assert stage.alive == ["maker-0"]
    stage.check_consistent()


def test_makers_that_join_are_counted_with_those_that_will_be_replaced():
    stage = Stage(makers=2)
    stage.die("maker-1")
    stage.scale_to(3)
    CLOCK.now += 100.0
    stage.turn()
    stage.until(lambda: not stage.loading)
    assert stage.alive == ["maker-0", "maker-1", "maker-2"]
    stage.check_consistent()


def test_at_the_end_of_a_run_no_failure_of_a_maker_counts(stage):
    stage.scale_to(2)
    stage["maker-0"].fail(RewardError("no such judge"))
    stage.peers.kill("maker-1")
    stage.crew.stop()
    stage.until(lambda: not stage.crew.working_makers)
