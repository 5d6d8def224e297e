"""NVIDIA's MPS daemon, with a control program of our own in its place that writes down what it is told."""

import contextlib
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from coati.errors import ConfigError
from coati.experience_maker import Experience
from coati.ray import cluster, environment, mps
from coati.ray.detached_trainer_ppo import PPOTrainer

CONTROL = """#!/bin/sh
text=$(cat)
[ "$text" = get_server_list ] || echo "$* $text${{CUDA_VISIBLE_DEVICES+ with some cards}}" >> "{told}"
pipe="${{CUDA_MPS_PIPE_DIRECTORY:-{default}}}/control"
case "$* $text" in
"-d "*) {start} ;;
*quit*) rm "$pipe" ;;
*) [ -s "$pipe" ] || {{ echo "Cannot find MPS control daemon process"; exit 1; }} ;;
esac
"""
START = 'echo alive > "$pipe"'


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


def install(tmp_path, start=START):
    program = tmp_path / "bin" / "nvidia-cuda-mps-control"
    program.write_text(CONTROL.format(told=tmp_path / "told", start=start, default=tmp_path / "default"))
    program.chmod(0o755)


def mps_variables():
    return {name: value for name, value in os.environ.items() if name.startswith("CUDA_MPS")}


def test_a_daemon_runs_inside_and_is_gone_afterwards(told, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")  # of the run; a daemon would number its cards anew
    assert not mps.is_running()
    with mps.daemon():
        assert mps.is_running()
        folder = Path(mps_variables()["CUDA_MPS_PIPE_DIRECTORY"])
        assert folder.is_dir()
    assert told() == ["-d ", " quit -t 10"]
    assert not mps.is_running()
    assert mps_variables() == {}
    assert not folder.exists()


def test_a_daemon_ends_with_a_run_that_fails_and_variables_come_back(told, monkeypatch):
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/nobody/listens")
    with pytest.raises(ZeroDivisionError), mps.daemon():
        raise ZeroDivisionError
    assert told() == ["-d ", " quit -t 10"]
    assert mps_variables() == {"CUDA_MPS_PIPE_DIRECTORY": "/nobody/listens"}


def test_a_daemon_that_is_there_is_used_and_left(told, tmp_path):
    (tmp_path / "default").mkdir()
    (tmp_path / "default" / "control").write_text("alive")
    with mps.daemon():
        assert mps_variables() == {}
    assert told() == []
    assert mps.is_running()


def test_the_pipe_of_a_dead_daemon_is_no_daemon(told, tmp_path):
    (tmp_path / "default").mkdir()
    (tmp_path / "default" / "control").touch()
    assert not mps.is_running()
    with mps.daemon():
        assert mps.is_running()
    assert told() == ["-d ", " quit -t 10"]


def test_where_nobody_can_be_asked_a_pipe_is_believed(told, tmp_path):
    (tmp_path / "bin" / "nvidia-cuda-mps-control").unlink()
    (tmp_path / "default").mkdir()
    (tmp_path / "default" / "control").touch()
    assert mps.is_running()


def test_without_the_program_the_error_names_it(told, tmp_path):
    (tmp_path / "bin" / "nvidia-cuda-mps-control").unlink()
    with pytest.raises(ConfigError, match=r"needs nvidia-cuda-mps-control, .* got none.* \"slices\""):
        mps.daemon().__enter__()


@pytest.mark.parametrize(
    ("start", "answer"),
    [
        ("echo no such card >&2; exit 1", "got: no such card. Look for"),
        (f"{START}; exec sleep 30", r"no answer in 0\.3 s"),  # it runs, though nobody heard
    ],
)
def test_a_daemon_that_does_not_start_is_an_error_and_none_is_left(start, answer, told, tmp_path, monkeypatch):
    monkeypatch.setattr(mps, "_SECONDS", 0.3)
    install(tmp_path, start)
    with pytest.raises(ConfigError, match=answer):
        mps.daemon().__enter__()
    assert mps_variables() == {}
    assert told()[-1] == " quit -t 10"


@pytest.mark.parametrize("gpu_sharing", ["slices", "mps"])
def test_a_private_ray_starts_inside_of_the_daemon_and_ends_before_it(gpu_sharing, told, monkeypatch):
    seen = []
    monkeypatch.setattr(cluster.ray, "init", lambda **_: seen.append(("init", len(mps_variables()))))
    monkeypatch.setattr(cluster.ray, "shutdown", lambda: seen.append(("shutdown", len(told()))))
    monkeypatch.setattr(cluster, "_check_resources", lambda *_, **__: None)
    monkeypatch.setattr(cluster.build, "num_actors", lambda _: 2)
    config = SimpleNamespace(topology=SimpleNamespace(gpu_sharing=gpu_sharing, environment=()))
    with cluster.connected(config, address=None, namespace="n", log_to_driver=False):
        pass
    if gpu_sharing == "slices":
        assert (seen, told()) == ([("init", 0), ("shutdown", 0)], [])
    else:
        assert (seen, told()) == ([("init", 2), ("shutdown", 1)], ["-d ", " quit -t 10"])


@pytest.fixture
def half_a_card(monkeypatch):
    monkeypatch.setattr(environment, "assigned_gpus", lambda: 0.5)
    monkeypatch.setattr(environment, "ProcessorShare", lambda *arguments: arguments)


def test_a_trainer_keeps_to_its_share_under_mps_only(half_a_card, monkeypatch):
    card = torch.device("cuda", 0)
    monkeypatch.setattr(mps, "is_running", lambda: True)
    assert environment.processors_for(card, "mps") == (card, 0.5)
    for device, sharing in ((card, "slices"), (torch.device("cpu"), "mps")):
        assert environment.processors_for(device, sharing) is None
    monkeypatch.setattr(environment, "assigned_gpus", lambda: 1.0)  # a card of its own
    assert environment.processors_for(card, "mps") is None


def test_a_trainer_without_a_daemon_says_so(half_a_card, monkeypatch):
    monkeypatch.setattr(mps, "is_running", lambda: False)
    with pytest.raises(
        ConfigError, match=r'needs an MPS daemon on the machine of each trainer, got none on .*"ray start"'
    ):
        environment.processors_for(torch.device("cuda", 0), "mps")


@pytest.mark.parametrize("has_share", [True, False])
def test_a_trainers_step_runs_on_its_share_and_nothing_else_of_it(has_share):
    order = []

    @contextlib.contextmanager
    def used():
        order.append("share")
        yield
        order.append("all")

    def step(_):
        order.append("step")
        return {"policy/approx_kl": 0.0}

    trainer = SimpleNamespace(
        version=0,
        _max_staleness=None,
        _processors=SimpleNamespace(used=used) if has_share else None,
        _hold_weights=contextlib.nullcontext,
        _learner=SimpleNamespace(step=step),
        _num_steps_unpublished=0,
        _timeline=SimpleNamespace(total=lambda _: 0.0),
    )
    PPOTrainer.training_step(trainer, Experience.empty())
    assert order == (["share", "step", "all"] if has_share else ["step"])
