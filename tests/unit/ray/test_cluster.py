"""Connecting to Ray: private folders, logs of failed runs, and errors about addresses and resources."""

import os
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from ray.exceptions import AuthenticationError

from coati.config import RewardSettings, build_config
from coati.errors import ConfigError, HeadLost, RunStopped
from coati.ray import cluster


@pytest.fixture(autouse=True)
def no_other_ray(monkeypatch):
    """Other tests in this process may use a real Ray."""
    monkeypatch.setattr(cluster.ray, "is_initialized", lambda: False)


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
    """A fake Ray with a world-writable folder and a log; records its folders and the environments it was given."""
    folders, environments = [], []

    def init(*, _temp_dir, **_):
        logs = Path(_temp_dir) / "session_latest" / "logs"
        logs.mkdir(parents=True)
        Path(_temp_dir).chmod(0o777)
        (logs / "worker.out").write_text("maker-0: no such file")
        folders.append(Path(_temp_dir))
        environments.append(dict(os.environ))

    monkeypatch.setattr(cluster.ray, "init", init)
    monkeypatch.setattr(cluster.ray, "shutdown", lambda: None)
    monkeypatch.setattr(cluster.ray, "cluster_resources", lambda: {"CPU": 6.0})
    monkeypatch.setattr(cluster.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    return SimpleNamespace(folders=folders, environments=environments)


def connect(config, address=None):
    return cluster.connected(config, address=address, namespace="n", log_to_driver=False)


@pytest.mark.parametrize("address", [None, "auto"])
def test_a_program_that_uses_ray_keeps_its_connection(fake_ray, config, monkeypatch, address):
    closed = []
    monkeypatch.setattr(cluster.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(cluster.ray, "shutdown", lambda: closed.append(True))
    with pytest.raises(ConfigError, match=r"Call ray\.shutdown\(\)"), connect(config, address):
        pass
    assert not closed
    assert not fake_ray.folders


def left_behind(tmp_path):
    return [path.name for path in tmp_path.iterdir() if path.name.startswith("coati-")]


def test_only_the_user_may_enter_the_folder_of_a_private_ray_and_it_is_gone_afterwards(fake_ray, config, tmp_path):
    with connect(config) as is_private:
        assert is_private
        assert stat.S_IMODE(fake_ray.folders[0].parent.stat().st_mode) == 0o700
    assert left_behind(tmp_path) == []
    assert not (tmp_path / "out" / "ray-logs").exists()


def test_every_private_ray_has_its_own_token_that_only_the_user_can_read(fake_ray, config, tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # meant for other clusters
    monkeypatch.setenv("RAY_AUTH_TOKEN", "of another cluster")
    tokens = set()
    for _ in range(2):
        with connect(config):
            environment = fake_ray.environments[-1]
            path = Path(environment["RAY_AUTH_TOKEN_PATH"])
            assert path.parent == fake_ray.folders[-1].parent
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            assert {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN"}.isdisjoint(environment)
            tokens.add(path.read_text())
    assert len(tokens) == 2
    assert min(map(len, tokens)) >= 64
    assert not (tmp_path / ".ray").exists()
    assert os.environ["RAY_AUTH_TOKEN"] == "of another cluster"
    assert "RAY_AUTH_TOKEN_PATH" not in os.environ


def test_actors_of_a_private_ray_get_the_variables_that_are_allowed(fake_ray, config, monkeypatch):
    for name in ("BANK_KEY", "JUDGE_KEY", "SCORER_KEY", "HF_HOME"):
        monkeypatch.setenv(name, "1")
    topology = config.topology.model_copy(update={"environment": ("JUDGE_KEY",)})
    reward = RewardSettings(function="http", options={"url": "http://host", "api_key_env": "SCORER_KEY"})
    with connect(config.model_copy(update={"topology": topology, "reward": reward})):
        environment = fake_ray.environments[0]
        assert "BANK_KEY" not in environment
        assert {"JUDGE_KEY", "SCORER_KEY", "HF_HOME", "PATH"} <= environment.keys()
        assert os.environ["BANK_KEY"] == "1"


def test_a_warden_ends_what_a_killed_driver_left_running_and_deletes_the_folder(tmp_path):
    """Of three processes, one has an open file in the folder, one names it in its environment, one does neither."""
    folder = tmp_path / "coati-x"
    folder.mkdir()
    script = """if True:
        import os, subprocess, sys, time, types
        from pathlib import Path
        sys.modules["coati.build"] = types.ModuleType("coati.build")  # which would import torch
        from coati.ray.cluster import _warden
        folder, sleep = Path(sys.argv[1]), [sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)"]
        with _warden(folder):
            children = [
                subprocess.Popen(sleep, stdout=(folder / "log").open("w")),
                subprocess.Popen(sleep, stdout=subprocess.DEVNULL, env={**os.environ, "TOKEN": f"{folder}/token"}),
                subprocess.Popen(sleep, stdout=subprocess.DEVNULL),
            ]
            print(*(child.pid for child in children), flush=True)
            time.sleep(600)
    """
    with subprocess.Popen([sys.executable, "-c", script, folder], stdout=subprocess.PIPE, text=True) as driver:
        *marked, other = map(int, driver.stdout.readline().split())
        driver.kill()
        driver.stdout.read()  # returns when the warden, which inherited it, has ended
    try:
        assert not any(map(is_running, marked))
        assert is_running(other)
        assert not folder.exists()
    finally:
        os.kill(other, signal.SIGKILL)


def is_running(process):
    try:
        return " Z " not in Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False


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


def test_an_interrupted_start_leaves_nothing_behind(fake_ray, config, tmp_path, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    def exit_as_ray_does_at_a_sigterm(**_):
        raise SystemExit(15)

    monkeypatch.setattr(cluster.ray, "init", exit_as_ray_does_at_a_sigterm)
    with pytest.raises(KeyboardInterrupt), connect(config):
        pass
    assert left_behind(tmp_path) == []
    assert not (tmp_path / "out" / "ray-logs").exists()
    monkeypatch.setattr(cluster.subprocess, "Popen", interrupt)  # before the warden runs
    with pytest.raises(KeyboardInterrupt), connect(config):
        pass
    assert left_behind(tmp_path) == []


def test_logs_that_cannot_be_kept_do_not_hide_why_the_run_failed(fake_ray, config, tmp_path):
    (tmp_path / "out").write_text("a file")
    with pytest.raises(ZeroDivisionError), connect(config):
        raise ZeroDivisionError
    assert left_behind(tmp_path) == []


def test_a_run_that_does_not_fit_the_cluster_is_refused(fake_ray, config):
    large = config.model_copy(update={"topology": config.topology.model_copy(update={"makers": 64})})
    with pytest.raises(ConfigError, match="65 CPUs"), connect(large):
        pass


def test_an_address_where_nothing_listens_is_reported_at_once(config):
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:1"), connect(config, "127.0.0.1:1"):
        pass


@pytest.mark.parametrize(
    "error",
    [
        ConnectionError("Failed to connect"),  # Ray buries the reason in the text of an inner error
        AuthenticationError("RAY_AUTH_TOKEN_PATH is set but file cannot be opened"),
    ],
)
def test_a_cluster_that_wants_a_token_says_what_to_set(config, monkeypatch, error):
    def refuse(**_):
        raise error from RuntimeError("…\nUnauthenticated: RPC error: InvalidAuthToken: missing or incorrect")

    monkeypatch.setattr(cluster.ray, "init", refuse)
    with pytest.raises(ConfigError, match="RAY_AUTH_MODE=token"), connect(config, "auto"):
        pass


@pytest.fixture
def health_check(monkeypatch):
    """A cluster that answers health checks without a token with a given exit code and text."""
    asked = []
    monkeypatch.setattr(cluster.ray, "init", lambda **_: None)
    monkeypatch.setattr(cluster.ray, "shutdown", lambda: None)
    monkeypatch.setattr(cluster.ray, "cluster_resources", lambda: {"CPU": 6.0})
    monkeypatch.setattr(cluster.ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address="head:6379"))

    def answer(code, text):
        def run(command, *, env, **_):
            asked.append((command[-1], env["RAY_AUTH_MODE"]))
            return subprocess.CompletedProcess(command, code, "", text)

        monkeypatch.setattr(cluster.subprocess, "run", run)
        return asked

    return answer


@pytest.mark.parametrize(
    ("code", "text", "said"), [(0, "", "has no token authentication"), (1, "no route to host", "no route to host")]
)
def test_a_cluster_that_lets_in_callers_without_a_token_is_refused_unless_allowed(
    health_check, config, code, text, said
):
    asked = health_check(code, text)
    with pytest.raises(ConfigError, match=rf"{said}(.|\n)*allow_open_cluster"), connect(config, "auto"):
        pass
    assert asked == [("head:6379", "disabled")]
    topology = config.topology.model_copy(update={"allow_open_cluster": True})
    with connect(config.model_copy(update={"topology": topology}), "auto") as is_private:
        assert not is_private


def test_a_cluster_that_refuses_callers_without_a_token_is_joined(health_check, config):
    health_check(1, "RPC error: InvalidAuthToken: Authentication token is missing or incorrect.")
    with connect(config, "auto") as is_private:
        assert not is_private


def test_a_head_that_is_gone_is_an_error_after_ten_seconds(monkeypatch):
    now = [0.0]
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = f"127.0.0.1:{head.getsockname()[1]}"
        monkeypatch.setattr(cluster.ray, "is_initialized", lambda: True)
        monkeypatch.setattr(cluster.ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address=address))
        monkeypatch.setattr(cluster.time, "monotonic", lambda: now[0])
        watch = cluster.HeadWatch()
        for now[0] in range(0, 100, 5):
            watch.check()
    for now[0] in (100, 104):  # a short outage is tolerated
        watch.check()
    now[0] = 106
    with pytest.raises(HeadLost, match=address):
        watch.check()
