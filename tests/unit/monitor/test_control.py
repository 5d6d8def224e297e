"""A run and somebody who asks it for makers, through two files."""

import dataclasses
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
    control.say(status="running")
    return control


def test_a_request_is_seen_once_worked_on_and_answered(running, tmp_path):
    seen, told = [], []

    def turn():
        request = running.new_request()
        if request is not None:
            seen.append(request.makers)
            running.begin(request)
            running.say(message="waiting for maker-1")
        elif seen:
            running.say(answer="done", makers=3, message="")

    state = ask(tmp_path, 3, turn, on_progress=told.append)
    assert (state.makers, seen, told) == (
        3,
        [3],
        ["the run has 1 maker; waiting for it to begin", "waiting for maker-1"],
    )
    assert running.new_request() is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["control.json", "state.json"]


def test_what_was_asked_of_an_earlier_run_or_is_no_request_is_not_followed(tmp_path):
    (tmp_path / "control.json").write_text('{"request_id": "old", "makers": 9}')
    control = RunControl(tmp_path, makers=1)
    assert control.new_request() is None
    for text in ("{", "[]", '{"makers": "many", "request_id": 1}', "{}"):
        (tmp_path / "control.json").write_text(text)
        assert control.new_request() is None
    (tmp_path / "control.json").write_text('{"request_id": "new", "makers": 2}')
    assert control.new_request() == MakersRequest("new", 2)


def test_a_refusal_says_why_once(running, tmp_path):
    told = []

    def turn():
        if request := running.new_request():
            running.begin(request)
            running.say(answer="refused", message="no room")

    with pytest.raises(ScalingRefused, match="no room"):
        ask(tmp_path, 3, turn, on_progress=told.append)
    assert told == ["the run has 1 maker; waiting for it to begin"]


def put_request(folder, request_id, makers):
    (folder / "control.json").write_text(json.dumps({"request_id": request_id, "makers": makers}))


def test_a_request_that_is_replaced_before_it_is_begun_ends_at_once(running, tmp_path):
    running.begin(MakersRequest("first", 3))
    running.say(message="waiting for maker-1")
    turns, told = [], []

    def turn():
        turns.append(None)
        put_request(tmp_path, "third", 2)

    says = r"a later request, for 2 makers, took the place of this one, for 1 maker, .* not tried any more"
    with pytest.raises(ScalingRefused, match=says):
        ask(tmp_path, 1, turn, deadline_seconds=600, on_progress=told.append)
    assert len(turns) == 2
    assert told == [
        "the run has 1 maker and is changing to 3 as was asked before (waiting for maker-1); waiting for that to end"
    ]


@pytest.mark.parametrize(("answer", "message"), [("done", ""), ("refused", "no room")])
def test_a_request_that_is_worked_on_gets_its_answer_though_a_later_one_is_there(running, tmp_path, answer, message):
    # The run has read ours just before it was replaced, and says so a turn later; it ends with ours and begins the
    # later one between two looks at its state.
    turns = []

    def turn():
        turns.append(running.new_request())
        if len(turns) == 1:
            put_request(tmp_path, "later", 2)
        elif len(turns) == 2:
            running.begin(turns[0])
        elif len(turns) == 3:
            running.say(answer=answer, message=message, makers=3)
            running.begin(MakersRequest("later", 2))

    if answer == "done":
        assert ask(tmp_path, 3, turn).makers == 3
    else:
        with pytest.raises(ScalingRefused, match=r"^no room$"):
            ask(tmp_path, 3, turn)
    assert len(turns) == 3


@pytest.mark.parametrize("makers", [0, -1, 65])
def test_numbers_that_no_run_can_have_are_refused_at_once(running, tmp_path, makers):
    with pytest.raises(ConfigError, match=f"--makers must be a whole number from 1 to 64, got {makers}"):
        ask(tmp_path, makers, lambda: None)
    assert running.new_request() is None


def test_a_folder_without_a_run_that_lives(tmp_path):
    with pytest.raises(ConfigError, match=r"RUN_FOLDER must be .* which has no state.json.* still starting, try again"):
        ask(tmp_path, 2, lambda: None)
    with pytest.raises(ConfigError, match=r"RUN_FOLDER must be .*nowhere', which does not exist"):
        ask(tmp_path / "nowhere", 2, lambda: None)
    control = RunControl(tmp_path, makers=1)
    with pytest.raises(ConfigError, match="has ended: all is trained"):
        ask(tmp_path, 2, lambda: control.say(status="ended", message="all is trained"))
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(timeout=60)
    control.say(status="running", pid=ended.pid)
    with pytest.raises(ConfigError, match=f"its process {ended.pid} is gone"):
        ask(tmp_path, 2, lambda: None)
    (tmp_path / "state.json").write_text('{"status": "running"}')
    with pytest.raises(ConfigError, match=r"cannot be read: .*missing"):
        ask(tmp_path, 2, lambda: None)


def test_a_run_elsewhere_that_has_gone_silent_is_taken_for_dead(running, tmp_path):
    running.say(host="elsewhere", pid=1)
    with pytest.raises(ConfigError, match=r"process 1 on elsewhere\) has said nothing for 60 s"):
        ask(tmp_path, 2, lambda: None, deadline_seconds=600)
    with pytest.raises(DeadlineExceeded, match=r"waited 600 s .* to have 1 maker; it has 1: busy. It has not begun"):
        ask(tmp_path, 1, lambda: running.say(message="busy"), deadline_seconds=600)


def test_a_request_that_takes_too_long_goes_on(running, tmp_path):
    def turn():
        if request := running.new_request():
            running.begin(request)
        running.say(message="loading")

    with pytest.raises(DeadlineExceeded, match=r"waited 600 s .* to have 2 makers; it has 1: loading. It goes on"):
        ask(tmp_path, 2, turn, deadline_seconds=600)


def test_a_slow_run_here_is_waited_for_until_the_deadline(running, tmp_path):
    with pytest.raises(DeadlineExceeded, match="waited 90 s"):
        ask(tmp_path, 2, lambda: None, deadline_seconds=90)
    state = json.loads((tmp_path / "state.json").read_text())
    assert (state["pid"], state["host"]) == (os.getpid(), socket.gethostname())


def test_a_disk_that_fails_does_not_end_the_run(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    control = RunControl(tmp_path / "file" / "folder", makers=1)
    control.say(makers=2)
    assert [record.message for record in caplog.records if "coati scale will not work" in record.message]
    assert len(caplog.records) == 1


def test_the_command_says_what_is_wrong_in_one_line(tmp_path, monkeypatch, capsys):
    for arguments, expected in (
        ([str(tmp_path), "--makers", "2"], "has no state.json"),
        ([str(tmp_path), "--makers", "0"], "--makers must be a whole number from 1 to 64, got 0"),
    ):
        monkeypatch.setattr(sys, "argv", ["coati", "scale", *arguments])
        with pytest.raises(SystemExit) as stopped:
            main()
        assert stopped.value.code == 2
        assert expected in capsys.readouterr().err


def test_the_command_says_how_many_there_are(running, tmp_path, monkeypatch, capsys):
    def answer(folder, makers, **_):
        return dataclasses.replace(running._state, makers=makers)

    monkeypatch.setattr("coati.cli.scale.ask_for_makers", answer)
    monkeypatch.setattr(sys, "argv", ["coati", "scale", str(tmp_path), "--makers", "1"])
    monkeypatch.setenv("COLUMNS", "300")
    with pytest.raises(SystemExit) as stopped:
        main()
    assert not stopped.value.code
    assert "has 1 maker." in capsys.readouterr().out
