"""Makers on threads join, leave and die: the run reaches its target number, and its trainers know every maker."""

import re
import time
from types import SimpleNamespace

import pytest
from fake_actors import Factory, Host
from thread_peers import PATIENCE

from coati.config import build_config
from coati.errors import PeerDied, RewardError
from coati.monitor.run_log import RunLog
from coati.ray import run_actor, supervisor
from coati.ray.supervisor import Supervisor

CLOCK = SimpleNamespace(now=0.0, monotonic=lambda: CLOCK.now, sleep=lambda seconds: None)


@pytest.fixture(autouse=True)
def driver_time(monkeypatch):
    """A clock for the driver that only tests advance."""
    monkeypatch.setattr(CLOCK, "now", 0.0)
    for module in (supervisor, run_actor):
        monkeypatch.setattr(module, "time", CLOCK)


class Stage:
    """A training run and the record of its events."""

    def __init__(self, *, makers=1, trainers=1, max_restarts=3):
        self.host = Host()
        self.peers, self.killed = self.host.peers, self.host.killed
        config = build_config(
            {
                "model": {"path": "m"},
                "prompts": {"path": "p.jsonl"},
                "reward": {"function": "module:function"},
                "train": {"total_steps": 6, "batch_size": 2},
                "topology": {"makers": makers, "trainers": trainers, "max_restarts": max_restarts},
            }
        )
        self.log = RunLog(None, total_steps=6)
        self.crew = Supervisor(config, Factory(config, host=self.host), self.log)
        self.restarts = self.crew.restarts
        self.crew.create_all(None)
        self.until(lambda: self.crew.trainer_states == {"training"} and not self.loading)
        for trainer in self.crew.trainers:
            del self.story_of(trainer)[:]

    def __getitem__(self, name):
        return self.host[name]

    def scale_to(self, makers):
        self.crew.target_makers = makers
        CLOCK.now += 1.0  # after this, names can be reused
        self.until(lambda: not self.crew.message)

    def turn(self):
        self.crew.turn(0.0)

    def until(self, is_reached):
        """Take turns until a condition holds."""
        deadline = time.monotonic() + PATIENCE
        while not is_reached():
            assert time.monotonic() < deadline, f"still {self.crew.message!r}"
            self.turn()
            time.sleep(0)  # let the other threads run

    def die(self, name):
        self.peers[name].kill()
        self.turn()

    @property
    def loading(self):
        """Makers whose loop has not begun or that have no weights."""
        return [name for name, maker in self.crew.makers.items() if maker.state in ("loading", "loaded")]

    @property
    def story(self):
        return self.story_of("trainer-0")

    def story_of(self, trainer):
        """The calls that a trainer received."""
        self.peers[trainer].call("report", 0, 0).result(PATIENCE)  # runs after all earlier calls
        return self[trainer].story

    @property
    def alive(self):
        return sorted(name for name in self.crew.makers if self.peers[name].is_alive)

    def check_consistent(self):
        """Assert that the same makers are alive, counted and working."""
        names = self.alive
        assert sorted(self.crew.makers_in_loop) == names
        assert self.crew.target_makers == len(names)


@pytest.fixture
def stage():
    return Stage()


# Joining and leaving


def test_new_makers_start_at_once_and_count_once_they_have_weights(stage):
    stage.host.on_start = lambda name: setattr(stage[name], "has_weights", False)
    stage.crew.target_makers = 3
    stage.until(lambda: stage.crew.makers_in_loop == ["maker-0", "maker-1", "maker-2"])
    assert stage.crew.message == "1 of 3 makers working"
    stage["maker-1"].has_weights = True
    stage.until(lambda: stage.crew.message == "2 of 3 makers working")
    stage["maker-2"].has_weights = True
    stage.until(lambda: not stage.crew.message)
    stage.check_consistent()
    assert stage.alive == ["maker-0", "maker-1", "maker-2"]
    assert stage.story[-1] == ("told", "maker-0", "maker-1", "maker-2")


