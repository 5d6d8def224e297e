"""The processors and streams of a shared card, with streams that are a few lines of Python."""

import contextlib
import doctest
import gc
from types import SimpleNamespace

import pytest
import torch

from coati import gpu
from coati.errors import ConfigError


@pytest.mark.parametrize(
    ("share", "total", "expected"), [(0.5, 132, 64), (0.75, 132, 96), (0.01, 132, 8), (1.0, 132, 128), (0.9, 8, 8)]
)
def test_processors_are_given_out_in_groups_of_eight(share, total, expected):
    assert gpu.processors_of(share, total) == expected
    assert doctest.testmod(gpu).failed == 0


class Stream:
    """Writes down who waited for whom."""

    def __init__(self, name, log):
        self.name, self.log = name, log
        self.cuda_stream = id(self)

    def wait_stream(self, other):
        self.log.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def log(monkeypatch):
    """What happens on a card of 132 processors that can be divided."""
    green = pytest.importorskip("torch.cuda.green_contexts")
    log = []
    streams = [Stream("outside", log)]
    asked = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: asked)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: streams[-1])

    @contextlib.contextmanager
    def stream(chosen):
        log.append(f"on {chosen.name}")
        streams.append(chosen)
        try:
            yield
        finally:
            streams.pop()
        log.append(f"off {chosen.name}")

    def create(**wanted):
        log.append(wanted)
        names = iter(["inside", "beside"])
        return SimpleNamespace(Stream=lambda: Stream(next(names), log))

    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(green.GreenContext, "create", create)
    return log


def test_a_step_on_a_share_comes_after_what_was_before_and_before_what_follows(log):
    share = gpu.ProcessorShare(torch.device("cuda", 1), 0.5)
    with share.used():
        log.append("step")
    assert log == [
        {"num_sms": 64, "device_id": 1},
        "inside waits for outside",
        "on inside",
        "step",
        "off inside",
        "outside waits for inside",
    ]


def test_a_step_that_fails_is_waited_for_too(log):
    share = gpu.ProcessorShare(torch.device("cuda"), 0.5)
    with pytest.raises(ZeroDivisionError), share.used():
        raise ZeroDivisionError
    assert log[-1] == "outside waits for inside"


def test_what_is_beside_a_share_stays_on_its_processors(log, monkeypatch):
    monkeypatch.setattr(gpu, "_second_stream", lambda _: "anywhere")
    device = torch.device("cuda")
    share, other = (gpu.ProcessorShare(device, part) for part in (0.5, 0.25))
    assert gpu.side_stream(device) == "anywhere"
    for one in (share, other):
        with one.used():
            assert gpu.side_stream(device) is one.side_stream
    assert share.side_stream is not other.side_stream
    assert gpu.side_stream(device) == "anywhere"
    del one, other, share
    gc.collect()
    assert not gpu._shares


def test_a_torch_that_cannot_divide_a_card_is_named(log, monkeypatch):
    from torch.cuda import green_contexts

    def create(**_):
        raise RuntimeError("PyTorch was not built with Green Context support!")

    monkeypatch.setattr(green_contexts.GreenContext, "create", create)
    with pytest.raises(ConfigError, match=rf'got torch {torch.__version__}: .* Set it to "slices"'.replace("+", r"\+")):
        gpu.ProcessorShare(torch.device("cuda"), 0.5)


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
