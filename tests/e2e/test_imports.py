"""Import rules: `import coati` is light, and only coati.ray and coati.cli import Ray."""

import json
import subprocess
import sys

import pytest

CONTRACT = {
    "coati.experience_maker.base": ["Experience", "ExperienceMaker"],
    "coati.experience_maker": ["Experience", "ExperienceMaker", "NaiveExperienceMaker"],
    "coati.experience_buffer.utils": ["BufferItem", "split_experience_batch", "make_experience_batch"],
    "coati.ray.detached_replay_buffer": ["DetachedReplayBuffer"],
    "coati.ray.detached_trainer_base": ["DetachedTrainer"],
    "coati.ray.detached_trainer_ppo": ["DetachedPPOTrainer"],
    "coati.ray.experience_maker_holder": ["ExperienceMakerHolder"],
    "coati.ray.callbacks": [
        "MakerCallback",
        "TrainerCallback",
        "ExperienceMakerPerformanceEvaluator",
        "TrainerPerformanceEvaluator",
    ],
    "coati.ray.lora_constructor": ["LoRAConstructor"],
    "coati.models": ["Actor", "Critic", "RewardModel"],
    "coati.models.loss": ["PolicyLoss", "ValueLoss"],
    "coati.trainer.strategies": ["Strategy", "DDPStrategy", "LowLevelZeroStrategy", "GeminiStrategy"],
    "coati.trainer.optim": ["HybridAdam"],
}

NEEDS_A_GPU = ["coati.rollout.native.kernels"]  # import Triton

# One fresh interpreter walks through the stages and says after each which heavy packages are in.
PROBE = """
import importlib, json, pkgutil, sys, warnings

def loaded():
    return sorted({"torch", "numpy", "ray", "transformers", "datasets", "pyarrow", "rich"} & set(sys.modules))

import coati
report = {"coati": loaded()}
import coati.config, coati.monitor, coati.ray.callbacks
report["config and monitor"] = loaded()
import numpy, torch
filters = list(warnings.filters)
import coati.wire
report["keeps filters"] = warnings.filters == filters
import coati.experience_buffer, coati.algos
report["data and maths"] = loaded()
names = [found.name for found in pkgutil.walk_packages(coati.__path__, "coati.")
         if not found.name.startswith(("coati.ray", "coati.cli")) and found.name not in json.loads(sys.argv[2])]
for name in names:
    importlib.import_module(name)
report["all but ray and cli"] = loaded()
report["modules"] = names
report["missing"] = []
for module, exported in json.loads(sys.argv[1]).items():
    found = importlib.import_module(module)
    report["missing"] += [f"{module}.{name}" for name in exported if not hasattr(found, name)]
print(json.dumps(report))
"""


@pytest.fixture(scope="module")
def report():
    done = subprocess.run(
        [sys.executable, "-c", PROBE, json.dumps(CONTRACT), json.dumps(NEEDS_A_GPU)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_import_coati_is_light(report):
    assert report["coati"] == []


def test_config_monitor_and_callbacks_are_light_too(report):
    assert report["config and monitor"] == []


def test_importing_leaves_the_warning_filters_of_the_process_alone(report):
    assert report["keeps filters"]


def test_data_and_maths_need_torch_only(report):
    assert report["data and maths"] == ["numpy", "torch"]


def test_nothing_outside_the_ray_and_cli_rooms_imports_ray(report):
    assert len(report["modules"]) > 50
    assert "ray" not in report["all but ray and cli"]


def test_every_import_of_the_contract_works(report):
    assert report["missing"] == []
