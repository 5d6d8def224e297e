"""The output folder of a run: foreign files are not touched, and an earlier run stays until a new one trains."""

import contextlib
import os
import socket
import sys
from pathlib import Path

import pytest

from coati.cli.main import main
from coati.config import build_config, load_config
from coati.errors import ConfigError, DataError, RewardError, RunStopped
from coati.prompts.table import load_prompts
from coati.run_folder import (
    MARKER,
    RUN_FILES,
    ask_for_makers,
    asked_makers,
    check_inputs_outside,
    check_run_folder,
    open_run_folder,
    resumed_settings,
    save_makers,
    save_prompts,
)


def make_config(tmp_path, **sections):
    fields = {
        "run": {"output": str(tmp_path / "out")},
        "model": {"path": "m"},
        "prompts": {"path": "p.jsonl"},
        "reward": {"model": "r"},
    }
    return build_config({**fields, **sections})


@pytest.fixture
def config(tmp_path):
    """The settings of a run whose folder holds an earlier run."""
    config = make_config(tmp_path)
    with open_run_folder(config, overwrite=False) as begin:
        begin()
        (tmp_path / "out" / "model").mkdir()
        (tmp_path / "out" / "model" / "weights").write_text("earlier")
    return config


def names(tmp_path):
    return {path.name for path in (tmp_path / "out").iterdir()}


EARLIER_RUN = {MARKER, "config.toml", "model"}


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("foreign", ["config.toml", "samples.jsonl"])
def test_a_foreign_folder_is_not_touched(tmp_path, foreign, overwrite):
    """A Hugo site and a cargo home have a config.toml too."""
    out = tmp_path / "out"
    out.mkdir()
    (out / foreign).write_text("baseURL = 'mine'")
    config = make_config(tmp_path)
    with pytest.raises(ConfigError, match="not a coati run"):
        check_run_folder(config, overwrite=overwrite)
    with pytest.raises(ConfigError, match=MARKER), open_run_folder(config, overwrite=overwrite):
        pass
    assert names(tmp_path) == {foreign}
    assert (out / foreign).read_text() == "baseURL = 'mine'"


def test_without_overwrite_only_a_run_without_results_is_replaced(config, tmp_path):
    with pytest.raises(ConfigError, match="--overwrite"):
        check_run_folder(config, overwrite=False)
    with pytest.raises(ConfigError, match="--overwrite"), open_run_folder(config, overwrite=False):
        pass
    assert names(tmp_path) == EARLIER_RUN
    config = make_config(tmp_path, run={"output": str(tmp_path / "second")})
    for _ in range(2):  # neither has results
        with open_run_folder(config, overwrite=False) as begin:
            begin()
            assert not (tmp_path / "second" / "metrics.jsonl").exists()
            (tmp_path / "second" / "metrics.jsonl").write_text("")


def test_an_earlier_run_stays_until_the_new_one_trains(config, tmp_path):
    with open_run_folder(config, overwrite=True) as begin:
        assert names(tmp_path) == EARLIER_RUN
        assert (tmp_path / "out" / "model" / "weights").read_text() == "earlier"
        begin()
        assert names(tmp_path) == {MARKER, "config.toml"}


def test_a_failed_run_writes_its_error_to_its_own_folder_only(config, tmp_path, monkeypatch):
    monkeypatch.setenv("JUDGE_API_KEY", "swordfish-123")
    out = tmp_path / "out"

    def fail(*, begins, error, **options):
        error.add_note("The model after step 3 was saved")
        with contextlib.suppress(type(error)), open_run_folder(config, **{"overwrite": True, **options}) as begin:
            if begins:
                begin()
            raise error

    fail(begins=False, error=ConfigError("no such model"))
    assert not (out / "error.txt").exists(), "the folder still holds the earlier run"
    fail(begins=True, error=RunStopped("stopped"))
    assert not (out / "error.txt").exists()
    fail(begins=True, error=RewardError("401 for swordfish-123"))
    assert (out / "error.txt").read_text() == "401 for <JUDGE_API_KEY>\n  The model after step 3 was saved"
    with open_run_folder(config, overwrite=False, is_resumed=True) as begin:
        assert (out / "error.txt").exists(), "the error stays until training begins"
        begin()
        assert not (out / "error.txt").exists()
    fail(begins=False, error=ValueError("unexpected"), is_resumed=True)
    assert (out / "error.txt").read_text().startswith("ValueError: unexpected\n")


