"""The stack limit of a shared card, with a driver that is a few lines of Python."""

import ctypes
import logging

import pytest
import torch

from coati import gpu


class Driver:
    """What libcuda answers: one limit, and an error for those functions that are told to fail."""

    def __init__(self, limit, *, failing=()):
        self.limit = limit
        self.failing = failing

    def cuCtxGetLimit(self, found, which):
        assert which == 0
        found._obj.value = self.limit
        return 201 if "get" in self.failing else 0

    def cuCtxSetLimit(self, which, value):
        assert which == 0
        if "set" in self.failing:
            return 215
        self.limit = value.value
        return 0


@pytest.mark.parametrize(("before", "after"), [(1024, 256), (257, 256), (256, 256), (16, 16)])
def test_the_stack_is_lowered_to_256_bytes_and_never_raised(before, after):
    driver = Driver(before)
    gpu.lower_stack_limit(driver)
    assert gpu.stack_limit(driver) == after


@pytest.mark.parametrize(("failing", "status"), [("get", 201), ("set", 215)])
def test_a_driver_that_refuses_is_heard_at_debug_level_only(failing, status, caplog):
    driver = Driver(1024, failing=[failing])
    with caplog.at_level(logging.DEBUG, logger="coati.gpu"):
        gpu.lower_stack_limit(driver)
    assert driver.limit == 1024
    assert [(record.levelname, str(status) in record.message) for record in caplog.records] == [("DEBUG", True)]


def test_a_driver_without_limits_changes_nothing(caplog):
    with caplog.at_level(logging.DEBUG, logger="coati.gpu"):
        gpu.lower_stack_limit(object())
    assert "cuCtxGetLimit" in caplog.text


@pytest.fixture
def loaded(monkeypatch):
    """What libraries were asked for; there are none."""
    names = []

    def load(name):
        names.append(name)
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", load)
    return names


def test_a_cpu_needs_no_driver(loaded):
    gpu.share_gpu(torch.device("cpu"))
    assert loaded == []


def test_a_missing_driver_is_no_error(loaded, caplog):
    with caplog.at_level(logging.DEBUG, logger="coati.gpu"):
        gpu.share_gpu(torch.device("cuda"))
    assert loaded == ["libcuda.so.1"]
    assert "cannot open shared object file" in caplog.text


def test_a_process_group_keeps_the_stack_as_it_is(loaded, monkeypatch):
    monkeypatch.setattr(gpu.dist, "is_initialized", lambda: True)
    gpu.share_gpu(torch.device("cuda"))
    assert loaded == []
