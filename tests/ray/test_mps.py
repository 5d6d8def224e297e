"""NVIDIA's MPS daemon, with a control program of our own in its place that writes down what it is told."""

import contextlib
import os
from types import SimpleNamespace

import pytest
import torch

from coati.errors import ConfigError
from coati.ray import cluster, environment, mps

CONTROL = """#!/bin/sh
text=$(cat)
echo "$* $text" >> "{told}"
case "$* $text" in
"-d "*) {start} ;;
*quit*) rm "$CUDA_MPS_PIPE_DIRECTORY/control" ;;
esac
"""


@pytest.fixture
def told(tmp_path, monkeypatch):
    """What the control program was told, a line each; nobody else's daemon is there."""
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    monkeypatch.delenv("CUDA_MPS_LOG_DIRECTORY", raising=False)
    monkeypatch.setattr(mps, "_DEFAULT_PIPES", str(tmp_path / "default"))
    (tmp_path / "bin").mkdir()
    install(tmp_path)
    return lambda: (tmp_path / "told").read_text().splitlines() if (tmp_path / "told").exists() else []


def install(tmp_path, start='touch "$CUDA_MPS_PIPE_DIRECTORY/control"'):
    program = tmp_path / "bin" / "nvidia-cuda-mps-control"
    program.write_text(CONTROL.format(told=tmp_path / "told", start=start))
    program.chmod(0o755)


def mps_variables():
    return {name: value for name, value in os.environ.items() if name.startswith("CUDA_MPS")}


def test_a_daemon_runs_inside_and_is_gone_afterwards(told, tmp_path):
    assert not mps.is_running()
    with mps.daemon(tmp_path / "mps"):
        assert mps.is_running()
        assert mps_variables()["CUDA_MPS_PIPE_DIRECTORY"] == str(tmp_path / "mps")
    assert told() == ["-d ", " quit"]
    assert not mps.is_running()
    assert mps_variables() == {}


def test_a_daemon_ends_with_a_run_that_fails_and_variables_come_back(told, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/nobody/listens")
    with pytest.raises(ZeroDivisionError), mps.daemon(tmp_path / "mps"):
        raise ZeroDivisionError
    assert told() == ["-d ", " quit"]
    assert mps_variables() == {"CUDA_MPS_PIPE_DIRECTORY": "/nobody/listens"}


def test_a_daemon_that_is_there_is_used_and_left(told, tmp_path):
    (tmp_path / "default").mkdir()
    (tmp_path / "default" / "control").touch()
    with mps.daemon(tmp_path / "mps"):
        assert mps_variables() == {}
    assert told() == []
    assert mps.is_running()


def test_without_the_program_the_error_names_it(told, tmp_path):
    (tmp_path / "bin" / "nvidia-cuda-mps-control").unlink()
    with pytest.raises(ConfigError, match=r"needs nvidia-cuda-mps-control, .* got none.* \"slices\""):
        mps.daemon(tmp_path / "mps").__enter__()


@pytest.mark.parametrize(
    ("start", "answer"),
    [("echo no such card >&2; exit 1", "got: no such card. Look for"), ("exec sleep 30", r"no answer in 0\.3 s")],
)
def test_a_daemon_that_does_not_start_is_an_error(start, answer, told, tmp_path, monkeypatch):
    monkeypatch.setattr(mps, "_SECONDS", 0.3)
    install(tmp_path, start)
    with pytest.raises(ConfigError, match=answer):
        mps.daemon(tmp_path / "mps").__enter__()
    assert mps_variables() == {}


@pytest.mark.parametrize("gpu_sharing", ["slices", "mps"])
def test_a_private_ray_starts_inside_of_the_daemon_and_ends_before_it(gpu_sharing, told, monkeypatch):
    seen = []
    monkeypatch.setattr(cluster.ray, "init", lambda **_: seen.append(("init", len(mps_variables()))))
    monkeypatch.setattr(cluster.ray, "shutdown", lambda: seen.append(("shutdown", len(told()))))
    monkeypatch.setattr(cluster, "_check_resources", lambda *_, **__: None)
    monkeypatch.setattr(cluster.assembly, "num_actors", lambda _: 2)
    config = SimpleNamespace(topology=SimpleNamespace(gpu_sharing=gpu_sharing))
    with cluster.connected(config, address=None, namespace="n", log_to_driver=False):
        pass
    if gpu_sharing == "slices":
        assert (seen, told()) == ([("init", 0), ("shutdown", 0)], [])
    else:
        assert (seen, told()) == ([("init", 2), ("shutdown", 1)], ["-d ", " quit"])


@pytest.fixture
def half_a_card(monkeypatch):
    monkeypatch.setattr(environment, "assigned_gpus", lambda: 0.5)
    monkeypatch.setattr(environment, "ProcessorShare", lambda *arguments: SimpleNamespace(used=arguments))


def test_a_trainer_keeps_to_its_share_under_mps_only(half_a_card, monkeypatch):
    card = torch.device("cuda", 0)
    monkeypatch.setattr(mps, "is_running", lambda: True)
    assert environment.processors_for(card, "mps") == (card, 0.5)
    for device, sharing in ((card, "slices"), (torch.device("cpu"), "mps")):
        assert environment.processors_for(device, sharing) is contextlib.nullcontext
    with pytest.raises(ConfigError, match='gpu_sharing must be "slices" or "mps", got \'msp\''):
        environment.processors_for(card, "msp")
    monkeypatch.setattr(environment, "assigned_gpus", lambda: 1.0)  # a card of its own
    assert environment.processors_for(card, "mps") is contextlib.nullcontext


def test_a_trainer_without_a_daemon_says_so(half_a_card, monkeypatch):
    monkeypatch.setattr(mps, "is_running", lambda: False)
    with pytest.raises(
        ConfigError, match=r'needs an MPS daemon on the machine of each trainer, got none on .*"ray start"'
    ):
        environment.processors_for(torch.device("cuda", 0), "mps")
