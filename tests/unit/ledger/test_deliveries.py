"""What has arrived is recognised when it comes again, in whatever order."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from coati.experience_buffer import BufferItem
from coati.ledger import DeliveryLog


def item(delivery_id):
    one = torch.zeros(1)
    return BufferItem(torch.zeros(2), one, one, torch.zeros(()), one, one, None, None, delivery_id=delivery_id)


def fresh_ids(log, *ids):
    return [entry.delivery_id for entry in log.fresh([item(delivery_id) for delivery_id in ids])]


def test_a_repeated_delivery_is_dropped_and_counted():
    log = DeliveryLog()
    assert fresh_ids(log, ("a", 0), ("a", 1)) == [("a", 0), ("a", 1)]
    assert fresh_ids(log, ("a", 1), ("a", 2)) == [("a", 2)]
    assert log.num_repeated == 1


def test_a_repeat_within_one_delivery_is_dropped():
    log = DeliveryLog()
    assert fresh_ids(log, ("a", 0), ("a", 0)) == [("a", 0)]
    assert log.num_repeated == 1


def test_out_of_order_deliveries_are_fresh_once():
    log = DeliveryLog()
    assert fresh_ids(log, ("a", 2), ("a", 0)) == [("a", 2), ("a", 0)]
    assert fresh_ids(log, ("a", 2), ("a", 1), ("a", 0)) == [("a", 1)]
    assert fresh_ids(log, ("a", 3)) == [("a", 3)]


def test_senders_are_told_apart():
    log = DeliveryLog()
    assert fresh_ids(log, ("a", 0), ("b", 0)) == [("a", 0), ("b", 0)]
    assert log.num_repeated == 0


def test_items_without_an_id_are_always_fresh():
    log = DeliveryLog()
    assert fresh_ids(log, None, None) == [None, None]
    assert fresh_ids(log, None) == [None]
    assert log.num_repeated == 0


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 9)), max_size=60))
def test_any_sequence_of_deliveries_lets_each_id_through_once(ids):
    log = DeliveryLog()
    passed = [entry for delivery_id in ids for entry in fresh_ids(log, delivery_id)]
    assert passed == list(dict.fromkeys(ids))
    assert log.num_repeated == len(ids) - len(set(ids))
