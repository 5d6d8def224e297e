"""Signals while Ray starts: an interrupted start can crash Ray."""

import signal

import pytest

from coati.ray.cluster import _own_signal_handlers


@pytest.fixture
def handled():
    """Numbers of the signals that reached the program's handler."""
    found, before = [], {}
    for number in (signal.SIGINT, signal.SIGTERM):
        before[number] = signal.signal(number, lambda number, _: found.append(number))
    yield found
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_waits_until_ray_has_started(handled, number):
    with _own_signal_handlers():
        signal.raise_signal(number)
        assert not handled
    assert handled == [number]


def test_a_second_signal_does_not_wait(handled):
    with _own_signal_handlers():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        assert handled == [signal.SIGTERM]


def test_a_start_that_fails_raises_its_error_and_restores_the_handlers(handled):
    def start():
        signal.raise_signal(signal.SIGINT)
        raise OSError("no space")

    with pytest.raises(OSError, match="no space"), _own_signal_handlers():
        start()
    assert not handled
    signal.raise_signal(signal.SIGINT)
    assert handled == [signal.SIGINT]
