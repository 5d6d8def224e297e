"""Delivery from a maker to its trainers: in turn, acknowledged, bounded, and safe when trainers die."""

import threading

import pytest
import ray
from ray.exceptions import ActorUnavailableError
from ray_testing import PATIENCE, QUICK, Background, Gate, Sink, items, parcels, pass_gate

from coati.config import Deadlines
from coati.errors import ActorNotFound, DataError, DeadlineExceeded, PeerDied
from coati.ledger import DeliveryLog, WorkShare
from coati.monitor.timeline import Timeline
from coati.ray.delivery import ItemSender

pytestmark = pytest.mark.usefixtures("cluster")


def make_sender(names, **kwargs):
    return ItemSender(list(names), sender="maker", **{"deadlines": QUICK} | kwargs)


def received(sinks):
    return [ray.get(sink.sample_ids.remote()) for sink in sinks.values()]


def test_items_go_round_one_at_a_time_and_on_across_batches(sinks):
    sender = make_sender(sinks)
    for first in (0, 4, 8):  # batches of 4 to 3 trainers: item k goes to trainer k mod 3
        sender.send(parcels(first, 4))
    sender.flush()
    assert received(sinks) == [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]]
    assert (sender.num_delivered, sender.num_redirected, sender.num_unacknowledged) == (12, 0, 0)


def test_a_maker_may_start_at_another_trainer(sinks):
    sender = make_sender(
        sinks,
        share=WorkShare(rounds_per_version=4, total_rounds=8, maker_index=2, num_makers=3, num_trainers=3),
    )
    sender.send(parcels(0, 4))
    sender.flush()
    assert received(sinks) == [[1], [2], [0, 3]]


def test_unacknowledged_items_of_a_dead_trainer_arrive_exactly_once_elsewhere(keep, unique, sinks):
    gate = keep(Gate.remote())
    victim_name, living_name = unique("victim"), next(iter(sinks))
    victim = Sink.options(name=victim_name).remote(gate, hold_from=1)
    sender = make_sender([victim_name, living_name])
    sender.send(parcels(0, 4))
    sender.flush()  # 0 and 2 are acknowledged by the victim
    sender.send(parcels(4, 4))  # 4 and 6 are held by it
    pass_gate(gate, "wait", "sink reached")
    ray.kill(victim)
    sender.flush()
    sender.send(parcels(8, 3))
    sender.flush()
    # All but what the victim had acknowledged is with the living one, once.
    assert sorted(received(sinks)[0]) == [1, 3, 4, 5, 6, 7, 8, 9, 10]
    assert (sender.num_delivered, sender.num_redirected) == (11, 2)


def test_with_every_trainer_dead_the_maker_is_told(unique):
    name = unique("victim")
    victim = Sink.options(name=name).remote()
    sender = make_sender([name])
    sender.send(parcels(0, 1))
    sender.flush()
    ray.kill(victim)
    sender.send(parcels(1, 1))
    with pytest.raises(PeerDied, match=rf"maker maker has nobody to send experience to: .*{name}.* is gone"):
        sender.flush()


def test_a_trainer_name_that_does_not_exist_is_named(sinks):
    sender = make_sender([next(iter(sinks)), "no-such-trainer"])
    with pytest.raises(ActorNotFound, match=r"no trainer actor named 'no-such-trainer' appeared within 1\.5 s"):
        sender.send(parcels(0, 2))


def test_no_more_sends_are_open_than_allowed(keep, unique):
    gate, name = keep(Gate.remote()), unique("slow")
    slow = keep(Sink.options(name=name).remote(gate, hold_from=0))
    timeline = Timeline()
    sender = make_sender([name], max_in_flight=2, timeline=timeline)
    wants_room = threading.Event()
    await_oldest = sender._await_oldest

    def noting_await():
        wants_room.set()
        await_oldest()

    sender._await_oldest = noting_await
    sender.send(parcels(0, 1))
    sender.send(parcels(1, 1))
    assert not wants_room.is_set()
    third = Background(sender.send, parcels(2, 1))
    assert wants_room.wait(PATIENCE)
    pass_gate(gate, "wait", "sink reached")
    assert third.is_running
    pass_gate(gate, "open", "sink")
    third.result()
    sender.flush()
    assert ray.get(slow.sample_ids.remote()) == [0, 1, 2]
    assert [span.what for span in timeline.since(0).records] == ["wait_room"] * 3  # one by one, two of them at the end