@pytest.mark.parametrize("error", [RewardError("no score"), RunStopped("stopped"), ValueError("unexpected")])
def test_the_error_of_a_run_with_a_checkpoint_names_the_command_that_continues_it(config, tmp_path, error):
    out = tmp_path / "out"

    def notes_of_failure(*parts, begins=True, is_resumed=False):
        folder = open_run_folder(config, parts, overwrite=True, is_resumed=is_resumed)
        with contextlib.suppress(type(error)), folder as begin:
            if begins:
                begin()
            raise error
        return getattr(error, "__notes__", [])

    (out / "checkpoints" / "version-3").mkdir(parents=True)
    assert notes_of_failure(begins=False) == [], "the checkpoint is the earlier run's"
    assert notes_of_failure() == [], "there is no checkpoint yet"
    (out / "checkpoints" / ".version-4").mkdir(parents=True)
    (out / "checkpoints" / "version-4.damaged").mkdir()
    assert notes_of_failure(is_resumed=True) == []
    (out / "checkpoints" / "version-4").mkdir()
    (note,) = notes_of_failure(is_resumed=True)
    assert note.endswith(f"coati train --resume {out}")
    del error.__notes__[:]
    (note,) = notes_of_failure("reward", "maker", is_resumed=True)
    assert note.endswith(f"coati.train(resume={str(out)!r}, reward=..., maker=...)")
    assert (out / "error.txt").exists() != isinstance(error, RunStopped)
    if (out / "error.txt").exists():
        assert note in (out / "error.txt").read_text()


def test_overwrite_deletes_what_runs_write_and_nothing_else(config, tmp_path):
    out = tmp_path / "out"
    (out / "notes.md").write_text("mine")
    (out / "plots").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "version-1").write_text("mine")
    (out / "checkpoints").symlink_to(tmp_path / "elsewhere")
    for name in set(RUN_FILES) - {"checkpoints", "model", "tensorboard"}:
        (out / name).write_text("earlier")
    (out / "tensorboard").mkdir()
    with open_run_folder(config, overwrite=True) as begin:
        begin()
    assert names(tmp_path) == {MARKER, "config.toml", "notes.md", "plots"}
    assert (tmp_path / "elsewhere" / "version-1").exists()


def test_saved_settings_have_absolute_paths_of_files_written_after_opening(tmp_path, monkeypatch):
    """The demo writes its model and prompts into the run folder; a copy of config.toml must work anywhere."""
    monkeypatch.chdir(tmp_path)
    fields = {"run": {"output": "out"}, "model": {"path": "out/base"}, "prompts": {"path": "out/prompts.jsonl"}}
    with open_run_folder(make_config(tmp_path, **fields), overwrite=True) as begin:
        (tmp_path / "out" / "base").mkdir()
        (tmp_path / "out" / "prompts.jsonl").touch()
        begin()
    saved = load_config(tmp_path / "out" / "config.toml")
    assert (saved.model.path, saved.prompts.path) == (str(tmp_path / "out/base"), str(tmp_path / "out/prompts.jsonl"))


