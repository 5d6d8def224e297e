"""Whole runs through the launcher: shares, groups, checkpoints, stops, failures, and what is left behind."""

import dataclasses
import logging
import os
import re
from types import SimpleNamespace

import pytest
import ray
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ray.exceptions import ActorDiedError, ActorDiedErrorContext, RayActorError, RayError
from ray_testing import PATIENCE
from transformers import AutoModelForCausalLM, AutoTokenizer

from coati.errors import ConfigError, PeerDied, RewardError, RunStopped
from coati.monitor import read_jsonl
from coati.monitor.report import read_run, run_times
from coati.ray import cluster as cluster_module
from coati.ray import crew, launcher
from coati.ray.detached_trainer_ppo import PPOTrainer
from coati.ray.environment import apply_env_info
from coati.ray.experience_maker_holder import MakerHolder
from coati.ray.peers import death_reason
from coati.ray.topology import first_updaters, makers_to_leave, trainer_for_newcomer


def test_one_maker_and_three_trainers_train_their_exact_shares(run, make_config, tmp_path, monkeypatch):
    logs, poll = {}, launcher.DetachedRun._look

    def log_of(_):
        log = logging.getLogger("coati")
        return log.getEffectiveLevel(), log.hasHandlers()

    def poll_logs_too(self):
        for name, actor in self._actors() if not logs else ():
            logs[name] = ray.get(actor.__ray_call__.remote(log_of), timeout=PATIENCE)
        poll(self)

    monkeypatch.setattr(launcher.DetachedRun, "_look", poll_logs_too)
    progress = run(make_config(makers=1, trainers=3, max_staleness=0))
    assert logs == dict.fromkeys(["maker-0", *(f"trainer-{rank}" for rank in range(3))], (logging.INFO, True))
    for trainer in (progress[f"trainer-{rank}"] for rank in range(3)):
        # 2 batches of 2 samples each, one weight version after each.
        assert (trainer.state, trainer.num_batches, trainer.num_samples, trainer.version) == (
            "finished",
            2,
            4,
            2,
        )
    assert progress["maker-0"].num_delivered == 12
    assert progress["maker-0"].version == 2
    check_times(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.generate(**tokenizer("the film", return_tensors="pt"), max_new_tokens=2).shape[0] == 1


def check_times(folder):
    """Everybody's time is in the run's folder: on-policy, all of them wait for each other."""
    run = read_run(folder)
    times = run_times(run.spans)
    assert [actor.actor for actor in times.actors] == ["maker-0", "trainer-0", "trainer-1", "trainer-2"]
    maker, *trainers = times.actors
    assert maker.seconds.keys() >= {"generate", "score", "send", "commit", "wait_weights", "wait_prompts"}
    assert "weights" in maker.other_lanes
    for trainer in trainers:
        assert trainer.seconds.keys() >= {"train", "publish", "wait_data", "wait_ranks"}
        assert "buffer" in trainer.other_lanes
        assert sum(piece.what == "train" for piece in trainer.pieces) == 2
    # Nobody's time is counted twice. How much belongs to nobody is the machine's affair: the run takes half a second.
    assert all(0 < actor.busy_share + actor.idle_share <= 1.0 + 1e-9 for actor in times.actors)
    made = [row for row in run.metrics if "wait/weights_share" in row]
    assert made
    assert all(0 < row["maker/busy_share"] <= 1 and row["maker/generate_seconds"] > 0 for row in made)
    assert all(0 < row["trainer/busy_share"] <= 1 for row in run.metrics if "trainer/busy_share" in row)
    assert any("trainer/busy_share" in row for row in run.metrics)


class Witness:
    """An actor of a run that tells more of itself: its environment, and the weight updates that reached it."""

    def __init__(self, *args, **kwargs):
        self._updates = []
        super().__init__(*args, **kwargs)

    def progress(self):
        return SimpleNamespace(
            **dataclasses.asdict(super().progress()), updates=self._updates, environment=dict(os.environ)
        )


@ray.remote(concurrency_groups={"experience_io": 1, "model_io": 1, "compute": 1})
class WitnessMaker(Witness, MakerHolder):
    @ray.method(concurrency_group="model_io")
    def update_experience_maker(self, *args, update=None, **kwargs):
        if update is not None:
            self._updates.append((update.version, update.source.partition(" (")[0]))
        super().update_experience_maker(*args, update=update, **kwargs)


TRAINER_GROUPS = ("buffer_length", "buffer_append", "buffer_sample", "model_io", "compute")


@ray.remote(concurrency_groups=dict.fromkeys(TRAINER_GROUPS, 1))
class WitnessTrainer(Witness, PPOTrainer):
    pass


@pytest.fixture
def witnessed(run, monkeypatch):
    """Runs with makers and trainers that tell more of themselves."""
    monkeypatch.setattr(crew, "_MAKER", WitnessMaker)
    monkeypatch.setattr(crew, "_TRAINER", WitnessTrainer)
    return run


GROUP_VARIABLES = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}


