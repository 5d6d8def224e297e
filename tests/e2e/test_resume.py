"""`coati train --resume`: an interrupted run continues as if it had never stopped."""

import json
import logging
import shutil
import signal
import sys

import pytest

import coati
from coati.errors import CheckpointError, ConfigError
from coati.ledger.audit import audit_run
from coati.monitor import read_jsonl

SETTINGS = ["train.save_every=1", "train.lr_schedule=linear", "train.warmup_steps=2"]

REWARD = """
import os
import signal
import time
from pathlib import Path
from coati.demo.reward import film_sentiment

scored = []


def kind(prompts, completions):
    scored.extend(completions)
    flag = Path(__file__).with_name("fails_at")
    if flag.exists() and len(scored) > int(flag.read_text()):
        deadline = time.monotonic() + 120
        while not list(flag.parent.glob("out/checkpoints/version-*")):  # which another thread or actor writes
            assert time.monotonic() < deadline, "there is no checkpoint to resume from"
            time.sleep(0.01)
        if flag.with_name("kills").exists():
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError("the power went out")
    return film_sentiment(completions, prompts)
"""


@pytest.fixture
def fails_at(film_run):
    """Has the reward raise after so many samples, when there is a checkpoint; None for never."""
    (film_run.parent / "film_rewards.py").write_text(REWARD)
    flag = film_run.parent / "fails_at"

    def change(number):
        sys.modules.pop("film_rewards", None)  # it counts from 0 again
        flag.unlink(missing_ok=True)
        if number is not None:
            flag.write_text(str(number))

    change(None)
    yield change
    change(None)


def weights(folder):
    (file,) = (folder / "model").glob("*model.safetensors")
    return file.read_bytes()


def rows(folder):
    """The metrics without those that tell the time."""
    timed = ("time", "seconds", "per_second", "fraction", "wait", "busy", "memory")
    return [
        {name: value for name, value in row.items() if not any(word in name for word in timed)}
        for row in read_jsonl(folder / "metrics.jsonl")
    ]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """The folder of a run with these settings that nothing disturbed; made once."""
    made = {}

    def make(film_run, overrides):
        key = tuple(overrides)
        if key not in made:
            made[key] = tmp_path_factory.mktemp("unbroken") / "out"
            coati.train(film_run, overrides=[*overrides, f"run.output={made[key]}"], sync=True)
            sys.modules.pop("film_rewards", None)  # it counts from 0 again
        return made[key]

    return make


def test_a_run_that_failed_ends_in_the_same_bits_and_rows(film_run, unbroken, fails_at, tmp_path):
    """With adapters; the other tests have none."""
    settings = [*SETTINGS, "lora.rank=2"]
    whole = unbroken(film_run, settings)
    fails_at(80)
    with pytest.raises(Exception, match="the power went out"):
        coati.train(film_run, overrides=settings, sync=True)
    out = tmp_path / "out"
    assert 0 < len(rows(out)) < 10
    fails_at(None)
    result = coati.train(resume=out, sync=True)
    assert weights(out) == weights(whole)
    assert rows(out) == rows(whole)
    assert [row["step"] for row in rows(out)] == list(range(1, 11))
    assert read_jsonl(out / "samples.jsonl") == read_jsonl(whole / "samples.jsonl")
    assert result.rewards == [(row["version"], row["reward/mean"]) for row in rows(out) if "reward/mean" in row]
    assert result.num_samples == 5 * 24
    assert audit_run(out).problems == []


def test_a_process_that_was_killed_can_be_resumed(film_run, unbroken, fails_at, coati_command, tmp_path):
    whole = unbroken(film_run, SETTINGS)
    fails_at(80)
    (film_run.parent / "kills").touch()
    killed = coati_command("train", film_run, "--sync", *(part for change in SETTINGS for part in ("--set", change)))
    assert killed.returncode == -signal.SIGKILL
    fails_at(None)
    out = tmp_path / "out"
    coati.train(resume=out, sync=True)
    assert weights(out) == weights(whole)
    assert rows(out) == rows(whole)
    assert read_jsonl(out / "samples.jsonl") == read_jsonl(whole / "samples.jsonl")
    assert audit_run(out).problems == []


def test_a_run_that_was_stopped_goes_on_from_there_and_may_train_longer(film_run, unbroken, fails_at, tmp_path):
    whole = unbroken(film_run, ["train.total_steps=6"])
    steps = []
    stopped = coati.train(
        film_run,
        overrides=["train.total_steps=4"],
        sync=True,
        on_progress=lambda snapshot: steps.append(snapshot.step),
        should_stop=lambda: 4 in steps,  # after the first version, of two batches gone over twice
    )
    assert stopped.was_stopped
    out = tmp_path / "out"
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["version-1"]
    resumed = coati.train(resume=out, overrides=["train.total_steps=6"], sync=True)
    assert weights(out) == weights(whole)
    assert rows(out) == rows(whole)
    assert resumed.config.train.total_steps == 6
    assert coati.config.load_config(out / "config.toml").train.total_steps == 6
    with pytest.raises(ConfigError, match="is complete"):
        coati.train(resume=out, sync=True)
    shutil.rmtree(out / "model")  # as if it had died before it was saved
    again = coati.train(resume=out, sync=True)  # from the only checkpoint there is, once more
    assert weights(out) == weights(whole)
    assert rows(out) == rows(whole)
    assert not again.was_stopped


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_used(film_run, unbroken, fails_at, tmp_path, caplog):
    whole = unbroken(film_run, SETTINGS)
    coati.train(film_run, overrides=SETTINGS, sync=True)
    checkpoints = tmp_path / "out" / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["version-2", "version-3"]
    file = checkpoints / "version-3" / "rank-0.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    shutil.rmtree(tmp_path / "out" / "model")  # else it is complete
    caplog.clear()
    coati.train(resume=tmp_path / "out", sync=True)
    assert any(record.levelno == logging.ERROR and "version-3" in record.message for record in caplog.records)
    assert sorted(path.name for path in checkpoints.iterdir()) == ["version-2", "version-3", "version-3.damaged"]
    assert weights(tmp_path / "out") == weights(whole)
    assert rows(tmp_path / "out") == rows(whole)
    assert audit_run(tmp_path / "out").problems == []


