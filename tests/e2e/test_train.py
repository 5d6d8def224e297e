"""`coati train`: asynchronous and synchronous runs, stopping, and invalid input."""

import contextlib
import importlib.util
import json
import logging
import os
import sys
import tempfile
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from coati.cli.train import show_messages
from coati.config import load_config
from coati.run_folder import MARKER, RUN_FILES
from coati.synchronous import SynchronousRun


def processes_that_mention(text):
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if text in command and int(folder.name) != os.getpid():
                found.append(command)
    return found


@pytest.mark.usefixtures("forked_workers")
def test_two_makers_at_staleness_zero_and_the_synchronous_loop_end_in_the_same_bits(
    film_run, coati_here, tmp_path, monkeypatch
):
    """With rewards that are sometimes NaN: those samples are dropped, counted, and replaced."""
    temporary = Path(tempfile.mkdtemp(prefix="ct-", dir="/tmp"))  # short: Ray's socket paths have a length limit
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    arguments = ("train", film_run, "--set", "reward.function=film_rewards:sometimes_nan")
    modes = {"sync": ("--sync",), "ray": ("--set", "topology.makers=2")}
    weights = {}
    for mode, more in modes.items():
        output = tmp_path / mode
        finished = coati_here(*arguments, "--set", f"run.output={output}", *more)
        assert finished.returncode == 0, finished.stderr + finished.stdout
        weights[mode] = (output / "model" / "model.safetensors").read_bytes()
        assert {path.name for path in output.iterdir()} <= {MARKER, *RUN_FILES}  # which --overwrite deletes
        lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
        # 5 fresh batches in episodes of 2, 2 and 1, each gone over twice.
        assert [line["step"] for line in lines] == list(range(1, 11))
        assert max(line.get("maker/dropped", 0) for line in lines) > 0
        account = coati_here("audit", output)
        assert account.returncode == 0, account.stdout
        assert "dropped" in account.stdout
    assert weights["sync"] == weights["ray"]
    assert weights["sync"] != (Path(load_config(film_run).model.path) / "model.safetensors").read_bytes()
    # The private Ray is gone, with all that was its own.
    assert processes_that_mention(str(temporary)) == []
    assert list(temporary.iterdir()) == []
    temporary.rmdir()


def test_a_run_leaves_config_metrics_samples_and_a_model(film_run, coati_here, tmp_path):
    settings = ("train.total_steps=2", "logging.tensorboard=true")
    arguments = ("train", film_run, "--sync", *(part for one in settings for part in ("--set", one)))
    finished = coati_here(*arguments)
    assert finished.returncode == 0, finished.stderr
    out = tmp_path / "out"
    assert load_config(out / "config.toml").train.total_steps == 2
    samples = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    assert {"version", "prompt", "response", "reward", "sample_id"} <= samples[0].keys()
    assert samples[0]["columns"] == {"topic": "film"}
    AutoModelForCausalLM.from_pretrained(out / "model")
    AutoTokenizer.from_pretrained(out / "model")
    assert list((out / "tensorboard").iterdir())
    told = coati_here("report", out)
    assert told.returncode == 0, told.stderr
    for part in ("maker-0", "generate", "train", "mean reward", "Samples", "report.html"):
        assert part in told.stdout
    again = coati_here(*arguments)
    assert again.returncode == 2
    assert "holds an earlier run" in again.stderr
    assert "--overwrite" in again.stderr


def test_a_stranger_can_follow_a_run_whose_reward_often_fails(film_run, coati_here, tmp_path):
    out = tmp_path / "out"
    often = ("--set", "reward.function=film_rewards:picky", "--set", "reward.max_quarantined=1000")
    finished = coati_here("train", film_run, "--sync", *often)
    assert finished.returncode == 0, finished.stderr
    num_failed = len((out / "quarantine.jsonl").read_text().splitlines())
    assert f"Quarantined: {num_failed} groups of 1 sample: Reward function 'picky' raised ValueError" in finished.stdout
    assert "120 samples made, 120 trained on" in finished.stdout
    assert finished.stderr.count("Retrying") == 3 + (num_failed >= 10)
    assert (out / "warnings.log").read_text().count("Retrying") > 3
    (row,) = [line for line in coati_here("audit", out).stdout.splitlines() if "quarantined" in line]
    assert row.count(f" {num_failed} ") == 2  # groups and samples, one row for all of them


@pytest.mark.parametrize("can_save", [True, False])
def test_a_synchronous_run_that_fails_says_what_was_saved(film_run, coati_here, tmp_path, monkeypatch, can_save):
    if not can_save:

        def full_disk(self, path):
            raise OSError("no space left")

        monkeypatch.setattr(SynchronousRun, "strategy_save_actor", full_disk)
    finished = coati_here("train", film_run, "--sync", "--set", "reward.function=film_rewards:raises_late")
    assert finished.returncode == 2
    assert "no such lexicon" in finished.stderr
    assert ("was saved" in finished.stderr) == can_save
    assert ("no space left" in finished.stderr) != can_save
    assert (tmp_path / "out" / "error.txt").read_text().strip() in finished.stderr
    if can_save:
        AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "model-at-failure")
        AutoTokenizer.from_pretrained(tmp_path / "out" / "model-at-failure")


