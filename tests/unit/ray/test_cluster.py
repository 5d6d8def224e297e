"""Connecting to Ray: private folders, logs of failed runs, and errors of addresses and resources."""

import stat
from pathlib import Path

import pytest

from coati.config import build_config
from coati.errors import ConfigError, RunStopped
from coati.ray import cluster


@pytest.fixture
def config(tmp_path):
    return build_config(
        {
            "run": {"output": str(tmp_path / "out")},
            "model": {"path": "m"},
            "prompts": {"path": "p.jsonl"},
            "reward": {"function": "module:function"},
        }
    )


@pytest.fixture
def fake_ray(tmp_path, monkeypatch):
    """A Ray that opens its folder to everybody and writes a log; gives the folder's path."""
    folders = []

    def init(*, _temp_dir, **_):
        logs = Path(_temp_dir) / "session_latest" / "logs"
        logs.mkdir(parents=True)
        Path(_temp_dir).chmod(0o777)
        (logs / "worker.out").write_text("maker-0: no such file")
        (tmp_path / ".ray").mkdir(exist_ok=True)
        (tmp_path / ".ray" / "auth_token").touch(mode=0o644)
        folders.append(Path(_temp_dir))

    monkeypatch.setattr(cluster.ray, "init", init)
    monkeypatch.setattr(cluster.ray, "shutdown", lambda: None)
    monkeypatch.setattr(cluster.ray, "cluster_resources", lambda: {"CPU": 6.0})
    monkeypatch.setattr(cluster.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    return folders


def connect(config, address=None):
    return cluster.connected(config, address=address, namespace="n", log_to_driver=False)


def left_behind(tmp_path):
    return [path.name for path in tmp_path.iterdir() if path.name.startswith("coati-")]


def test_only_the_user_may_enter_the_folder_of_a_private_ray_and_it_is_gone_afterwards(fake_ray, config, tmp_path):
    with connect(config) as is_private:
        assert is_private
        assert stat.S_IMODE(fake_ray[0].parent.stat().st_mode) == 0o700
        assert stat.S_IMODE((tmp_path / ".ray" / "auth_token").stat().st_mode) == 0o600
    assert left_behind(tmp_path) == []
    assert not (tmp_path / "out" / "ray-logs").exists()


def test_a_failed_run_keeps_its_logs_in_its_output_folder_and_nothing_elsewhere(fake_ray, config, tmp_path, caplog):
    with pytest.raises(ZeroDivisionError), connect(config):
        raise ZeroDivisionError
    assert (tmp_path / "out" / "ray-logs" / "worker.out").read_text() == "maker-0: no such file"
    assert "ray-logs" in caplog.text
    assert left_behind(tmp_path) == []


def test_a_run_that_was_stopped_keeps_no_logs(fake_ray, config, tmp_path):
    with pytest.raises(RunStopped), connect(config):
        raise RunStopped("stopped")
    assert left_behind(tmp_path) == []
    assert not (tmp_path / "out" / "ray-logs").exists()


def test_logs_that_cannot_be_kept_do_not_hide_why_the_run_failed(fake_ray, config, tmp_path):
    (tmp_path / "out").write_text("a file")
    with pytest.raises(ZeroDivisionError), connect(config):
        raise ZeroDivisionError
    assert left_behind(tmp_path) == []


def test_a_run_that_does_not_fit_the_cluster_is_refused(fake_ray, config):
    large = config.model_copy(update={"topology": config.topology.model_copy(update={"makers": 64})})
    with pytest.raises(ConfigError, match="65 CPUs"), connect(large):
        pass


def test_an_address_where_nothing_answers_is_reported_at_once(config):
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:1"), connect(config, "127.0.0.1:1"):
        pass


def test_a_cluster_that_wants_a_token_says_what_to_set(config, monkeypatch):
    def refuse(**_):  # Ray buries the reason in the text of an inner error
        raise ConnectionError("Failed to connect") from RuntimeError("…\nray.exceptions.AuthenticationError: no token")

    monkeypatch.setattr(cluster.ray, "init", refuse)
    with pytest.raises(ConfigError, match="RAY_AUTH_MODE=token"), connect(config, "auto"):
        pass
