"""When a trainer concludes that no more experience will come."""

from concurrent.futures import Future
from types import SimpleNamespace

import pytest
from thread_peers import LocalQueue

from coati.config import Deadlines
from coati.errors import PeerDied
from coati.peers import Peer, Peers, remote_error
from coati.ray import detached_replay_buffer
from coati.ray.detached_replay_buffer import DetachedReplayBuffer


@pytest.fixture(autouse=True)
def no_wait(monkeypatch):
    """Make waits return at once: a pending answer stays pending."""
    monkeypatch.setattr(detached_replay_buffer, "wait", lambda calls, timeout: None)


def answer(state):
    call = Future()
    if state in ("missing", "gone"):
        call.set_exception(PeerDied("killed"))
    elif state == "unknown":
        call.set_exception(remote_error("a", TypeError("progress takes an argument")))
    elif state != "busy":
        call.set_result(SimpleNamespace(state=state))
    return call


class Maker(Peer):
    def __init__(self, name, story):
        super().__init__(name)
        self._story = story

    def call(self, method):
        if self._story.states[self.name] == "silent":
            raise AttributeError(method)
        self._story.num_asked += 1
        return answer(self._story.states[self.name])


class Makers(Peers):
    def __init__(self, story):
        super().__init__()
        self._story = story

    def _lookup(self, name):
        return None if self._story.states.get(name, "missing") == "missing" else Maker(name, self._story)

    def _names(self):
        return self._story.states

    def share(self, value):
        return value


class Story:
    """A clock and the makers' answers, both set by the test."""

    def __init__(self, *names, existing=()):
        self.now = 100.0
        self.num_asked = 0
        self.states = dict.fromkeys(existing, "working")
        self.buffer = DetachedReplayBuffer(
            1,
            0,
            maker_names=names,
            deadlines=Deadlines(grace_seconds=5.0),
            peers=Makers(self),
            queue=LocalQueue(),
            clock=lambda: self.now,
        )
        self.states |= dict.fromkeys(names, "working")

    def after(self, seconds, **states):
        self.now += seconds
        self.states |= states
        return self.buffer.all_finished()


def test_finished_makers_count_only_after_the_grace_time():
    story = Story("a", "b")
    assert not story.after(0.0, a="finished")
    assert not story.after(3.0, b="finished")
    assert not story.after(4.0)
    assert story.after(1.0)


def test_a_maker_that_works_again_restarts_the_grace_time():
    story = Story("a")
    assert not story.after(0.0, a="finished")
    assert not story.after(4.0, a="working")
    assert not story.after(3.0, a="finished")
    assert not story.after(4.9)
    assert story.after(0.2)


def test_makers_are_polled_at_intervals():
    story = Story("a")
    for _ in range(10):
        story.after(0.5)
    assert story.num_asked == 3  # at 0.5 s, 2.5 s and 4.5 s


def test_all_gone_is_an_error_at_once():
    story = Story("a", "b", existing=("a", "b"))
    assert not story.after(1.0, a="missing")
    with pytest.raises(PeerDied, match="a is gone, b is gone"):
        story.after(3.0, b="gone")


def test_a_maker_seen_before_a_wait_is_gone_and_not_late():
    story = Story("a")
    story.after(0.0)
    with pytest.raises(PeerDied, match="a is gone"):
        story.after(3.0, a="missing")


def test_finished_and_gone_makers_end_the_data():
    story = Story("a", "b", existing=("a", "b"))
    assert not story.after(0.0, a="finished", b="missing")
    assert story.after(5.0)


def test_failed_makers_are_an_error_after_the_grace_time():
    story = Story("a", "b")
    assert not story.after(0.0, a="failed", b="gone")
    with pytest.raises(PeerDied, match="a is failed, b is gone"):
        story.after(5.0)


def test_a_failed_and_a_finished_maker_end_the_data():
    story = Story("a", "b")
    assert not story.after(0.0, a="failed", b="finished")
    assert story.after(5.0)


def test_the_trainer_waits_for_a_late_maker():
    story = Story("a", "b")
    assert not story.after(0.0, a="finished", b="missing")
    assert not story.after(1000.0)
    assert not story.after(3.0, b="busy")


def test_without_maker_names_the_data_never_ends():
    story = Story()
    assert not story.after(1e6)
    assert story.buffer.describe_wait() == "none are named"


@pytest.mark.parametrize("state", ["idle", "working", "busy", "unknown", "silent"])
def test_any_other_state_means_more_may_come(state):
    story = Story("a", "b")
    story.after(0.0, a="finished", b=state)
    assert not story.after(1e6)


def test_the_trainer_waits_for_a_maker_that_reuses_a_dead_ones_name():
    story = Story("a", "b", existing=("a", "b"))
    assert not story.after(0.0, a="finished", b="gone")
    assert not story.after(3.0, b="working")
    assert not story.after(1000.0)
    assert not story.after(3.0, b="finished")
    assert story.after(5.0)
