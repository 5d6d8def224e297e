"""Measure how long a run takes to recover from a kill, and how its memory grows behind a 50 x slower trainer.

    python benchmarks/recovery.py                     # maker, trainer, node: 5 kills each; then 10 minutes of memory
    python benchmarks/recovery.py maker --kills 3
    python benchmarks/recovery.py memory --minutes 2

Runs `coati train` on the demo's task with two makers and a trainer, one thread each; use an idle machine. A recovery
starts with the kill and ends when the replacement works: a maker generates, a trainer trains. `noticed` is the time
until the driver detects the death. `loading` is the time from the start of the replacement's process to the end of
loading, mostly imports. `trainer waited` is the longest time between two steps while a maker was away; near the median,
training did not stall. A node is killed in a cluster of three, with the health checks of docs/cluster.md.
"""

import argparse
import contextlib
import itertools
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from checked import one_or_more
from living_run import Fault, LivingRun, slope

ROOT = Path(__file__).resolve().parents[1]
# More than a minute: an actor that dies again sooner after its restart is restarted with a growing delay.
SECONDS_BETWEEN = 75.0
PATIENCE = 180.0
SLOW_STEP_SECONDS = 5.0  # the demo's model takes about 0.1 s per step


def main() -> None:
    """Print one table per measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", default=["maker", "trainer", "node", "memory"])
    parser.add_argument("--kills", type=one_or_more, default=5)
    parser.add_argument("--minutes", type=one_or_more, default=10)
    arguments = parser.parse_args()
    print("$ python benchmarks/recovery.py", *sys.argv[1:], f"   ({os.cpu_count()} cores)")
    for what in arguments.what:
        folder = Path(tempfile.mkdtemp(prefix="rec-", dir="/tmp"))
        if what == "memory":
            grow(folder, arguments.minutes)
        elif what == "node":
            rows = [kill_node(folder / str(number)) for number in range(arguments.kills)]
            show("node (a maker on it)", rows)
        else:
            show(what, kill(folder, what, arguments.kills))
        shutil.rmtree(folder)


def show(what: str, rows: list[dict[str, float]]) -> None:
    """Print the median and the worst value of each part."""
    print(f"\n{what}: {len(rows)} kills, seconds\n{'':28} {'median':>8} {'worst':>8}")
    for name in rows[0]:
        values = [row[name] for row in rows if name in row]
        print(f"{name:28} {statistics.median(values):8.2f} {max(values):8.2f}")


def kill(folder: Path, what: str, kills: int) -> list[dict[str, float]]:
    """Kill a maker while it generates, or the trainer after a step, `kills` times in one run."""
    point, actor = {
        "maker": ("maker.generating", "maker-1"),
        "trainer": ("trainer.after_step", "trainer-0"),
    }[what]
    faults = [Fault(point, "kill", actor=actor, after=SECONDS_BETWEEN * (1 + number)) for number in range(kills)]
    run = LivingRun(folder, faults)
    try:
        deadline = time.monotonic() + SECONDS_BETWEEN * (kills + 1) + PATIENCE
        work = "generate" if what == "maker" else "train"
        while not all(_is_back(run, actor, work, died) for died in _deaths(run, kills)):
            if time.monotonic() > deadline or run.process.poll() is not None:
                raise SystemExit("\n".join(line for _, line in run.lines[-20:]))
            time.sleep(1.0)
        run.stop()
    finally:
        run.end()
    assert not run.account().problems, run.account().problems
    said = run.said("restarting")
    return [_times(run, actor, work, died, said) for died in _deaths(run, kills)]


def _deaths(run: LivingRun, kills: int) -> list[float]:
    """Return the time of each kill, infinite if it has not happened yet."""
    happened = run.happened()
    return [happened.get(number, float("inf")) for number in range(kills)]


def _is_back(run: LivingRun, actor: str, work: str, died: float) -> bool:
    with contextlib.suppress(OSError):
        return died < float("inf") and any(start > died for start, _ in run.spans(actor, work))
    return False


def _times(run: LivingRun, actor: str, work: str, died: float, said: list[float]) -> dict[str, float]:
    """Return the parts of one recovery, in seconds."""
    first = {
        kind: min((start for start, _ in run.spans(actor, kind) if start > died), default=float("nan"))
        for kind in (work, "wait_weights", "wait_data")
    }
    noticed = min((at for at in said if at >= died - 1.0), default=float("nan"))
    back = first[work]
    loaded = first["wait_weights" if work == "generate" else "wait_data"]
    backoff = float(
        re.findall(r"restarting .*? in ([\d.]+) s", next(line for at, line in run.lines if at == noticed))[0]
    )
    row = {
        "until it works again": back - died,
        "noticed": noticed - died,
        "wait before the restart": backoff,
        "loading": loaded - noticed - backoff,
        "without loading": back - died - (loaded - noticed - backoff),
    }
    if work == "generate":
        steps = [start for start, _ in run.spans("trainer-0", "train")]
        gaps = [later - earlier for earlier, later in itertools.pairwise(steps)]
        meanwhile = [gap for gap, start in zip(gaps, steps, strict=False) if died - 1 < start < back]
        row |= {"trainer waited": max(meanwhile, default=0.0), "median between steps": statistics.median(gaps)}
    return row


@contextlib.contextmanager
def three_nodes(folder: Path) -> Iterator[tuple[str, Any]]:
    """Start three raylets with one CPU and tuned health checks; yield the address and a function that kills one."""
    health = dict(re.findall(r"(RAY_health_check\w+)=(\d+)", (ROOT / "docs" / "cluster.md").read_text()))
    with subprocess.Popen(
        [sys.executable, str(ROOT / "tests" / "ray" / "cluster_process.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, **health, "RAY_TMPDIR": str(folder), "RAY_USAGE_STATS_ENABLED": "0"},
    ) as cluster:
        assert cluster.stdin is not None
        assert cluster.stdout is not None

        def kill_one() -> float:
            assert cluster.stdin is not None
            at = time.time()
            print("kill", file=cluster.stdin, flush=True)
            return at

        yield cluster.stdout.readline().strip(), kill_one
        cluster.stdin.close()


def kill_node(folder: Path) -> dict[str, float]:
    """Kill the newest of three nodes; return the times until the driver notices and until training continues."""
    folder.mkdir()
    with three_nodes(folder) as (address, kill_one):
        settings = {"topology.allow_open_cluster": "true"}
        run = LivingRun(folder, [], settings, "--address", address)
        try:
            run.wait_for_step(2, seconds=PATIENCE)
            died, deadline = kill_one(), time.monotonic() + PATIENCE
            while not (noticed := [at for at in run.said("restarting") if at > died]):
                if time.monotonic() > deadline or run.process.poll() is not None:
                    raise SystemExit("\n".join(line for _, line in run.lines[-20:]))
                time.sleep(0.1)
            run.wait_for_step(run.step() + 2, seconds=PATIENCE)
            run.stop()
        finally:
            run.end()
        assert not run.account().problems, run.account().problems
        trains = min(start for start, _ in run.spans("trainer-0", "train") if start > noticed[0])
        return {"noticed": noticed[0] - died, "training continues": trains - died}


def grow(folder: Path, minutes: int) -> None:
    """Sample the memory of every process while each training step takes 50 times as long."""
    slow = Fault("trainer.after_step", "sleep", nth=0, seconds=SLOW_STEP_SECONDS)
    run = LivingRun(folder, [slow], {"train.save_every": 0})
    memory: dict[tuple[int, str], list[tuple[float, float]]] = {}
    try:
        run.wait_for_step(3, seconds=PATIENCE)
        settled = minutes * 30.0
        began = time.monotonic() + settled  # time for buffers and caches to fill
        while (elapsed := time.monotonic() - began) < minutes * 60 and run.process.poll() is None:
            if elapsed >= 0:
                for process, megabytes in run.memory().items():
                    memory.setdefault(process, []).append((elapsed, megabytes))
            time.sleep(2.0)
        run.stop()
    finally:
        run.end()
    assert not run.account().problems, run.account().problems
    print(f"\nmemory with steps of {SLOW_STEP_SECONDS:g} s, over {minutes} minutes: final MB, growth per 10 minutes")
    lasting = {process: series for process, series in memory.items() if series[-1][0] - series[0][0] > minutes * 30}
    for (_, name), series in sorted(lasting.items(), key=lambda item: -item[1][-1][1]):
        print(f"{name:32} {series[-1][1]:8.1f} {slope(series):+8.2f}")


if __name__ == "__main__":
    main()
