"""Make the table of docs/performance.md: generation beside vLLM, and whole runs beside TRL with vLLM, on one GPU.

    python benchmarks/table.py --folder FOLDER [--vllm-site SITE]        all of it; vLLM and TRL must be there
    python benchmarks/table.py --folder FOLDER --waves 0.5B              a part; the table has what FOLDER has by then
    python benchmarks/table.py --folder FOLDER --processes native-7B vllm-7B coati-ppo-7B       fewer processes of each
    python benchmarks/table.py --folder FOLDER --tiny                    tries the commands out on a CPU

Starting takes longer than measuring. So the processes of a wave start and warm up side by side, each then waits, and
when all are ready they measure one after the other, with nothing else at work on the machine. Waves are cut so that
their models fit on a card of 139 GiB. Logs and results stay in FOLDER; a process that fails leaves its row empty.

Memory is what nvidia-smi shows while a process measures, less what it shows when that process has ended.
"""

import argparse
import dataclasses
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from checked import check_device
from end_to_end import RESULT
from rollout import case_of, job_for_vllm, qwen2_config
from rollout_vllm import TURN, read_results, vllm_command, vllm_environment

BENCHMARKS = Path(__file__).resolve().parent
START_SECONDS = 240.0


@dataclasses.dataclass(frozen=True)
class Rollout:
    """A row of generation."""

    model: str
    case: str
    goal: str
    has_vllm: bool = True


@dataclasses.dataclass(frozen=True)
class Training:
    """Rows of whole runs that compare with each other."""

    options: str
    steps: dict[str, str]  # by competitor, in the order that they measure in
    what: str
    goal: str = ""
    at_once: int = 3
    """So many of them fit on the card."""


ROLLOUTS = [
    Rollout("0.5B", "2048/256x512+2048~500", "90,000 and 5 ×"),
    Rollout("0.5B", "64x128+256", ""),
    Rollout("0.5B", "256x128+256", ""),
    Rollout("7B", "64x512+512", "1.25 ×"),
    Rollout("7B", "256x512+512", "1.2 ×"),
    Rollout("1.5B", "1024/256x512+2048~500", "3 ×"),
    Rollout("0.5B", "1024x128+256", "", has_vllm=False),
    Rollout("0.5B", "64x512+8192", "45,000", has_vllm=False),
]
TRAININGS = {
    "0.5B": Training(
        "--shape 0.5b --prompt-tokens 128 --new-tokens 256 --mixed-precision true",
        {
            "coati-vllm": "--steps 14 --warmup 5",
            "coati-ppo": "--steps 18 --warmup 6",
            "trl-vllm": "--steps 10 --warmup 4",
            "coati-lead2": "--steps 18 --warmup 6",
            "coati-lead3": "--steps 18 --warmup 6",
            "coati-grpo": "--steps 18 --warmup 6",
            "coati-grpo-lead3": "--steps 18 --warmup 6",
        },
        "0.5B, 64 × (128 + 256)",
        "4.5 ×",
    ),
    "1.5B": Training(
        "--shape 1.5b --prompt-tokens 512 --new-tokens 2048 --mean-length 500 --mixed-precision true "
        "--trl-micro-batch 4",
        {
            "coati-ppo": "--steps 12 --warmup 5",
            "trl-vllm": "--steps 4 --warmup 2",
            "coati-lead2": "--steps 12 --warmup 5",
        },
        "1.5B, 64 × (512 + geometric to 2,048)",
        "4 ×",
        at_once=2,
    ),
    "7B": Training(
        "--shape 7b --prompt-tokens 128 --new-tokens 256 --lora-rank 16",
        {"coati-ppo": "--steps 7 --warmup 3"},
        "7B with LoRA, 64 × (128 + 256)",
    ),
}
WAVES = ["0.5B", "rollout", "1.5B", "7B"]
NAMES = {
    "coati-ppo": "coati, PPO",
    "coati-lead2": "coati, PPO, `topology.lead = 2`",
    "coati-lead3": "coati, PPO, `topology.lead = 3`",
    "coati-grpo": "coati, GRPO",
    "coati-grpo-lead3": "coati, GRPO, `topology.lead = 3`",
    "coati-vllm": 'coati, PPO, `engine = "vllm"`',
    "trl-vllm": "TRL with vLLM, GRPO",
}


