"""Delivery from a maker to its trainers: round-robin, acknowledged, bounded, and safe when trainers die."""

import threading
from types import SimpleNamespace

import pytest
from thread_peers import PATIENCE, ThreadPeers

from coati.config import Deadlines
from coati.errors import ActorNotFound, DataError, DeadlineExceeded, PeerDied
from coati.experience_maker.delivery import ItemSender
from coati.monitor.timeline import Timeline

QUICK = Deadlines(start_seconds=0.05, batch_seconds=PATIENCE, grace_seconds=0.05)


class Sink:
    """A trainer that implements only what makers call."""

    def __init__(self):
        self.calls = []
        self.error = None

    def buffer_extend(self, items):
        if self.error is not None:
            raise self.error
        self.calls.append([(item.sample_ids, item.delivery_id) for item in items])

    @property
    def sample_ids(self):
        return [sample_id for call in self.calls for sample_id, _ in call]


@pytest.fixture
def sinks():
    return {name: Sink() for name in ("t0", "t1", "t2")}


@pytest.fixture
def peers(sinks):
    return ThreadPeers(**sinks)


def parcels(first, count):
    """What delivery needs of items."""
    return [SimpleNamespace(sample_ids=first + index, delivery_id=None, lease=None) for index in range(count)]


def leased_parcels(first, count):
    """Parcels with leases of the same numbers."""
    found = parcels(first, count)
    for parcel in found:
        parcel.lease = (parcel.sample_ids, 0)
    return found


@pytest.fixture
def make_sender(peers):
    def make(*names, **options):
        return ItemSender(
            names, **{"peers": peers, "maker_name": "m", "deadlines": QUICK, "retry_seconds": 0.0} | options
        )

    return make


@pytest.fixture(autouse=True)
def _plain_bundles(monkeypatch):
    """Parcels are sent as a list. Other tests cover the packing of real items."""
    monkeypatch.setattr("coati.experience_maker.delivery.ItemBundle", list)


def in_background(function, *args):
    thread = threading.Thread(target=function, args=args, daemon=True)
    thread.start()
    return thread


def test_items_go_round_robin_across_batches(make_sender, sinks):
    sender = make_sender(*sinks)
    for first in (0, 4, 8):  # batches of 4 to 3 trainers: item k goes to trainer k mod 3
        sender.send(parcels(first, 4))
    sender.flush()
    assert [sink.sample_ids for sink in sinks.values()] == [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]]
    assert sender.num_delivered == 12


def test_leased_items_go_to_their_trainer_and_are_dropped_if_it_dies(make_sender, peers, sinks):
    sender = make_sender("t0", "t1")
    sender.send(leased_parcels(0, 4))
    sender.flush()
    held = peers.hold("t0", "buffer_extend")
    sender.send(leased_parcels(4, 2))
    held.reached()
    peers.kill("t0")
    held.release()
    sender.flush()
    assert [sink.sample_ids for sink in sinks.values()] == [[0, 2], [1, 3, 5], []]
    assert sender.num_delivered == 5


def test_unacknowledged_items_of_a_dead_trainer_arrive_exactly_once_elsewhere(make_sender, peers, sinks):
    sender = make_sender("t0", "t1")
    sender.send(parcels(0, 4))
    sender.flush()  # 0 and 2 are acknowledged by t0
    held = peers.hold("t0", "buffer_extend")
    sender.send(parcels(4, 4))  # t0 holds 4 and 6
    held.reached()
    peers.kill("t0")
    held.release()
    sender.flush()
    sender.send(parcels(8, 3))
    sender.flush()
    assert sinks["t0"].sample_ids == [0, 2]
    assert sorted(sinks["t1"].sample_ids) == [1, 3, 4, 5, 6, 7, 8, 9, 10]
    assert sender.num_delivered == 11


def test_items_that_a_trainer_took_without_acknowledgement_before_it_died_go_elsewhere_too(make_sender, peers, sinks):
    peers.kill_at("t0", "buffer_extend", "after")
    sender = make_sender("t0", "t1")
    sender.send(parcels(0, 2))
    sender.flush()
    assert sinks["t0"].sample_ids == [0]  # lost when t0 died
    assert sorted(sinks["t1"].sample_ids) == [0, 1]


def test_collect_after_a_death_may_process_the_answers_of_other_trainers(make_sender, peers, sinks):
    sender = make_sender("t0", "t1")
    held = peers.hold("t0", "buffer_extend")
    sender.send(parcels(0, 2))
    sender.send(parcels(2, 2))  # two unacknowledged sends to each trainer, the maximum
    held.reached()
    peers["t1"].call("buffer_extend", []).result(PATIENCE)  # calls run in order, so both are answered
    peers.kill("t0")
    held.release()
    sender.collect()
    sender.flush()
    assert sorted(sinks["t1"].sample_ids) == [0, 1, 2, 3]
    assert sender.num_delivered == 4


def test_it_is_an_error_if_all_trainers_died(make_sender, peers):
    sender = make_sender("t0")
    sender.send(parcels(0, 1))
    sender.flush()
    peers.kill("t0")
    sender.send(parcels(1, 1))
    with pytest.raises(PeerDied, match="no trainer"):
        sender.flush()


def test_a_trainer_name_that_does_not_exist_is_named(make_sender):
    with pytest.raises(ActorNotFound, match="no-such-trainer"):
        make_sender("t0", "no-such-trainer").send(parcels(0, 2))


