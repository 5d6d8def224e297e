"""`coati train`: signals before and during training, results, and names of reward functions."""

import functools
import json
import signal

import pytest
from rich.console import Console

from coati import entry
from coati.cli.audit import show_losses
from coati.cli.main import main
from coati.cli.train import _show_result, execute
from coati.config import build_config, dump_config
from coati.errors import ConfigError, RunStopped
from coati.ledger import LedgerRules
from coati.ledger.audit import Group, RunAccount, TrainerAccount
from coati.monitor.run_log import RunSnapshot
from coati.rewards.calling import load_reward_function

CONFIG = build_config({"model": {"path": "m"}, "prompts": {"path": "p.jsonl"}, "reward": {"model": "r"}})


def test_a_result_has_a_one_line_repr():
    account = RunAccount([TrainerAccount(LedgerRules(samples_per_version=2, total_samples=6))], [])
    account.trainers[0].groups = dict.fromkeys(range(2000), Group("trained"))
    result = entry.RunResult(config=CONFIG, account=account, num_restarts={}, seconds=12.3, was_stopped=False)
    assert repr(result) == "<RunResult in 'runs/run': done, 2,000 samples, 12 s>"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [(["train.epochs=0"], "with --set"), ({"train.epochs": 0}, "with overrides"), ((), "with overrides")],
)
def test_the_error_names_where_overrides_came_from(tmp_path, overrides, expected):
    path = tmp_path / "run.toml"
    wrong = "" if overrides else "train.epochs = 0\n"
    path.write_text(wrong + 'model.path = "m"\nprompts.path = "p.jsonl"\n')
    with pytest.raises(ConfigError, match=rf"1 setting is wrong in .*run\.toml {expected}:\n  train.epochs"):
        entry.choose_settings(path, overrides=overrides, reward=max)


@pytest.mark.parametrize("sync", [False, True])
def test_a_table_given_as_a_string_replaces_the_table(tmp_path, sync):
    path = tmp_path / "run.toml"
    path.write_text(dump_config(CONFIG).replace("[rollout.generate]\n", "[rollout.generate]\nmin_p = 0.0\n"))
    assert entry.choose_settings(path).rollout.generate == {"min_p": 0.0}
    overrides = ['rollout.generate={ stop_strings = ["."] }']
    settings = entry.choose_settings(path, overrides=overrides, sync=sync, reward=max)
    assert settings.rollout.generate == {"stop_strings": ["."]}
    assert settings.reward.function == "builtins:max"
    assert settings.topology.max_staleness == (0 if sync else 1)


@pytest.mark.parametrize("form", ["settings", "dict", "file"])
@pytest.mark.parametrize("has_own", [False, True])
def test_sets_without_a_reward_of_their_own_get_the_reward_that_replaces_the_runs(tmp_path, form, has_own):
    own = {"reward": {"model": "judge"}} if has_own else {}
    sets = [{"name": "held-out", "prompts": {"path": "q.jsonl"}, **own}]
    before = build_config(CONFIG.model_dump() | {"eval": sets})
    (tmp_path / "config.toml").write_text(dump_config(before))
    given = {"settings": before, "dict": before.model_dump(), "file": tmp_path / "config.toml"}[form]
    for options in ({"reward": max}, {"overrides": ["reward.function=builtins:max", "reward.model="]}):
        after = entry.choose_settings(given, **options)
        assert after.reward.function == "builtins:max"
        assert after.eval[0].reward == (before.eval[0].reward if has_own else after.reward)


def test_settings_and_a_run_to_resume_exclude_each_other(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["coati", "train", "long.toml", "--resume", str(tmp_path)])
    with pytest.raises(SystemExit):
        main()
    expected = "--resume takes its settings from the run. Remove long.toml; change settings with --set."
    assert expected in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"Remove config; change settings with overrides\."):
        entry.choose_settings("long.toml", resume=tmp_path)
    with pytest.raises(ConfigError, match="Got neither"):
        entry.choose_settings(None)
    with pytest.raises(ConfigError, match="prompts from the run"):
        entry.choose_settings(None, resume=tmp_path, has_prompts=True)


