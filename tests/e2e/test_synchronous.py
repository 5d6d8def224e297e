"""The whole system in one process, with a model of a few hundred weights."""

import itertools

import pytest
import tiny
import torch
from metric_table import DOCUMENTED
from peft import PeftModel
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from coati.config import build_config
from coati.config.algorithm import ALGORITHMS
from coati.errors import DataError, DeadlineExceeded, RewardError, TrainingDiverged
from coati.experience_buffer.buffer import LeasedBuffer
from coati.ledger.audit import audit_run
from coati.monitor import read_jsonl
from coati.monitor.run_log import RunLog
from coati.synchronous import SynchronousRun
from coati.trainer.checkpoints import Checkpoints
from coati.weights.receiver import WeightReceiver

REWARDS = """
import itertools
import os

calls, samples = itertools.count(), itertools.count()


def likes_c(completions):
    return [text.split().count("c") / 4 for text in completions]


def now_and_then_nan(completions):
    if next(calls) % 3 == 1:
        return [None] * len(completions)
    return [float("nan") if next(samples) % 3 == 0 else 1.0 for _ in completions]


def one_nan_in_seven(completions):
    return [float("nan") if next(samples) % 7 == 0 else 1.0 for _ in completions]


def always_nan(completions):
    return [float("nan")] * len(completions)


def raises_on_g(completions):
    if any("g" in text for text in completions):
        raise KeyError("g")
    return [text.split().count("c") / 4 for text in completions]


def exits_on_g(completions):
    if any(text.endswith("g") for text in completions):  # seldom, because its process takes a second to start again
        os._exit(3)
    return [text.split().count("c") / 4 for text in completions]


def always_raises(completions):
    raise KeyError("no such column")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, its tokenizer, prompts and rewards."""
    folder = tmp_path_factory.mktemp("synchronous")
    tiny.save_words(folder)
    (folder / "rewards_of_the_synchronous_tests.py").write_text(REWARDS)
    return folder


@pytest.fixture(autouse=True)
def restored_threads(monkeypatch):
    for key in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(key, raising=False)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


class Outcome:
    """A finished run and what it logged."""

    def __init__(
        self, folder, output, *, reward="likes_c", reward_settings=None, clock=None, should_stop=None, **sections
    ):
        settings = {
            "run": {"seed": 1, "output": str(output)},
            "model": {"path": str(folder / "model"), "device": "cpu"},
            "prompts": {"path": str(folder / "prompts.jsonl")},
            "reward": {
                "function": f"rewards_of_the_synchronous_tests:{reward}",
                "search_paths": [str(folder)],
                **(reward_settings or {}),
            },
            "rollout": {"prompts_per_batch": 8, "max_new_tokens": 4},
            "algorithm": {"kl_coef": 0.0},
            "train": {"total_steps": 2, "batch_size": 8, "actor_lr": 0.02, "critic_lr": 0.02},
            "topology": {"threads_per_actor": 1},
        }
        for section, values in sections.items():
            settings[section] = {**settings.get(section, {}), **values}
        clock_setting = {} if clock is None else {"clock": clock}
        self.log = RunLog(output, total_steps=0, **clock_setting)
        self.snapshots = []
        self._should_stop = should_stop or (lambda outcome: False)
        run = SynchronousRun(
            build_config(settings),
            self.log,
            on_progress=self.snapshots.append,
            should_stop=lambda: self._should_stop(self),
        )
        run.run(str(output / "model"))
        self.log.flush()
        self.rows = read_jsonl(output / "metrics.jsonl") if (output / "metrics.jsonl").exists() else []
        file = output / "model" / "model.safetensors"
        self.weights = file.read_bytes() if file.exists() else None  # a run with adapters saves only those

    def column(self, name):
        return [row[name] for row in self.rows if name in row]


@pytest.fixture
def run(folder, tmp_path):
    numbers = itertools.count()

    def start(**kwargs):
        output = tmp_path / str(next(numbers))
        output.mkdir()
        return Outcome(folder, output, **kwargs)

    return start