class Job:
    """A process that starts, says that it is ready, measures when it is its turn, and ends."""

    def __init__(self, name: str, command: list[str], arguments: argparse.Namespace, *, needs_vllm: bool) -> None:
        self.name = name
        self._folder: Path = arguments.folder
        self._turn = self._folder / f"{name}.turn"
        for kind in (".ready", ".go"):
            self._turn.with_name(self._turn.name + kind).unlink(missing_ok=True)
        environment = vllm_environment(arguments.vllm_site) if needs_vllm else {**os.environ}
        with self.log.open("w") as sink:
            self.process = subprocess.Popen(
                command,
                env={**environment, TURN: str(self._turn), "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def log(self) -> Path:
        return self._folder / f"{self.name}.log"

    @property
    def is_ready(self) -> bool:
        return self.process.poll() is not None or self._turn.with_name(self._turn.name + ".ready").exists()

    def begin(self) -> None:
        self._turn.with_name(self._turn.name + ".go").touch()

    def end(self, deadline: float) -> str:
        """Wait until it has ended, stop it at the deadline; returns how it ended."""
        try:
            code = self.process.wait(max(0.0, deadline - time.monotonic()))
            return f"status {code}" if code else ""
        except subprocess.TimeoutExpired:
            for number, seconds in ((signal.SIGTERM, 15.0), (signal.SIGKILL, 5.0)):
                os.killpg(self.process.pid, number)
                try:
                    self.process.wait(seconds)
                    break
                except subprocess.TimeoutExpired:
                    continue
            return "stopped: its time was over"

    def keep(self, result: object) -> None:
        (self._folder / f"{self.name}.json").write_text(json.dumps(result, indent=2) + "\n")


class Memory:
    """What the card has in use, in GiB, now and the most since `start`; 0 without a card."""

    def __init__(self) -> None:
        self.most = self.now = 0.0
        self._has_card = shutil.which("nvidia-smi") is not None
        threading.Thread(target=self._watch, daemon=True).start()

    def start(self) -> None:
        self.most = self.now

    def look(self) -> float:
        command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
        if self._has_card:
            found = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
            self.now = float(found.split()[0]) / 1024
            self.most = max(self.most, self.now)
        return self.now

    def _watch(self) -> None:
        while True:
            self.look()
            time.sleep(0.25)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--waves", nargs="*", choices=WAVES, default=WAVES, help="none: only print what FOLDER has")
    parser.add_argument("--processes", nargs="*", help="leave out all others; the logs in FOLDER have their names")
    parser.add_argument("--vllm-site", type=Path, help="folder with vLLM, if it is not in this environment")
    parser.add_argument("--seconds", type=float, default=3600.0, help="for all of it; then the rest is left out")
    parser.add_argument("--repeats", type=int, default=3, help="of generation, at most")
    parser.add_argument("--case-seconds", type=float, default=30.0, help="no repeat of a case is begun after these")
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    arguments.folder = arguments.folder.resolve()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    arguments.device = "cpu" if arguments.tiny else "cuda"
    arguments.start_seconds = START_SECONDS * (5 if arguments.tiny else 1)
    if arguments.waves:
        check_device(parser, arguments.device)
        run_waves(arguments)
    print("\n".join(table(arguments.folder)))


def run_waves(arguments: argparse.Namespace) -> None:
    started, memory = time.monotonic(), Memory()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - started:5.0f} s] {text}", flush=True)

    deadline = started + arguments.seconds
    preparing = {wave: prepare(wave, arguments) for wave in arguments.waves if wave in TRAININGS}
    for wave in arguments.waves:
        if time.monotonic() > deadline:
            say(f"{wave}: left out, the time is over")
            continue
        if wave in preparing:
            preparing[wave].wait(arguments.start_seconds)
        for start in starts(wave, arguments):
            say(f"{wave}: starting")
            jobs = start()
            until = min(deadline, time.monotonic() + arguments.start_seconds)
            others = [process for process in preparing.values() if process.poll() is None]
            while time.monotonic() < until and not all(job.is_ready for job in jobs):
                time.sleep(0.1)
            for process in others:
                process.wait(arguments.start_seconds)
            take_turns(jobs, memory, deadline, say)