def check_environment(progress, bare):
    """The actors of a run have what a bare actor has, Ray's own variables, and what the ranks of a group meet by."""
    assert "COATI_TEST_SECRET" in os.environ
    for name, one in progress.items():
        ours = {key for key, value in one.environment.items() if bare.get(key) != value and not key.startswith("RAY_")}
        assert ours == (GROUP_VARIABLES if name.startswith("trainer") else set()), name


def test_three_makers_and_two_sharded_trainers_train_their_shares_and_save_on_the_way(
    witnessed, make_config, tmp_path, keep, monkeypatch
):
    monkeypatch.setenv("COATI_TEST_SECRET", "hush")  # after Ray was started
    config = make_config(makers=3, trainers=2, train={"total_steps": 3, "save_every": 2, "strategy": "gemini"})
    progress = witnessed(config)
    for trainer in (progress[f"trainer-{rank}"] for rank in range(2)):
        assert (trainer.state, trainer.num_batches, trainer.num_samples, trainer.version) == (
            "finished",
            3,
            6,
            3,
        )
    makers = [progress[f"maker-{index}"] for index in range(3)]
    assert [maker.num_delivered for maker in makers] == [4, 4, 4]
    assert {maker.version for maker in makers} == {3}
    for index, maker in enumerate(makers):  # the first weights and three versions, each once and from one trainer
        assert maker.updates == [(version, f"trainer {index % 2}") for version in range(4)]
    check_environment(progress, ray.get(keep(Looker.remote()).environment.remote()))
    checkpoints = tmp_path / "out" / "checkpoints"
    assert [folder.name for folder in checkpoints.iterdir()] == ["version-2"]
    for folder in (checkpoints / "version-2", tmp_path / "model"):  # no trainer ever held the model whole
        assert (folder / "model.safetensors.index.json").exists()
        assert not (folder / "model.safetensors").exists()
    early = AutoModelForCausalLM.from_pretrained(checkpoints / "version-2").state_dict()
    late = AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    assert any(not torch.equal(early[name], late[name]) for name in early)
    assert AutoTokenizer.from_pretrained(checkpoints / "version-2").vocab_size > 0


def test_groups_of_three_go_through_two_makers_and_two_trainers(run, make_config):
    # 2 trainers of 3 samples a step: every version takes two whole groups, one of each maker.
    config = make_config(
        makers=2,
        trainers=2,
        max_staleness=1,
        algorithm="dapo",
        rollout={"samples_per_prompt": 3, "prompts_per_batch": 2},
        train={"total_steps": 4, "batch_size": 3, "strategy": "zero2"},
    )
    progress = run(config)
    for trainer in (progress[f"trainer-{rank}"] for rank in range(2)):
        assert (trainer.state, trainer.num_batches, trainer.num_samples, trainer.version) == ("finished", 4, 12, 4)
    assert [progress[f"maker-{index}"].num_delivered for index in range(2)] == [12, 12]


def test_an_adaptive_bound_moves_and_ages_stay_below_its_upper_end(run, make_config, tmp_path):
    # Targets that everything meets: the bound rises whenever it has settled, 0 → 1, one version later → 2.
    config = make_config(
        makers=1,
        trainers=2,
        max_staleness=2,
        staleness_control="adaptive",
        target_kl=1e9,
        target_effective_samples=0.0,
        target_idle=0.0,
        train={"total_steps": 5},
    )
    progress = run(config)
    assert [progress[f"trainer-{rank}"].num_samples for rank in range(2)] == [10, 10]
    rows = read_jsonl(tmp_path / "metrics.jsonl")
    assert [row["staleness/bound"] for row in rows if "staleness/bound" in row] == [1, 1, 2, 2, 2]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    for row in rows:
        assert row["train/age_max"] <= 2
        assert sum(row[f"age/samples_{age}"] for age in range(3)) == pytest.approx(1)
        assert sum(row[f"age/tokens_{age}"] for age in range(3)) == pytest.approx(1)
    assert rows[0]["age/samples_0"] == 1


