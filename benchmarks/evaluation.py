"""Measure what evaluations cost training: the same run with and without an evaluation set, alternating.

    python benchmarks/evaluation.py                    the trainer is the bottleneck, so the maker has spare capacity
    python benchmarks/evaluation.py --epochs 1         the maker has none
    python benchmarks/evaluation.py --device cuda --makers 2

One step makes one version. Every `--every` versions a maker samples and scores `--prompts` prompts with the weights of
one version. Runs with and without the set alternate `--rounds` times. The table has medians of the steady part, without
warm-up and without the time before and after training.

    s/step      seconds per step
    evaluating  share of the makers' time that evaluations take
    cost        increase of s/step
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path

from checked import check_device, one_or_more, quiet_libraries
from detached_runs import Measured, Workload, measure

from coati.config import RunSettings, build_config
from coati.monitor import RunLog, read_jsonl
from coati.monitor.report import read_run


def settings(workload: Workload, folder: Path, arguments: argparse.Namespace, *, evaluates: bool) -> RunSettings:
    """Return the settings of a workload with `--epochs`, and with the evaluation set if `evaluates`."""
    plain = workload.config(folder, makers=arguments.makers, staleness=arguments.staleness)
    sections = plain.model_dump()
    sections["train"]["epochs"] = arguments.epochs
    sections["topology"]["lead"] = arguments.staleness
    held_out = {
        "name": "held-out",
        "prompts": sections["prompts"],
        "max_prompts": arguments.prompts,
        "every": arguments.every,
        "before": False,
        "at_end": False,
    }
    return build_config({**sections, "eval": [held_out] if evaluates else []})


def run(config: RunSettings, here: Path, *, batch: int, warmup: int) -> tuple[Measured, int]:
    """Train once; return the timings and the number of evaluations."""
    from coati.ray.launcher import DetachedRun

    quiet_libraries()
    here.mkdir()
    log = RunLog(here, total_steps=config.train.optimizer_steps, max_spans=1_000_000)
    DetachedRun(config, log).run(str(here / "model"))
    log.flush()
    path = here / "evaluations.jsonl"
    return measure(read_run(here).spans, batch=batch, warmup=warmup), len(read_jsonl(path)) if path.exists() else 0


def report(found: dict[str, list[Measured]], num_evaluations: int) -> dict[str, float]:
    """Print the table and return its numbers."""
    without, with_them = (statistics.median(one.seconds_per_step for one in found[key]) for key in ("without", "with"))
    shares = [
        statistics.fmean(own.get("evaluate", 0.0) / one.seconds for actor, own in one.spent.items() if "maker" in actor)
        for one in found["with"]
    ]
    numbers = {"without": without, "with": with_them, "evaluating": statistics.median(shares)}
    numbers["cost"] = with_them / without - 1.0
    print(f"{'':12}{'s/step':>10}{'evaluating':>12}{'cost':>8}")
    print(f"{'without':12}{without:10.3f}")
    print(f"{'with':12}{with_them:10.3f}{numbers['evaluating']:12.1%}{numbers['cost']:+8.1%}")
    print(f"{num_evaluations} evaluations in the last run")
    return numbers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--makers", type=one_or_more, default=1)
    parser.add_argument("--staleness", type=one_or_more, default=4)
    parser.add_argument("--epochs", type=one_or_more, default=4, help="more epochs give makers more spare capacity")
    parser.add_argument("--steps", type=one_or_more, default=60)
    parser.add_argument("--every", type=one_or_more, default=10)
    parser.add_argument("--prompts", type=one_or_more, default=64)
    parser.add_argument("--rounds", type=one_or_more, default=3)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    arguments = parser.parse_args()
    check_device(parser, arguments.device)
    workload = Workload(steps=arguments.steps, device=arguments.device)
    found: dict[str, list[Measured]] = {"without": [], "with": []}
    with tempfile.TemporaryDirectory() as name:
        for number in range(arguments.rounds):
            for kind in found:
                folder = Path(name) / f"{kind}-{number}"
                folder.mkdir()
                config = settings(workload, folder, arguments, evaluates=kind == "with")
                measured, num_evaluations = run(config, folder / "run", batch=workload.batch, warmup=8)
                found[kind].append(measured)
    numbers = report(found, num_evaluations)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({**vars(arguments), "json": "", **numbers}, indent=1))


if __name__ == "__main__":
    main()