def test_a_run_repeats_to_the_bit_and_the_seed_matters(run):
    first, again, other = run(), run(), run(run={"seed": 2})
    assert first.weights == again.weights
    assert first.column("reward/mean") == again.column("reward/mean")
    assert first.column("policy/loss") == again.column("policy/loss")
    assert first.weights != other.weights


def test_it_learns_to_write_a_word(run):
    outcome = run(
        train={"total_steps": 12, "batch_size": 32, "actor_lr": 0.05, "critic_lr": 0.05},
        rollout={"prompts_per_batch": 32},
    )
    rewards = outcome.column("reward/mean")
    assert len(rewards) == 12
    # A random model writes each of 12 tokens alike: 1/12 of the words, less where texts end early.
    assert rewards[0] < 0.2
    assert sum(rewards[-3:]) / 3 > 0.6


@pytest.mark.parametrize("name", sorted(ALGORITHMS.keys() - {"ppo", "vapo", "distill"}))
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.long)])
def test_every_algorithm_without_a_critic_learns_to_write_a_word(run, name, seed):
    outcome = run(
        run={"seed": seed},
        algorithm={"name": name},
        train={"total_steps": 12, "batch_size": 32, "actor_lr": 0.05},
        rollout={"prompts_per_batch": 8, "samples_per_prompt": 4},
    )
    rewards = outcome.column("reward/mean")
    assert rewards[0] < 0.25
    assert sum(rewards[-3:]) / 3 > 0.55
    assert not outcome.column("value/loss")
    if name == "dapo":
        assert sum(outcome.column("maker/no_signal")) > 0  # in the end all write the word, and are left out


def test_one_nan_among_the_samples_of_a_prompt_costs_the_group_and_does_not_stall(run):
    outcome = run(
        reward="one_nan_in_seven",
        algorithm={"name": "rloo"},
        rollout={"prompts_per_batch": 2, "samples_per_prompt": 4},
    )
    assert outcome.column("train/samples") == [8.0, 8.0]
    assert sum(outcome.column("maker/dropped")) >= 4


def test_versions_ages_and_batches_of_a_run_with_a_remainder(run):
    # 5 batches in episodes of 2, 2, 1, each trained twice: 4, 4 and 2 optimizer steps on versions 0, 1, 2.
    outcome = run(train={"total_steps": 5, "update_steps": 2, "epochs": 2, "batch_size": 4})
    assert outcome.column("version") == [0.0] * 4 + [1.0] * 4 + [2.0] * 2
    assert outcome.column("train/age_max") == [0.0] * 10  # the newest weights wrote everything
    assert outcome.column("train/samples") == [4.0] * 10
    assert [row["step"] for row in outcome.rows if "policy/loss" in row] == list(range(1, 11))
    assert outcome.column("maker/samples") == [8.0, 8.0, 4.0]
    assert all(seconds > 0 for seconds in outcome.column("wait/weights_seconds")[1:])  # while the trainer trained
    assert outcome.log.state.num_made == 20
    assert [snapshot.step for snapshot in outcome.snapshots] == [*range(1, 11), 10]
    assert {name for row in outcome.rows for name in row} - {"step", "time", "version"} <= DOCUMENTED


def test_on_its_own_data_the_first_step_has_ratio_one(run):
    outcome = run(train={"update_steps": 1})
    # Engine and learner agree to rounding: log-probs to 1e-5, and so a KL of its square.
    assert outcome.column("policy/ratio_max") == pytest.approx([1.0, 1.0], abs=1e-5)
    assert outcome.column("policy/approx_kl") == pytest.approx([0.0, 0.0], abs=1e-10)


