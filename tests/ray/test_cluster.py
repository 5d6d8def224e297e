"""The commands of docs/cluster.md on several "machines", and a run on which one of them dies.

The page's command blocks that are named by a comment are run unchanged, each machine in its own network namespace, if
the system permits namespaces. The session's Ray is not used: every command is a process.
"""

import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

import pytest
from ray_testing import PATIENCE
from transformers import AutoModelForCausalLM, AutoTokenizer

from coati.ledger.audit import audit_run

PAGE = Path(__file__).resolve().parents[2] / "docs" / "cluster.md"
# The job server requires ray[default], which coati does not need; without it the run is started directly.
CAN_SUBMIT_JOBS = all(
    map(importlib.util.find_spec, ("aiohttp", "aiohttp_cors", "colorful", "opencensus", "smart_open"))
)
REWARDS = "def length(completions, **_):\n    return [float(len(text)) for text in completions]\n"


def block(name):
    """Return a named block of shell commands from the page."""
    found = re.search(rf"<!-- tested: {name} -->\n```sh\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    assert found, f"{PAGE.name} has no block {name!r}"
    return found[1]


def test_every_block_of_commands_is_tested():
    named = set(re.findall(r"<!-- tested: (\S+) -->", PAGE.read_text()))
    assert named == {"token", "every-machine", "head", "other", "status", "train", "job", "health"}
    assert PAGE.read_text().count("```sh") == len(named)


@pytest.fixture
def folder(base_model):
    """A folder with run.toml, prompts and rewards; its name is short, because socket paths have a length limit."""
    path = Path(tempfile.mkdtemp(prefix="ct-"))
    (path / "rewards.py").write_text(REWARDS)
    (path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": "the film"}) + "\n" for _ in range(4)))
    (path / "run.toml").write_text(
        f"""
        [run]
        output = "{path / "out"}"
        [model]
        path = "{base_model}"
        [prompts]
        path = "{path / "prompts.jsonl"}"
        [reward]
        function = "rewards:length"
        [rollout]
        prompts_per_batch = 4
        max_new_tokens = 4
        [train]
        total_steps = 2
        batch_size = 2
        [topology]
        threads_per_actor = 1
        [deadlines]
        start_seconds = 120
        batch_seconds = 60
        update_seconds = 60
        """
    )
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def environ(folder):
    """The environment of a user's shell, without the variables of the tests' Ray."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    tools = f"{Path(sys.executable).parent}{os.pathsep}{clean['PATH']}"
    return clean | {
        "PATH": tools,
        "HOME": str(folder),
        "COLUMNS": "200",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_TMPDIR": str(folder),
    }


@pytest.fixture
def three_nodes(environ):
    """A cluster of three raylets with one CPU each: its address, and a function that kills one of the nodes."""
    health = dict(re.findall(r"(RAY_health_check\w+)=(\d+)", block("health")))
    assert len(health) == 4
    with subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("cluster_process.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environ | health,
    ) as process:
        address = process.stdout.readline().strip()
        assert address, "the cluster did not start"

        def kill_one():
            process.stdin.write("kill\n")
            process.stdin.flush()
            assert process.stdout.readline() == "killed\n"

        yield address, kill_one
        process.stdin.close()
        process.wait(timeout=PATIENCE)


@pytest.mark.long
def test_actors_of_a_node_that_dies_move_to_another_and_the_account_closes(three_nodes, folder, environ):
    address, kill_one = three_nodes
    host, _, port = address.partition(":")
    command = block("train").strip().replace("$HEAD:6379", f"{host}:{port}")
    # One CPU per node and per actor, so two makers and a trainer must be on three nodes.
    command += " --set topology.makers=2 --set train.total_steps=100000"
    command += " --set topology.allow_open_cluster=true"  # `Cluster` starts nodes without tokens
    with subprocess.Popen(
        ["bash", "-c", f"exec {command}"],
        cwd=folder,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as driver:
        try:
            seen = list(_until(driver.stdout, lambda line: re.match(r"step [1-9]", line)))
            assert re.match(r"step [1-9]", seen[-1]), "".join(seen)
            kill_one()
            seen = list(_until(driver.stdout, lambda line: "restarting it in" in line))
            seen += _until(driver.stdout, lambda line: line.startswith("step"))
            assert seen[-1].startswith("step"), "".join(seen)
            driver.send_signal(signal.SIGINT)
            rest = "".join(seen) + driver.communicate(timeout=PATIENCE)[0]
        finally:
            driver.kill()
    assert driver.returncode == 130, rest
    assert "Traceback" not in rest
    assert audit_run(folder / "out").problems == []


@pytest.fixture
def machines(environ):
    """Two connected network namespaces with an address each; the processes in them end with the test."""
    if not shutil.which("ip"):
        pytest.skip("no `ip` command to make network namespaces with")
    name = f"ct{uuid.uuid4().hex[:6]}"
    spaces = {f"{name}-{n}": f"198.18.0.{n}" for n in (1, 2)}
    first, second = spaces
    try:
        for space in spaces:
            _ip("netns", "add", space)
        _ip("link", "add", f"{name}a", "netns", first, "type", "veth", "peer", "name", f"{name}b", "netns", second)
        for (space, address), link in zip(spaces.items(), (f"{name}a", f"{name}b"), strict=True):
            _ip("-n", space, "addr", "add", f"{address}/24", "dev", link)
            _ip("-n", space, "link", "set", "lo", "up")
            _ip("-n", space, "link", "set", link, "up")
    except subprocess.CalledProcessError as error:
        _remove(spaces)
        pytest.skip(f"network namespaces cannot be made here: {error.stderr.strip()}")
    yield spaces
    _remove(spaces)


@pytest.mark.long
def test_the_walk_through_on_two_machines(machines, folder, environ):
    (head, head_address), (other, other_address) = machines.items()
    prelude = block("every-machine")
    subprocess.run(["bash", "-c", block("token")], env=environ, check=True, timeout=PATIENCE)

    def start(space, name, **variables):
        return subprocess.Popen(
            ["ip", "netns", "exec", space, "bash", "-c", prelude + block(name)],
            cwd=folder,
            env=environ | {"HEAD": head_address, "ACTORS": "1", **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    with start(head, "head") as head_process, start(other, "other", NODE=other_address) as other_process:
        try:
            for process in (head_process, other_process):
                seen = list(_until(process.stdout, lambda line: "Ray runtime started" in line))
                assert "Ray runtime started" in seen[-1], "".join(seen)
            # The output of `ray status` is a few seconds old.
            statuses = (start(head, "status").communicate(timeout=PATIENCE)[0] for _ in range(20))
            seen = list(_until(statuses, lambda status: "/2.0 CPU" in status))
            assert "/2.0 CPU" in seen[-1], seen[-1]
            # One CPU per machine, so maker and trainer are on different ones.
            with start(head, "job" if CAN_SUBMIT_JOBS else "train") as run:
                log, _ = run.communicate(timeout=PATIENCE)
        finally:
            _remove(machines)
    assert "Done after" in log, log
    assert "succeeded" in log or not CAN_SUBMIT_JOBS, log
    AutoModelForCausalLM.from_pretrained(folder / "out" / "model")
    AutoTokenizer.from_pretrained(folder / "out" / "model")


def _until(lines, is_last):
    """Return the lines up to and including the first for which `is_last` holds; pytest's timeout bounds the wait."""
    for line in lines:
        yield line
        if is_last(line):
            return


def _ip(*arguments):
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=PATIENCE).stdout


def _remove(spaces):
    """Kill every process in these namespaces, and delete the namespaces."""
    for space in spaces:
        with contextlib.suppress(subprocess.CalledProcessError):
            for process_id in _ip("netns", "pids", space).split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(process_id), signal.SIGKILL)
            _ip("netns", "del", space)
