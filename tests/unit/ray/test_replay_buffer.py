"""The replay buffer turns items into whole batches. The queue is in this process."""

import functools
import threading

import pytest
import torch
from ray_testing import Background
from thread_peers import PATIENCE, LocalQueue
from tiny import experience, item, items

from coati.batching import make_experience_batch
from coati.config import Deadlines
from coati.errors import ConfigError, DataError, DeadlineExceeded
from coati.experience import EXPERIENCE_FIELDS
from coati.ray.detached_replay_buffer import DetachedReplayBuffer


@pytest.fixture
def make_buffer():
    return lambda *args, **kwargs: DetachedReplayBuffer(*args, **kwargs, queue=LocalQueue())


@pytest.fixture
def unleased():
    """A full buffer with room for one batch of one sample."""
    buffer = DetachedReplayBuffer(1, 1, queue=LocalQueue())
    buffer.extend(delivery("first", 0))
    return buffer


def delivery(name, first):
    made = items(first, 1)
    for one in made:
        one.delivery_id = name
    return made


def ids(batch):
    return batch.sample_ids.tolist()


def blocked_producer(buffer, new_items, **options):
    """Start a producer in a thread, and wait until it has found the buffer full."""
    found_full = threading.Event()
    length = buffer.get_length

    def noting_length():
        if length() >= buffer.limit:
            found_full.set()
        return length()

    buffer.get_length = noting_length
    producer = Background(functools.partial(buffer.extend, **options), new_items)
    assert found_full.wait(PATIENCE)
    buffer.get_length = length
    assert producer.is_running or options  # one with a deadline may have given up
    return producer


def test_items_are_batched_across_extends_in_order(make_buffer):
    buffer = make_buffer(4)
    # 3 + 6 + 2 items = 2 batches of 4 and 3 left over.
    for first, count in ((0, 3), (3, 6), (9, 2)):
        buffer.extend(items(first, count))
    assert (buffer.get_length(), buffer.num_items_waiting) == (2, 3)
    assert ids(buffer.sample()) == [0, 1, 2, 3]
    assert ids(buffer.sample()) == [4, 5, 6, 7]
    assert buffer.get_length() == 0
    assert buffer.num_items_waiting == 3


