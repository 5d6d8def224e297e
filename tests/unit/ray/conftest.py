import pytest
from ray_testing import make_ppo_trainer
from thread_peers import LocalQueue

from coati.actors import trainer
from coati.ray import detached_replay_buffer


@pytest.fixture
def local_queue(monkeypatch):
    """Keep the batches of this process's trainers in this process."""
    monkeypatch.setattr(detached_replay_buffer, "BatchQueue", LocalQueue)


@pytest.fixture
def make_trainer(local_queue, monkeypatch):
    """Create a PPO trainer without Ray; `weight_testing.connect` connects it to makers."""
    monkeypatch.setattr(trainer, "_SLICE_SECONDS", 0.01)
    return lambda **options: make_ppo_trainer([], **options)
