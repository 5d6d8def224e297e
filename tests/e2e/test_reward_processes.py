"""Reward functions in child processes: faults stay inside the child, and no process is left behind."""

import os
import pickle
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch

from coati.background import run_in_background
from coati.config import RewardSettings
from coati.errors import ConfigError, RewardError, RewardFailed
from coati.rewards import RewardRequest, build_reward
from coati.rewards.process import RewardProcess

HERE = Path(__file__).parent
SECONDS = 120.0  # far more than any call here takes


def request_of(*completions, **columns):
    size = len(completions)
    ones = torch.ones(size, 4, dtype=torch.long)
    return RewardRequest(
        prompts=[f"prompt {index}" for index in range(size)],
        completions=list(completions),
        columns={name: [value] * size for name, value in columns.items()},
        sequences=ones,
        attention_mask=ones,
        action_mask=ones[:, 2:].bool(),
    )


@pytest.fixture(scope="module")
def isolated():
    made = {}

    def make(function="obey", **settings):
        key = function, str(settings)
        if key not in made:  # starting a process takes a second
            name = function if ":" in function else f"hostile_rewards:{function}"
            settings = {"timeout_seconds": SECONDS, "isolation": "process", "function": name, **settings}
            made[key] = build_reward(RewardSettings(**settings), load_model=None, search_paths=[HERE])
            made[key].name = "judge"
        made[key].timeout_seconds = SECONDS
        return made[key]

    yield make
    for reward in made.values():
        reward._process.kill()


def score(reward, request):
    import tiny  # not on the path in `test_all_processes_end_when_the_maker_is_killed`

    return tiny.ask(reward, request).values


def guard_of(reward):
    return reward._process._process.pid


def wait_until(is_true):
    deadline = time.monotonic() + SECONDS
    while not is_true():
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)


