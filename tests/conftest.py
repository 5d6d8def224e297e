"""For all tests: which run first, how many examples they try, and what makes each of thousands cheap."""

import contextlib
import gc
import logging
import os
import sys

import pytest

# Before huggingface_hub is imported. Without a network it retries a made-up name for half a minute. No test needs it.
os.environ["HF_HUB_OFFLINE"] = "1"

with contextlib.suppress(ImportError):  # tests/gpu runs without it
    from hypothesis import settings

    # The same examples every time: a test that failed fails again, and only a change of ours makes a green test red.
    settings.register_profile("quick", max_examples=10, deadline=None, derandomize=True)
    settings.register_profile("long", max_examples=300, deadline=None, derandomize=True)  # make test-long
    settings.register_profile("search", max_examples=3000, deadline=None)  # others every time, to look for failures
    settings.load_profile("quick")

gc.set_threshold(50_000, 20, 100)

# Slow folders first, so that the workers of `pytest -n` end together.
ORDER = ("e2e", "ray", "ranks", "gpu", "with_vllm", "with_trackers", "unit")


def pytest_collection_modifyitems(config, items):
    here = config.rootpath / "tests"
    items.sort(key=lambda item: ORDER.index(item.path.relative_to(here).parts[0]))


def pytest_collection_finish():
    gc.collect()
    gc.freeze()  # what imports left is not looked at again


@pytest.fixture(autouse=True, scope="module")
def hide_loggers_of_torch():
    """Let loggers of torch and transformers, which keep working, leave the register.

    pytest walks over the register 16 times per test, and adds handlers to each logger that does not propagate.
    """
    register = logging.root.manager.loggerDict
    for name in [name for name in register if name.startswith(("torch.", "transformers."))]:
        register.pop(name).propagate = True


@pytest.fixture(scope="module")
def quick_collections():
    """Make each `gc.collect` of a module look at few objects, and not at all that earlier tests have imported."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def forget_rewards():
    """What a test wrote as `rewards.py`, and a run or a check imported, is not what the next one means."""
    yield
    sys.modules.pop("rewards", None)


@pytest.fixture
def one_thread():
    """Let torch use one thread: rounding depends on the number of threads that share a sum."""
    import torch

    from coati.devices import set_up_cpu

    before = torch.get_num_threads()
    set_up_cpu(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def forked_workers():
    """Workers of Rays that this process starts are forked from one that has imported everything."""
    from forked_workers import forked_workers

    with forked_workers():
        yield