def test_a_queue_that_fails_adds_nothing_and_a_retry_adds_each_item_once(make_buffer, monkeypatch):
    buffer = make_buffer(2)
    buffer.extend(delivery("first", 0))
    monkeypatch.setattr(buffer._queue, "put_all", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        buffer.extend(delivery("second", 1))
    assert (buffer.get_length(), buffer.num_items_waiting) == (0, 1)
    monkeypatch.undo()
    buffer.extend(delivery("second", 1))
    assert ids(buffer.sample()) == [0, 1]
    assert buffer.num_items_waiting == 0


def test_append_splits_a_batch_into_items(make_buffer):
    buffer = make_buffer(2)
    buffer.append(experience(0, 3))
    buffer.append(experience(3, 1))
    assert [ids(buffer.sample()) for _ in range(2)] == [[0, 1], [2, 3]]


def test_values_arrive_bit_for_bit_in_their_dtypes(make_buffer):
    buffer = make_buffer(3)
    sent = [item(1), item(2, num_prompt=5, num_actions=1), item(2**40, num_actions=6)]
    sent[1].values = torch.tensor([float("nan")])
    for one in sent:
        one.reference_log_probs = one.action_log_probs.to(torch.bfloat16)
    buffer.extend(sent)
    got, expected = buffer.sample(), make_experience_batch(sent)
    for name in EXPERIENCE_FIELDS:
        ours, theirs = getattr(got, name), getattr(expected, name)
        if theirs is None:
            assert ours is None
            continue
        assert ours.dtype == theirs.dtype, name
        assert torch.equal(ours.nan_to_num(9.0), theirs.nan_to_num(9.0)), name
    assert got.action_mask.dtype == torch.bool
    assert got.sample_ids.tolist()[2] == 2**40
    got.values.add_(1.0)  # the returned tensors are writable


def test_at_the_limit_a_producer_blocks_until_a_batch_is_taken(make_buffer):
    buffer = make_buffer(2, limit=1)
    buffer.extend(items(0, 2))
    producer = blocked_producer(buffer, items(2, 4))
    assert buffer.get_length() == 1
    assert ids(buffer.sample()) == [0, 1]
    assert ids(buffer.sample()) == [2, 3]
    assert ids(buffer.sample()) == [4, 5]
    producer.result()


def test_a_producer_that_gives_up_has_added_nothing(make_buffer):
    buffer = make_buffer(1, limit=1)
    buffer.extend(items(0, 1))
    with pytest.raises(DeadlineExceeded, match=r"waited 0\.05 s for room .*limit 1 batches"):
        buffer.extend(items(1, 2), timeout_seconds=0.05)
    assert ids(buffer.sample()) == [0]
    assert buffer.try_sample(0.0) is None


def test_a_retried_delivery_that_found_no_room_is_added_once(unleased):
    late = blocked_producer(unleased, delivery("second", 1), timeout_seconds=0.05)
    retry = Background(unleased.extend, delivery("second", 1))
    with pytest.raises(DeadlineExceeded, match="for room"):
        late.result()
    assert ids(unleased.sample()) == [0]
    retry.result()
    assert ids(unleased.sample()) == [1]
    unleased.extend(delivery("second", 1))  # a retry after it was added
    assert unleased.try_sample(0.0) is None


def test_a_retry_is_not_acknowledged_before_its_delivery_is_added(unleased):
    waiting = blocked_producer(unleased, delivery("second", 1))
    with pytest.raises(DeadlineExceeded, match="for room"):
        unleased.extend(delivery("second", 1), timeout_seconds=0.05)
    retry = Background(unleased.extend, delivery("second", 1))
    assert ids(unleased.sample()) == [0]
    assert ids(unleased.sample(timeout_seconds=PATIENCE)) == [1]
    waiting.result()
    retry.result()
    assert unleased.try_sample(0.0) is None


def test_clear_drops_everything_and_makes_room_for_a_blocked_producer(make_buffer):
    buffer = make_buffer(2, limit=1)
    buffer.extend(items(0, 3))
    producer = blocked_producer(buffer, items(3, 2))
    buffer.clear()
    producer.result()
    assert ids(buffer.sample()) == [3, 4]
    # It still works, including the limit.
    buffer.extend(items(10, 2))
    blocked = blocked_producer(buffer, items(12, 2))
    assert ids(buffer.sample()) == [10, 11]
    assert ids(buffer.sample()) == [12, 13]
    blocked.result()


def test_an_item_that_does_not_fit_is_refused_and_harms_nothing(make_buffer):
    buffer = make_buffer(2)
    buffer.extend(items(0, 1))
    ragged = item(1)
    ragged.values = torch.zeros(9)
    with pytest.raises(DataError, match=r"values must be \[3\], got \[9\]"):
        buffer.extend([item(5), ragged])
    buffer.extend(items(1, 1))
    assert ids(buffer.sample()) == [0, 1]


def test_sample_says_what_it_waited_for(make_buffer):
    buffer = make_buffer(4)
    buffer.extend(items(0, 3))
    with pytest.raises(DeadlineExceeded, match=r"worker 2 waited 0\.05 s for a batch of 4 samples.*; 3 samples"):
        buffer.sample(worker_rank=2, timeout_seconds=0.05)
    buffer.extend(items(3, 1))
    assert ids(buffer.sample()) == [0, 1, 2, 3]


def test_a_waiting_consumer_gets_the_batch_when_it_comes(make_buffer):
    buffer = make_buffer(2)
    consumer = Background(buffer.sample)
    buffer.extend(items(0, 1))
    assert consumer.is_running
    buffer.extend(items(1, 1))
    assert ids(consumer.result()) == [0, 1]


def test_concurrent_producers_lose_and_repeat_nothing(make_buffer):
    buffer = make_buffer(4, limit=2)
    producers = [Background(buffer.extend, items(100 * n, 10)) for n in range(4)]
    seen = [sample for _ in range(10) for sample in ids(buffer.sample(timeout_seconds=PATIENCE))]
    for producer in producers:
        producer.result()
    assert sorted(seen) == [100 * n + k for n in range(4) for k in range(10)]


@pytest.mark.parametrize(("arguments", "rule"), [((0,), "sample_batch_size"), ((1, -1), "buffer limit")])
def test_impossible_sizes_are_refused(arguments, rule):
    with pytest.raises(ConfigError, match=rule):
        DetachedReplayBuffer(*arguments)


def test_the_wait_for_room_uses_the_batch_deadline():
    deadlines = Deadlines(batch_seconds=0.01)
    buffer = DetachedReplayBuffer(1, 1, deadlines=deadlines, queue=LocalQueue())
    buffer.extend(delivery("first", 0))
    with pytest.raises(DeadlineExceeded, match=r"0\.01 s"):
        buffer.extend(delivery("second", 1))
