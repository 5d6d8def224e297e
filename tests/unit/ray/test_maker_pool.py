"""Makers that join, leave and die, on threads: the run has as many as it should, and its trainers know of each."""

import threading
import time
from types import SimpleNamespace

import pytest
from thread_peers import PATIENCE, ThreadPeers

from coati.config import build_config
from coati.errors import PeerDied, RewardError, ScalingRefused
from coati.ray.maker_pool import MakerPool
from coati.ray.restarts import Restarts
from coati.ray.run_actors import RunActors


class FakeMaker:
    def __init__(self):
        self.has_weights, self.error, self.ended = True, None, threading.Event()

    def progress(self):
        return SimpleNamespace(has_weights=self.has_weights)

    def workingloop(self, prompts):
        assert prompts == "the prompts"
        assert self.ended.wait(PATIENCE)
        if self.error is not None:
            raise self.error

    workingloop.__ray_concurrency_group__ = "compute"

    def stop(self):
        self.ended.set()

    def fail(self, error):
        self.error = error
        self.ended.set()


class FakeTrainer:
    def __init__(self):
        self.story = []

    def change_makers(self, names):
        self.story.append(("told", *names))

    def release_maker(self, maker, reason):
        self.story.append(("release", maker, reason.split(":")[0]))


class Stage:
    """A pool of one maker, and what has happened to it."""

    def __init__(self, *, makers=1, trainers=1, max_restarts=3, is_private=True):
        self.peers, self.killed, self.on_create, self.free = ThreadPeers(), [], lambda name: None, {}
        self.now, self.taken_leave, self.died = 0.0, [], []
        self.restarts = Restarts(max_restarts, clock=lambda: self.now)
        config = build_config(
            {
                "model": {"path": "m"},
                "prompts": {"path": "p.jsonl"},
                "reward": {"function": "module:function"},
                "train": {"total_steps": 6, "batch_size": 2},
                "topology": {"makers": makers, "trainers": trainers},
            }
        )
        self.actors = RunActors(config, checkpoints=None, host=self, clock=lambda: self.now)
        self.actors.create(should_stop=lambda: False, is_private=is_private)
        self.pool = MakerPool(
            self.actors,
            "the prompts",
            restarts=self.restarts,
            before_end=self._take_leave,
            after_death=self.died.append,
            clock=lambda: self.now,
        )
        for name in self.actors.makers:
            self.pool.start(name)

    # The host.

    def start(self, actor_class, ray_options, /, **arguments):
        name = ray_options["name"]
        peer = self.peers.add(name, FakeTrainer() if name.startswith("trainer") else FakeMaker())
        self.on_create(name)
        return peer

    def find_meeting(self, name, options):
        return SimpleNamespace(result=lambda seconds: ("ab" * 28, "127.0.0.1", 4711))

    def kill(self, peer):
        self.killed.append(peer.name)
        peer.kill()

    def free_resources(self):
        return self.free

    # What tests do and see.

    def _take_leave(self, names):
        assert all(self.peers[name].is_alive for name in names), "what it recorded can still be fetched"
        self.taken_leave += names

    def __getitem__(self, name):
        return self.peers[name].target

    def scale_to(self, makers):
        self.pool.scale_to(makers)
        self.until(lambda message: not message)

    def until(self, is_reached):
        """Advance until what is waited for is as it should be; returns it."""
        deadline = time.monotonic() + PATIENCE
        while not is_reached(message := self.pool.advance()):
            assert time.monotonic() < deadline, f"still {message!r}"
            time.sleep(0)  # the others' turn
        return message

    def die(self, name):
        self.peers.kill(name)
        self.pool.advance()

    @property
    def story(self):
        """What the trainer was told."""
        self.peers["trainer-0"].drain()
        return self["trainer-0"].story

    @property
    def alive(self):
        return sorted(name for name in self.actors.makers if self.peers[name].is_alive)

    def check_consistent(self):
        """The same makers are alive, counted, updated and working."""
        names = self.alive
        assert sorted(self.pool.working) == names
        assert self.pool.size == len(names)


@pytest.fixture
def stage():
    return Stage()


# Joining and leaving


def test_makers_that_join_work_at_once_and_have_joined_when_they_have_weights(stage):
    stage.on_create = lambda name: setattr(stage[name], "has_weights", False)
    stage.pool.scale_to(3)
    assert stage.pool.working == ["maker-0", "maker-1", "maker-2"]
    assert stage.pool.size == 1
    stage["maker-1"].has_weights = True
    assert stage.until(lambda message: "maker-1" not in message).startswith("maker-2 loading")
    assert stage.pool.size == 2
    stage["maker-2"].has_weights = True
    stage.until(lambda message: not message)
    stage.check_consistent()
    assert stage.alive == ["maker-0", "maker-1", "maker-2"]
    assert stage.story[-1] == ("told", "maker-0", "maker-1", "maker-2")


