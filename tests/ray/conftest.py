"""One local Ray for the test session, and cleanup of every actor that a test creates."""

import contextlib
import importlib
import json
import os
import shutil
import tempfile
import uuid
from pathlib import Path

import pytest
import ray
import torch

from coati.config import build_config
from coati.demo.base_model import pretrain
from coati.monitor import RunLog
from coati.ray import launcher

for name in ("ray_testing", "tiny", "thread_peers", "weight_testing"):  # workers lack pytest's import paths
    ray.cloudpickle.register_pickle_by_value(importlib.import_module(name))


def pytest_collection_finish(session):
    here = Path(__file__).parent
    for module in {item.module for item in session.items if here in Path(item.path).parents}:
        ray.cloudpickle.register_pickle_by_value(module)  # workers cannot import test modules


@pytest.fixture(scope="session")
def cluster(forked_workers):
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # Set before ray.init, because a private local Ray inherits the driver's environment at that time.
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
    """Turn a word into a unique actor name."""
    suffix = uuid.uuid4().hex[:8]
    return lambda word: f"{word}-{suffix}"


@pytest.fixture
def keep(cluster):
    """Register actors, and anything with `close`, to be ended after the test; returns its argument."""
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
    """Names and handles of three shared trainers that record their items, emptied; tests must not kill them."""
    ray.get([sink.reset.remote() for sink in _shared_sinks.values()])
    return _shared_sinks


REWARDS = """
def length(completions, **_):
    return [float(len(text)) for text in completions]

def broken(completions, **_):
    raise KeyError("no such judge")
"""


@pytest.fixture(scope="session")
def base_model(tmp_path_factory):
    """The demo's model, trained only briefly."""
    folder = tmp_path_factory.mktemp("base") / "model"
    pretrain(folder, steps=2, batch_size=2)
    return folder


@pytest.fixture
def make_config(tmp_path, base_model):
    (tmp_path / "rewards.py").write_text(REWARDS)
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": "the film"}) + "\n" for _ in range(4)))

    def make(*, function="rewards:length", train=None, rollout=None, algorithm="ppo", lora=None, **topology):
        return build_config(
            {
                "run": {"name": "test", "output": str(tmp_path / "out")},
                "model": {"path": str(base_model)},
                "prompts": {"path": str(tmp_path / "prompts.jsonl")},
                "reward": {"function": function, "search_paths": [str(tmp_path)]},
                "rollout": {"prompts_per_batch": 4, "max_new_tokens": 4, **(rollout or {})},
                "algorithm": algorithm,
                "train": {"total_steps": 2, "batch_size": 2, "actor_lr": 1e-3, **(train or {})},
                "topology": {"threads_per_actor": 1, **topology},
                "lora": lora or {},
                "logging": {"samples_kept": 64},
                "deadlines": {"start_seconds": 120, "batch_seconds": 120, "update_seconds": 120},
            }
        )

    return make


@pytest.fixture
def run(cluster, tmp_path, monkeypatch):
    """Run a config on the session's Ray; returns the final progress of trainers and makers.

    `makers`: the makers at the end, if they differ from the initial ones.
    """

    @contextlib.contextmanager
    def on_shared_cluster(config, **_):
        yield False

    monkeypatch.setattr(launcher, "connected", on_shared_cluster)

    def go(config, *, checkpoint=None, should_stop=lambda: False, log_class=RunLog, makers=None):
        log = log_class(
            tmp_path,
            total_steps=1,
            max_spans=10_000,
        )
        names = makers or [f"maker-{n}" for n in range(config.topology.makers)]
        names += [f"trainer-{n}" for n in range(config.topology.trainers)]
        at_the_end = {}

        def look(snapshot):
            if snapshot.message == "saving the model":
                at_the_end.update({n: ray.get(ray.get_actor(n).progress.remote()) for n in names})

        detached = launcher.DetachedRun(config, log, on_progress=look, checkpoint=checkpoint, should_stop=should_stop)
        try:
            detached.run(str(tmp_path / "model"))
        finally:
            log.flush()
            for name in names:
                with pytest.raises(ValueError, match="Failed to look up actor"):
                    ray.get_actor(name)
        return at_the_end

    return go