def test_how_prompts_are_grouped_does_not_change_what_is_written(run):
    # Draws are keyed by sample id: the same weights write the same samples in one part or in 3, 3 and 2.
    once = {"total_steps": 1}
    whole = run(rollout={"prompts_per_batch": 8}, train=once)
    parts = run(rollout={"prompts_per_batch": 3}, train=once)
    assert whole.column("reward/mean") == pytest.approx(parts.column("reward/mean"))
    assert whole.column("response/length") == parts.column("response/length")


def test_the_topology_does_not_matter_here(run):
    alone = run()
    crowd = run(topology={"makers": 3, "trainers": 2, "max_staleness": 2})
    assert crowd.weights == alone.weights
    assert crowd.column("train/samples") == [8.0] * 2


def test_nan_rewards_now_and_then_do_not_stall_it(run):
    outcome = run(reward="now_and_then_nan")
    assert outcome.column("train/samples") == [8.0] * 2  # others took the place of every dropped sample
    assert outcome.column("maker/dropped")[-1] > 0
    assert outcome.column("optim/skipped_batches")[-1] == 0.0


def test_a_ledger_that_grants_nothing_is_waited_for_no_longer_than_the_deadline(run, monkeypatch):
    monkeypatch.setattr(LeasedBuffer, "lease", lambda self, request: [])
    with pytest.raises(DeadlineExceeded, match=r"waited 0.1 s for a batch of 8 samples"):
        run(deadlines={"batch_seconds": 0.1})


def test_nothing_but_nan_ends_with_an_error(run):
    with pytest.raises(DataError, match="64 samples in a row had to be dropped"):
        run(reward="always_nan")


@pytest.mark.parametrize("rate", ["actor_lr", "critic_lr"])
def test_a_learning_rate_that_breaks_the_models_ends_with_an_error_that_names_it(run, tmp_path, rate):
    with pytest.raises(TrainingDiverged, match=rf"train\.{rate} is 1e\+09"):
        run(train={rate: 1e9, "total_steps": 40})
    (saved,) = tmp_path.glob("*/model-at-failure/model.safetensors")
    assert all(bool(tensor.isfinite().all()) for tensor in load_file(saved).values())


def test_a_checkpoint_that_is_never_written_costs_neither_the_model_nor_the_reason_of_a_failure(
    run, tmp_path, monkeypatch, caplog
):
    def never_written(self):
        raise DeadlineExceeded("waited 1 s for checkpoint 3 to be written.")

    def diverge(self):
        raise TrainingDiverged("the loss is nan.")

    monkeypatch.setattr(Checkpoints, "wait", never_written)
    monkeypatch.setattr(SynchronousRun, "finish", diverge)
    with pytest.raises(TrainingDiverged, match="the loss is nan"):
        run()
    assert (tmp_path / "0" / "model-at-failure" / "config.json").is_file()
    assert "checkpoint 3" in caplog.text


def test_a_reward_that_always_raises_ends_with_a_reward_error(run):
    with pytest.raises(RewardError, match="'always_raises' raised KeyError: 'no such column'"):
        run(reward="always_raises")


@pytest.mark.parametrize(
    ("function", "isolation", "error"),
    [("raises_on_g", "thread", "KeyError"), ("exits_on_g", "process", "exit code 3")],
)
def test_samples_that_a_reward_fails_on_are_put_aside_and_the_run_continues(run, tmp_path, function, isolation, error):
    folder = tmp_path / "0"
    outcome = run(reward=function, reward_settings={"isolation": isolation})
    assert outcome.column("train/samples") == [8.0] * 2
    records = read_jsonl(folder / "quarantine.jsonl")
    assert sum(outcome.column("maker/quarantined")) == len(records) > 0
    assert all("g" in record["completion"] and error in record["error"] for record in records)
    account = audit_run(folder)
    assert not account.problems
    (row,) = [row for row in account.table() if row[0] == "quarantined"]  # all for the same reason
    assert row[3] == len(records)


