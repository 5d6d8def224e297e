"""A run and somebody who asks it for makers, through two files."""

import json
import os
import subprocess
import sys

import pytest

from coati.cli.main import main
from coati.errors import ConfigError
from coati.monitor.control import RunControl, ask_for_makers


@pytest.fixture
def running(tmp_path):
    control = RunControl(tmp_path, makers=1)
    control.report(status="running")
    return control


def test_a_request_is_seen_once_and_the_state_is_told(running, tmp_path):
    assert ask_for_makers(tmp_path, 3).makers == 1
    assert (running.new_request(), running.new_request()) == (3, None)
    running.report(makers=3, message="waiting for maker-1")
    state = ask_for_makers(tmp_path, 3)  # the same again is a request of its own
    assert (state.status, state.makers, state.message) == ("running", 3, "waiting for maker-1")
    assert running.new_request() == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["state.json"]


def test_a_state_that_is_the_same_is_not_written_again(running, tmp_path):
    before = (tmp_path / "state.json").stat().st_ino
    running.report(status="running", makers=1)
    assert (tmp_path / "state.json").stat().st_ino == before
    running.report(makers=2)
    assert json.loads((tmp_path / "state.json").read_text())["makers"] == 2


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "{}",
        "",
        "null",
        '{"makers": "many"}',
        '{"makers": 1e309}',
        '{"makers": NaN}',
        '{"makers": 2.5}',
        '{"makers": true}',
        '{"makers": 0}',
        '{"makers": 99999999999999999999}',
        '{"makers": ' + "9" * 3900 + "}",
        "[" * 100_000,
        '{"a":' * 100_000,
        "\ud800",
    ],
)
def test_what_is_not_a_request_is_refused_once_and_the_next_one_is_followed(running, tmp_path, caplog, text):
    (tmp_path / "control.json").write_text(text, errors="surrogatepass")
    assert running.new_request() is None
    assert running.new_request() is None
    (warning,) = caplog.messages
    assert "refused" in warning
    assert len(warning) < 1000
    put_request(tmp_path, 2)
    assert running.new_request() == 2


def test_only_a_file_of_the_same_user_is_obeyed(running, tmp_path, caplog, monkeypatch):
    put_request(tmp_path, 2)
    mine = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: mine + 1)
    assert running.new_request() is None
    monkeypatch.undo()
    os.mkfifo(tmp_path / "control.json")  # opening it would wait for ever
    assert running.new_request() is None
    assert ["regular file of the user" in message for message in caplog.messages] == [True, True]
    put_request(tmp_path, 2)
    (tmp_path / "control.json").rename(tmp_path / "elsewhere.json")
    (tmp_path / "control.json").symlink_to(tmp_path / "elsewhere.json")
    assert running.new_request() is None


def put_request(folder, makers):
    (folder / "control.json").write_text(json.dumps({"makers": makers}))


@pytest.mark.parametrize("makers", [0, -1, 65])
def test_numbers_that_no_run_can_have_are_refused_at_once(running, tmp_path, makers):
    with pytest.raises(ConfigError, match=f"--makers must be a whole number from 1 to 64, got {makers}"):
        ask_for_makers(tmp_path, makers)
    assert running.new_request() is None


def test_a_folder_without_a_run_that_lives(tmp_path):
    with pytest.raises(ConfigError, match=r"RUN_FOLDER must be .* state.json cannot be read: .*No such file"):
        ask_for_makers(tmp_path, 2)
    with pytest.raises(ConfigError, match=r"RUN_FOLDER must be .*nowhere'"):
        ask_for_makers(tmp_path / "nowhere", 2)
    control = RunControl(tmp_path, makers=1)
    control.report(status="ended", message="completed")
    with pytest.raises(ConfigError, match="has ended: completed"):
        ask_for_makers(tmp_path, 2)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(timeout=60)
    control.report(status="running", pid=ended.pid)
    with pytest.raises(ConfigError, match=f"its process {ended.pid} is gone"):
        ask_for_makers(tmp_path, 2)
    control.report(host="elsewhere")  # where it cannot be seen
    assert ask_for_makers(tmp_path, 2).pid == ended.pid
    (tmp_path / "state.json").write_text('{"status": "running"}')
    with pytest.raises(ConfigError, match=r"(?s)cannot be read: .*required"):
        ask_for_makers(tmp_path, 2)


def test_a_disk_that_fails_does_not_end_the_run(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    control = RunControl(tmp_path / "file" / "folder", makers=1)
    control.report(makers=2)
    assert [record.message for record in caplog.records if "coati scale will not work" in record.message]
    assert len(caplog.records) == 1


def test_the_command_says_what_is_wrong_in_one_line(tmp_path, monkeypatch, capsys):
    for arguments, expected in (
        ([str(tmp_path), "--makers", "2"], "state.json cannot be read"),
        ([str(tmp_path), "--makers", "0"], "--makers must be a whole number from 1 to 64, got 0"),
    ):
        monkeypatch.setattr(sys, "argv", ["coati", "scale", *arguments])
        with pytest.raises(SystemExit) as stopped:
            main()
        assert stopped.value.code == 2
        assert expected in capsys.readouterr().err


def test_the_command_says_how_many_there_are(running, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["coati", "scale", str(tmp_path), "--makers", "3"])
    monkeypatch.setenv("COLUMNS", "300")
    with pytest.raises(SystemExit) as stopped:
        main()
    assert not stopped.value.code
    assert "has 1 maker, for 3." in capsys.readouterr().out
    assert running.new_request() == 3
