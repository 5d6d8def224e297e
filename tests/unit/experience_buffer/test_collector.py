"""Single samples become training batches, in the order they came."""

import pytest
import torch

from coati.errors import ConfigError, DataError
from coati.experience_buffer import BatchCollector


def ids(batch):
    return batch.sample_ids.tolist()


def test_batches_are_full_and_in_order_of_arrival(item):
    collector = BatchCollector(2)
    assert collector.add([item(1)]) == []
    assert [ids(batch) for batch in collector.add([item(2), item(3), item(4), item(5)])] == [[1, 2], [3, 4]]
    assert len(collector) == 1
    assert [ids(batch) for batch in collector.add([item(6)])] == [[5, 6]]
    assert len(collector) == 0


def test_flush_hands_out_the_rest_once(item):
    collector = BatchCollector(3)
    collector.add([item(1), item(2)])
    assert ids(collector.flush()) == [1, 2]
    assert collector.flush() is None


def test_after_clear_the_collector_still_works(item):
    collector = BatchCollector(2)
    collector.add([item(1)])
    collector.clear()
    assert len(collector) == 0
    assert [ids(batch) for batch in collector.add([item(2), item(3)])] == [[2, 3]]


@pytest.mark.parametrize("bad", [{"values": torch.zeros(5)}, {"reward": None}])
def test_a_bad_item_is_refused_with_its_whole_delivery_and_harms_nothing(item, bad):
    collector = BatchCollector(2)
    collector.add([item(1)])
    with pytest.raises(DataError, match="buffer item"):
        collector.add([item(2), item(3, **bad)])
    assert len(collector) == 1
    assert [ids(batch) for batch in collector.add([item(4)])] == [[1, 4]]


def test_what_is_not_an_item_is_refused_by_its_type():
    collector = BatchCollector(1)
    with pytest.raises(DataError, match="BufferItem, got a dict"):
        collector.add([{"sequences": [1]}])
    assert len(collector) == 0


@pytest.mark.parametrize("size", [0, -1])
def test_a_batch_size_below_one_is_an_error(size):
    with pytest.raises(ConfigError, match="sample_batch_size"):
        BatchCollector(size)