def test_a_kill_during_a_resume_keeps_the_settings(config, tmp_path, monkeypatch):
    path = tmp_path / "out" / "config.toml"
    (tmp_path / "out" / "ledger").mkdir()
    before, other = path.read_text(), make_config(tmp_path, train={"total_steps": 7})

    def resume(config):
        with open_run_folder(config, overwrite=False, is_resumed=True) as begin:
            begin()

    def killed(file, text, **_):
        file.open("w").close()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", killed)
        with pytest.raises(KeyboardInterrupt):
            resume(other)
        assert path.read_text() == before
        resume(config)  # unchanged settings are not written
    resume(other)
    assert load_config(path).train.total_steps == 7
    assert {earlier.read_text() for earlier in (tmp_path / "out" / "ledger").glob("config-*.toml")} == {before}


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_in_use_is_refused_before_anything_moves(config, tmp_path, overwrite):
    with open_run_folder(config, overwrite=True):
        before = names(tmp_path)
        who = f"pid {os.getpid()} on {socket.gethostname()}"
        for use in (check_run_folder, open_run_folder):
            with pytest.raises(ConfigError, match=who):
                use(config, overwrite=overwrite).__enter__()
        assert names(tmp_path) == before
    check_run_folder(config, overwrite=True)


def test_a_folder_behind_a_link_is_replaced_and_the_link_stays(tmp_path):
    (tmp_path / "disk" / "run").mkdir(parents=True)
    (tmp_path / "out").symlink_to(tmp_path / "disk" / "run")
    config = make_config(tmp_path)
    for _ in range(2):
        with open_run_folder(config, overwrite=True):
            pass
    assert (tmp_path / "out").is_symlink()
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["run"]


@pytest.mark.parametrize("key", ["model.path", "model.reference", "prompts.path", "reward.model"])
def test_inputs_in_the_output_folder_are_rejected(config, tmp_path, key):
    section, name = key.split(".")
    fields = {"model": {"path": "m"}, "prompts": {"path": "p.jsonl"}, "reward": {"model": "r"}}
    fields[section][name] = str(tmp_path / "out" / "model")
    with pytest.raises(ConfigError, match=key):
        check_inputs_outside(make_config(tmp_path, **fields))
    check_inputs_outside(config)


# Scaling a running job


@pytest.fixture
def running(tmp_path):
    """The folder of a running job."""
    with open_run_folder(make_config(tmp_path), overwrite=False):
        yield tmp_path / "out"


def put_request(folder, text='{"makers": 2}'):
    (folder / "control.json").write_text(text, errors="surrogatepass")


def test_a_scale_request_is_returned_once(running, monkeypatch, capsys):
    for makers in (3, 3):  # a repeated request counts again
        monkeypatch.setattr(sys, "argv", ["coati", "scale", str(running), "--makers", str(makers)])
        with pytest.raises(SystemExit) as stopped:
            main()
        assert not stopped.value.code
        assert "3 makers" in capsys.readouterr().out
        assert (asked_makers(running), asked_makers(running)) == (makers, None)


def test_scale_without_a_number_shows_the_target(config, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["coati", "scale", str(config.output_folder)])
    for expected in ("1 maker", "5 makers"):
        with pytest.raises(SystemExit):
            main()
        assert expected in capsys.readouterr().out
        save_makers(config, 5)
    assert resumed_settings(config.output_folder, ()).topology.makers == 5


def test_scale_without_a_number_while_the_run_starts(running, tmp_path, monkeypatch, capsys):
    for folder, expected in (
        (running, "is still starting"),
        (tmp_path / "nowhere", "must be the output folder of a run"),
    ):
        monkeypatch.setattr(sys, "argv", ["coati", "scale", str(folder)])
        with pytest.raises(SystemExit) as stopped:
            main()
        assert stopped.value.code == 2
        assert expected in capsys.readouterr().err


@pytest.mark.parametrize(
    "text",
    [
        *("{", "[]", "{}", "", "null", '{"makers": "many"}', '{"makers": 1e309}', '{"makers": NaN}', '{"makers": 2.5}'),
        *('{"makers": true}', '{"makers": 0}', '{"makers": 65}', '{"makers": ' + "9" * 3900 + "}", "\ud800"),
    ],
)
def test_an_invalid_request_is_refused_once_and_the_next_one_accepted(running, caplog, text):
    put_request(running, text)
    assert asked_makers(running) is None
    assert asked_makers(running) is None
    (warning,) = caplog.messages
    assert "refused" in warning
    put_request(running)
    assert asked_makers(running) == 2


