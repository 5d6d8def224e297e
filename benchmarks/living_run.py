"""A real `coati train` in a session of its own, on the demo's task, to do harm to and to measure."""

import contextlib
import importlib.util
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from coati.cli.demo import demo_config
from coati.config import dump_config
from coati.demo.base_model import pretrain
from coati.demo.grammar import PROMPTS
from coati.ledger.audit import RunAccount, audit_run
from coati.monitor import read_jsonl

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from fault_schedule import Fault, Schedule

ENDLESS = 1_000_000  # steps

SETTINGS = {
    "train.total_steps": ENDLESS,
    "train.actor_lr": 1e-4,
    "train.critic_lr": 1e-4,
    "train.save_every": 1,  # or a trainer that dies too often would never get on
    "topology.makers": 2,
    "topology.max_staleness": 2,
    "topology.max_restarts": 10_000,
    "topology.threads_per_actor": 1,
    "deadlines.stall_seconds": 8,
}


class LivingRun:
    """A run with faults, which trains until it is stopped."""

    def __init__(
        self,
        folder: Path,
        faults: list[Fault],
        settings: Mapping[str, object] | None = None,
        *options: str,
        begins: bool = True,
    ) -> None:
        """With `begins` false nothing happens before `schedule.begin()`."""
        self.folder, self.out = folder, folder / "out"
        base = folder / "base"
        pretrain(base)
        config = demo_config(base, seed=0, output=self.out).model_copy(update={"eval": ()})  # its prompts are elsewhere
        prompts = folder / "prompts.jsonl"
        prompts.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
        (folder / "run.toml").write_text(dump_config(config))
        changes = SETTINGS | {"prompts.path": str(prompts)} | dict(settings or {})
        if importlib.util.find_spec("vaderSentiment") is None:  # the demo's reward needs it
            (folder / "words.py").write_text(
                "def count(completions):\n    return [len(set(t.split())) for t in completions]\n"
            )
            changes |= {"reward.function": "words:count", "reward.search_paths": f'["{folder}"]'}
        command = [sys.executable, "-m", "coati.cli.main", "train", str(folder / "run.toml"), *options]
        for name, value in changes.items():
            command += ["--set", f"{name}={value}"]
        self.schedule = Schedule(folder / "faults", faults, begins=begins)
        self._temporary = Path(tempfile.mkdtemp(prefix="ct-", dir="/tmp"))
        environment = {**os.environ, **self.schedule.environment, "TMPDIR": str(self._temporary), "COLUMNS": "200"}
        self.lines: list[tuple[float, str]] = []
        """What it has said, and when, in seconds since the epoch."""
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env=environment,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append((time.time(), line.rstrip()))

    def said(self, text: str) -> list[float]:
        """When it said something with this text."""
        return [at for at, line in self.lines if text in line]

    def wait_for_step(self, step: int, *, seconds: float) -> None:
        """Wait until it has trained so many steps; RuntimeError with what it said if it has not."""
        deadline = time.monotonic() + seconds
        while self.step() < step:
            if time.monotonic() > deadline or self.process.poll() is not None:
                raise RuntimeError("\n".join(line for _, line in self.lines[-30:]))
            time.sleep(0.2)

    def step(self) -> int:
        """The last step in its metrics."""
        try:
            rows = (self.out / "metrics.jsonl").read_text().splitlines()
        except OSError:
            return 0
        return max((int(json.loads(row)["step"]) for row in rows[-2:] if row.endswith("}")), default=0)

    def members(self) -> dict[int, str]:
        """Processes of the session that are not zombies, with what they are."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError, ValueError, IndexError):
                _, _, rest = (folder / "stat").read_text().rpartition(")")
                state, _, _, session, *_ = rest.split()
                if int(session) == self.process.pid and state not in "ZX":
                    words = (folder / "cmdline").read_text().replace("\0", " ").split()
                    found[int(folder.name)] = Path(words[0]).name.partition(".")[0]
        return found

    def memory(self) -> dict[tuple[int, str], float]:
        """Resident memory of every process, in MB, by number and name."""
        found = {}
        for pid, name in self.members().items():
            with contextlib.suppress(OSError):
                pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
                found[pid, name] = pages * os.sysconf("SC_PAGE_SIZE") / 1e6
        return found

    def happened(self) -> dict[int, float]:
        """When each fault happened, in seconds since the epoch, by its number."""
        files = (self.folder / "faults").glob("happened-*")
        return {int(file.name.rpartition("-")[2]): file.stat().st_mtime for file in files}

    def spans(self, actor: str, what: str) -> list[tuple[float, float]]:
        """Start and end of everything of a kind that an actor did."""
        rows = read_jsonl(self.out / "spans.jsonl")
        return [(row["start"], row["end"]) for row in rows if row["actor"] == actor and row["what"] == what]

    def stop(self, *, seconds: float = 120.0) -> int:
        """Have it stop as a person would; returns its exit code."""
        self.process.send_signal(signal.SIGINT)
        try:
            return self.process.wait(seconds)
        finally:
            self.end()

    def end(self) -> None:
        """Kill the driver if it lives, and wait for the warden to end the rest."""
        self.process.kill()
        self.process.wait()
        self._reader.join(30.0)  # the warden has the pipe too

    def left_behind(self) -> list[str]:
        """Processes and folders that are there after the end, and should not be."""
        folders = [path.name for path in self._temporary.iterdir() if path.name.startswith("coati-")]
        return [f"{name} ({pid})" for pid, name in self.members().items()] + folders

    def account(self) -> RunAccount:
        """What became of every group."""
        return audit_run(self.out)


def slope(samples: list[tuple[float, float]]) -> float:
    """How a series of (seconds, MB) grows, in MB in 10 minutes, by least squares."""
    seconds, values = zip(*samples, strict=True)
    return statistics.linear_regression(seconds, values).slope * 600.0
