"""One local Ray for the whole test session, and a tidy end for every actor that a test makes."""

import importlib.util
import os
import shutil
import sys
import tempfile
import uuid
from pathlib import Path

import pytest
import ray
import torch


def _load_helpers():
    """Make tests/ray/ray_testing.py importable under one name, here and (by value) in Ray's workers."""
    spec = importlib.util.spec_from_file_location("ray_testing", Path(__file__).with_name("ray_testing.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules["ray_testing"] = module
    spec.loader.exec_module(module)
    ray.cloudpickle.register_pickle_by_value(module)


_load_helpers()


def pytest_collection_finish(session):
    here = Path(__file__).parent
    for module in {item.module for item in session.items if here in Path(item.path).parents}:
        ray.cloudpickle.register_pickle_by_value(module)  # workers cannot import test modules


@pytest.fixture(scope="session")
def cluster():
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # Secret before ray.init: what the driver has now is what a private local Ray inherits.
    os.environ["COATI_TEST_BEFORE_INIT"] = "inherited"
    torch.set_num_threads(1)
    folder = tempfile.mkdtemp(prefix="ct-")  # short: Ray's socket paths have a length limit
    ray.init(
        address="local",
        namespace="tests",
        num_cpus=6,  # logical: room for three makers and two trainers
        include_dashboard=False,
        log_to_driver=False,
        _temp_dir=folder,
    )
    yield
    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def unique(cluster):
    """Turns a word into a name that no other actor has."""
    suffix = uuid.uuid4().hex[:8]
    return lambda word: f"{word}-{suffix}"


@pytest.fixture
def keep(cluster):
    """Notes actors (and anything with `close`) to be ended with the test, and hands them back."""
    kept = []

    def note(thing):
        kept.append(thing)
        return thing

    yield note
    for thing in reversed(kept):
        if hasattr(thing, "close") and not isinstance(thing, ray.actor.ActorHandle):
            thing.close()
        else:
            ray.kill(thing)


@pytest.fixture(scope="session")
def _shared_sinks(cluster):
    from ray_testing import Sink

    names = [f"shared-sink-{index}" for index in range(3)]
    return {name: Sink.options(name=name).remote() for name in names}


@pytest.fixture
def sinks(_shared_sinks):
    """Names and handles of three trainers that remember what they get, emptied; tests must not kill them."""
    ray.get([sink.reset.remote() for sink in _shared_sinks.values()])
    return _shared_sinks
