import json
import os
import subprocess
import sys

import pytest
from evaluation_sets import config_of, words  # noqa: F401

from coati.cli.main import main
from coati.demo.base_model import pretrain
from coati.demo.grammar import PROMPTS


@pytest.fixture(scope="session")
def base_model(tmp_path_factory):
    """The demo's model, hardly trained."""
    folder = tmp_path_factory.mktemp("base")
    pretrain(folder, steps=20, batch_size=8)
    return folder


@pytest.fixture(scope="session")
def coati_command():
    """Runs the `coati` command as a person would, in a process of its own."""

    def run(*arguments, cwd=None, timeout=500, **variables):
        return subprocess.run(
            [sys.executable, "-m", "coati.cli.main", *map(str, arguments)],
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=timeout,
            env={**os.environ, "COLUMNS": "200", **variables},
        )

    return run


@pytest.fixture
def coati_here(monkeypatch, capsys, caplog):
    """Runs the `coati` command in this process, which saves its imports; gives exit code, stdout, and stderr with logs.

    For one that starts a Ray, add the fixture `forked_workers`, which saves those of the actors.
    """

    def run(*arguments, cwd=".", **variables):
        capsys.readouterr()
        caplog.clear()
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", ["coati", *map(str, arguments)])
            patch.chdir(cwd)
            for name, value in {"COLUMNS": "200", **variables}.items():
                patch.setenv(name, value)
            try:
                main()
                code = 0
            except SystemExit as stop:
                code = stop.code or 0
        sys.modules.pop("film_rewards", None)  # the next test writes its own
        captured = capsys.readouterr()
        return subprocess.CompletedProcess(arguments, code, captured.out, captured.err + caplog.text)

    return run


@pytest.fixture
def film_run(tmp_path, base_model):
    """A folder with run.toml, prompts and rewards for a short run on the demo's model."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": prompt, "topic": "film"}) + "\n" for prompt in PROMPTS))
    sys.modules.pop("film_rewards", None)  # of another test, in this process
    (tmp_path / "film_rewards.py").write_text(FILM_REWARDS)
    (tmp_path / "run.toml").write_text(
        f"""
        [run]
        output = "{tmp_path / "out"}"
        [model]
        path = "{base_model}"
        device = "cpu"
        [prompts]
        path = "{prompts}"
        [reward]
        function = "film_rewards:kind"
        [rollout]
        prompts_per_batch = 20
        max_new_tokens = 16
        [algorithm]
        kl_coef = 0.05
        [train]
        total_steps = 5
        update_steps = 2
        epochs = 2
        batch_size = 24
        actor_lr = 1e-3
        critic_lr = 1e-3
        [topology]
        max_staleness = 0
        threads_per_actor = 1
        [logging]
        tensorboard = false  # its process takes a second of every run
        """
    )
    return tmp_path / "run.toml"


FILM_REWARDS = """
from coati.demo.reward import film_sentiment


def kind(prompts, completions, topic):
    assert all(name == "film" for name in topic)
    return film_sentiment(completions, prompts)


def raises(prompts, completions):
    raise KeyError("no such lexicon")


def picky(prompts, completions):
    for text in completions:
        if len(text) % 4 == 0:
            raise ValueError(f"cannot judge {text!r}")
    return film_sentiment(completions, prompts)


def always_nan(prompts, completions):
    return [float("nan")] * len(completions)


def sometimes_nan(prompts, completions):
    scores = film_sentiment(completions, prompts)
    return [float("nan") if len(text.split()) % 4 == 0 else score for text, score in zip(completions, scores)]


def raises_late(prompts, completions, calls=[]):
    calls.append(1)
    if len(calls) > 4:
        raise KeyError("no such lexicon")
    return [float(len(text)) for text in completions]


def too_few(prompts, completions):
    return [1.0]
"""