def test_makers_that_leave_finish_their_work_and_the_rest_of_it_goes_to_others(stage):
    stage.scale_to(3)
    del stage.story[:]
    held = stage.peers.hold("maker-2", "stop")
    stage.pool.scale_to(1)
    assert stage.pool.size == 1
    assert stage.until(lambda message: "maker-1" not in message).startswith("maker-2 finishing")
    assert stage.killed == stage.taken_leave == ["maker-1"]
    held.release()
    stage.until(lambda message: not message)
    assert stage.killed == stage.taken_leave == ["maker-1", "maker-2"]
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


@pytest.mark.parametrize("makers", [0, -1, 10**6])
def test_impossible_numbers_of_makers_are_refused(stage, makers):
    with pytest.raises(ScalingRefused, match=f"got {makers}"):
        stage.pool.scale_to(makers)
    stage.check_consistent()


def test_without_room_what_makers_need_and_what_is_free_are_counted():
    stage = Stage(is_private=False)
    stage.free = {"CPU": 1.0}
    with pytest.raises(ScalingRefused, match=r"2 CPUs.* 1 is free"):
        stage.pool.scale_to(3)
    stage.free = {}
    with pytest.raises(ScalingRefused, match=r"1 CPU.* 0 are free"):
        stage.pool.scale_to(2)
    stage.check_consistent()


def test_each_maker_is_updated_by_one_trainer_which_it_keeps():
    stage = Stage(makers=3, trainers=2)
    stage.scale_to(5)
    stage.scale_to(4)
    stage.die("maker-0")
    stage.now += 1.0
    stage.pool.advance()
    stage.until(lambda _: not stage.actors.loading)
    last = [stage.peers[f"trainer-{rank}"].drain() or stage[f"trainer-{rank}"].story[-1] for rank in range(2)]
    assert [sorted(told) for told in last] == [["maker-0", "maker-2", "told"], ["maker-1", "maker-3", "told"]]


def fail_to_be_made(stage):
    def create(name):
        if name == "maker-2":
            raise ValueError("the name is taken")

    stage.on_create = create
    return "the name is taken"


def die(stage):
    stage.on_create = lambda name: name == "maker-2" and stage.peers.kill(name)
    return "killed by the test"


def not_load(stage):
    stage.on_create = lambda name: stage[name].fail(OSError("no such file: prompts.jsonl"))
    return r"no such file: prompts\.jsonl"


@pytest.mark.parametrize("fail", [fail_to_be_made, die, not_load])
def test_of_makers_that_cannot_join_nothing_is_left(stage, fail):
    reason = fail(stage)
    create = stage.on_create

    def create_without_weights(name):
        if name.startswith("maker"):
            stage[name].has_weights = False
        create(name)

    stage.on_create = create_without_weights
    with pytest.raises(ScalingRefused, match=f"maker-1, maker-2 could not join.*{reason}"):
        stage.scale_to(3)
    assert stage.pool.advance() == ""
    assert stage.story[-1] == ("told", "maker-0")
    assert stage.alive == ["maker-0"]
    assert stage.restarts.counts["makers"] == 0
    stage.check_consistent()
    stage.on_create = lambda name: None
    stage.scale_to(2)  # others may join
    assert stage.alive == ["maker-0", "maker-3"]
    stage.check_consistent()


def test_a_lost_answer_of_a_maker_that_joins_is_asked_for_again(stage):
    stage.on_create = lambda name: stage.peers.drop_reply(name, "progress")
    stage.scale_to(2)
    stage.check_consistent()


# Death


def test_a_maker_that_dies_is_replaced_after_a_while_under_its_name(stage):
    stage.die("maker-0")
    assert stage.died == ["maker-0"]
    assert stage.pool.size == 1, "it will be there again"
    assert stage.pool.working == []
    stage.now += 0.4
    stage.pool.advance()
    assert stage.alive == []
    stage.now += 0.2
    stage.pool.advance()
    assert stage.alive == stage.pool.working == ["maker-0"]
    stage.until(lambda _: not stage.actors.loading)
    # Told twice: to trainers its successor is a maker that joins, and needs weights.
    assert stage.story == [("release", "maker-0", "died"), ("told",), ("told", "maker-0")]
    stage.check_consistent()