def test_after_a_short_last_version_a_run_may_train_longer(film_run, fails_at, tmp_path):
    coati.train(film_run, overrides=SETTINGS, sync=True)
    out = tmp_path / "out"
    coati.train(resume=out, overrides=["train.total_steps=7"], sync=True)
    assert [row["version"] for row in rows(out)] == [0] * 4 + [1] * 4 + [2] * 2 + [3] * 2  # the sixth batch is left out
    assert audit_run(out).problems == []


GROUPS = ["algorithm.name=grpo", "rollout.samples_per_prompt=16", "rollout.prompts_per_batch=1"]


@pytest.mark.parametrize(
    ("settings", "num_groups"),
    [([], (24, 120)), (GROUPS, (2, 8))],  # of the second group half is in the first batch
    ids=["samples", "groups across batches"],
)
def test_a_stop_in_the_middle_of_a_version_ends_it_early_and_the_run_goes_on(
    film_run, fails_at, tmp_path, settings, num_groups
):
    steps, out = [], tmp_path / "out"

    def num_trained():
        account = audit_run(out)
        assert account.problems == []
        return sum(group.state == "trained" for group in account.trainers[0].groups.values())

    coati.train(
        film_run,
        overrides=["train.total_steps=6", *settings],
        sync=True,
        on_progress=lambda snapshot: steps.append(snapshot.step),
        should_stop=lambda: 1 in steps,
    )
    assert [row["version"] for row in rows(out)] == [0, 0]  # one batch, gone over twice
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["version-1"]
    assert num_trained() == num_groups[0]
    coati.train(resume=out, sync=True)
    assert [row["version"] for row in rows(out)] == [0] * 2 + [1] * 4 + [2] * 4
    assert [row["step"] for row in rows(out)] == list(range(1, 11))
    assert num_trained() == num_groups[1]


def test_there_is_never_a_silent_fresh_start(film_run, fails_at, tmp_path):
    with pytest.raises(ConfigError, match=r"config\.toml"):
        coati.train(resume=tmp_path / "nothing", sync=True)
    coati.train(film_run, overrides=["train.total_steps=2"], sync=True)
    before = (tmp_path / "out" / "metrics.jsonl").read_bytes()
    shutil.rmtree(tmp_path / "out" / "model")  # else it is complete
    with pytest.raises(CheckpointError, match="got none"):
        coati.train(resume=tmp_path / "out", sync=True)
    assert (tmp_path / "out" / "metrics.jsonl").read_bytes() == before
    with pytest.raises(ConfigError, match="Remove config"):
        coati.train(film_run, resume=tmp_path / "out", sync=True)


@pytest.mark.usefixtures("forked_workers")
def test_a_detached_run_that_failed_ends_in_the_same_bits(film_run, unbroken, fails_at, coati_here, tmp_path):
    whole = unbroken(film_run, SETTINGS)
    out = tmp_path / "out"
    fails_at(80)
    failed = coati_here("train", film_run, *(part for change in SETTINGS for part in ("--set", change)))
    assert failed.returncode == 2, failed.stderr
    assert "the power went out" in failed.stderr
    fails_at(None)
    told = coati_here("train", "--resume", out, "--dry-run")
    assert told.returncode == 0, told.stderr
    assert "would continue from" in told.stdout
    # Not with more makers: who is written with whom, which decides the last bits, would then be a matter of speed.
    resumed = coati_here("train", "--resume", out, "--set", "train.save_every=2")
    assert resumed.returncode == 0, resumed.stderr
    assert "train.save_every was 1, is now 2" in resumed.stderr
    assert weights(out) == weights(whole)
    assert [row["step"] for row in rows(out)] == list(range(1, 11))
    assert coati_here("audit", out).returncode == 0
    lines = (out / "ledger" / "stream-0.jsonl").read_text().splitlines()
    assert sum("resume" in event for line in lines for event in json.loads(line[9:])) == 1


@pytest.mark.usefixtures("forked_workers")
def test_an_asynchronous_run_that_was_resumed_replays_to_the_bit(film_run, fails_at, coati_here, tmp_path):
    out = tmp_path / "out"
    changes = ["topology.max_staleness=2", "topology.makers=2", "train.total_steps=8", "rollout.in_flight=true"]
    fails_at(40)  # one of them comes to it; by then they have delivered enough for a version
    settings = [part for change in [*SETTINGS, *changes] for part in ("--set", change)]
    failed = coati_here("train", film_run, *settings)
    assert "the power went out" in failed.stderr
    fails_at(None)
    resumed = coati_here("train", "--resume", out)
    assert resumed.returncode == 0, resumed.stderr
    assert audit_run(out).oldest > 0
    same = coati_here("replay", out)
    assert same.returncode == 0, same.stdout + same.stderr
    assert "version 4" in same.stdout
    (out.parent / "film_rewards.py").write_text(
        REWARD.replace("return film", "return [score / 2 for score in film") + "]"
    )
    different = coati_here("replay", out)
    assert different.returncode == 1
    assert "differs in" in different.stdout