def take_turns(jobs: list[Job], memory: Memory, deadline: float, say: Callable[[str], None]) -> None:
    """Let the processes that are ready measure, one after the other."""
    late = [job for job in jobs if not job.is_ready]
    for job in late:
        say(f"{job.name}: not ready in time; {job.end(0.0)}")
    for job in jobs:
        if job in late:
            continue
        say(f"{job.name}: its turn")
        memory.start()
        job.begin()
        ended = job.end(deadline)
        most, peak = memory.most, memory.most - memory.look()
        result = result_of(job, ended)
        if isinstance(result, dict):
            result["peak_gib"] = peak
        job.keep(result)
        say(f"{job.name}: {ended or 'done'}, {peak:.1f} GiB (of {most:.1f}): {json.dumps(result)[:1500]}")


def starts(wave: str, arguments: argparse.Namespace) -> list[Callable[[], list[Job]]]:
    """Start the processes of a wave, as many at once as fit on the card."""
    if wave == "rollout":
        return [functools.partial(rollout_jobs, arguments)]
    names = [name for name in TRAININGS[wave].steps if is_wanted(f"{name}-{wave}", arguments)]
    at_once = TRAININGS[wave].at_once
    parts = [names[first : first + at_once] for first in range(0, len(names), at_once)]
    return [functools.partial(training_jobs, wave, part, arguments) for part in parts]


def is_wanted(process: str, arguments: argparse.Namespace) -> bool:
    return arguments.processes is None or process in arguments.processes


def prepare(wave: str, arguments: argparse.Namespace) -> subprocess.Popen:
    """Write models and prompts of a wave, unless they are there."""
    folder = arguments.folder / f"models-{wave}"
    if (folder / "prompts.jsonl").is_file():
        return subprocess.Popen(["true"])
    folder.mkdir(exist_ok=True)
    with (folder / "prepare.log").open("w") as sink:
        return subprocess.Popen(training_command(wave, arguments), stdout=sink, stderr=subprocess.STDOUT)


def training_command(wave: str, arguments: argparse.Namespace) -> list[str]:
    options = TRAININGS[wave].options
    if arguments.tiny:
        options = "--shape tiny --prompt-tokens 8 --new-tokens 16 --batch 16 --threads 1"
        options += " --mean-length 10" if "mean-length" in TRAININGS[wave].options else ""
        options += " --lora-rank 4" if "lora-rank" in TRAININGS[wave].options else ""
    folder = arguments.folder / f"models-{wave}"
    script = [sys.executable, str(BENCHMARKS / "end_to_end.py"), "--device", arguments.device, "--folder", str(folder)]
    return [*script, *options.split()]


def training_jobs(wave: str, names: list[str], arguments: argparse.Namespace) -> list[Job]:
    return [
        Job(
            f"{name}-{wave}",
            [*training_command(wave, arguments), "--only", name, *TRAININGS[wave].steps[name].split()],
            arguments,
            needs_vllm="vllm" in name,
        )
        for name in names
        if not (arguments.tiny and name == "trl-vllm")  # it needs a GPU
    ]


def rollout_jobs(arguments: argparse.Namespace) -> list[Job]:
    jobs = []
    for model, has_vllm in dict.fromkeys((row.model, row.has_vllm) for row in ROLLOUTS):
        rows = [row.case for row in ROLLOUTS if (row.model, row.has_vllm) == (model, has_vllm)]
        names = [tiny(case) if arguments.tiny else case for case in rows]
        size, dtype = ("tiny", "float32") if arguments.tiny else (model, "bfloat16")
        if has_vllm and is_wanted(f"vllm-{model}", arguments):
            job = arguments.folder / f"vllm-{model}.job"
            limits = {"repeats": arguments.repeats, "seconds": arguments.case_seconds}
            cases = [case_of(name) for name in names]
            job.write_text(json.dumps(job_for_vllm(qwen2_config(size), dtype, cases, **limits)))
            jobs.append(Job(f"vllm-{model}", vllm_command(job), arguments, needs_vllm=True))
        name = native_name(model, has_vllm)
        if not is_wanted(name, arguments):
            continue
        command = [sys.executable, str(BENCHMARKS / "rollout.py"), "--device", arguments.device, "--engines", "native"]
        command += ["--model", size, "--repeats", str(arguments.repeats), "--case-seconds", str(arguments.case_seconds)]
        command += ["--json", str(arguments.folder / f"{name}.rows"), "--cases", *names]
        jobs.append(Job(name, command, arguments, needs_vllm=False))
    return jobs


