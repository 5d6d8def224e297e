"""The output folder of a run: other files are not touched, and an earlier run stays until a new one trains."""

import os
import signal
import socket
import subprocess
import sys

import pytest

from coati.config import build_config
from coati.errors import ConfigError
from coati.run_folder import MARKER, check_inputs_outside, check_run_folder, open_run_folder


def make_config(tmp_path, **sections):
    fields = {
        "run": {"output": str(tmp_path / "out")},
        "model": {"path": "m"},
        "prompts": {"path": "p.jsonl"},
        "reward": {"model": "r"},
    }
    return build_config({**fields, **sections})


@pytest.fixture
def config(tmp_path):
    """Of a run whose folder holds an earlier one."""
    config = make_config(tmp_path)
    with open_run_folder(config, overwrite=False):
        (tmp_path / "out" / "model").mkdir()
        (tmp_path / "out" / "model" / "weights").write_text("earlier")
    return config


def weights(tmp_path):
    return (tmp_path / "out" / "model" / "weights").read_text()


def names(tmp_path):
    return {path.name for path in (tmp_path / "out").iterdir()}


EARLIER_RUN = {MARKER, "config.toml", "model"}


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("foreign", ["config.toml", "samples.jsonl"])
def test_a_folder_that_is_not_a_runs_is_not_touched(tmp_path, foreign, overwrite):
    """A Hugo site and a cargo home have a config.toml too."""
    out = tmp_path / "out"
    out.mkdir()
    (out / foreign).write_text("baseURL = 'mine'")
    config = make_config(tmp_path)
    with pytest.raises(ConfigError, match="not a coati run"):
        check_run_folder(config, overwrite=overwrite)
    with pytest.raises(ConfigError, match=MARKER), open_run_folder(config, overwrite=overwrite):
        pass
    assert names(tmp_path) == {foreign}
    assert (out / foreign).read_text() == "baseURL = 'mine'"


def test_without_overwrite_only_what_a_start_writes_is_replaced(config, tmp_path):
    with pytest.raises(ConfigError, match="--overwrite"):
        check_run_folder(config, overwrite=False)
    with pytest.raises(ConfigError, match="--overwrite"), open_run_folder(config, overwrite=False):
        pass
    assert names(tmp_path) == EARLIER_RUN
    config = make_config(tmp_path, run={"output": str(tmp_path / "second")})
    for _ in range(2):  # neither has made a sample
        with open_run_folder(config, overwrite=False):
            (tmp_path / "second" / "metrics.jsonl").write_text("")
    (tmp_path / "second" / "notes.md").write_text("mine")
    with pytest.raises(ConfigError, match="--overwrite"), open_run_folder(config, overwrite=False):
        pass
    assert (tmp_path / "second" / "notes.md").exists()


def test_an_earlier_run_is_there_until_the_new_one_trains(config, tmp_path):
    with open_run_folder(config, overwrite=True) as delete_earlier:
        assert not (tmp_path / "out" / "model").exists()
        assert list((tmp_path / "out").rglob("weights"))
        delete_earlier()
        assert not list((tmp_path / "out").rglob("weights"))
    assert names(tmp_path) == {MARKER, "config.toml"}


@pytest.mark.parametrize("error", [ConfigError("no such cluster"), SystemExit(130)])
def test_a_run_that_does_not_begin_leaves_the_earlier_one(config, tmp_path, error):
    def run():
        with open_run_folder(config, overwrite=True):
            (tmp_path / "out" / "metrics.jsonl").write_text("of the new one")
            raise error

    with pytest.raises(type(error)):
        run()
    assert weights(tmp_path) == "earlier"
    assert names(tmp_path) == EARLIER_RUN


def test_what_a_run_that_began_has_made_stays_when_it_fails(config, tmp_path):
    def run():
        with open_run_folder(config, overwrite=True) as delete_earlier:
            delete_earlier()
            (tmp_path / "out" / "metrics.jsonl").write_text("of the new one")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run()
    assert names(tmp_path) == {MARKER, "config.toml", "metrics.jsonl"}


KILLED_START = """
import os, signal, sys
from pathlib import Path
from coati.config import build_config
from coati import run_folder

folder, kill_at = Path(sys.argv[1]), int(sys.argv[2])
config = build_config({"run": {"output": str(folder)}, "model": {"path": "m"}, "prompts": {"path": "p.jsonl"},
                       "reward": {"model": "r"}})
calls = 0
real = Path.rename
def rename(self, target):
    global calls
    if calls == kill_at:
        os.kill(os.getpid(), signal.SIGKILL)
    calls += 1
    return real(self, target)
Path.rename = rename
with run_folder.open_run_folder(config, overwrite=True):
    (folder / "metrics.jsonl").write_text("of the new one")
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("renames_before_the_kill", [0, 1, 2, 99])
def test_a_start_that_is_killed_is_undone_by_the_next(config, tmp_path, renames_before_the_kill):
    killed = subprocess.run(
        [sys.executable, "-c", KILLED_START, str(tmp_path / "out"), str(renames_before_the_kill)], check=False
    )
    assert killed.returncode == -signal.SIGKILL
    with pytest.raises(ConfigError, match="--overwrite"):
        check_run_folder(config, overwrite=False)
    with pytest.raises(ConfigError, match="--overwrite"), open_run_folder(config, overwrite=False):
        pass
    assert weights(tmp_path) == "earlier"
    assert names(tmp_path) == EARLIER_RUN


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_in_use_is_refused_before_anything_moves(config, tmp_path, overwrite):
    with open_run_folder(config, overwrite=True):
        before = names(tmp_path)
        who = f"pid {os.getpid()} on {socket.gethostname()}"
        for use in (check_run_folder, open_run_folder):
            with pytest.raises(ConfigError, match=who):
                use(config, overwrite=overwrite).__enter__()
        assert names(tmp_path) == before
    check_run_folder(config, overwrite=True)


def test_a_folder_behind_a_link_is_replaced_and_the_link_stays(tmp_path):
    (tmp_path / "disk" / "run").mkdir(parents=True)
    (tmp_path / "out").symlink_to(tmp_path / "disk" / "run")
    config = make_config(tmp_path)
    for _ in range(2):
        with open_run_folder(config, overwrite=True):
            pass
    assert (tmp_path / "out").is_symlink()
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["run"]


@pytest.mark.parametrize("key", ["model.path", "model.reference", "prompts.path", "reward.model"])
def test_what_a_run_reads_may_not_lie_in_what_it_replaces(config, tmp_path, key):
    section, name = key.split(".")
    fields = {"model": {"path": "m"}, "prompts": {"path": "p.jsonl"}, "reward": {"model": "r"}}
    fields[section][name] = str(tmp_path / "out" / "model")
    with pytest.raises(ConfigError, match=key):
        check_inputs_outside(make_config(tmp_path, **fields))
    check_inputs_outside(config)