def test_a_stop_saves_what_was_learnt_even_with_a_full_buffer(run, make_config, tmp_path):
    # A maker without bound and a buffer of one batch: when the stop comes, it stands before a full buffer.
    config = make_config(max_staleness=-1, buffer_limit=1, train={"total_steps": 100_000})

    def after_some_steps():
        trainer = ray.get_actor("trainer-0")
        return ray.get(trainer.progress.remote(), timeout=PATIENCE).num_batches >= 2

    progress = run(config, should_stop=after_some_steps)
    assert 2 <= progress["trainer-0"].num_batches < 100_000
    assert progress["trainer-0"].state == "finished"
    assert progress["maker-0"].state == "finished"
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model") is not None


def test_a_stop_before_training_begins_ends_the_run_and_leaves_nothing(run, make_config, tmp_path):
    with pytest.raises(RunStopped, match="nothing to save"):
        run(make_config(), should_stop=lambda: True)
    assert not (tmp_path / "model").exists()


def test_a_constructor_that_raises_ends_the_run_with_its_reason(run, make_config):
    with pytest.raises(PeerDied) as caught:
        run(make_config(function="rewards:no_such_function"))
    text = str(caught.value)
    assert text.startswith("maker-0 died: ")
    assert "no_such_function" in text
    assert "\n" not in text
    assert "Traceback" not in text
    assert "File " not in text


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (
            "The actor died because its node has died. Node Id: f6c8\n\tthe actor's node was terminated unexpectedly: "
            "health check failed due to missing too many heartbeats",
            "The actor died because its node has died. Node Id: f6c8 the actor's node was terminated unexpectedly: "
            "health check failed due to missing too many heartbeats",
        ),
        ("its worker process has died. Worker exit type: SYSTEM_ERROR", "its worker process has died. .*SYSTEM_ERROR"),
        ("", "its node is gone or its process was killed; Ray gives no reason .*See the log."),
    ],
)
def test_an_actor_that_died_has_a_reason(said, reason):
    # The node's text is what Ray 2.60 said when a raylet was killed.
    context = ActorDiedErrorContext(
        class_name="Maker", actor_id=b"1" * 16, pid=10193, name="maker-0", node_ip_address="192.0.2.2"
    )
    context.error_message = said
    assert re.fullmatch(reason, death_reason(ActorDiedError(context)))
    assert death_reason(ActorDiedError()).startswith("its node is gone or its process was killed; ")


def test_the_reason_of_a_constructor_is_what_it_raised_with_all_its_lines():
    text = "in its creation task\n  File 'a.py', line 1\n    fail()\ncoati.errors.ConfigError: 2 are wrong:\n  a\n  b"
    assert death_reason(RayActorError(error_msg=text)) == "2 are wrong: a b"


def test_a_reward_that_raises_ends_the_run_with_its_name_and_place(run, make_config):
    with pytest.raises(RewardError, match="no such judge") as caught:
        run(make_config(function="rewards:broken"))
    assert "Traceback" not in str(caught.value)
    assert "raised in maker-0" in caught.value.__notes__


def test_a_run_that_does_not_fit_the_cluster_is_refused(cluster, make_config):
    with pytest.raises(ConfigError, match=r"needs 65 CPUs \(64 makers, 1 trainer\), but the cluster has 6"):
        cluster_module._check_resources(make_config(makers=64), num_cpus=65)


@settings(max_examples=50, deadline=None)
@given(num_makers=st.integers(0, 12), num_trainers=st.integers(1, 12))
def test_each_maker_is_updated_by_exactly_one_trainer_and_evenly(num_makers, num_trainers):
    updaters = first_updaters([f"maker-{index}" for index in range(num_makers)], num_trainers)
    assert len(updaters) == num_makers
    assert spread_over(updaters, num_trainers) <= 1


def spread_over(updaters, num_trainers):
    parts = [sum(updater == rank for updater in updaters.values()) for rank in range(num_trainers)]
    return max(parts) - min(parts)


@settings(max_examples=50, deadline=None)
@given(changes=st.lists(st.integers(-4, 4), max_size=6), num_trainers=st.integers(1, 5))
def test_makers_stay_evenly_spread_and_with_their_trainer_when_others_come_and_go(changes, num_trainers):
    updaters = first_updaters(["a", "b", "c"], num_trainers)
    for number, change in enumerate(changes):
        before = dict(updaters)
        for index in range(change):
            updaters[f"{number}-{index}"] = trainer_for_newcomer(updaters, num_trainers)
        leaving = makers_to_leave(updaters, min(-change, len(updaters) - 1)) if change < 0 else []
        assert len(set(leaving)) == len(leaving) == min(max(0, -change), len(before) - 1)
        updaters = {name: rank for name, rank in updaters.items() if name not in leaving}
        assert spread_over(updaters, num_trainers) <= 1
        assert all(updaters[name] == before[name] for name in updaters.keys() & before.keys())