def native_name(model: str, has_vllm: bool) -> str:
    return f"native-{model}" if has_vllm else f"native-{model}-alone"


def tiny(case: str) -> str:
    """The same with few prompts and short texts."""
    shape = case_of(case)
    rows = f"{shape.batch // 64}/{shape.slots // 64}" if shape.slots < shape.batch else f"{shape.batch // 32}"
    mean = f"~{shape.mean_tokens // 50}" if shape.mean_tokens else ""
    return f"{rows}x{shape.prompt_tokens // 64}+{shape.new_tokens // 64}{mean}"


def result_of(job: Job, ended: str) -> object:
    """What a process measured; where it failed, the reason."""
    log = job.log.read_text(errors="replace")
    if job.name.startswith("vllm-"):
        measured, reason = read_results(log, ended)
        return measured or {"left_out": reason}
    rows = job.log.with_suffix(".rows")
    if job.name.startswith("native-"):
        return json.loads(rows.read_text()) if rows.is_file() else {"left_out": ended}
    found = [line for line in log.splitlines() if line.startswith(RESULT)]
    return json.loads(found[-1].removeprefix(RESULT)) if found else {"left_out": ended}


# The table.


def table(folder: Path) -> list[str]:
    found = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}
    return [*rollout_table(found), "", *training_table(found)]


def rollout_table(found: dict) -> list[str]:
    lines = ["| generation | coati, tokens/s | vLLM, tokens/s | ratio | goal | of the memory limit |", "|---" * 6 + "|"]
    for row in ROLLOUTS:
        cases = {row.case, tiny(row.case)}
        measured = found.get(native_name(row.model, row.has_vllm), [])
        ours = [one for one in measured if isinstance(one, dict) and one["case"] in cases]
        rates = {one["engine"]: one["tokens_per_second"] for one in ours}
        theirs = found.get(f"vllm-{row.model}", {}) if row.has_vllm else {}
        peer = next((one["tokens_per_second"] for name, one in theirs.items() if name in cases), None)
        own, limit = rates.get("native"), rates.get("memory limit")
        ratio = f"**{own / peer:.2f}**" if own and peer else ""
        share = f"{own / limit:.0%}" if own and limit else ""
        cells = [f"{row.model}, {words(row.case)}", number(own), number(peer), ratio, row.goal, share]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def words(case: str) -> str:
    shape = case_of(case)
    length = f"geometric to {shape.new_tokens:,}" if shape.mean_tokens else f"{shape.new_tokens:,}"
    slots = f" through {shape.slots} slots" if shape.slots < shape.batch else ""
    return f"{shape.batch:,} × ({shape.prompt_tokens} + {length}){slots}"


def training_table(found: dict) -> list[str]:
    lines = ["| end to end | | tokens/s | step | memory | over TRL | goal |", "|---" * 7 + "|"]
    for wave, training in TRAININGS.items():
        rows = {name: found.get(f"{name}-{wave}", {}) for name in training.steps}
        peer = rows.get("trl-vllm", {}).get("tokens_per_second")
        for name, row in rows.items():
            rate = row.get("tokens_per_second")
            if rate is None:
                lines.append(f"| {training.what} | {NAMES[name]} | | | | | |")
                continue
            over = f"**{rate / peer:.2f}**" if peer else ""
            goal = training.goal if name == "coati-ppo" else ""
            step, memory = f"{row['ms_per_step']:,.0f} ms", f"{row['peak_gib']:.0f} GiB"
            cells = [training.what, NAMES[name], number(rate), step, memory, over, goal]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def number(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"


if __name__ == "__main__":
    main()