def test_after_a_stop_a_full_trainer_does_not_hold_the_maker(keep, unique):
    gate, name = keep(Gate.remote()), unique("full")
    keep(Sink.options(name=name).remote(gate, hold_from=0))
    sender = make_sender([name], should_stop=lambda: True)
    sender.send(parcels(0, 3))
    sender.flush()
    assert (sender.num_delivered, sender.num_unacknowledged) == (0, 3)


def test_a_full_trainer_is_waited_for_until_the_deadline(keep, unique):
    gate, name = keep(Gate.remote()), unique("full")
    full = keep(Sink.options(name=name).remote(gate, hold_from=0))
    sender = make_sender([name], deadlines=Deadlines(start_seconds=5.0, batch_seconds=0.3, message_seconds=0.1))
    sender.send(parcels(0, 2))
    with pytest.raises(DeadlineExceeded, match=rf"0\.3 s for trainer {name} to take 2 items of maker maker"):
        sender.flush()
    del full


def unavailable(times, sender):
    """The connection breaks after the call was executed, so many times."""
    wait_for = sender._wait_for
    left = [times]

    def breaking_wait(flight):
        wait_for(flight)
        if left[0] > 0:
            left[0] -= 1
            raise ActorUnavailableError("the connection broke", b"\1" * 16)

    sender._wait_for = breaking_wait


def test_a_broken_connection_is_retried_with_the_same_delivery_ids(sinks):
    name, sink = next(iter(sinks.items()))
    sender = make_sender([name])
    unavailable(1, sender)
    sender.send(parcels(0, 2))
    sender.flush()
    first, again = ray.get(sink.calls.remote())
    assert first == again
    assert sender.num_delivered == 2
    # This is what makes the repetition harmless at a trainer.
    log, sent = DeliveryLog(), items(0, 2)
    for one, (_, delivery_id) in zip(sent, first, strict=True):
        one.delivery_id = delivery_id
    assert [len(log.fresh(sent)), len(log.fresh(sent))] == [2, 0]


def test_a_trainer_that_stays_unreachable_is_an_error_at_the_deadline(sinks):
    sender = make_sender([next(iter(sinks))], deadlines=Deadlines(batch_seconds=0.2))
    unavailable(10**6, sender)
    sender.send(parcels(0, 1))
    with pytest.raises(DeadlineExceeded, match="which is there but does not answer"):
        sender.flush()


def test_a_maker_made_anew_under_an_old_name_is_another_sender(sinks):
    name, sink = next(iter(sinks.items()))
    for _ in range(2):
        sender = make_sender([name])
        sender.send(parcels(0, 1))
        sender.flush()
    (first,), (second,) = ray.get(sink.calls.remote())
    sent = items(0, 2)
    sent[0].delivery_id, sent[1].delivery_id = first[1], second[1]
    assert len(DeliveryLog().fresh(sent)) == 2


@ray.remote(num_cpus=0)
class Refuser:
    def buffer_extend(self, items):
        raise DataError("these items are not welcome")


def test_what_a_trainer_raises_reaches_the_maker_as_it_is(keep, unique):
    name = unique("refuser")
    keep(Refuser.options(name=name).remote())
    sender = make_sender([name])
    sender.send(parcels(0, 1))
    with pytest.raises(DataError) as caught:
        sender.flush()
    assert str(caught.value) == "these items are not welcome"
    assert caught.value.__notes__ == [f"raised in trainer {name}, which maker maker sends to"]