# The environment.


def test_env_info_touches_five_names_and_refuses_others(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "before")
    before = dict(os.environ)
    info = {"rank": 1, "local_rank": 0, "world_size": "2", "master_addr": "10.0.0.1", "master_port": 29500}
    apply_env_info(info)
    changed = {name: value for name, value in os.environ.items() if before.get(name) != value}
    assert changed == {
        "RANK": "1",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29500",
    }
    now = dict(os.environ)
    with pytest.raises(ConfigError, match=r"env_info may hold local_rank, .* got 'aws_secret'"):
        apply_env_info({"rank": "7", "aws_secret": "hush"})
    assert dict(os.environ) == now, "nothing is set if anything is refused"
    apply_env_info(None)


@ray.remote(num_cpus=0)
class Looker:
    def environment(self):
        return dict(os.environ)


def test_secrets_reach_actors_only_by_rays_own_inheritance(keep, monkeypatch):
    monkeypatch.setenv("COATI_TEST_SECRET", "hush")  # set after ray.init
    environment = ray.get(keep(Looker.remote()).environment.remote())
    assert "COATI_TEST_SECRET" not in environment
    assert "hush" not in environment.values()
    # A private local Ray is the driver's child and has what the driver had when it started.
    assert environment["COATI_TEST_BEFORE_INIT"] == "inherited"


@pytest.mark.parametrize("num_full_disks", [0, 1, 2])
def test_what_was_learnt_goes_to_another_disk_if_the_runs_own_is_full(num_full_disks, monkeypatch, tmp_path):
    asked, written = [], []

    def save(place):
        asked.append(place)
        if len(asked) <= num_full_disks:
            raise RayError("no space left")

    trainer = SimpleNamespace(strategy_save_actor=SimpleNamespace(remote=lambda path, only_rank0: path))
    monkeypatch.setattr(launcher.ray, "get", lambda place, timeout: save(place))
    monkeypatch.setattr(launcher.tempfile, "gettempdir", lambda: str(tmp_path))
    tokenizer = SimpleNamespace(save_pretrained=written.append)
    monkeypatch.setattr(launcher.assembly, "load_tokenizer", lambda _: tokenizer)
    failed = SimpleNamespace(
        _log=SimpleNamespace(trainer_version=7), _crew=SimpleNamespace(trainers={"trainer-0": trainer}), _config=None
    )
    error = ConfigError("the run failed")
    launcher.DetachedRun._rescue(failed, "/run/model-at-failure", error)
    notes = getattr(error, "__notes__", [])
    if num_full_disks == 2:
        assert (notes, written) == ([], [])
        return
    assert notes == [f"the model as of version 7 was saved to {asked[-1]}"]
    assert written == asked[-1:]
    assert asked[-1].startswith(str(tmp_path) if num_full_disks else "/run/model-at-failure")


@pytest.mark.parametrize(
    ("save_every", "said"), [(0, "so nothing is saved"), (5, "what train.save_every saved is there")]
)
def test_a_group_that_failed_says_what_is_saved(save_every, said):
    failed = SimpleNamespace(
        _log=SimpleNamespace(trainer_version=7),
        _crew=SimpleNamespace(trainers={"trainer-0": None, "trainer-1": None}),
        _config=SimpleNamespace(train=SimpleNamespace(save_every=save_every)),
    )
    error = ConfigError("maker-1 died")
    launcher.DetachedRun._rescue(failed, "/run/model-at-failure", error)
    (note,) = error.__notes__
    assert said in note


def test_a_checkpoint_without_room_for_its_tokenizer_is_reported_once(tmp_path, monkeypatch, caplog):
    tried = []

    class Tokenizer:
        def save_pretrained(self, folder):
            tried.append(folder)
            raise OSError(28, "No space left on device")

    (tmp_path / "version-2").mkdir()
    monkeypatch.setattr(launcher.assembly, "load_tokenizer", lambda _: Tokenizer())
    run = SimpleNamespace(_checkpoints=tmp_path, _config=None, _incomplete=set())
    for _ in range(2):
        launcher.DetachedRun._complete_checkpoints(run)
    assert len(tried) == 1
    assert caplog.text.count("No space left") == 1
    assert list((tmp_path / "version-2").iterdir()) == []
