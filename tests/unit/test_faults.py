import ast
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from fault_schedule import POINTS, Fault, InjectedFault, Schedule

from coati import faults
from coati.background import run_in_background
from coati.faults import reach

SOURCE = Path(faults.__file__).parent


def passes(count, point="maker.generating", index=None):
    """Reach a point `count` times; return the numbers, from 1, of the passes that raised."""
    raised = []
    for number in range(1, count + 1):
        try:
            reach(point, index)
        except InjectedFault:
            raised.append(number)
    return raised


def test_points_do_nothing_without_a_schedule():
    assert faults.hook is None
    assert passes(3) == []


def test_a_fault_fires_once_at_its_pass_in_its_actor(tmp_path, monkeypatch):
    fault = Fault("maker.generating", "raise", actor="maker-1", nth=3)
    with Schedule(tmp_path, [fault]).enabled():
        monkeypatch.setattr(faults, "actor", "maker-0")
        assert passes(9) == []
        monkeypatch.setattr(faults, "actor", "maker-1")
        assert passes(9, "maker.before_deliver") == []
        assert passes(9) == [3]
    with Schedule(tmp_path).enabled():  # as in a restarted process
        monkeypatch.setattr(faults, "actor", "maker-1")
        assert passes(9) == []
    assert passes(9) == []


def test_faults_by_index_after_a_time_and_at_every_pass(tmp_path):
    with Schedule(tmp_path / "index", [Fault("weights.before_chunk", "raise", index=2, nth=2)]).enabled():
        assert passes(5, "weights.before_chunk", index=1) == []
        assert passes(5, "weights.before_chunk", index=2) == [2]
    with Schedule(tmp_path / "late", [Fault("maker.generating", "raise", after=3600.0)]).enabled():
        assert passes(5) == []
    waiting = Schedule(tmp_path / "waiting", [Fault("maker.generating", "raise")], begins=False)
    with waiting.enabled():
        faults.reach("maker.generating")
        waiting.begin()
        with pytest.raises(InjectedFault):
            faults.reach("maker.generating")
    with Schedule(tmp_path / "always", [Fault("maker.generating", "raise", nth=0)]).enabled():
        assert passes(3) == [1, 2, 3]


def test_a_process_with_the_variable_kills_itself_once(tmp_path):
    schedule = Schedule(tmp_path, [Fault("journal.before_write", "kill", nth=2)])
    code = "from coati.faults import reach\nfor _ in range(5): reach('journal.before_write')"
    command, environment = [sys.executable, "-c", code], {**os.environ, **schedule.environment}
    codes = [subprocess.run(command, env=environment, timeout=300).returncode for _ in range(2)]
    assert codes == [-signal.SIGKILL, 0]


def test_a_stopped_process_continues(tmp_path):
    schedule = Schedule(tmp_path, [Fault("maker.generating", "stop", seconds=0.05)])
    code = "from coati.faults import reach; reach('maker.generating')"
    environment = {**os.environ, **schedule.environment}
    process = subprocess.Popen([sys.executable, "-c", code], env=environment)
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    _, status = os.waitpid(process.pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    process.returncode = 0


def test_a_blocked_point_waits_until_released(tmp_path):
    schedule = Schedule(tmp_path, [Fault("trainer.after_step", "block")])
    with schedule.enabled():
        blocked = run_in_background(lambda: reach("trainer.after_step"), name="blocked")
        while not schedule.has_happened():
            os.sched_yield()
        assert not blocked.done()
        schedule.release()
        blocked.result(300)


def test_clock_and_sleep_faults(tmp_path, monkeypatch):
    slept, here, really_sleep = [], threading.get_ident(), time.sleep
    # Threads that earlier tests left, such as those of Ray, sleep too.
    fake_sleep = lambda seconds: (slept.append if threading.get_ident() == here else really_sleep)(seconds)  # noqa: E731
    monkeypatch.setattr(time, "sleep", fake_sleep)
    monkeypatch.setattr(time, "time", lambda: 5.0)
    clock, sleep = Fault("trainer.after_ack", "clock", seconds=-3600.0), Fault("trainer.after_ack", "sleep", seconds=7)
    with Schedule(tmp_path, [clock, sleep]).enabled():
        reach("trainer.after_ack")
    assert (time.time(), slept) == (-3595.0, [7])


def test_listed_points_match_the_code(tmp_path):
    files = (path.read_text() for path in SOURCE.rglob("*.py"))
    found = {name for text in files for name in re.findall(r'faults\.reach\("([\w.]+)"', text)}
    assert found == set(POINTS)
    with pytest.raises(ValueError, match="point"):
        Fault("maker.sleeping", "kill")
    with pytest.raises(ValueError, match="action"):
        Fault("maker.generating", "explode")


def test_only_records_read_the_wall_clock():
    reads = re.compile(r"\btime\.time\b|datetime\.(?:now|today|utcnow)|time\.(?:localtime|gmtime|ctime)\b")
    found = {path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py") if reads.search(path.read_text())}
    # Times of rows, the start of a timeline (continued with a monotonic clock), and what trackers have seen.
    assert found == {f"monitor/{name}.py" for name in ("run_log", "timeline", "follow", "trackers")}


def test_every_row_of_the_reliability_page_names_existing_tests():
    root = SOURCE.parents[1]
    rows = re.findall(r"^\| (\d+) \|(.*)", (root / "docs" / "reliability.md").read_text(), re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, 26))
    for number, row in rows:
        short, _, long = row.partition("long:")
        assert "::" in short, f"row {number} has no short test"
        for tests, should_be_long in ((short, False), (long, True)):
            for file, name in re.findall(r"`(tests/[\w/.]+)::(\w+)`", tests):
                (test,) = (
                    node for node in ast.parse((root / file).read_text()).body if getattr(node, "name", "") == name
                )
                is_long = any(ast.unparse(mark) == "pytest.mark.long" for mark in test.decorator_list)
                assert is_long is should_be_long, f"row {number}: {name}"