def is_gone(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_a_process_scores_like_a_thread_and_is_kept(isolated):
    reward = isolated()
    assert score(reward, request_of("a", "bb")).tolist() == [1.0, 2.0]
    guard = guard_of(reward)
    assert score(reward, request_of("a", "bb", "ccc")).tolist() == [1.0, 2.0, 3.0]
    assert guard_of(reward) == guard
    assert score(isolated("numpy_scores"), request_of("a", "b")).tolist() == [1.5, 2.5]
    assert score(isolated("waits"), request_of("a")).tolist() == [1.0]


def test_large_texts(isolated):
    assert score(isolated(), request_of("x" * 3_000_000, "y")).tolist() == [3e6, 1.0]


@pytest.mark.parametrize(
    ("action", "message"),
    [
        ("raise", "raised KeyError: 'no such word' (at "),
        ("exit", "ended its process with exit code 3"),
        ("sys.exit", "raised SystemExit: 3"),
        ("hang", "did not return within 0.2 s"),
        ("hang in C", "did not return within 0.2 s"),
        ("spin", "did not return within 0.2 s"),
        ("daemonize", "ended its process with exit code 7"),
        ("abort", "was killed by SIGABRT"),
        ("kill the guard", "SIGKILL"),
        ("scribble", "corrupted the pipe of its process"),
        ("answer ahead", "corrupted the pipe of its process"),
    ],
)
def test_what_a_function_does_is_said_by_name_and_the_next_batch_is_scored(isolated, action, message):
    reward = isolated()
    score(reward, request_of("a"))
    guard, reward.timeout_seconds = guard_of(reward), 0.2 if "0.2 s" in message else SECONDS
    with pytest.raises(RewardFailed, match=r"^Reward function 'judge' ") as caught:
        score(reward, request_of(action))
    assert message in str(caught.value)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    if "raised" not in message:
        assert is_gone(guard)
    reward.timeout_seconds = SECONDS
    assert score(reward, request_of("a", "bb")).tolist() == [1.0, 2.0]


@pytest.mark.parametrize("action", ["hang", "exit", "kill the guard", "abort"])
def test_nothing_that_it_started_is_left(isolated, tmp_path, action):
    reward = isolated("writes_pids")
    path = tmp_path / "pids"

    def end_it():  # like a deadline, but not before the processes run
        wait_until(lambda: path.exists() and path.read_text().count(" ") == 2)
        reward._process.kill()

    if action == "hang":
        run_in_background(end_it, name="deadline")
    with pytest.raises(RewardFailed):
        score(reward, request_of(action, path=str(path)))
    worker, away, near = map(int, path.read_text().split())
    wait_until(lambda: is_gone(worker))
    wait_until(lambda: is_gone(near))
    if action == "kill the guard":  # a process outside the group survives its guard: see docs/rewards.md
        os.kill(away, 9)
    wait_until(lambda: is_gone(away))


def test_a_forked_copy_of_the_worker_does_not_answer(isolated):
    reward = isolated()
    assert score(reward, request_of("fork")).tolist() == [4.0]
    assert score(reward, request_of("a", "bb")).tolist() == [1.0, 2.0]


def test_printed_text_is_not_an_answer(isolated):
    assert score(isolated(), request_of("print")).tolist() == [5.0]


def test_memory_is_limited(isolated):
    reward = isolated(memory_mib=512)
    with pytest.raises(RewardFailed, match=r"raised MemoryError|was killed by"):
        score(reward, request_of("exhaust"))
    assert score(reward, request_of("a")).tolist() == [1.0]


def test_only_named_environment_variables_are_passed(isolated, monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "s")
    monkeypatch.setenv("PASSED_ON", "p")
    assert score(isolated("environment", environment=["PASSED_ON"]), request_of("a", "b")).tolist() == [0.0, 1.0]


def can_leave_the_network():
    return any(
        subprocess.run(["unshare", *flags, "true"], capture_output=True).returncode == 0 for flags in (["-n"], ["-Un"])
    )


def test_the_network_is_closed_if_the_kernel_permits_it(isolated, caplog):
    server = socket.create_server(("127.0.0.1", 0))
    request = request_of(str(server.getsockname()[1]))
    is_closed = can_leave_the_network()
    assert score(isolated("connects"), request).tolist() == [0.0 if is_closed else 1.0]
    assert ("can use the network" in caplog.text) == (not is_closed)
    assert score(isolated("connects", network=True), request).tolist() == [1.0]
    server.close()


def test_invalid_scores_are_not_retried(isolated):
    reward = isolated("returns")
    assert score(reward, request_of("a", "b", value="nan")).isnan().all()
    for value, message in (("short", "returned 1 score for 2 completions"), ("text", "not a number")):
        with pytest.raises(RewardError, match=message) as caught:
            score(reward, request_of("a", "b", value=value))
        assert not isinstance(caught.value, RewardFailed)


def test_a_function_that_cannot_be_loaded_is_a_config_error(isolated):
    for name in ("hostile_rewards:nothing", "no_such_module:obey"):
        with pytest.raises(ConfigError, match=name.partition(":")[2]):
            isolated(name)
    settings = RewardSettings(function="x:y", isolation="process")
    with pytest.raises(ConfigError, match="can import"):
        RewardProcess(lambda completions: [], settings)


def test_a_function_passed_by_a_program():
    settings = RewardSettings(function="x:y", isolation="process")
    reward = build_reward(settings, load_model=None, given=textwrap.dedent)  # any importable function
    with pytest.raises(RewardError, match=r"the parameter 'text', but .* prompts, completions"):
        score(reward, request_of("a"))
    reward._process.kill()


@pytest.mark.long  # it imports torch
def test_all_processes_end_when_the_maker_is_killed(tmp_path):
    program = f"""
import os, sys
path = {str(tmp_path / "pids")!r}
sys.path.insert(0, {str(HERE)!r})
from {Path(__file__).stem} import *
settings = RewardSettings(function="hostile_rewards:writes_pids", isolation="process")
reward = build_reward(settings, load_model=None, search_paths=[HERE])
threading.Thread(target=reward.score, args=(request_of("hang", path=path),), daemon=True).start()
wait_until(lambda: os.path.exists(path) and open(path).read().count(" ") == 2)
print(guard_of(reward), flush=True)
os.kill(os.getpid(), 9)
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=SECONDS)
    assert found.returncode == -9, found.stderr
    for pid in (found.stdout, *(tmp_path / "pids").read_text().split()):
        wait_until(lambda pid=pid: is_gone(int(pid)))