def test_the_number_of_unacknowledged_sends_is_bounded(make_sender, peers, sinks):
    timeline = Timeline()
    sender = make_sender("t0", max_unacknowledged=2, timeline=timeline)
    held = peers.hold("t0", "buffer_extend")
    sender.send(parcels(0, 1))
    sender.send(parcels(1, 1))
    third = in_background(sender.send, parcels(2, 1))
    held.reached()
    third.join(0.05)
    assert third.is_alive()
    assert len(peers["t0"].calls) == 2
    held.release()
    third.join(PATIENCE)
    sender.flush()
    assert sinks["t0"].sample_ids == [0, 1, 2]
    # Only this thread's waits count, not those in the background.
    assert [span.what for span in timeline.spans.since(0).records] == ["wait_room"] * 2


def test_there_is_room_when_every_send_has_been_answered(make_sender, peers):
    sender = make_sender("t0", "t1")
    assert sender.has_room()
    held = peers.hold("t0", "buffer_extend")
    sender.send(parcels(0, 2))
    held.reached()
    assert not sender.has_room()
    assert len(peers["t0"].calls) == 1
    held.release()
    peers["t0"].call("buffer_extend", []).result(PATIENCE)  # calls run in order, so the previous one has ended
    peers["t1"].call("buffer_extend", []).result(PATIENCE)
    assert sender.has_room()


def test_items_that_wait_for_room_at_a_trainer_that_dies_go_elsewhere(make_sender, peers, sinks):
    sender = make_sender("t0", "t1", max_unacknowledged=1)
    held = peers.hold("t0", "buffer_extend")
    sender.send(parcels(0, 2))
    held.reached()
    waiting = in_background(sender.send, parcels(2, 1))
    waiting.join(0.05)
    assert waiting.is_alive()
    peers.kill("t0")
    held.release()
    waiting.join(PATIENCE)
    sender.flush()
    assert sorted(sinks["t1"].sample_ids) == [0, 1, 2]


def test_after_a_stop_a_full_trainer_does_not_block_the_maker(make_sender, peers, caplog, monkeypatch):
    monkeypatch.setattr("coati.experience_maker.delivery._SLICE_SECONDS", 0.02)
    held = peers.hold("t0", "buffer_extend")
    sender = make_sender("t0", should_stop=lambda: True)
    sender.send(parcels(0, 3))
    sender.flush()
    assert sender.num_delivered == 0
    assert "has not accepted 3 items" in caplog.text
    held.release()


def test_a_full_trainer_is_waited_for_until_the_deadline(make_sender, peers):
    held = peers.hold("t0", "buffer_extend")
    sender = make_sender("t0", deadlines=Deadlines(batch_seconds=0.05))
    sender.send(parcels(0, 2))
    with pytest.raises(DeadlineExceeded, match="2 items"):
        sender.flush()
    held.release()


def test_a_broken_connection_is_retried_with_the_same_delivery_id(make_sender, peers, sinks):
    peers.drop_reply("t0", "buffer_extend")
    sender = make_sender("t0")
    sender.send(parcels(0, 2))
    sender.flush()
    first, again = sinks["t0"].calls
    assert first == again
    assert sender.num_delivered == 2


def test_a_call_that_never_arrived_is_retried(make_sender, peers, sinks):
    peers.drop_call("t0", "buffer_extend")
    sender = make_sender("t0")
    sender.send(parcels(0, 2))
    sender.flush()
    assert sinks["t0"].sample_ids == [0, 1]


def test_a_trainer_that_dies_while_its_connection_is_broken_is_skipped(make_sender, peers, sinks):
    peers.drop_reply("t0", "buffer_extend")
    sender = make_sender("t0", "t1")
    sender.send(parcels(0, 1))
    peers.kill_at("t0", "buffer_extend", "before", nth=2)
    sender.flush()
    assert sinks["t1"].sample_ids == [0]


def test_retries_do_not_extend_the_deadline(make_sender, peers, sinks, monkeypatch):
    now = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: now.append(now.pop() + seconds))
    monkeypatch.setattr("coati.experience_maker.delivery.time", clock)
    for nth in range(1, 21):
        peers.drop_reply("t0", "buffer_extend", nth=nth)
    sender = make_sender("t0", deadlines=Deadlines(batch_seconds=10), retry_seconds=1.0)
    sender.send(parcels(0, 1))
    with pytest.raises(DeadlineExceeded, match=r"10 s\. .*does not answer"):
        sender.flush()
    assert len(sinks["t0"].calls) == 11


def test_each_send_has_its_own_delivery_id(make_sender, sinks):
    for _ in range(2):
        sender = make_sender("t0")
        sender.send(parcels(0, 1))
        sender.send(parcels(1, 2))
        sender.flush()
    assert [len({delivery_id for _, delivery_id in call}) for call in sinks["t0"].calls] == [1, 1, 1, 1]
    assert len({delivery_id for call in sinks["t0"].calls for _, delivery_id in call}) == 4


@pytest.mark.parametrize("error", [DataError("not welcome"), PeerDied("its queue is gone"), DeadlineExceeded("full")])
def test_an_error_of_a_trainer_is_raised_unchanged_in_the_maker(make_sender, sinks, error):
    sinks["t0"].error = error
    sender = make_sender("t0", "t1")
    sender.send(parcels(0, 1))
    with pytest.raises(type(error), match=str(error)) as caught:
        sender.flush()
    assert "t0" in caught.value.__notes__[0]
    assert sinks["t1"].calls == []
