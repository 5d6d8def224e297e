"""The commands that the demo prints: they work in the shell that it was started from."""

import os
import sys

import pytest

from coati.cli.demo import program


@pytest.fixture
def environment(tmp_path, monkeypatch):
    """A Python environment in .venv that is not activated."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / ".venv/bin"
    folder.mkdir(parents=True)
    (folder / "coati").touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(folder / "python3"))
    monkeypatch.setenv("PATH", os.defpath)
    return folder


def test_commands_work_without_activating_the_environment(environment, monkeypatch):
    assert program("coati") == ".venv/bin/coati"
    monkeypatch.setenv("PATH", f"{environment}:{os.defpath}")
    assert program("coati") == "coati"


def test_a_coati_of_another_environment_on_the_path_is_not_meant(environment, tmp_path, monkeypatch):
    other = tmp_path / "other"
    other.mkdir()
    (other / "coati").touch(mode=0o755)
    monkeypatch.setenv("PATH", f"{other}:{os.defpath}")
    assert program("coati") == ".venv/bin/coati"


def test_a_program_that_is_not_beside_python_is_called_by_name(environment):
    assert program("tensorboard") == "tensorboard"