def test_a_run_without_tensorboard_trains(film_run, coati_here, tmp_path, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "tensorboard" else find_spec(name, *rest)
    )
    settings = ("--set", "train.total_steps=2", "--set", "logging.tensorboard=true")
    finished = coati_here("train", film_run, "--sync", *settings)
    assert finished.returncode == 0, finished.stderr
    assert not (tmp_path / "out" / "tensorboard").exists()


ASKS_TO_STOP = f"""
import os
import signal


def sends_sigterm(completions, calls=[]):
    calls.append(1)
    if len(calls) == 6:  # some batches were trained on, and their weights are here
        os.kill({os.getpid()}, signal.SIGTERM)
    return [float(len(text)) for text in completions]
"""


@pytest.mark.usefixtures("forked_workers")
def test_sigterm_saves_the_model_and_stops(film_run, coati_here, tmp_path):
    """What schedulers and `timeout` send. Ray takes this signal for itself, unlike SIGINT, if one lets it."""
    (tmp_path / "stops.py").write_text(ASKS_TO_STOP)
    changes = ("--set", "train.total_steps=100000", "--set", "reward.function=stops:sends_sigterm")
    finished = coati_here("train", film_run, *changes)
    assert finished.returncode == 130, finished.stdout + finished.stderr
    assert "Stopping" in finished.stdout + finished.stderr
    assert (tmp_path / "out" / "metrics.jsonl").stat().st_size > 0  # it had trained
    AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "model")


BAD_INPUT = [
    (["reward.function=film_rewards:raises"], ["'raises'", "no such lexicon"]),
    (["reward.function=film_rewards:always_nan"], ["no score by 'always_nan'", "in a row"]),
    (["reward.function=film_rewards:too_few"], ["too_few", "returned 1 score for 20"]),
    (["reward.function=film_rewards:missing"], ["film_rewards", "missing"]),
    (["reward.function=no_such_module:reward"], ["no_such_module"]),
    (["rollout.generate={nonsense=1}"], ["nonsense"]),
    (["train.batch_sise=4"], ["train.batch_sise", "batch_size"]),
    (["train.batch_size=0"], ["train.batch_size", "0"]),
    (["model.path=no/such/model"], ["model.path", "no/such/model"]),
    (["prompts.path=no/such/file.jsonl"], ["prompts.path", "no/such/file.jsonl"]),
]


@pytest.mark.parametrize(("overrides", "expected"), BAD_INPUT, ids=[" ".join(case[0]) for case in BAD_INPUT])
def test_bad_input_is_one_clear_message(film_run, coati_here, overrides, expected):
    settings = [argument for override in overrides for argument in ("--set", override)]
    finished = coati_here("train", film_run, "--sync", *settings, cwd=film_run.parent)
    assert finished.returncode == 2, finished.stdout + finished.stderr
    assert "Traceback" not in finished.stderr
    assert "error: " in finished.stderr
    for part in expected:
        assert part in finished.stderr


def test_an_empty_dataset_is_one_clear_message(film_run, coati_here, tmp_path):
    (tmp_path / "prompts.jsonl").write_text("")
    finished = coati_here("train", film_run, "--sync")
    assert finished.returncode == 2
    assert "prompts.jsonl" in finished.stderr
    assert "Traceback" not in finished.stderr


@pytest.mark.parametrize("more", [(), ("--set", "topology.gpus_per_trainer=0.5")])
def test_a_gpu_of_which_an_actor_has_no_share_is_named_before_anything_starts(film_run, coati_here, more):
    finished = coati_here("train", film_run, "--dry-run", "--set", "model.device=cuda", *more)
    assert finished.returncode == 2
    setting = "gpus_per_maker" if more else "gpus_per_trainer"
    assert f"topology.{setting}" in finished.stderr


@pytest.mark.parametrize(
    ("is_terminal", "no_color", "asked", "expected"),
    [(True, "", None, None), (False, "", None, "0"), (True, "1", None, "0"), (False, "", "1", "1")],
)
def test_what_ray_relays_is_coloured_in_terminals_only(monkeypatch, is_terminal, no_color, asked, expected):
    for stream in (sys.stdout, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: is_terminal)
    monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setenv("RAY_COLOR_PREFIX", asked or "")
    if asked is None:
        monkeypatch.delenv("RAY_COLOR_PREFIX")
    before = logging.getLogger().level
    try:
        show_messages(True)
    finally:
        logging.getLogger().setLevel(before)
    assert os.environ.get("RAY_COLOR_PREFIX") == expected


def test_a_dry_run_tokenizes_the_prompts(film_run, coati_here):
    counted = coati_here("train", film_run, "--dry-run", "--set", "prompts.max_tokens=3")
    assert counted.returncode == 0, counted.stderr
    assert "longer than prompts.max_tokens" in counted.stdout
    nothing = coati_here("train", film_run, "--dry-run", "--set", "prompts.max_tokens=1")
    assert nothing.returncode == 2
    assert "no usable prompts" in nothing.stderr


def test_a_run_that_cannot_find_its_cluster_takes_nothing_away(film_run, coati_here, tmp_path):
    (tmp_path / "out" / "model").mkdir(parents=True)
    (tmp_path / "out" / MARKER).touch()
    finished = coati_here("train", film_run, "--overwrite", "--address", "127.0.0.1:1")
    assert finished.returncode == 2
    assert "--address" in finished.stderr
    assert (tmp_path / "out" / "model").exists()
