"""The peer protocol over threads; `tests/ray/test_peers.py` tests it over Ray actors."""

import threading
from concurrent.futures import FIRST_COMPLETED, Future, wait
from types import SimpleNamespace

import pytest
from thread_peers import PATIENCE, ThreadPeers

from coati.errors import ActorNotFound, DeadlineExceeded, PeerDied, PeerUnavailable, RemoteError
from coati.peers import wait_in_slices


class Echo:
    def __init__(self):
        self.heard = []

    def hear(self, value, *, twice=False):
        self.heard.append(value)
        return [value, value] if twice else value

    def fail(self):
        raise KeyError("no such thing")


@pytest.fixture
def peers():
    return ThreadPeers(a=Echo(), b=Echo())


def test_a_call_returns_what_the_method_returns_and_arguments_are_copied(peers):
    peer = peers.find("a", role="echo", timeout=PATIENCE)
    sent = [1]
    call = peer.call("hear", sent, twice=True)
    sent.append(2)
    assert call.result(PATIENCE) == [[1], [1]]
    assert call.done()
    with pytest.raises(AttributeError):
        peer.call("speak")


def test_an_exception_in_a_method_is_the_cause_of_a_remote_error(peers):
    with pytest.raises(RemoteError, match="a: 'no such thing'") as caught:
        peers["a"].call("fail").result(PATIENCE)
    assert isinstance(caught.value.cause, KeyError)


def test_calls_to_a_dead_peer_fail_and_its_name_is_free_but_it_stays_cached(peers):
    found = peers.find_now("a")
    held = peers.hold("a", "hear")
    pending = found.call("hear", 1)
    held.reached()
    peers.kill("a")
    held.release()
    for call in (pending, found.call("hear", 2)):
        with pytest.raises(PeerDied):
            call.result(PATIENCE)
    assert peers.find_now("a") is found
    peers.forget("a")
    assert peers.find_now("a") is None
    assert found.target.heard == []


def test_a_held_call_is_pending_and_others_are_not(peers):
    held = peers.hold("a", "hear")
    slow, quick = peers["a"].call("hear", 1), peers["b"].call("hear", 2)
    assert wait([slow, quick], PATIENCE, FIRST_COMPLETED).done == {quick}
    with pytest.raises(TimeoutError):
        slow.result(0.01)
    held.release()
    assert slow.result(PATIENCE) == 1


def test_a_dropped_reply_leaves_the_call_executed_and_a_dropped_call_does_not(peers):
    peers.drop_reply("a", "hear")
    peers.drop_call("a", "hear", nth=2)
    for value in (1, 2):
        with pytest.raises(PeerUnavailable):
            peers["a"].call("hear", value).result(PATIENCE)
    assert peers["a"].call("hear", 3).result(PATIENCE) == 3
    assert peers["a"].target.heard == [1, 3]


def test_a_shared_value_arrives_as_itself_in_every_call(peers):
    shared = peers.share({"weights": [1, 2]})
    calls = [peers[name].call("hear", shared) for name in ("a", "b")]
    assert [call.result(PATIENCE) for call in calls] == [{"weights": [1, 2]}] * 2
    assert peers["a"].call("hear", value=shared).result(PATIENCE) == {"weights": [1, 2]}


def test_a_late_peer_is_found_and_a_missing_one_is_named(peers):
    threading.Timer(0.05, peers.add, ["late", Echo()]).start()
    assert peers.find("late", role="echo", timeout=PATIENCE).name == "late"
    with pytest.raises(ActorNotFound, match=r"'never'.*a, b, late"):
        peers.find("never", role="echo", timeout=0.02)


def test_ask_retries_lost_calls_until_its_deadline(peers, monkeypatch):
    now = [100.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: now.__setitem__(0, now[0] + seconds))
    monkeypatch.setattr("coati.peers.time", clock)  # not the module itself: threads of other tests may sleep too
    lost = {"what": "an echo", "seconds": PATIENCE, "should_stop": lambda: False}
    peers.drop_reply("a", "hear")
    assert peers.ask("a", "hear", 1, **lost) == 1
    assert peers["a"].target.heard == [1, 1]
    peers["a"].call = peers["b"].call = lambda *_: failed(PeerUnavailable("no way through"), now)
    with pytest.raises(DeadlineExceeded, match="an echo"):
        peers.ask("a", "hear", 2, **lost)
    assert peers.ask("b", "hear", 2, **{**lost, "should_stop": lambda: True}) is None


def failed(error, now):
    """Return a call that has failed. Asserts that the caller does not retry long after the deadline, or forever."""
    assert now[0] < 100.0 + 10 * PATIENCE, "retried long after the deadline"
    call = Future()
    call.set_exception(error)
    return call


def test_a_deadline_counts_from_the_last_progress(monkeypatch):
    now, progress, given = [100.0], [0.0], []
    monkeypatch.setattr("coati.peers.time", SimpleNamespace(monotonic=lambda: now[0]))

    def attempt(seconds):
        given.append(seconds)
        now[0] += seconds
        progress[0] = max(progress[0], now[0] if len(given) == 2 else 0.0)

    with pytest.raises(DeadlineExceeded, match="waited 3 s for nothing"):
        wait_in_slices(
            attempt,
            deadline_seconds=3.0,
            what=lambda: "nothing",
            slice_seconds=2.0,
            last_progress=lambda: progress[0],
        )
    assert given == [2.0, 1.0, 2.0, 1.0]
