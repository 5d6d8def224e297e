"""Resuming a run: which settings may change, and where it continues."""

import contextlib
import os

import pytest

from coati.config import build_config, dump_config
from coati.entry import choose_settings
from coati.errors import CheckpointError, ConfigError
from coati.run_folder import MARKER, StartingPoint, check_resumable, choose_start, open_run_folder, resumed_settings


@pytest.fixture
def folder(tmp_path):
    settings = {
        "run": {"name": "r", "output": "where it was"},
        "model": {"path": "m"},
        "prompts": {"path": "p.jsonl"},
        "reward": {"model": "r"},
    }
    (tmp_path / "config.toml").write_text(dump_config(build_config(settings)))
    return tmp_path


def test_settings_follow_a_moved_run_folder(folder, caplog):
    config = resumed_settings(folder, [])
    assert (config.run.name, config.output_folder) == ("r", folder)
    assert caplog.text == ""


@pytest.mark.parametrize(
    "change",
    [
        "train.total_steps=300",
        "topology.makers=3",
        "train.strategy=zero2",
        "topology.trainers=2",
        "logging.samples_kept=3",
        "train.actor_lr=1",
    ],
)
def test_most_settings_may_change_with_a_warning(folder, caplog, change):
    config = resumed_settings(folder, [change])
    section, key = change.partition("=")[0].split(".")
    assert str(getattr(getattr(config, section), key)) in change.replace("=1", "=1.0")
    assert f"{section}.{key} was" in caplog.text


@pytest.mark.parametrize(
    "change",
    [
        "model.path=other", "algorithm.name=grpo", "rollout.samples_per_prompt=4", "train.batch_size=32",
        "train.update_steps=2", "run.seed=3", "run.output=elsewhere", "run.name=other", "prompts.path=q.jsonl",
        "prompts.shuffle=false", "topology.max_staleness=7", "lora.rank=2",
    ],
)  # fmt: skip
def test_some_settings_cannot_change(folder, change):
    with pytest.raises(ConfigError, match=change.partition("=")[0]):
        resumed_settings(folder, [change, "train.total_steps=7"])


def test_an_off_policy_run_cannot_be_resumed_with_sync(folder):
    before = resumed_settings(folder, [])
    assert before.topology.max_staleness > 0
    with pytest.raises(ConfigError, match=r"max_staleness.*--sync"):
        choose_settings(None, resume=folder, sync=True)
    on_policy = before.topology.model_copy(update={"max_staleness": 0})
    (folder / "config.toml").write_text(dump_config(before.model_copy(update={"topology": on_policy})))
    assert choose_settings(None, resume=folder, sync=True).topology.max_staleness == 0, "max_staleness is unchanged"


@pytest.mark.parametrize(("steps", "is_saved"), [(4, True), (3, True), (4, False)])
def test_a_complete_run_cannot_be_resumed(folder, steps, is_saved):
    (folder / "metrics.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in range(1, steps + 1)))
    (folder / "model").mkdir()
    if not is_saved:  # the model of an earlier stop
        os.utime(folder / "model", ns=(0, 0))
    config = resumed_settings(folder, ["train.total_steps=4"])
    with pytest.raises(ConfigError, match="complete") if steps == 4 and is_saved else contextlib.nullcontext():
        check_resumable(config)
    check_resumable(resumed_settings(folder, ["train.total_steps=5"]))


def test_a_run_with_parts_of_a_program_is_not_resumed_without_them(folder):
    config = resumed_settings(folder, [])
    (folder / MARKER).touch()
    (folder / "ledger").mkdir(exist_ok=True)
    with open_run_folder(config, ["reward", "learner"], overwrite=True, is_resumed=True) as begin:
        begin()
    with open_run_folder(config, overwrite=True):
        pass  # a new run that fails before it trains, which leaves the earlier one
    with pytest.raises(ConfigError, match=r"coati\.train\(resume='.*', reward=\.\.\., learner=\.\.\.\)"):
        check_resumable(config, ["maker"])
    check_resumable(config, ["learner"])  # a reward is loaded by its name


def test_trainers_restart_from_the_beginning_only_without_any_checkpoint(folder, caplog):
    config = resumed_settings(folder, [])
    assert choose_start(config, is_restart=True) == StartingPoint()
    assert "from its beginning" in caplog.text
    for version in (100, 200):
        (folder / "checkpoints" / f"version-{version}").mkdir(parents=True)  # unreadable checkpoints
    with pytest.raises(CheckpointError, match="version-200, version-100"):
        choose_start(config, is_restart=True)
    assert len(list((folder / "checkpoints").iterdir())) == 2