@pytest.mark.parametrize("overrides", [["train.epochs=2"], {"train": {"epochs": 2}}, ()])
def test_several_reward_functions_are_terms_of_a_sum(overrides):
    before = build_config(CONFIG.model_dump(), {"reward.function": "", "reward.model": "r"})
    settings = entry.choose_settings(before, overrides=overrides, reward=[max, min], has_prompts=True)
    assert [(term.function, term.label, term.weight) for term in settings.reward.terms] == [
        ("builtins:max", "max", 1.0),
        ("builtins:min", "min", 1.0),
    ]
    assert (settings.reward.function, settings.reward.model) == ("", "")
    assert settings.train.epochs == (2 if overrides else CONFIG.train.epochs)
    with pytest.raises(ConfigError, match=r"different names.* with def"):
        entry.choose_settings(before, reward=[max, max])
    with pytest.raises(ConfigError, match=r"exactly one of function, model and terms.* pass reward= in Python"):
        entry.choose_settings(before, reward=[])


def test_the_summary_of_a_run_ends_with_its_held_out_scores(tmp_path, capsys):
    config = build_config(CONFIG.model_dump(), {"run.output": str(tmp_path)})
    evaluations = [{"name": "held-out", "version": version, "avg@8": version / 10} for version in (0, 2, 4, 9)]
    (tmp_path / "evaluations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in evaluations))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "version": 0, "reward/mean": 0.382}\n')
    (tmp_path / "model").mkdir()
    (tmp_path / "model/coati.json").write_text('{"version": 9}')
    account = RunAccount([TrainerAccount(LedgerRules(samples_per_version=2, total_samples=6))], [])
    result = entry.RunResult(config=config, account=account, num_restarts={}, seconds=12.3, was_stopped=False)
    _show_result(Console(width=80), result)
    lines = capsys.readouterr().out.splitlines()
    assert "held-out avg@8: 0.000 → 0.900 (before → after training)" in lines
    assert "Mean reward 0.382 → 0.382." in lines, "on a line of its own, so that it does not wrap"


def test_the_summary_warns_of_the_bias_by_quarantined_groups(capsys):
    account = RunAccount([TrainerAccount(LedgerRules(samples_per_version=8, total_samples=456, group_size=8))], [])
    failed = {number: Group("quarantined", reason=f"{ValueError if number < 5 else KeyError}") for number in range(25)}
    account.trainers[0].groups = failed | {number: Group("trained") for number in range(25, 57)}
    show_losses(Console(width=80), account)
    lines = capsys.readouterr().out.splitlines()
    warning = (
        "25 of 57 groups (43.9%) were quarantined because the reward failed; training is biased towards the others."
    )
    assert lines[0] == warning
    assert lines[1].startswith("Quarantined: 20 groups of 8 samples: <class 'KeyError'>")
    account.trainers[0].groups = {0: Group("trained")}
    show_losses(Console(width=80), account)
    assert not capsys.readouterr().out


class Judge:
    def __call__(self, completions):
        return [0.0] * len(completions)


@pytest.mark.parametrize(
    ("reward", "name"), [(functools.partial(max, 3), "__main__:_given_max"), (Judge(), "__main__:_given_Judge")]
)
def test_a_reward_without_an_importable_name_gets_a_placeholder(reward, name):
    settings = entry.choose_settings(CONFIG, reward=reward)
    assert settings.reward.function == name
    with pytest.raises(ConfigError, match="by a program"):
        load_reward_function(name)


@pytest.fixture
def run(monkeypatch):
    """Returns a function that runs `execute` with `training(on_begin, should_stop)` in place of a run."""

    def run(training):
        def fake(config, *, on_begin, should_stop, on_progress, **_):
            on_progress(RunSnapshot(step=3, total_steps=9, version=3, seconds_per_step=2.5))
            return training(on_begin, should_stop)

        monkeypatch.setattr(entry, "execute", fake)
        return execute(CONFIG, Console(), sync=True, address=None, verbose=True)

    return run


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_startup_ends_the_run_at_once(run, number):
    def load(on_begin, should_stop):
        signal.raise_signal(number)
        pytest.fail("the signal was ignored")

    before = signal.getsignal(number)
    with pytest.raises(RunStopped, match="before training began"):
        run(load)
    assert signal.getsignal(number) is before


def test_the_first_signal_asks_a_run_that_trains_to_stop_and_the_second_ends_it(run, capsys):
    def train(on_begin, should_stop):
        on_begin()
        assert not should_stop()
        signal.raise_signal(signal.SIGINT)
        assert should_stop()
        return "saved"

    def hang(on_begin, should_stop):
        train(on_begin, should_stop)
        signal.raise_signal(signal.SIGINT)

    assert run(train) == "saved"
    assert "2.5 s" in capsys.readouterr().out
    with pytest.raises(KeyboardInterrupt):
        run(hang)
