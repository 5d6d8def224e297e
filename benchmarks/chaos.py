"""Soak test: a real run on the demo's task in which an actor is killed or stalled every 10 to 20 seconds.

    python benchmarks/chaos.py --seconds 600 --seed 0

The seed decides which actor fails, when, and at which named point of the code (`coati.faults`). It is printed with the
schedule, which starts with the first step. At the end the run is stopped with SIGINT. The test fails with exit code 1
if the run ends early, if the account of `coati audit` does not close (a sample was lost, trained on twice, or older
than the bound), or if a process or temporary folder is left over. The growth of each process's memory is only printed,
because no limit holds for every duration. On a busy machine, where actors start slowly, use longer pauses:
--every 30 45.
"""

import argparse
import collections
import dataclasses
import math
import random
import shutil
import tempfile
import time
from pathlib import Path

from checked import one_or_more, zero_or_more
from living_run import Fault, LivingRun, slope

START_SECONDS = 300.0
STALL_SECONDS = 12.0  # more than deadlines.stall_seconds of the run
MAKER_POINTS = ("maker.generating", "maker.before_deliver", "receiver.before_chunk")
TRAINER_POINTS = (
    *("trainer.after_forward", "trainer.after_backward", "trainer.after_step", "trainer.after_ack"),
    *("trainer.after_delivery", "weights.before_chunk", "journal.before_write", "checkpoint.before_rename"),
)


def choices(makers: int, *, trainer: bool) -> list[Fault]:
    """Return the possible faults. One in four kills the trainer."""
    of_makers = [
        fault
        for number in range(makers)
        for fault in (
            *(Fault(point, "kill", actor=f"maker-{number}") for point in MAKER_POINTS),
            Fault("maker.generating", "stop", actor=f"maker-{number}", seconds=STALL_SECONDS),
        )
    ]
    of_trainer = [Fault(point, "kill", actor="trainer-0") for point in TRAINER_POINTS]
    if not trainer:
        return of_makers
    total = math.lcm(len(of_makers), len(of_trainer))  # so that all faults of a kind are equally likely
    return of_makers * (3 * total // len(of_makers)) + of_trainer * (total // len(of_trainer))


def seeded(seed: int, choices: list[Fault], *, seconds: float, every: tuple[float, float]) -> list[Fault]:
    """Draw a schedule of faults for `seconds`, with random pauses within `every`. Deterministic for a given seed."""
    draws, faults, at = random.Random(seed), list[Fault](), 0.0
    while (at := at + draws.uniform(*every)) < seconds:
        faults.append(dataclasses.replace(draws.choice(choices), after=round(at, 2)))
    return faults


def told(fault: Fault) -> str:
    """Describe a fault in one line."""
    return f"{fault.after:7.2f} s  {fault.action} {fault.actor or 'any process'} at {fault.point}"


def main() -> None:
    """Run the soak test and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=one_or_more, default=600)
    parser.add_argument("--seed", type=zero_or_more, default=0)
    parser.add_argument("--makers", type=one_or_more, default=2)
    parser.add_argument(
        "--every", type=one_or_more, nargs=2, default=(10, 20), help="minimum and maximum seconds between faults"
    )
    parser.add_argument("--only-makers", action="store_true", help="inject no faults into the trainer")
    parser.add_argument("--keep", action="store_true", help="keep the run's folder")
    arguments = parser.parse_args()
    possible = choices(arguments.makers, trainer=not arguments.only_makers)
    faults = seeded(arguments.seed, possible, seconds=arguments.seconds, every=tuple(arguments.every))
    print(
        f"seed {arguments.seed}: {len(faults)} faults in {arguments.seconds} s",
        *map(told, faults),
        sep="\n",
        flush=True,
    )
    folder = Path(tempfile.mkdtemp(prefix="chaos-", dir="/tmp"))
    problems = soak(folder, faults, arguments.seconds, makers=arguments.makers)
    if not problems and not arguments.keep:
        shutil.rmtree(folder)
    print(*(f"FAILED: {problem}" for problem in problems), sep="\n")
    raise SystemExit(f"see {folder}; --seed {arguments.seed} repeats the schedule" if problems else 0)


def soak(folder: Path, faults: list[Fault], seconds: int, *, makers: int) -> list[str]:
    """Run with the faults and return the problems found."""
    run = LivingRun(folder, faults, {"topology.makers": makers}, begins=False)
    memory: dict[tuple[int, str], list[tuple[float, float]]] = collections.defaultdict(list)
    last_step, problems = 0, []
    try:
        run.wait_for_step(1, seconds=START_SECONDS)
        run.schedule.begin()
        began = time.monotonic()
        while (elapsed := time.monotonic() - began) < seconds and run.process.poll() is None:
            for process, megabytes in run.memory().items():
                memory[process].append((elapsed, megabytes))
            total = sum(run.memory().values())
            print(
                f"{elapsed:5.0f} s  step {run.step():5}  {len(run.happened())}/{len(faults)} faults  {total:6.0f} MB",
                flush=True,
            )
            time.sleep(5.0)
        if run.process.poll() is not None:
            problems.append(f"the run ended early with exit code {run.process.returncode}")
        last_step = run.step()
        code = run.stop()
        if code not in (0, 130):
            problems.append(f"the run did not stop cleanly: exit code {code}")
    finally:
        run.end()
        (folder / "log.txt").write_text("\n".join(line for _, line in run.lines))
    deadline = time.monotonic() + 30.0
    while run.left_behind() and time.monotonic() < deadline:
        time.sleep(0.5)
    problems += [f"left behind: {thing}" for thing in run.left_behind()]
    account = run.account()
    problems += account.problems
    for row in account.table():
        print(f"{row[0]:12} {row[1]:40} {row[2]:7} groups")
    print(f"oldest group trained on: {account.oldest} versions; {last_step} steps; {len(run.happened())} faults")
    for (_, name), series in sorted(memory.items(), key=lambda item: -item[1][-1][1]):
        late = [point for point in series if point[0] > seconds / 3]
        if late and late[-1][0] - late[0][0] > seconds / 3:  # others did not live long enough for a slope
            print(f"{name:32} {series[-1][1]:6.0f} MB, {slope(late):+.1f} MB in 10 minutes")
    if last_step == 0:
        problems.append("the run trained no step")
    due = [number for number, fault in enumerate(faults) if fault.after < seconds - 60]
    problems += [f"did not happen: {told(faults[number])}" for number in due if number not in run.happened()]
    return problems


if __name__ == "__main__":
    main()
