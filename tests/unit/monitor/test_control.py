"""A run and somebody who asks it for makers, through two files."""

import json
import os
import socket
import subprocess
import sys

import pytest

from coati.cli.main import main
from coati.errors import ConfigError, DeadlineExceeded, ScalingRefused
from coati.monitor.control import MakersRequest, RunControl, ask_for_makers


class Clock:
    """Time that passes only while somebody sleeps; then the run takes its turn."""

    def __init__(self, turn):
        self.now, self._turn = 0.0, turn

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now += 5.0  # a sleeper that oversleeps: a minute is twelve turns
        self._turn()


def ask(folder, makers, turn, *, deadline_seconds=60.0, **kwargs):
    clock = Clock(turn)
    return ask_for_makers(folder, makers, deadline_seconds=deadline_seconds, clock=clock, sleep=clock.sleep, **kwargs)


@pytest.fixture
def running(tmp_path):
    control = RunControl(tmp_path, makers=1)
    control.report(status="running")
    return control


def test_a_request_is_seen_once_worked_on_and_answered(running, tmp_path):
    seen, told = [], []

    def turn():
        request = running.new_request()
        if request is not None:
            seen.append(request.makers)
            running.report(message="waiting for maker-1")
        elif seen:
            running.report(answer="done", makers=3, message="")

    state = ask(tmp_path, 3, turn, on_progress=told.append)
    assert (state.makers, seen, told) == (
        3,
        [3],
        ["the run has 1 maker and is running; waiting for it to begin", "waiting for maker-1"],
    )
    assert running.new_request() is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["control.json", "state.json"]


def test_a_request_to_an_earlier_run_is_not_followed(tmp_path):
    (tmp_path / "control.json").write_text('{"request_id": "old", "makers": 9}')
    assert RunControl(tmp_path, makers=1).new_request() is None


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "{}",
        "",
        "null",
        '{"makers": "many", "request_id": 1}',
        '{"request_id": "a", "makers": 1e309}',
        '{"request_id": "a", "makers": NaN}',
        '{"request_id": "a", "makers": 2.5}',
        '{"request_id": "a", "makers": true}',
        '{"request_id": "a", "makers": 0}',
        '{"request_id": "a", "makers": 99999999999999999999}',
        '{"request_id": "a", "makers": ' + "9" * 3900 + "}",
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
    put_request(tmp_path, "new", 2)
    assert running.new_request() == MakersRequest(request_id="new", makers=2)


def test_only_a_file_of_the_same_user_is_obeyed(running, tmp_path, caplog, monkeypatch):
    put_request(tmp_path, "theirs", 2)
    mine = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: mine + 1)
    assert running.new_request() is None
    monkeypatch.undo()
    (tmp_path / "control.json").unlink()
    os.mkfifo(tmp_path / "control.json")  # opening it would wait for ever
    assert running.new_request() is None
    assert ["regular file of the user" in message for message in caplog.messages] == [True, True]
    (tmp_path / "control.json").unlink()
    put_request(tmp_path, "linked", 2)
    (tmp_path / "control.json").rename(tmp_path / "elsewhere.json")
    (tmp_path / "control.json").symlink_to(tmp_path / "elsewhere.json")
    assert running.new_request() is None


def test_a_refusal_says_why_once(running, tmp_path):
    told = []

    def turn():
        if running.new_request():
            running.report(answer="refused", message="no room")

    with pytest.raises(ScalingRefused, match="no room"):
        ask(tmp_path, 3, turn, on_progress=told.append)
    assert len(told) == 1


def put_request(folder, request_id, makers):
    (folder / "control.json").write_text(json.dumps({"request_id": request_id, "makers": makers}))


def test_a_request_is_refused_while_the_run_works_on_another(running, tmp_path):
    put_request(tmp_path, "first", 3)
    assert running.new_request().makers == 3
    running.report(message="waiting for maker-1")
    with pytest.raises(ScalingRefused, match="waiting for maker-1"):
        ask(tmp_path, 1, lambda: None)
    assert running.new_request() is None
    running.report(answer="done", message="")

    def turn():
        if request := running.new_request():
            running.report(answer="done", makers=request.makers)

    assert ask(tmp_path, 1, turn).makers == 1


@pytest.mark.parametrize("makers", [0, -1, 65])
def test_numbers_that_no_run_can_have_are_refused_at_once(running, tmp_path, makers):
    with pytest.raises(ConfigError, match=f"--makers must be a whole number from 1 to 64, got {makers}"):
        ask(tmp_path, makers, lambda: None)
    assert running.new_request() is None


def test_a_folder_without_a_run_that_lives(tmp_path):
    with pytest.raises(ConfigError, match=r"RUN_FOLDER must be .* state.json cannot be read: .*No such file"):
        ask(tmp_path, 2, lambda: None)
    with pytest.raises(ConfigError, match=r"RUN_FOLDER must be .*nowhere'"):
        ask(tmp_path / "nowhere", 2, lambda: None)
    control = RunControl(tmp_path, makers=1)
    with pytest.raises(ConfigError, match="has ended: completed"):
        ask(tmp_path, 2, lambda: control.report(status="ended", message="completed"))
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(timeout=60)
    control.report(status="running", pid=ended.pid)
    with pytest.raises(ConfigError, match=f"its process {ended.pid} is gone"):
        ask(tmp_path, 2, lambda: None)
    (tmp_path / "state.json").write_text('{"status": "running"}')
    with pytest.raises(ConfigError, match=r"(?s)cannot be read: .*required"):
        ask(tmp_path, 2, lambda: None)


def test_a_run_elsewhere_that_does_not_answer_is_named_at_the_deadline(running, tmp_path):
    running.report(host="elsewhere", pid=1)
    with pytest.raises(DeadlineExceeded, match=r"process 1 on elsewhere.*it has 1: busy"):
        ask(tmp_path, 1, lambda: running.report(message="busy"), deadline_seconds=600)


def test_a_request_that_takes_too_long_ends_with_the_latest_message(running, tmp_path):
    def turn():
        running.new_request()
        running.report(message="loading")

    with pytest.raises(DeadlineExceeded, match=r"waited 600 s .*2 makers; it has 1: loading"):
        ask(tmp_path, 2, turn, deadline_seconds=600)


def test_a_slow_run_here_is_waited_for_until_the_deadline(running, tmp_path):
    with pytest.raises(DeadlineExceeded, match="waited 90 s"):
        ask(tmp_path, 2, lambda: None, deadline_seconds=90)
    state = json.loads((tmp_path / "state.json").read_text())
    assert (state["pid"], state["host"]) == (os.getpid(), socket.gethostname())


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
    def answer(folder, makers, **_):
        return running._state.model_copy(update={"makers": makers})

    monkeypatch.setattr("coati.monitor.control.ask_for_makers", answer)
    monkeypatch.setattr(sys, "argv", ["coati", "scale", str(tmp_path), "--makers", "1"])
    monkeypatch.setenv("COLUMNS", "300")
    with pytest.raises(SystemExit) as stopped:
        main()
    assert not stopped.value.code
    assert "has 1 maker." in capsys.readouterr().out
