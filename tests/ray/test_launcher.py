"""Whole runs through the launcher: sample shares, groups, checkpoints, stops, failures, and cleanup."""

import logging
import os
from types import SimpleNamespace

import pytest
import ray
import torch
from metric_table import DOCUMENTED
from ray_testing import PATIENCE
from transformers import AutoModelForCausalLM, AutoTokenizer

from coati.errors import PeerDied
from coati.ledger.audit import audit_run
from coati.monitor import read_jsonl
from coati.monitor.report import read_run, run_times
from coati.ray import actor_factory
from coati.ray.detached_trainer_ppo import PPOTrainer
from coati.ray.experience_maker_holder import MakerHolder


def test_one_maker_and_two_trainers_train_their_exact_shares(witnessed, make_config, tmp_path):
    progress = witnessed(make_config(makers=1, trainers=2, max_staleness=0, placement="spread"))
    assert {name: one.log for name, one in progress.items()} == dict.fromkeys(progress, (logging.INFO, True))
    for rank in range(2):  # 2 batches of 2 samples each, followed by one weight version each
        assert summary(progress[f"trainer-{rank}"]) == ("finished", 2, 4, 2)
    assert (progress["maker-0"].num_samples, progress["maker-0"].version) == (8, 2)
    check_times(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.generate(**tokenizer("the film", return_tensors="pt"), max_new_tokens=2).shape[0] == 1


def summary(trainer):
    return trainer.state, trainer.num_batches, trainer.num_samples, trainer.version


def check_times(folder):
    """Check that the run folder accounts for every actor's time; on-policy, all of them wait for each other."""
    run = read_run(folder)
    times = run_times(run.spans)
    assert list(times.actors) == ["maker-0", "trainer-0", "trainer-1"]
    assert times.actors["maker-0"].keys() >= {"generate", "score", "send", "wait_weights"}
    for trainer in ("trainer-0", "trainer-1"):
        assert times.actors[trainer].keys() >= {"train", "publish", "wait_data", "wait_ranks"}
        assert sum(span.what == "train" for span in run.spans[trainer]) == 2
    # No time is counted twice.
    assert all(0 < shares["worked"] + shares["waited"] <= 1 + 1e-6 for shares in times.actors.values())
    made = [row for row in run.metrics if "wait/weights_share" in row]
    assert made
    assert all(0 < row["maker/busy_share"] <= 1 and row["maker/generate_seconds"] > 0 for row in made)
    assert all(0 < row["trainer/busy_share"] <= 1 for row in run.metrics if "trainer/busy_share" in row)
    assert any("trainer/busy_share" in row for row in run.metrics)


class Witness:
    """An actor of a run that also reports its environment and the weight updates that it received."""

    def __init__(self, *args, **kwargs):
        self._updates = []
        super().__init__(*args, **kwargs)

    def progress(self):
        log = logging.getLogger("coati")
        return SimpleNamespace(
            **super().progress()._asdict(),
            updates=self._updates,
            environment=dict(os.environ),
            log=(log.getEffectiveLevel(), log.hasHandlers()),
        )


@ray.remote(concurrency_groups={"experience_io": 1, "model_io": 1, "compute": 1})
class WitnessMaker(Witness, MakerHolder):
    @ray.method(concurrency_group="model_io")
    def update_experience_maker(self, *args, message=None, **kwargs):
        if message is not None and message.is_start:
            self._updates.append((message.header.version, message.header.source))
        super().update_experience_maker(*args, message=message, **kwargs)


TRAINER_GROUPS = ("buffer_length", "buffer_append", "buffer_sample", "model_io", "compute")


@ray.remote(concurrency_groups=dict.fromkeys(TRAINER_GROUPS, 1))
class WitnessTrainer(Witness, PPOTrainer):
    pass


@pytest.fixture
def witnessed(run, monkeypatch):
    """Run with makers and trainers that report their environment and updates."""
    monkeypatch.setattr(actor_factory, "_MAKER", WitnessMaker)
    monkeypatch.setattr(actor_factory, "_TRAINER", WitnessTrainer)
    return run


GROUP_VARIABLES = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}


def check_environment(progress, bare):
    """Actors have a bare actor's variables, Ray's own, and those for the rendezvous of a group's ranks."""
    assert "COATI_TEST_SECRET" in os.environ
    for name, one in progress.items():
        ours = {key for key, value in one.environment.items() if bare.get(key) != value and not key.startswith("RAY_")}
        assert ours == (GROUP_VARIABLES if name.startswith("trainer") else set()), name


