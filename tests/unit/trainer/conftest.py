"""Fixtures for tests of a single trainer."""

import pytest
import torch


@pytest.fixture
def one_process(monkeypatch):
    """Run without process-group variables, with one torch thread; restores both, and leaves no process group."""
    for key in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(key, raising=False)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
