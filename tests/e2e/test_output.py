"""The output folder of a run: nothing is lost that somebody may want."""

import json
import os
import socket

import pytest

from coati.cli.output import check_inputs_stay, check_output, new_output, prepare_output
from coati.config import load_config
from coati.errors import ConfigError
from coati.monitor.control import RunControl


@pytest.fixture
def config(film_run, tmp_path):
    """Of a run whose folder holds an earlier one."""
    config = load_config(film_run)
    prepare_output(config, overwrite=False)
    (tmp_path / "out" / "model").mkdir()
    (tmp_path / "out" / "model" / "weights").write_text("earlier")
    return config


def weights(tmp_path):
    return (tmp_path / "out" / "model" / "weights").read_text()


def test_an_earlier_run_is_there_until_the_new_one_trains(config, tmp_path):
    with pytest.raises(ConfigError, match="holds an earlier run"):
        check_output(config, overwrite=False)
    with new_output(config, overwrite=True) as forget_earlier:
        assert not (tmp_path / "out" / "model").exists()
        assert [path for path in tmp_path.iterdir() if path.name.endswith(".earlier")]
        forget_earlier()
        assert not [path for path in tmp_path.iterdir() if path.name.endswith(".earlier")]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["config.toml"]


@pytest.mark.parametrize("error", [ConfigError("no such cluster"), SystemExit(130)])
def test_a_run_that_does_not_begin_leaves_the_earlier_one(config, tmp_path, error):
    def run():
        with new_output(config, overwrite=True):
            (tmp_path / "out" / "metrics.jsonl").write_text("of the new one")
            raise error

    with pytest.raises(type(error)):
        run()
    assert weights(tmp_path) == "earlier"
    assert not (tmp_path / "out" / "metrics.jsonl").exists()
    assert [path.name for path in tmp_path.iterdir() if path.name.endswith(".earlier")] == []


def test_what_a_run_that_began_has_made_stays_when_it_fails(config, tmp_path):
    def run():
        with new_output(config, overwrite=True) as forget_earlier:
            forget_earlier()
            (tmp_path / "out" / "metrics.jsonl").write_text("of the new one")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run()
    assert (tmp_path / "out" / "metrics.jsonl").exists()


def test_a_folder_behind_a_link_is_replaced_and_the_link_stays(film_run, tmp_path):
    (tmp_path / "disk" / "run").mkdir(parents=True)
    (tmp_path / "out").symlink_to(tmp_path / "disk" / "run")
    config = load_config(film_run)
    for _ in range(2):
        prepare_output(config, overwrite=True)
    assert (tmp_path / "out").is_symlink()
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["run"]


def test_a_run_that_cannot_find_its_cluster_takes_nothing_away(config, film_run, coati_here, tmp_path):
    finished = coati_here("train", film_run, "--overwrite", "--address", "127.0.0.1:1")
    assert finished.returncode == 2
    assert "--address must be that of a Ray cluster" in finished.stderr
    assert weights(tmp_path) == "earlier"


@pytest.mark.parametrize("key", ["model.path", "model.reference", "prompts.path", "reward.model"])
def test_what_a_run_reads_may_not_lie_in_what_it_replaces(film_run, config, tmp_path, key):
    overrides = [f"{key}={tmp_path / 'out' / 'model'}", *(["reward.function="] if key == "reward.model" else [])]
    inside = load_config(film_run, overrides)
    with pytest.raises(ConfigError, match=rf"{key} must not lie in the folder that the run replaces"):
        check_inputs_stay(inside)
    check_inputs_stay(config)


def test_a_run_at_work_is_not_replaced(config, tmp_path):
    control = RunControl(tmp_path / "out", makers=1)
    with pytest.raises(ConfigError, match=rf"still going, got .* process {os.getpid()} on {socket.gethostname()}"):
        check_output(config, overwrite=True)
    file = tmp_path / "out" / "state.json"
    os.utime(file, (0, 0))  # silent for years: the number belongs to another process by now
    check_output(config, overwrite=True)
    file.write_text(json.dumps({**json.loads(file.read_text()), "host": "elsewhere"}))
    with pytest.raises(ConfigError, match="on elsewhere is at work"):
        check_output(config, overwrite=True)
    control.say(status="ended")
    check_output(config, overwrite=True)
