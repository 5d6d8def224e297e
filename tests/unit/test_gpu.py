"""The side stream of a card, with streams that are a few lines of Python."""

import contextlib

import pytest
import torch

from coati import gpu


class Stream:
    """Writes down who waited for whom."""

    def __init__(self, name, log):
        self.name, self.log = name, log

    def wait_stream(self, other):
        self.log.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def log(monkeypatch):
    """What happens on the streams of a card."""
    log = []

    @contextlib.contextmanager
    def stream(chosen):
        log.append(f"on {chosen.name}")
        yield

    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Stream("outside", log))
    monkeypatch.setattr(torch.cuda, "stream", stream)
    return log


def test_work_on_the_side_stream_comes_after_what_was_before_and_before_what_follows(log, monkeypatch):
    monkeypatch.setattr(gpu, "side_stream", lambda _: Stream("side", log))
    side = gpu.SideStream(torch.device("cuda"))
    log.append("long work")
    with pytest.raises(ZeroDivisionError), side.used():
        raise ZeroDivisionError
    assert log == ["side waits for outside", "long work", "on side", "outside waits for side"]


def test_a_cpu_has_no_side_stream(monkeypatch):
    monkeypatch.setattr(gpu, "side_stream", None)
    with gpu.SideStream(torch.device("cpu")).used():
        assert torch.ones(2).sum() == 2