def test_a_reward_that_fails_too_often_ends_it_with_the_reason(run, tmp_path):
    with pytest.raises(RewardError, match=r"reward.max_quarantined \(1\)"):
        run(reward="raises_on_g", reward_settings={"max_quarantined": 1}, train={"total_steps": 20})
    assert len(read_jsonl(tmp_path / "0" / "quarantine.jsonl")) >= 2


def test_a_stop_ends_it_with_what_was_trained(run):
    outcome = run(train={"total_steps": 50}, should_stop=lambda outcome: len(outcome.snapshots) >= 2)
    assert [snapshot.step for snapshot in outcome.snapshots] == [1, 2, 2]  # two batches, and the end
    assert outcome.log.state.version == 2  # the weights after the second batch; the third never came


def test_the_clock_starts_with_training(run):
    # Looks at the clock: two when the log is made, two 500 s later when training begins, one for each of 2 batches, and
    # one at the end.
    ticks = iter([0.0, 0.0, 500.0, 500.0, 510.0, 520.0, 530.0])
    outcome = run(clock=lambda: next(ticks))
    assert [snapshot.elapsed for snapshot in outcome.snapshots] == [10.0, 20.0, 30.0]
    assert [snapshot.startup for snapshot in outcome.snapshots] == [500.0, 500.0, 500.0]
    assert outcome.snapshots[0].samples_per_second == 0.8  # 8 samples in 10 s


def test_a_run_with_adapters_on_tied_embeddings_saves_them(run, folder, tmp_path):
    torch.manual_seed(0)
    tied = LlamaConfig.from_pretrained(folder / "model", tie_word_embeddings=True)
    LlamaForCausalLM(tied).save_pretrained(tmp_path / "tied")
    PreTrainedTokenizerFast.from_pretrained(folder / "model").save_pretrained(tmp_path / "tied")
    outcome = run(model={"path": str(tmp_path / "tied")}, lora={"rank": 2}, train={"total_steps": 2, "batch_size": 16})
    assert max(outcome.column("policy/grad_norm")) > 0
    base = LlamaForCausalLM.from_pretrained(tmp_path / "tied")
    loaded = PeftModel.from_pretrained(base, tmp_path / "0" / "model")
    adapters = [value for name, value in loaded.state_dict().items() if "lora_B" in name]
    assert len(adapters) > 0
    assert any(value.abs().max() > 0 for value in adapters)  # B starts at zero


def test_weights_reach_the_maker_as_in_a_detached_run(run, monkeypatch):
    messages, receive = [], WeightReceiver.receive
    monkeypatch.setattr(
        WeightReceiver, "receive", lambda self, message: (messages.append(message), receive(self, message))
    )
    run(
        lora={"rank": 2},
        model={"dtype": "bfloat16"},
        train={"mixed_precision": True, "total_steps": 2},
        topology={"chunk_mib": 1e-3},
    )
    manifests = [message.manifest for message in messages if message.manifest is not None]
    assert [manifest.is_full for manifest in manifests] == [True, False, False]
    dtypes = {spec.dtype for manifest in manifests for info in manifest.chunks for spec in info.tensors}
    assert dtypes == {torch.bfloat16}
    assert all(info.checksum is not None for manifest in manifests for info in manifest.chunks)
    assert len(manifests[0].chunks) > 4, "in small chunks, as asked"


def test_checkpoints_are_saved_every_so_many_versions(run, tmp_path):
    outcome = run(train={"total_steps": 3, "save_every": 2})
    checkpoints = tmp_path / "0" / "checkpoints"
    assert [folder.name for folder in checkpoints.iterdir()] == ["version-2"]
    saved = LlamaForCausalLM.from_pretrained(checkpoints / "version-2")
    assert saved.get_input_embeddings().num_embeddings == 12
    assert (checkpoints / "version-2" / "model.safetensors").read_bytes() != outcome.weights  # version 3 is another
    assert PreTrainedTokenizerFast.from_pretrained(checkpoints / "version-2").eos_token == "<eos>"
