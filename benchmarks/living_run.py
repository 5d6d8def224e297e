"""A real `coati train` on the demo's task, in its own session, for fault injection and measurements."""

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
    "train.save_every": 1,  # otherwise a trainer that dies often never makes progress
    "topology.makers": 2,
    "topology.max_staleness": 2,
    "topology.max_restarts": 10_000,
    "topology.threads_per_actor": 1,
    "deadlines.stall_seconds": 8,
}


class LivingRun:
    """A run with injected faults that trains until it is stopped."""

    def __init__(
        self,
        folder: Path,
        faults: list[Fault],
        settings: Mapping[str, object] | None = None,
        *options: str,
        begins: bool = True,
    ) -> None:
        """Start the run. With `begins=False` no fault happens before `schedule.begin()`."""
        self.folder, self.out = folder, folder / "out"
        base = folder / "base"
        pretrain(base)
        config = demo_config(base, seed=0, output=self.out).model_copy(
            update={"eval": ()}
        )  # its prompt file does not exist here
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
        """Lines of output with their times, in seconds since the epoch."""
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
        """Return the times of output lines that contain `text`."""
        return [at for at, line in self.lines if text in line]

    def wait_for_step(self, step: int, *, seconds: float) -> None:
        """Wait until the run has trained `step` steps, or raise RuntimeError with its output after `seconds`."""
        deadline = time.monotonic() + seconds
        while self.step() < step:
            if time.monotonic() > deadline or self.process.poll() is not None:
                raise RuntimeError("\n".join(line for _, line in self.lines[-30:]))
            time.sleep(0.2)

    def step(self) -> int:
        """Return the last step in the metrics, or 0."""
        try:
            rows = (self.out / "metrics.jsonl").read_text().splitlines()
        except OSError:
            return 0
        return max((int(json.loads(row)["step"]) for row in rows[-2:] if row.endswith("}")), default=0)

    def members(self) -> dict[int, str]:
        """Return the ids and program names of the session's processes, except zombies."""
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
        """Return the resident memory of every process, in MB, by id and name."""
        found = {}
        for pid, name in self.members().items():
            with contextlib.suppress(OSError):
                pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
                found[pid, name] = pages * os.sysconf("SC_PAGE_SIZE") / 1e6
        return found

    def happened(self) -> dict[int, float]:
        """Return the time of each fault that happened, in seconds since the epoch, by fault number."""
        files = (self.folder / "faults").glob("happened-*")
        return {int(file.name.rpartition("-")[2]): file.stat().st_mtime for file in files}

    def spans(self, actor: str, what: str) -> list[tuple[float, float]]:
        """Return the start and end times of an actor's spans of one kind."""
        rows = read_jsonl(self.out / "spans.jsonl")
        return [(row["start"], row["end"]) for row in rows if row["actor"] == actor and row["what"] == what]

    def stop(self, *, seconds: float = 120.0) -> int:
        """Stop the run with SIGINT and return its exit code."""
        self.process.send_signal(signal.SIGINT)
        try:
            return self.process.wait(seconds)
        finally:
            self.end()

    def end(self) -> None:
        """Kill the driver if it is alive, and wait until the warden has ended the other processes."""
        self.process.kill()
        self.process.wait()
        self._reader.join(30.0)  # the warden holds the pipe too

    def left_behind(self) -> list[str]:
        """Return leftover processes and temporary folders."""
        folders = [path.name for path in self._temporary.iterdir() if path.name.startswith("coati-")]
        return [f"{name} ({pid})" for pid, name in self.members().items()] + folders

    def account(self) -> RunAccount:
        """Audit the run: the fate of every group."""
        return audit_run(self.out)


def slope(samples: list[tuple[float, float]]) -> float:
    """Return the growth of a series of (seconds, MB), in MB per 10 minutes, by least squares."""
    seconds, values = zip(*samples, strict=True)
    return statistics.linear_regression(seconds, values).slope * 600.0