def test_makers_that_leave_finish_their_work_and_release_the_rest(stage, caplog, monkeypatch):
    monkeypatch.setattr(supervisor, "_LAST_FETCH_SECONDS", 2 * PATIENCE)  # nobody waits for maker-2's report
    stage.scale_to(3)
    del stage.story[:]
    for name in ("maker-1", "maker-2"):
        stage[name].records.append({"warning": f"the last words of {name}", "kind": name})
    held = stage.peers.hold("maker-2", "stop")
    stage.crew.target_makers = 1
    stage.until(lambda: stage.killed == ["maker-1"])
    assert stage.crew.message
    held.release()
    stage.until(lambda: not stage.crew.message)
    assert stage.killed == ["maker-1", "maker-2"]
    assert all(f"the last words of {name}" in caplog.text for name in stage.killed)
    assert stage.story == [
        ("release", "maker-1", "left"),
        ("told", "maker-0", "maker-2"),
        ("release", "maker-2", "left"),
        ("told", "maker-0"),
    ]
    stage.check_consistent()


def test_a_maker_that_answers_is_not_stalled_while_others_leave_without_a_word(stage, monkeypatch):
    stage.scale_to(4)
    leaving = [f"maker-{number}" for number in (1, 2, 3)]
    held = [stage.peers.hold(name, "report", nth=2) for name in leaving]
    fetch = Supervisor.fetch

    def slow_fetch(crew, timeout, only=None):
        if only is not None:
            CLOCK.now += 0.6 * crew._config.deadlines.stall_seconds  # as if it was waited for
            timeout = 0.05
        fetch(crew, timeout, only)

    monkeypatch.setattr(Supervisor, "fetch", slow_fetch)
    del stage.story[:]
    stage.crew.target_makers = 1
    stage.until(lambda: sorted(stage.killed) == leaving)
    for one in held:
        one.release()
    assert ("release", "maker-0", "does not respond") not in stage.story
    stage.check_consistent()


def test_a_new_maker_may_reuse_a_name_once_it_is_free(stage):
    stage.scale_to(2)
    first, held = stage.peers["maker-1"], stage.peers.hold("maker-1", "stop")
    for wanted in (1, 2):
        stage.crew.target_makers = wanted
        stage.turn()
    assert stage.peers["maker-1"] is first
    held.release()
    stage.until(lambda: "maker-1" not in stage.crew.makers)
    stage.turn()
    assert stage.alive == ["maker-0"], "Ray may not have freed the name yet"
    CLOCK.now += 1.0
    stage.until(lambda: not stage.crew.message)
    assert stage.peers["maker-1"] is not first
    assert stage["maker-1"].arguments["options"].incarnation == 3
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


def die(stage):
    stage.host.on_start = lambda name: name == "maker-2" and stage.peers.kill(name)
    return "killed by the test"


def not_load(stage):
    stage.host.on_start = lambda name: name == "maker-2" and stage[name].fail(OSError("no such file: prompts.jsonl"))
    return r"no such file: prompts\.jsonl"


def never_answer(stage):
    stage.host.on_start = lambda name: name == "maker-2" and stage.peers.hold(name, "report")
    return r"did not load .*\(deadlines\.start_seconds\)"


@pytest.mark.parametrize("fail", [die, not_load, never_answer])
def test_the_run_continues_without_a_maker_that_cannot_join(stage, fail, caplog):
    reason, create = fail(stage), stage.host.on_start

    def create_without_weights(name):
        stage[name].has_weights = name != "maker-2"
        create(name)

    stage.host.on_start = create_without_weights
    stage.crew.target_makers = 3
    stage.until(lambda: stage.alive[:2] == ["maker-0", "maker-1"] and not {*stage.loading} - {"maker-2"})
    if fail is never_answer:
        CLOCK.now += 10_000.0
    stage.until(lambda: not stage.crew.message)
    assert re.search(f"maker-2 could not join; training continues with 2 makers: .*{reason}", caplog.text)
    assert stage.story[-1] == ("told", "maker-0", "maker-1")
    assert stage.alive == ["maker-0", "maker-1"]
    assert stage.restarts.counts["makers"] == 0
    stage.check_consistent()
    stage.host.on_start = lambda name: None
    stage.scale_to(3)  # it may be requested again
    assert stage.alive == ["maker-0", "maker-1", "maker-2"]
    stage.check_consistent()