def test_sharded_groups_are_saved_on_the_way_and_resume_under_another_strategy_with_other_makers(
    witnessed, make_config, tmp_path, keep, monkeypatch
):
    monkeypatch.setenv("COATI_TEST_SECRET", "hush")  # set after Ray was started
    # 2 trainers with 3 samples per step: every version takes a whole group on each.
    common = {
        "trainers": 2,
        "max_staleness": 1,
        "algorithm": "dapo",
        "rollout": {"samples_per_prompt": 3, "prompts_per_batch": 2},
    }
    train = {"batch_size": 3, "save_every": 3}
    progress = witnessed(make_config(makers=2, **common, train={**train, "total_steps": 4, "strategy": "gemini"}))
    for rank in range(2):
        assert summary(progress[f"trainer-{rank}"]) == ("finished", 4, 12, 4)
    assert sum(progress[f"maker-{index}"].num_samples for index in range(2)) >= 24  # fast makers request more often
    for index in range(2):  # the first weights and four versions, each once and from a single trainer
        maker = progress[f"maker-{index}"]
        assert maker.updates == [(version, f"trainer-{index}") for version in range(5)]
    check_environment(progress, ray.get(keep(Looker.remote()).environment.remote()))
    checkpoints = tmp_path / "out" / "checkpoints"
    assert [folder.name for folder in checkpoints.iterdir()] == ["version-3"]
    early = AutoModelForCausalLM.from_pretrained(checkpoints / "version-3").state_dict()
    late = AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    assert any(not torch.equal(early[name], late[name]) for name in early)
    for folder in (checkpoints / "version-3", tmp_path / "model"):
        assert AutoTokenizer.from_pretrained(folder).vocab_size > 0

    longer = make_config(makers=3, **common, train={**train, "total_steps": 6, "strategy": "zero2"})
    progress = witnessed(longer, checkpoint=checkpoints / "version-3")
    for rank in range(2):
        assert summary(progress[f"trainer-{rank}"]) == ("finished", 6, 18, 6)
    account = audit_run(tmp_path / "out")
    assert account.problems == []
    trained = sum(groups for fate, _, groups, _ in account.table() if fate == "trained")
    assert trained == 2 * 6  # each group once, regardless of what the first run made after version 3


def test_two_makers_and_a_trainer_keep_ages_within_the_bound(run, make_config, tmp_path):
    progress = run(make_config(makers=2, max_staleness=2, train={"total_steps": 5}))
    assert progress["trainer-0"].num_samples == 10
    # One maker may make everything, and leases revoked from a slow maker may be delivered twice.
    assert sum(progress[f"maker-{index}"].num_samples for index in range(2)) >= 10
    rows = read_jsonl(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    for row in rows:
        assert row["train/age_max"] <= 2
        assert row["train/token_age_mean"] <= row["train/age_mean"] <= row["train/age_max"]
    assert rows[0]["train/age_max"] == 0
    assert {name for row in rows for name in row} - {"step", "version", "time"} <= DOCUMENTED


def test_a_stop_saves_the_model(run, make_config, tmp_path):
    config = make_config(max_staleness=-1, train={"total_steps": 100_000})

    def after_some_steps():
        trainer = ray.get_actor("trainer-0")
        return ray.get(trainer.progress.remote(), timeout=PATIENCE).num_batches >= 2

    progress = run(config, should_stop=after_some_steps)
    assert 2 <= progress["trainer-0"].num_batches < 100_000
    assert progress["trainer-0"].state == "finished"
    assert progress["maker-0"].state == "finished"
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model") is not None


def test_a_constructor_that_raises_ends_the_run_with_its_reason(run, make_config):
    with pytest.raises(PeerDied) as caught:
        run(make_config(function="rewards:no_such_function"))
    text = str(caught.value)
    assert text.startswith("maker-0 died: ")
    assert "no_such_function" in text
    assert "\n" not in text
    assert "Traceback" not in text
    assert "File " not in text


@ray.remote(num_cpus=0)
class Looker:
    def environment(self):
        return dict(os.environ)


def test_secrets_reach_actors_only_by_rays_own_inheritance(keep, monkeypatch):
    monkeypatch.setenv("COATI_TEST_SECRET", "hush")  # set after ray.init
    environment = ray.get(keep(Looker.remote()).environment.remote())
    assert "COATI_TEST_SECRET" not in environment
    assert "hush" not in environment.values()
    # A private local Ray is a child of the driver and has its environment at that time.
    assert environment["COATI_TEST_BEFORE_INIT"] == "inherited"
