"""The replay buffer's queue: a light actor that reserves no CPU, and whose death is reported by name."""

import subprocess
import sys

import pytest
import ray
import torch
from ray_testing import PATIENCE
from tiny import item, items

from coati.batching import make_experience_batch
from coati.errors import PeerDied
from coati.experience import EXPERIENCE_FIELDS
from coati.ray.detached_replay_buffer import DetachedReplayBuffer


@ray.remote(num_cpus=0)
class Consumer:
    """Samples from a buffer with a shared queue; touches a file when the queue is empty."""

    def sample(self, queue, waits):
        get = queue.get

        def noting_get():
            found = get()
            if found is None:
                waits.touch()
            return found

        queue.get = noting_get
        return DetachedReplayBuffer(2, queue=queue).sample(timeout_seconds=PATIENCE).sample_ids.tolist()


@pytest.fixture
def make_buffer(keep):
    return lambda *args, **kwargs: keep(DetachedReplayBuffer(*args, **kwargs))


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


def call_until_it_fails(actor):
    while True:
        ray.get(actor.qsize.remote(), timeout=PATIENCE)


def test_the_queue_reserves_no_cpu_and_is_a_light_process_whose_death_is_named(make_buffer):
    before = ray.available_resources().get("CPU", 0.0)
    buffer = make_buffer(1)
    buffer.extend(items(0, 1))  # the queue actor is running
    assert ray.available_resources().get("CPU", 0.0) == before
    assert buffer.get_length() == 1
    # A queue that imports torch would cost half a gigabyte and five seconds.
    entry = ray.cloudpickle.dumps(buffer._queue.get())
    code = "import pickle, sys; pickle.loads(sys.stdin.buffer.read()); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], input=entry, check=True, timeout=PATIENCE)
    actor = buffer._queue._queue.actor
    ray.kill(actor)
    with pytest.raises(ray.exceptions.RayActorError):
        call_until_it_fails(actor)  # one call may still succeed before it ends
    with pytest.raises(PeerDied, match="queue"):
        buffer.extend(items(1, 1))


def test_a_consumer_killed_while_it_waits_takes_nothing_with_it(make_buffer, keep, tmp_path):
    buffer = make_buffer(2)
    consumer = Consumer.remote()
    asked = consumer.sample.remote(buffer._queue, tmp_path / "waits")
    while not (tmp_path / "waits").exists():
        assert ray.wait([asked], timeout=0.05)[1] == [asked]
    ray.kill(consumer)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(asked, timeout=PATIENCE)
    buffer.extend(items(0, 4))
    assert buffer.sample().sample_ids.tolist() == [0, 1]
    assert buffer.sample().sample_ids.tolist() == [2, 3]
    assert buffer.get_length() == 0