def test_a_lost_report_of_a_new_maker_is_requested_again(stage):
    stage.host.on_start = lambda name: stage.peers.drop_reply(name, "report")
    stage.scale_to(2)
    stage.check_consistent()


# Death


def test_a_maker_that_dies_is_replaced_after_a_while_under_its_name(stage):
    stage.die("maker-0")
    assert stage.crew.makers_in_loop == []
    CLOCK.now += 0.4
    stage.turn()
    assert stage.alive == []
    CLOCK.now += 0.2
    stage.turn()
    assert stage.alive == ["maker-0"]
    stage.until(lambda: not stage.loading)
    # Two lists: without it, and with its successor, which is a new maker to the trainers and needs weights.
    assert stage.story == [("release", "maker-0", "died"), ("told",), ("told", "maker-0")]
    stage.check_consistent()


def test_trainers_do_not_update_a_maker_before_it_has_loaded(stage):
    held = []
    stage.host.on_start = lambda name: held.append(stage.peers.hold(name, "report"))
    stage.die("maker-0")
    CLOCK.now += 0.5
    stage.turn()
    stage.turn()
    assert stage.story[-1] == ("told",), "otherwise each update would wait for it"
    held[0].release()
    stage.until(lambda: not stage.loading)
    assert stage.story[-1] == ("told", "maker-0")


def test_a_maker_that_never_loads_is_killed_and_counts_as_dead(stage):
    stage.host.on_start = lambda name: stage.peers.hold(name, "report")
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


def test_the_restart_backoff_doubles_up_to_a_limit():
    stage, waits = Stage(max_restarts=9), []
    for _ in range(9):
        stage.die("maker-0")
        begun = CLOCK.now
        while not stage.alive:
            CLOCK.now += 0.25
            stage.turn()
        waits.append(CLOCK.now - begun)
    assert waits == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]


def test_the_backoff_starts_over_for_a_maker_that_lived_long_enough(stage):
    for _ in range(3):
        stage.die("maker-0")
        CLOCK.now += 0.5
        stage.turn()
        assert stage.alive == ["maker-0"]
        CLOCK.now += 61.0


def test_a_death_beyond_the_restart_limit_ends_the_run_with_its_name():
    stage = Stage(makers=2, max_restarts=1)
    stage.die("maker-0")
    with pytest.raises(PeerDied, match=r"maker-1 died.*topology\.max_restarts allows 1 restart "):
        stage.die("maker-1")


def test_old_restarts_do_not_count():
    stage = Stage(max_restarts=1)
    for _ in range(3):
        stage.die("maker-0")
        CLOCK.now += 1.0
        stage.until(lambda: stage.alive == ["maker-0"])
        CLOCK.now += 3601.0
    assert stage.restarts.counts["makers"] == 3


def test_an_exception_in_a_maker_causes_no_restart(stage):
    stage["maker-0"].fail(RewardError("no such judge"))
    with pytest.raises(RewardError, match="no such judge") as caught:
        stage.until(lambda: False)
    assert caught.value.__notes__ == ["raised in maker-0"]
    assert stage.restarts.counts["makers"] == 0


def test_a_maker_that_dies_while_leaving_is_not_replaced(stage):
    stage.scale_to(2)
    stage.peers.hold("maker-1", "stop")
    stage.crew.target_makers = 1
    stage.turn()
    stage.die("maker-1")
    assert stage.crew.message == ""
    assert stage.restarts.counts["makers"] == 0
    assert stage.story[-2:] == [("release", "maker-1", "died"), ("told", "maker-0")]
    stage.check_consistent()


