"""Code that comes with a model runs only if `model.trust_remote_code` is set."""

import json
import logging

import pytest
from tiny import llama
from transformers import dynamic_module_utils

from coati import build, entry
from coati.config import build_config
from coati.errors import ConfigError
from coati.models import Actor, Critic


@pytest.fixture
def config(tmp_path, monkeypatch):
    """Settings with a model that has its own configuration class, which leaves a trace when it is imported."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tmp_path / "model"
    llama().save_pretrained(folder)
    settings = json.loads((folder / "config.json").read_text())
    settings |= {
        "model_type": "own-llama",
        "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.OwnLM", "AutoModel": "own.OwnBody"},
    }
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / "own.py").write_text(
        "from pathlib import Path\n"
        "from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel\n"
        f"Path({str(tmp_path / 'trace')!r}).touch()\n"
        "class Own(LlamaConfig):\n    model_type = 'own-llama'\n"
        "class OwnLM(LlamaForCausalLM):\n    config_class = Own\n"
        "class OwnBody(LlamaModel):\n    config_class = Own\n"
    )

    def make(trust):
        model = {"path": str(folder), "trust_remote_code": trust}
        return build_config(
            {"model": model, "prompts": {"path": "p.jsonl"}, "reward": {"model": "r"}, "algorithm": "grpo",
             "rollout": {"samples_per_prompt": 4}}
        )  # fmt: skip

    return make


def test_remote_code_runs_only_if_trusted(config, tmp_path):
    with pytest.raises(ConfigError, match=r"model\.path"):
        build.trainer_models(config(False))
    assert not (tmp_path / "trace").exists()
    actor, _ = build.trainer_models(config(True))
    assert (tmp_path / "trace").exists()
    assert type(actor.model).__name__ == "OwnLM"


@pytest.mark.parametrize("model_class", [Actor, Critic])
def test_models_with_remote_code_are_created_from_their_config(config, model_class):
    folder = config(True).model.path
    assert type(model_class.from_config(folder, trust_remote_code=True).config).__name__ == "Own"


@pytest.mark.parametrize("trust", [False, True])
def test_trusting_remote_code_logs_a_warning(config, trust, caplog):
    with caplog.at_level(logging.WARNING), pytest.raises(ConfigError, match=r"p\.jsonl"):
        entry.check_run(config(trust), {}, is_resumed=False, overwrite=False, sync=True, address=None)
    assert ("trust_remote_code" in caplog.text) == trust
