"""`coati eval`: which models are evaluated."""

import pytest

from coati.cli import eval as command
from coati.config import build_config, dump_config
from coati.errors import ConfigError
from coati.run_folder import MARKER


@pytest.fixture
def evaluated(tmp_path, monkeypatch):
    """Returns a function that runs `coati eval` without loading anything, and returns the models."""
    monkeypatch.chdir(tmp_path)
    for name in ("base", "model"):
        (tmp_path / name).mkdir()
    prompts = {"path": "p.jsonl"}
    settings = {"model": {"path": str(tmp_path / "base")}, "prompts": prompts, "reward": {"model": "r"}}
    config = build_config({**settings, "eval": [{"name": "held-out", "prompts": prompts}]})
    (tmp_path / "run.toml").write_text(dump_config(config))
    monkeypatch.setattr("coati.build.check_inputs", lambda config: None)

    def run(target, base=None):
        found = []
        monkeypatch.setattr("coati.evaluation.evaluator.evaluate_model", lambda _, model: found.append(model) or [])
        command.evaluate(target, settings=tmp_path / "run.toml", base=base, show=0, output=None, verbose=False)
        return found

    return run


def test_a_model_is_compared_with_the_base_model_unless_it_is_the_same(evaluated, tmp_path):
    assert evaluated("model") == ["model", str(tmp_path / "base")]
    assert evaluated("model", base="none") == ["model"]
    assert evaluated("owner/name", base="owner/name") == ["owner/name"]
    assert evaluated("base") == ["base"], "a relative and an absolute path of one folder"


def test_a_run_without_a_model_names_a_checkpoint_that_exists(evaluated, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / MARKER).touch()
    with pytest.raises(ConfigError, match=r"has not saved its final model\. It has no checkpoint either"):
        evaluated("run")
    for version in (9, 10):
        (run / "checkpoints" / f"version-{version}").mkdir(parents=True)
    with pytest.raises(ConfigError, match="Evaluate run/checkpoints/version-10"):
        evaluated("run")
    (run / "model-at-failure").mkdir()
    with pytest.raises(ConfigError, match="Evaluate run/model-at-failure"):
        evaluated("run")
