"""Runs ended from outside, by signals or by killing the driver or Ray's head, leave nothing behind."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from coati.errors import ConfigError
from coati.run_folder import ask_for_makers

PATIENCE = 120


class LivingRun:
    """A run that trains, in a session and with a temporary folder of its own."""

    def __init__(self, path, temporary):
        self.out, self.temporary, self.lines = path.parent / "out", temporary, []
        self.process = subprocess.Popen(
            [sys.executable, "-m", "coati.cli.main", "train", str(path), "--set", "train.total_steps=100000"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env={**os.environ, "COLUMNS": "200", "TMPDIR": str(temporary), "BANK_KEY": "sesame-open"},
        )

    def wait_until_it_trains(self):
        for line in self.process.stdout:
            self.lines.append(line)
            if line.startswith("step ") and not line.startswith("step 0/"):
                return
        pytest.fail("".join(self.lines))

    def members(self):
        """Processes of the run's session that are not zombies, by number: the driver, Ray and the actors."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                name, _, rest = (folder / "stat").read_text().partition("(")[2].rpartition(")")
                state, _, _, session, *_ = rest.split()
                if int(session) == self.process.pid and state not in "ZX":
                    found[int(folder.name)] = name
        return found

    def end(self):
        """Wait for the end, then for that of all that belongs to the run; gives the output."""
        rest, _ = self.process.communicate(timeout=PATIENCE)  # the warden has the pipe too, so it has ended
        self.lines.append(rest)
        deadline = time.monotonic() + PATIENCE
        while self.members() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert self.members() == {}
        assert [path.name for path in self.temporary.iterdir() if path.name.startswith("coati-")] == []
        return "".join(self.lines)


@pytest.fixture
def living_run(film_run):
    temporary = Path(tempfile.mkdtemp(prefix="ct-", dir="/tmp"))  # short: Ray's socket paths have a length limit
    shared = set(os.listdir("/dev/shm"))
    run = LivingRun(film_run, temporary)
    try:
        run.wait_until_it_trains()
        yield run
    finally:
        run.process.kill()
        run.process.stdout.close()
        subprocess.run(["rm", "-rf", str(temporary)], check=True)
    assert not [name for name in set(os.listdir("/dev/shm")) - shared if str(run.process.pid) in name]


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_the_model_and_leaves_nothing(living_run, number):
    living_run.process.send_signal(number)
    log = living_run.end()
    assert living_run.process.returncode == 130, log
    assert "Stopping" in log
    AutoModelForCausalLM.from_pretrained(living_run.out / "model")
    for path in living_run.out.rglob("*"):  # what the shell has is nowhere in the run's files
        assert not path.is_file() or b"sesame-open" not in path.read_bytes()
    assert "sesame-open" not in log


@pytest.mark.long
def test_a_second_signal_forces_the_end_and_leaves_nothing(living_run):
    living_run.process.send_signal(signal.SIGINT)
    for line in living_run.process.stdout:
        if "Stopping" in line:
            break
    living_run.process.send_signal(signal.SIGINT)
    log = living_run.end()
    assert living_run.process.returncode == 130, log
    assert "Traceback" not in log


@pytest.mark.long
def test_a_driver_that_is_killed_leaves_nothing_running(living_run):
    assert len(living_run.members()) > 5
    living_run.process.kill()
    living_run.end()
    with pytest.raises(ConfigError, match="none is alive"):  # it can be told from one that trains
        ask_for_makers(living_run.out, 2)


@pytest.mark.long
def test_a_head_that_is_killed_ends_the_run_with_its_name_and_saves_the_model(living_run):
    (head,) = (process for process, name in living_run.members().items() if name == "gcs_server")
    os.kill(head, signal.SIGKILL)
    log = living_run.end()
    assert living_run.process.returncode == 2, log
    assert "Ray's head" in log
    assert "Traceback" not in log
    AutoModelForCausalLM.from_pretrained(living_run.out / "model-at-failure")