def test_trainers_do_not_update_a_maker_before_it_has_loaded(stage):
    held = []
    stage.on_create = lambda name: held.append(stage.peers.hold(name, "progress"))
    stage.die("maker-0")
    stage.now += 0.5
    stage.pool.advance()
    stage.pool.advance()
    assert stage.story[-1] == ("told",), "or each update would wait for it"
    held[0].release()
    stage.until(lambda _: not stage.actors.loading)
    assert stage.story[-1] == ("told", "maker-0")


def test_a_maker_that_never_loads_is_killed_and_counts_as_dead(stage):
    stage.on_create = lambda name: stage.peers.hold(name, "progress")
    stage.die("maker-0")
    stage.now += 0.5
    stage.pool.advance()
    stage.on_create = lambda name: None
    stage.now += 10_000.0
    stage.until(lambda _: stage.restarts.counts["makers"] == 2)
    assert stage.killed.count("maker-0") >= 2
    stage.now += 30.0
    stage.until(lambda _: stage.alive == ["maker-0"] and not stage.actors.loading)
    stage.check_consistent()


def test_each_death_is_followed_by_a_longer_wait_up_to_a_limit():
    stage, waits = Stage(max_restarts=9), []
    for _ in range(9):
        stage.die("maker-0")
        begun = stage.now
        while not stage.alive:
            stage.now += 0.25
            stage.pool.advance()
        waits.append(stage.now - begun)
    assert waits == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]


def test_a_maker_that_lived_long_enough_comes_back_at_once_when_it_dies_again(stage):
    for _ in range(3):
        stage.die("maker-0")
        stage.now += 0.5
        stage.pool.advance()
        assert stage.alive == ["maker-0"]
        stage.now += 61.0


def test_after_so_many_restarts_a_death_is_the_end_and_has_a_name():
    stage = Stage(makers=2, max_restarts=1)
    stage.die("maker-0")
    with pytest.raises(PeerDied, match=r"maker-1 died.*1 time \(topology\.max_restarts\)"):
        stage.die("maker-1")


def test_restarts_of_long_ago_do_not_count():
    stage = Stage(max_restarts=1)
    for _ in range(3):
        stage.die("maker-0")
        stage.now += 1.0
        stage.until(lambda _: stage.alive == ["maker-0"])
        stage.now += 3601.0
    assert stage.restarts.counts["makers"] == 3


def test_what_a_maker_raises_is_not_repaired_by_another(stage):
    stage["maker-0"].fail(RewardError("no such judge"))
    with pytest.raises(RewardError, match="no such judge") as caught:
        stage.until(lambda _: False)
    assert caught.value.__notes__ == ["raised in maker-0"]
    assert stage.restarts.counts["makers"] == 0


def test_a_maker_that_dies_while_it_leaves_is_gone_as_it_should_be(stage):
    stage.scale_to(2)
    stage.peers.hold("maker-1", "stop")
    stage.pool.scale_to(1)
    stage.die("maker-1")
    assert stage.pool.advance() == ""
    assert (stage.restarts.counts["makers"], stage.died) == (0, ["maker-1"])
    assert stage.story[-2:] == [("release", "maker-1", "died"), ("told", "maker-0")]
    stage.check_consistent()


def test_a_member_that_dies_while_others_join_is_replaced_and_they_join(stage):
    stage.on_create = lambda name: setattr(stage[name], "has_weights", name != "maker-1")
    stage.pool.scale_to(2)
    stage.die("maker-0")
    stage.now += 1.0
    assert stage.pool.advance().startswith("maker-1")
    stage["maker-1"].has_weights = True
    stage.until(lambda message: not message)
    assert stage.alive == ["maker-0", "maker-1"]
    stage.check_consistent()


@pytest.mark.parametrize("makers", [1, 2])
def test_the_dead_are_the_first_to_leave(makers):
    stage = Stage(makers=3)
    stage.die("maker-1")
    stage.die("maker-2")
    assert stage.pool.size == 3
    stage.scale_to(makers)
    stage.now += 100.0
    stage.pool.advance()
    assert len(stage.alive) == makers
    assert "maker-0" in stage.alive
    stage.check_consistent()


def test_makers_that_join_are_counted_with_those_that_will_be_replaced():
    stage = Stage(makers=2)
    stage.die("maker-1")
    stage.scale_to(3)
    stage.now += 100.0
    stage.pool.advance()
    assert stage.alive == ["maker-0", "maker-1", "maker-2"]
    stage.check_consistent()


def test_at_the_end_of_a_run_no_failure_of_a_maker_counts(stage):
    stage.scale_to(2)
    stage["maker-0"].fail(RewardError("no such judge"))
    stage.peers.kill("maker-1")
    deadline = time.monotonic() + PATIENCE
    while stage.pool.working and time.monotonic() < deadline:
        stage.pool.wind_up(0.1)
    assert stage.pool.working == []