def test_only_a_regular_file_of_the_same_user_is_accepted(running, caplog, monkeypatch):
    put_request(running)
    mine = os.getuid()
    with monkeypatch.context() as patch:
        patch.setattr(os, "getuid", lambda: mine + 1)
        assert asked_makers(running) is None
    os.mkfifo(running / "control.json")  # opening it would block forever
    assert asked_makers(running) is None
    put_request(running)
    (running / "control.json").rename(running / "elsewhere.json")
    (running / "control.json").symlink_to(running / "elsewhere.json")
    assert asked_makers(running) is None
    assert ["owned by the user" in message for message in caplog.messages] == [True] * 3


def test_scale_needs_a_running_job(config, tmp_path, monkeypatch, capsys):
    for folder in (tmp_path, tmp_path / "nowhere", config.output_folder):  # the last one is of a finished run
        with pytest.raises(ConfigError, match="none is alive"):
            ask_for_makers(folder, 2)
        assert not (folder / "control.json").exists()
    for makers, expected in (("2", "none is alive"), ("0", "--makers"), ("65", "--makers")):
        monkeypatch.setattr(sys, "argv", ["coati", "scale", str(tmp_path), "--makers", makers])
        monkeypatch.setenv("COLUMNS", "300")
        with pytest.raises(SystemExit) as stopped:
            main()
        assert stopped.value.code == 2
        assert expected in capsys.readouterr().err


def test_a_synchronous_run_cannot_be_scaled(config):
    with open_run_folder(config, overwrite=True, is_sync=True), pytest.raises(ConfigError, match="--sync"):
        ask_for_makers(config.output_folder, 2)
    assert not (config.output_folder / "control.json").exists()


class Rows:
    """Has its rows as a `datasets.Dataset` has them."""

    def __init__(self, rows):
        self._rows = rows

    def to_list(self):
        return self._rows


def test_prompts_from_memory_are_saved_beside_the_run(tmp_path, monkeypatch):
    chat = [{"role": "user", "content": "häé?"}]
    cases = (["a", "b"], ("a",), [{"prompt": "a", "answer": 3}, {"prompt": chat}], [chat], Rows([{"prompt": "a"}]))
    paths = []
    for prompts in cases:
        saved = save_prompts(prompts, make_config(tmp_path))
        path = Path(saved.prompts.path)
        assert path.parent == tmp_path
        rows = prompts._rows if isinstance(prompts, Rows) else prompts
        expected = [row if isinstance(row, dict) else {"prompt": row} for row in rows]
        assert load_prompts(path).rows == expected
        assert save_prompts(prompts, make_config(tmp_path)) == saved, "a run that is repeated finds the same file"
        paths.append(path)
    assert paths[1] == paths[4], "the file is named by what it holds"
    assert len(set(paths)) == len(cases) - 1
    assert sorted(set(paths)) == sorted(tmp_path.iterdir())
    monkeypatch.chdir(tmp_path)
    here = save_prompts(["a"], make_config(tmp_path, run={"output": "."})).prompts.path
    assert Path(here).parent == tmp_path.parent
    own = save_prompts(["a"], make_config(tmp_path, prompts={"path": "p.jsonl", "column": "text"}))
    assert load_prompts(own.prompts.path, column="text").rows == [{"text": "a"}]


@pytest.mark.parametrize(
    ("prompts", "problem"),
    [
        ("prompts.jsonl", "a list of texts or rows .*, got str"),
        ({"prompt": "a"}, "a list of texts or rows .*, got dict"),
        (iter(["a"]), "a list of texts or rows .*, got list_iterator"),
        (b"abc", "a list of texts or rows .*, got bytes"),
        ([], r"not empty, got \[\]"),
        (["a", {"prompt": "b", "when": {1}}], "must be texts or dicts of JSON values: .* set "),
    ],
)
def test_prompts_that_cannot_be_saved_are_an_error(tmp_path, prompts, problem):
    with pytest.raises(DataError, match=problem):
        save_prompts(prompts, make_config(tmp_path))
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"run\.output .* cannot be written"):
        save_prompts(["a"], make_config(tmp_path, run={"output": str(tmp_path / "file" / "out")}))