def test_a_member_that_dies_while_others_join_is_replaced_and_they_join(stage):
    stage.host.on_start = lambda name: setattr(stage[name], "has_weights", name != "maker-1")
    stage.crew.target_makers = 2
    stage.die("maker-0")
    CLOCK.now += 1.0
    stage.until(lambda: stage.crew.message == "1 of 2 makers working")
    stage["maker-1"].has_weights = True
    stage.until(lambda: not stage.crew.message)
    assert stage.alive == ["maker-0", "maker-1"]
    stage.check_consistent()


@pytest.mark.parametrize("wanted", [1, 2, 3])
def test_dead_makers_are_replaced_if_they_are_still_wanted(wanted):
    stage = Stage(makers=2)
    stage.die("maker-1")
    stage.crew.target_makers = wanted
    CLOCK.now += 100.0
    stage.until(lambda: not stage.crew.message)
    assert stage.alive == [f"maker-{number}" for number in range(wanted)]
    stage.check_consistent()


def test_a_maker_that_joined_and_worked_is_replaced_like_the_first_ones(stage):
    stage.scale_to(3)
    stage.die("maker-1")
    stage.host.on_start = lambda name: stage.peers.kill(name)
    CLOCK.now += 5.0
    stage.until(lambda: stage.restarts.counts["makers"] == 2)  # its successor died too, while loading
    stage.host.on_start = lambda name: None
    CLOCK.now += 60.0
    stage.until(lambda: not stage.crew.message)
    assert stage.alive == ["maker-0", "maker-1", "maker-2"]
    stage.check_consistent()


def test_a_maker_that_left_and_finds_no_room_to_return_costs_no_restart():
    stage = Stage(makers=2)
    stage.scale_to(1)
    stage.host.on_start = lambda name: stage.peers.hold(name, "report")
    stage.crew.target_makers = 2
    CLOCK.now += 1.0  # after this, its name can be reused
    stage.turn()
    CLOCK.now += 400.0
    stage.until(lambda: not stage.crew.message)
    assert stage.alive == ["maker-0"]
    assert stage.crew.target_makers == 1
    assert stage.restarts.counts["makers"] == 0


def test_a_successor_that_is_still_loading_leaves_at_once(stage):
    stage.scale_to(2)
    stage.host.on_start = lambda name: stage.peers.hold(name, "report")
    stage.die("maker-1")
    CLOCK.now += 1.0
    stage.turn()
    assert stage.alive == ["maker-0", "maker-1"]
    stage.scale_to(1)
    assert stage.alive == ["maker-0"]
    stage.check_consistent()


def test_failures_of_makers_at_the_end_of_a_run_are_ignored(stage):
    stage.scale_to(2)
    stage["maker-0"].fail(RewardError("no such judge"))
    stage.peers.kill("maker-1")
    stage.crew.stop()
    stage.until(lambda: not stage.crew.makers_in_loop)


def test_an_exception_in_a_makers_report_ends_the_run(stage):
    stage["maker-0"].report = lambda *_: 1 / 0
    with pytest.raises(ZeroDivisionError) as failure:
        stage.until(lambda: False)
    assert failure.value.__notes__ == ["raised in maker-0"]


def test_creating_a_maker_is_retried_until_the_restarts_are_used_up():
    stage = Stage(max_restarts=2)

    def refuse(name):
        raise ValueError("no room for another actor")

    stage.host.on_start = refuse
    stage.die("maker-0")
    CLOCK.now += 30.0
    stage.turn()  # the second restart; the first followed its death
    assert stage.crew.makers == {}
    CLOCK.now += 30.0
    with pytest.raises(PeerDied, match="no room for another actor") as failure:
        stage.turn()
    assert "max_restarts" in str(failure.value)


def test_a_maker_that_cannot_be_created_does_not_join(stage, caplog):
    def refuse(name):
        raise ValueError("no room for another actor")

    stage.host.on_start = refuse
    stage.crew.target_makers = 2
    stage.turn()
    assert stage.crew.target_makers == 1
    assert "no room for another actor" in caplog.text
